"""models.corpus: what a reader need not see."""
import random
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st

from moe_lab.models.corpus import KINDS, Windows, in_order, load_corpus, read_docs, split_docs, stdlib_files, token_kinds, train_tokenizer


@settings(max_examples=50, deadline=None)
@given(n=st.integers(2, 200), context=st.integers(1, 50), batch=st.integers(1, 7), seed=st.integers(0, 3), start=st.integers(0, 20))
def test_every_window_once_an_epoch(n, context, batch, seed, start):
    tokens = torch.arange(n)
    if context > n - 1:
        with pytest.raises(ValueError, match="context"): Windows(tokens, context, batch)
        return
    w = Windows(tokens, context, batch, seed)
    epochs = -(-w.n * 2 // batch)
    firsts = torch.cat([w[s][0][:, 0] for s in range(epochs)])[:w.n * 2].view(2, w.n)
    for epoch in firsts: assert epoch.sort().values.tolist() == [i * context for i in range(w.n)]
    x, y = w[start]
    assert x.shape == y.shape == (batch, context) and x.dtype == torch.int64
    assert torch.equal(y, x + 1)
    random.random()
    assert torch.equal(Windows(tokens, context, batch, seed)[start][0], x)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(alphabet="ab\n ", min_size=1, max_size=40), min_size=1, max_size=60), st.floats(0.02, 0.3), st.randoms())
def test_split_keeps_every_character(texts, share, rnd):
    docs = [(f"d{i}", t) for i, t in enumerate(texts)]
    try: parts = split_docs(docs, share)
    except ValueError as e:
        assert "too little text" in str(e)
        return
    assert sum(len(t) for v in parts.values() for _, t in v) == sum(map(len, texts))
    rnd.shuffle(docs)
    if len(docs) >= 40: assert split_docs(docs, share) == parts


def test_every_file_without_an_end_of_line():
    parts = split_docs([("one", "x" * 10_000)])
    assert all(parts.values()) and "".join(t for v in parts.values() for _, t in v) == "x" * 10_000


def test_one_long_file_among_many_is_not_held_out():
    docs = [("big", "x" * 5000)] + [(f"s{i}", "y" * 100) for i in range(50)]
    assert ("big", "x" * 5000) in split_docs(docs)["train"]


def test_folder_reading(tmp_path):
    (tmp_path / ".git").mkdir(), (tmp_path / "sub").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("hidden")
    (tmp_path / "sub" / "é.md").write_text("naïve\r\n", encoding="utf-8", newline="")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert read_docs(tmp_path) == [("sub/é.md", "naïve\r\n")]
    with pytest.raises(ValueError, match="1 of them not UTF-8"): read_docs(tmp_path / "latin.txt")
    with pytest.raises(FileNotFoundError, match="nowhere"): read_docs(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no text: 0 files"): read_docs(tmp_path / "empty")


def test_corpus_of_one_small_file(tmp_path):
    text = "".join(f"line {i} says {i * i}\n" for i in range(2000))
    (tmp_path / "book.txt").write_text(text)
    c = load_corpus(tmp_path / "book.txt", vocab_size=300)
    assert c.vocab_size == 300 and c.num_chars == len(text)
    assert all(int(getattr(c, k).max()) < 300 for k in ("train", "tune", "valid"))
    again = load_corpus(tmp_path / "book.txt", tokenizer=c.tokenizer)
    assert torch.equal(again.valid, c.valid)
    # END closes documents and never stands in them
    assert int((c.valid == 0).sum()) == c.num_docs["valid"]


def test_kinds_over_real_files():
    tok = train_tokenizer([f.read_text("utf-8") for f in stdlib_files()[:20]], 400)
    for f in stdlib_files()[20:30]:
        ids, kinds = token_kinds(tok, f.read_text("utf-8"))
        assert ids.shape == kinds.shape and int(kinds.max()) < len(KINDS)
        assert tok.decode(ids.tolist(), skip_special_tokens=False) == f.read_text("utf-8")


@pytest.mark.parametrize("text", ['x = f"a {b!r} c"\n', "'''m'''\r\nclass A:\r\n    '''d'''\r\n", "\x0c\nx = 1\n", "s = 'é' + b'x'  # naïve\n", "", "if x:\n  '''doc'''\n  pass\n"])
def test_kinds_of_odd_text(text):
    tok = train_tokenizer(["x"], 257)
    ids, kinds = token_kinds(tok, text)
    assert len(ids) == len(kinds) == len(text.encode())


def test_the_same_in_another_process(tmp_path):
    "Hash seeds and thread counts must not show."
    code = "from moe_lab.models.corpus import *; import hashlib; c = load_corpus(r'%s', 300); print(hashlib.sha256(c.train.numpy().tobytes() + c.tokenizer.to_str().encode()).hexdigest())"
    (tmp_path / "a.txt").write_text("".join(f"{i} {i % 7} word{i % 13}\n" for i in range(3000)))
    run = lambda **env: subprocess.run([sys.executable, "-c", code % tmp_path], capture_output=True, text=True, check=True, env={**__import__("os").environ, **env}).stdout
    assert run(PYTHONHASHSEED="1", RAYON_NUM_THREADS="1") == run(PYTHONHASHSEED="2", RAYON_NUM_THREADS="2")

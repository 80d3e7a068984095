"""Files from outside that are cut off, huge, of another kind or malicious: refused by name, nothing executed, memory bounded."""
import json, os, pickle, re, resource, signal, zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moe_lab import MoE
from moe_lab.bench import harness
from moe_lab.cluster.topology import from_yaml, h200_nvlink, load as load_cluster, to_yaml
from moe_lab.comm import checkpoint
from moe_lab.comm.pipeline import Choice, Dictionary
from moe_lab.experts import tuning
from moe_lab.models.corpus import read_docs
from moe_lab.models.distill import TeacherCache
from moe_lab.models.gpt import GPT, GPTConfig
from moe_lab.models.train import TrainConfig, load_checkpoint, load_run, make_optimizer, read_configs, read_log, save_checkpoint
from moe_lab.placement.arena import read_trace
from moe_lab.placement.profile import Profile
from moe_lab.plan import find_model
from tally import ROOT
from moe_lab.sim.workload import from_hf

# Every module of the package that opens a file: what it is, and the test of wrong ones. Files that come with the package, and what ranks tell their parent, are its own.
OWN = "the package's own"
READERS = {"core/files": ("whatever the others ask for", "test_*"), "cluster/topology": ("cluster, YAML", "test_clusters"), "sim/workload": ("model, config.json", "test_configs"),
           "placement/traces": ("loads, csv and npz", "test_traces"), "placement/profile": ("measured machine", "test_measured_tables"), "models/train": ("checkpoint, tokenizer, log", "test_training_checkpoints, test_logs"),
           "comm/checkpoint": ("distributed checkpoint, safetensors", "test_distributed_checkpoints"), "comm/pipeline": ("book of choices", "test_books_of_choices"), "bench/harness": ("results of a benchmark", "test_measured_tables"),
           "experts/tuning": ("chosen kernels", "test_chosen_kernels_that_are_not_ours"), "models/distill": ("answers of a teacher", "test_answers_of_a_teacher"), "models/corpus": ("text", "test_text"),
           "models/ablations": ("text; stored results", OWN), "models/vision": ("stored results", OWN), "tour": ("stored results", OWN), "ledger/measurements": ("stored results", OWN), "ledger/counts": ("published numbers", OWN),
           "sim/validation": ("published numbers", OWN), "claims": ("claims", OWN), "cluster/launch": ("answers of its ranks, through pipes", OWN), "bench/grouped": ("lines of its child", OWN), "cli": ("nothing: /dev/null", OWN)}
OPENS = re.compile(r"(?<![.\w])open\(|os\.open\(|\.open\(|read_text\(|read_bytes\(|read_json\(|json\.loads?\(|torch\.load|np\.load|safe_open|open_tensors|load_file|yaml\.load|pickle\.load|unpickle\(|csv\.(?:Dict)?[Rr]eader|ZipFile\(|tarfile|fromfile|memmap|loadtxt|genfromtxt")


def test_every_reader_is_listed():
    found = {str(f.relative_to(ROOT / "moe_lab"))[:-3] for f in (ROOT / "moe_lab").rglob("*.py") if f.name != "_modidx.py" and OPENS.search(re.sub(r"\bdef \w+\(", "", f.read_text()))}
    assert found - READERS.keys() <= {"hybrid_ep/migrate", "viz/render"}, "opens a file (the first opens parcels, the second reads the JSON it just made) and is not in the table"
    assert {t for _, tests in READERS.values() if tests not in (OWN, "test_*") for t in tests.split(", ")} <= globals().keys()


CONFIG = dict(hidden_size=64, vocab_size=100, num_attention_heads=4, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2)
SMALL = GPTConfig(50, 8, 1, 2, 16, experts=2)
GIB = 2**30


class Harm:
    "Unpickled by anybody who lets it, it leaves a file."
    def __init__(self, path): self.path = str(path)
    def __reduce__(self): return open, (self.path, "w")


def within(memory, seconds, f, *args):
    "What `f` returns in a process that may take `memory` bytes and `seconds` more; an exception as (type, text)."
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + memory, resource.RLIM_INFINITY))
            signal.alarm(seconds)
            try: answer = f(*args)
            except BaseException as e: answer = (type(e).__name__, str(e))
            with os.fdopen(w, "wb") as out: pickle.dump(answer, out)
        finally: os._exit(0)
    os.close(w)
    with os.fdopen(r, "rb") as answer: raw = answer.read()
    _, status = os.waitpid(pid, 0)
    return pickle.loads(raw) if raw else ("died", str(os.waitstatus_to_exitcode(status)))


def refusals(read, ways):
    "Write each content, read it: name -> (type, text) of what was raised, None where nothing was."
    out = {}
    for name, write in ways.items():
        write()
        try: read()
        except BaseException as e: out[name] = type(e).__name__, str(e)
        else: out[name] = None
    return out


def sparse(path, size):
    with open(path, "wb") as f: f.truncate(size)


def spoil(path, good, harm, text=True):
    "Ways in which any file can be wrong."
    put = lambda b: lambda: path.write_bytes(b)
    ways = dict(empty=put(b""), half=put(good[:len(good) // 2]), cut=put(good[:-2]), pickle=put(pickle.dumps(Harm(harm))), noise=put(bytes(range(256)) * 9),
                huge=lambda: sparse(path, 6 * GIB), one=put(b"\0"))
    if text: ways |= dict(number=put(b"3"), list=put(b"[1, 2]"), null=put(b"null"), deep=put(b"[" * 30000), string=put(b'"x"'))
    return ways


@pytest.fixture
def harm(tmp_path):
    yield (path := tmp_path / "harm")
    assert not path.exists(), "code from a file was executed"


def check(read, ways, names, record_property, kinds=("ValueError", "TypeError", "FileNotFoundError")):
    "Every way is refused by an error that names the file."
    got = within(5 * GIB, 60, refusals, read, ways)
    assert isinstance(got, dict), got
    bad = {n: e for n, e in got.items() if e is None or e[0] not in kinds or not any(s in e[1] for s in names) or len(e[1]) > 3000}
    assert not bad, "\n".join(f"{n}: {str(e)[:300]}" for n, e in bad.items())
    record_property("files", len(got))


def test_clusters(tmp_path, harm, record_property):
    path = tmp_path / "mine.yaml"
    good = to_yaml(h200_nvlink())
    put = lambda s: lambda: path.write_text(s)
    laughs = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi")) + "levels: *i\ndevice: H200\n"
    merges = "a: &a {x: 1}\n" + "".join(f"{b}: &{b}\n  <<: [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi"))
    ways = spoil(path, good.encode(), harm) | dict(
        tag=put(f"device: !!python/object/apply:builtins.open ['{harm}', 'w']\nlevels: []"), laughs=put(laughs), merges=put(merges), date=put(good + "when: 2024-13-45\n"),
        digits=put(good.replace("size: 8", "size: " + "9" * 20000)), nan=put(good.replace("bandwidth: 320", "bandwidth: .nan #")), devices=put(good.replace("size: 8", "size: " + "9" * 30)),
        text=put(good.replace("size: 8", "size: eight")), fraction=put(good.replace("size: 8", "size: 8.5")), true=put(good.replace("size: 8", "size: true")), device=put(good.replace("device:", "device: [") ),
        levels=put("device: H200\nlevels: {a: 1}"), level=put("device: H200\nlevels: [1]"))
    del ways["half"]                                             # half of a YAML file may be a smaller cluster
    check(lambda: load_cluster(str(path)), ways, ["mine.yaml"], record_property)
    assert from_yaml(good) == h200_nvlink()


def test_configs(tmp_path, harm, record_property):
    path = tmp_path / "config.json"
    put = lambda **change: lambda: path.write_text(json.dumps(CONFIG | change))
    ways = spoil(path, json.dumps(CONFIG).encode(), harm) | dict(
        layers=put(num_hidden_layers=10**9), text=put(hidden_size="64"), fraction=put(num_hidden_layers=2.5), negative=put(num_local_experts=-4), true=put(vocab_size=True),
        k=put(num_experts_per_tok=5), nothing=put(num_attention_heads=0), nested=put(text_config=3), list=put(num_hidden_layers=[1]), big=put(hidden_size=10**4000),
        step=put(decoder_sparse_step=0), infinite=put(num_hidden_layers=float("inf")), period=put(expert_layer_period=2), rank=put(kv_lora_rank=4, q_lora_rank=4))
    check(lambda: from_hf(path), ways, ["config"], record_property)
    check(lambda: find_model(str(path)), ways, ["config"], record_property)


def test_traces(tmp_path, harm, record_property):
    path = tmp_path / "trace.csv"
    head = "step,layer,expert,count\n"
    good = head + "0,0,0,5\n0,0,1,2\n"
    put = lambda s: lambda: path.write_text(s)
    ways = spoil(path, good.encode(), harm) | dict(
        large=put(head + f"{2**40},{2**40},0,1\n"), larger=put(head + f"{10**30},0,0,1\n"), text=put(head + "a,0,0,1\n"), short=put(head + "0,0\n"), fraction=put(head + "0,0,0,1.5\n"),
        wraps=put(head + f"{2**32 - 1},{2**32 - 1},0,1\n"), total=put(head + f"0,0,0,{2**62}\n0,0,0,{2**62}\n"))
    del ways["cut"], ways["half"]                                # whole lines of a trace are a shorter trace
    check(lambda: read_trace(path), ways, ["trace.csv"], record_property)

    path = tmp_path / "trace.npz"
    def stored(**arrays):
        np.savez(b := BytesIO(), **arrays)
        return b.getvalue()
    def claims(items, size=None):
        def write():
            head = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({items},), }}".ljust(117).encode() + b"\n"
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
                z.writestr("counts.npy", b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + bytes(80))
                if size: z.filelist[0].file_size = size
        return write
    ways = spoil(path, stored(counts=np.ones((2, 3), int)), harm, text=False) | dict(
        objects=lambda: path.write_bytes(stored(counts=np.array([Harm(harm)], object))), other=lambda: path.write_bytes(stored(x=np.ones(3))), bomb=claims(2**30, 2**33), shape=claims(2**30), vast=claims(2**60),
        floats=lambda: path.write_bytes(stored(counts=np.ones((2, 3)))), scalar=lambda: path.write_bytes(stored(counts=np.int64(3))))
    check(lambda: read_trace(path), ways, ["trace.npz"], record_property)


def test_training_checkpoints(tmp_path, harm, record_property):
    torch.manual_seed(0)
    model, path = GPT(SMALL), tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, model, make_optimizer(model, TrainConfig()), 0, TrainConfig())
    good = path.read_bytes()
    tensors = {f"model.{n}": t for n, t in model.state_dict().items()}
    about = {"step": "0", "model": json.dumps(dict(vocab_size=50, d_model=8, num_layers=1, num_heads=2, d_hidden=16, experts=2)), "train": "{}"}
    put = lambda **change: lambda: save_file(tensors, path, metadata=about | change)
    claims = lambda **change: put(model=json.dumps(json.loads(about["model"]) | change))
    def large():
        header = json.dumps({n: dict(dtype="F32", shape=[2**29], data_offsets=[0, 2**31]) for n in list(tensors)[:1]}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with open(path, "r+b") as f: f.truncate(8 + len(header) + 2**31)
    ways = spoil(path, good, harm, text=False) | dict(large=large, header=lambda: path.write_bytes((2**62).to_bytes(8, "little") + b"{}"))
    check(lambda: load_checkpoint(path, GPT(SMALL)), ways, ["checkpoint"], record_property)
    (tmp_path / "tokenizer.json").write_text("{")
    about_itself = dict(json=put(model="{"), list=put(model="[]"), step=put(step="x"), train=put(train='{"lr": "fast"}'), layers=claims(num_layers=10**9), width=claims(d_model=2**20),
                        experts=claims(experts=2**30), text=claims(d_model="8"), unknown=claims(colour=1), tokenizer=put())
    check(lambda: load_run(tmp_path), ways | about_itself, ["checkpoint", "tokenizer"], record_property)
    put()()
    assert read_configs(path) == (SMALL, TrainConfig(), 0)


def test_distributed_checkpoints(tmp_path, harm, record_property):
    torch.manual_seed(0)
    model = MoE(4, 8, 3, 2)
    folder = checkpoint.save(tmp_path, 1, model)
    good = {p.name: p.read_bytes() for p in folder.iterdir()}
    def restore(): [(folder / n).write_bytes(b) for n, b in good.items()]
    def read():
        try: checkpoint.load(tmp_path, MoE(4, 8, 3, 2))
        finally: restore()
    def edited(change):
        def write():
            import torch.distributed.checkpoint as dcp
            m = dcp.FileSystemReader(folder).read_metadata()
            change(m)
            (folder / ".metadata").write_bytes(pickle.dumps(m))
        return write
    first = lambda m: next(iter(m.state_dict_metadata.values()))
    def outside(m): m.storage_data = {k: type(v)("../../harm2", v.offset, v.length) for k, v in m.storage_data.items()}
    def beyond(m): m.storage_data = {k: type(v)(v.relative_path, v.offset + 10**9, v.length) for k, v in m.storage_data.items()}
    def vast(m): first(m).size = torch.Size([2**40])
    for name, content in good.items():
        ways = {f"{name} {k}": v for k, v in spoil(folder / name, content, harm, text=name.endswith("json")).items()}
        if name == ".metadata": ways |= dict(outside=edited(outside), beyond=edited(beyond), vast=edited(vast), emptied=edited(lambda m: m.state_dict_metadata.clear()),
                                             other=edited(lambda m: setattr(m, "state_dict_metadata", 3)), nothing=edited(lambda m: setattr(m, "storage_data", None)))
        if name == "extra.json": ways.pop("extra.json cut", None)
        check(read, ways, ["step-00000001"], record_property)
        if name != "__0_0.distcp":
            def export():
                try: checkpoint.export_safetensors(folder, tmp_path / "out.safetensors")
                finally: restore()
            check(export, {k: v for k, v in ways.items() if k not in ("emptied",)}, ["step-00000001"], record_property)
    checkpoint.load(tmp_path, MoE(4, 8, 3, 2))
    path = checkpoint.export_safetensors(folder, tmp_path / "all.safetensors")
    check(lambda: checkpoint.import_safetensors(path, MoE(4, 8, 3, 2)), spoil(path, path.read_bytes(), harm, text=False), ["all.safetensors"], record_property)


def test_books_of_choices(tmp_path, harm, record_property):
    path = tmp_path / "book.json"
    book = Dictionary(1)
    book.choices[3] = Choice(1, 1, "linear")
    book.save(path)
    text = path.read_text()
    ways = spoil(path, text.encode(), harm) | dict(key=lambda: path.write_text(text.replace('"3"', '"x"')), window=lambda: path.write_text(text.replace('"window": ', '"window": "a')))
    check(lambda: Dictionary.load(path), ways, ["book.json"], record_property)


def test_measured_tables(tmp_path, harm, record_property):
    path = tmp_path / "table.json"
    ways = spoil(path, b'{"machine": {}, "rows": []}', harm) | dict(rows=lambda: path.write_text('{"rows": 3}'), row=lambda: path.write_text('{"rows": [3]}'), none=lambda: path.write_text("{}"))
    check(lambda: harness.load(path), ways, ["table.json"], record_property)
    profile = Profile("CPU", "gloo", "float64", 8, 16, 4, 10, [["gpu", 2, 1e9]], [1e6, 1e6], 1e9, 1e-3)
    profile.save(path)
    assert Profile.load(path) == profile
    stored = json.loads(path.read_text())
    put = lambda **change: lambda: path.write_text(json.dumps(stored | change))
    ways = spoil(path, path.read_bytes(), harm) | dict(nan=put(fixed=float("nan")), text=put(d_model="8"), levels=put(levels=[["gpu", 0, 1e9]]), level=put(levels=3), dtype=put(dtype="exec"), rates=put(tokens_per_second=[]),
                                                       slow=put(tokens_per_second=[0., 0.]), link=put(levels=[["gpu", 2, -1.]]), unknown=put(colour=1), vast=put(levels=[["gpu", 10**40, 1e9]]))
    ways.pop("cut")                                              # a newline and a brace: still JSON without the newline
    check(lambda: Profile.load(path), ways, ["table.json"], record_property)


def test_logs(tmp_path, harm, record_property):
    path = tmp_path / "log.jsonl"
    good = b"".join(json.dumps(dict(step=i, loss=1.)).encode() + b"\n" for i in range(4))
    ways = spoil(path, good, harm) | dict(middle=lambda: path.write_bytes(good.replace(b'{"step": 2', b"[[[")), other=lambda: path.write_bytes(good + b"{}\n"))
    for cut in ("empty", "half", "cut", "one", "deep"): ways.pop(cut)          # a last line that a kill cut off
    check(lambda: read_log(path), ways, ["log.jsonl"], record_property)
    path.write_bytes(good[:-4])
    assert [o["step"] for o in read_log(path)] == [0, 1, 2]


def test_chosen_kernels_that_are_not_ours(tmp_path, harm, record_property, monkeypatch):
    "A launch goes on with the defaults."
    monkeypatch.setenv("MOE_LAB_CACHE", str(tmp_path))
    path = tuning.path()
    ways = spoil(path, b'{"H200": {"up": {"BM": 64}}}', harm) | dict(numbers=lambda: path.write_text('{"H200": 3}'), choices=lambda: path.write_text('{"H200": {"up": 3}}'))
    ways["cut"] = lambda: path.write_text('{"H200": {"up": {"BM": 64}')
    def read():
        tuning._choices.cache_clear()
        assert tuning.choose("H200", "up", None) == {}
    got = within(5 * GIB, 60, refusals, read, ways)
    assert set(got.values()) == {None}, got
    record_property("files", len(got))
    tuning._choices.cache_clear()


def test_answers_of_a_teacher(tmp_path, harm, record_property):
    torch.manual_seed(0)
    cache, x = TeacherCache(tmp_path, GPT(SMALL)), torch.zeros(1, 3, dtype=torch.int64)
    want, path = cache(0, x), tmp_path / "0000000.safetensors"
    assert cache(0, x).equal(want)
    ways = spoil(path, path.read_bytes(), harm, text=False) | dict(other=lambda: save_file(dict(g=want), path, dict(teacher=cache.who, batch="")), bare=lambda: save_file(dict(h=want), path))
    check(lambda: cache(0, x), ways, ["0000000.safetensors"], record_property)


def test_text(tmp_path, harm, record_property):
    "What is no text is passed over, a large binary unread; with nothing else it is refused."
    path = tmp_path / "text" / "a.txt"
    path.parent.mkdir()
    ways = {n: w for n, w in spoil(path, b"words", harm, text=False).items() if n not in ("half", "cut", "pickle")} | dict(pickle=lambda: path.write_bytes(pickle.dumps(Harm(harm))))
    check(lambda: read_docs(path.parent), ways, ["text"], record_property)
    (path.parent / "b.txt").write_text("words")
    assert read_docs(path.parent) == [("b.txt", "words")]

"""models.distill and models.pr_moe: losses against their definitions, memory, stages, layouts."""
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from moe_lab.models.corpus import load_corpus
from moe_lab.models.distill import _Losses, Distill, TeacherCache, chunked_losses, kd_loss, teach
from moe_lab.models.gpt import GPT, GPTConfig
from moe_lab.models.pr_moe import layout, pyramid, residual_moe, spread
from moe_lab.models.train import TrainConfig, fit

SMALL = GPTConfig(vocab_size=257, d_model=16, num_layers=2, num_heads=2, d_hidden=16, experts=(0, 4), residual="mix")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("".join(f"{i} plus {i} is {2 * i}\n" for i in range(3000)))
    return load_corpus(path, vocab_size=257)


def test_kd_is_a_mean_over_tokens_of_a_sum_over_classes():       # R03
    t, s = torch.tensor([.5, .5]).log().expand(6, 2), torch.tensor([.75, .25]).log().expand(6, 2)
    assert kd_loss(s, t).shape == (6,) and abs(kd_loss(s, t).mean().item() - 0.143841) < 1e-6
    _, kl = chunked_losses(s, torch.eye(2), torch.zeros(6, dtype=torch.int64), t, torch.eye(2), chunk=1)
    assert abs(kl.mean().item() - 0.143841) < 1e-6


@settings(max_examples=40, deadline=None)
@given(N=st.integers(0, 6), V=st.integers(1, 9), chunk=st.integers(1, 12), tau=st.sampled_from([.5, 1., 3.]), scale=st.sampled_from([1., 30.]), seed=st.integers(0, 999))
def test_chunks_change_nothing(N, V, chunk, tau, scale, seed):
    g = torch.Generator().manual_seed(seed)
    h, W, h_t, W_t = (torch.randn(*s, generator=g, dtype=torch.float64) * scale for s in ((N, 3), (V, 3), (N, 2), (V, 2)))
    y, weights = torch.randint(V, (N,), generator=g), torch.randn(2, N, generator=g, dtype=torch.float64)
    grads = []
    for f in (lambda h, W: chunked_losses(h, W, y, h_t, W_t, tau, chunk),
              lambda h, W: (F.cross_entropy(h @ W.t(), y, reduction="none"), kd_loss(h @ W.t(), h_t @ W_t.t(), tau))):
        a, b = h.clone().requires_grad_(), W.clone().requires_grad_()
        losses = torch.stack(f(a, b))
        (losses * weights).sum().backward()
        grads.append((losses.detach(), a.grad, b.grad))
    for x, y_ in zip(*grads): torch.testing.assert_close(x, y_, rtol=1e-8, atol=1e-8 * scale ** 2)


class Largest(TorchDispatchMode):
    "The most numbers that any tensor made inside has."
    n = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor): self.n = max(self.n, t.numel())
        return out


def test_no_tensor_of_all_logits_exists():
    N, V, D, chunk = 64, 1000, 4, 50
    h, W = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    with Largest() as seen:
        ce, kl = chunked_losses(h, W, torch.randint(V, (N,)), torch.randn(N, D), torch.randn(V, D), chunk=chunk)
        (ce + kl).sum().backward()
    assert max(N * chunk, V * D) >= seen.n > 0 and seen.n < N * V / 4


class Alive(TorchDispatchMode):
    "The most bytes of tensors made inside that live at a time."
    def __init__(self): super().__init__(); self.now = self.most = 0; self.seen = set()
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            s = t.untyped_storage() if isinstance(t, torch.Tensor) else None
            if s is None or (key := s._cdata) in self.seen: continue
            self.seen.add(key); self.now += s.nbytes(); self.most = max(self.most, self.now)
            def gone(key=key, n=s.nbytes()): self.seen.discard(key); self.now -= n
            weakref.finalize(s, gone)
        return out


def test_six_slices_live_at_a_time():
    "What the docstring says; written plainly, eight tensors of all logits."
    T, V, D, chunk = 256, 2048, 4, 128
    h, W, y, h_t, W_t = torch.randn(T, D, requires_grad=True), torch.randn(V, D, requires_grad=True), torch.randint(V, (T,)), torch.randn(T, D), torch.randn(V, D)
    def most(loss):
        with Alive() as alive: loss().backward()
        return alive.most / (4 * T)
    assert 5 < most(lambda: sum(l.mean() for l in chunked_losses(h, W, y, h_t, W_t, chunk=chunk))) / chunk < 7
    assert most(lambda: F.cross_entropy(h @ W.t(), y) + kd_loss(h @ W.t(), h_t @ W_t.t()).mean()) / V > 7


def test_bf16_is_close_to_float32():
    torch.manual_seed(0)
    h, W, h_t, W_t = (torch.randn(*s) for s in ((20, 8), (30, 8), (20, 8), (30, 8)))
    y = torch.randint(30, (20,))
    exact = torch.stack(chunked_losses(h, W, y, h_t, W_t))
    with torch.autocast("cpu", torch.bfloat16): low = torch.stack(chunked_losses(h, W, y, h_t, W_t))
    assert low.dtype == torch.float32 and (low - exact).abs().max() < 0.1 and (low - exact).abs().max() > 0


def test_stage_shows_in_the_losses_and_ends(corpus, tmp_path):       # R08
    c = TrainConfig(steps=6, batch_size=2, context=16, eval_windows=2, warmup=0)
    torch.manual_seed(9)
    teacher = GPT(SMALL)
    before = [p.clone() for p in teacher.parameters()]
    runs = {stop: fit(SMALL, c, corpus, tmp_path / str(stop), objective=Distill(teacher, alpha=10., stop=stop))[1] for stop in (0., .5, 1.)}
    kd = {stop: [o["step"] for o in log if "kd" in o] for stop, log in runs.items()}
    assert kd == {0.: [], .5: [0, 1, 2], 1.: [0, 1, 2, 3, 4, 5]}
    loss = {stop: [o["loss"] for o in log if "loss" in o] for stop, log in runs.items()}
    assert loss[0.][0] == pytest.approx(loss[1.][0], abs=1e-5) and loss[0.][1:] != loss[.5][1:] and loss[.5][:3] == loss[1.][:3] and max(abs(a - b) for a, b in zip(loss[.5][4:], loss[1.][4:])) > 1e-4
    assert all(p.grad is None and torch.equal(p, b) for p, b in zip(teacher.parameters(), before))       # R04


def test_cached_answers_train_the_same_student(corpus, tmp_path):
    c = TrainConfig(steps=4, batch_size=2, context=16, eval_windows=2)
    torch.manual_seed(9)
    teacher = GPT(SMALL)
    logs = [fit(SMALL, c, corpus, tmp_path / n, objective=Distill(teacher, stop=1., cache=TeacherCache(tmp_path / "kept", teacher) if n != "no" else None))[1] for n in ("no", "fill", "read")]
    losses = [[o["loss"] for o in log if "loss" in o] for log in logs]
    assert losses[0] == losses[1] == losses[2]
    assert len(list((tmp_path / "kept").glob("*.safetensors"))) == 4


def test_teacher_is_heard_without_noise():
    torch.manual_seed(0)
    teacher, x = GPT(SMALL).train(), torch.randint(257, (2, 5))
    h = teach(teacher, x)
    assert not h.requires_grad and not teacher.training and torch.equal(h, teach(teacher, x))


@settings(max_examples=60, deadline=None)
@given(E=st.integers(1, 200), W=st.integers(1, 64))
def test_every_layout_is_a_partition(E, W):
    l = layout(E, W)
    assert l.ep * l.dp == W and l.ep <= E and sum(l.experts_per_rank) == E and min(l.experts_per_rank) >= 1
    assert sorted(r for b in l.blocks for r in b) == sorted(r for c in l.copies for r in c) == list(range(W))
    assert all(len(set(b) & set(c)) == 1 for b in l.blocks for c in l.copies)


@pytest.mark.parametrize("f,word", [(lambda: layout(0, 4), "num_experts"), (lambda: layout(4, 0), "num_ranks"), (lambda: layout(4, 8, ep=3), "ep must divide"),
                                    (lambda: spread([4], 4, n=5), "n must be"), (lambda: spread([4, 4, 4], 4), "each of 2"), (lambda: pyramid(8, 4, 8, wide=-1), "wide"),
                                    (lambda: residual_moe(8, 8, 4, how="both"), "how"), (lambda: Distill(None, temperature=0.), "temperature"), (lambda: Distill(None, stop=1.1), "stop")])
def test_impossible_set_ups_say_so(f, word):
    with pytest.raises(ValueError, match=word): f()


def test_token_outside_the_vocabulary():
    torch.manual_seed(0)
    h, W, h_t, W_t = torch.randn(3, 4), torch.randn(5, 4), torch.randn(3, 6), torch.randn(5, 6)
    for y in (9, 5, -1, -100):
        with pytest.raises(ValueError, match=r"y_T must be tokens of the vocabulary, in \[0, 4\]"): chunked_losses(h, W, torch.tensor([0, y, 4]), h_t, W_t)
    ce, kl = _Losses.apply(h, W, torch.tensor([0, 9, 4]), h_t, W_t, 1., 2)      # as on a GPU, where nobody looks
    assert ce.isnan().tolist() == [False, True, False] and kl.isfinite().all()
    assert chunked_losses(h[:0], W, torch.zeros(0, dtype=torch.int64), h_t[:0], W_t)[0].shape == (0,)

"""HybridEP: compression and its kernels, migration on real ranks, faults, the planner's data centres."""
import pytest
import torch
from hypothesis import given, strategies as st

from moe_lab.core.backend import use
from moe_lab.hybrid_ep.compress import AdamW, Residual, SRAdamW, decode, encode, shared_expert, step_and_select


# ---- compression
def slow_encode(w, shared, k):
    "The k largest differences by a stable sort: ties to the lowest index."
    r = (w - shared).flatten(1)
    index = r.abs().argsort(dim=1, descending=True, stable=True)[:, :k].sort(1).values
    return r.gather(1, index), index


@given(st.integers(1, 4), st.integers(1, 60), st.data())
def test_encode_is_the_stable_sort(E, n, data):
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    w, s = torch.randn(E, n).mul(2).round(), torch.randn(n).round()          # many ties
    k = data.draw(st.integers(0, n))
    got, (value, index) = encode(w, s, k), slow_encode(w, s, k)
    assert torch.equal(got.value, value) and torch.equal(got.index.long(), index)


def test_a_broken_expert_stays_visible():
    w = torch.zeros(1, 8); w[0, 5] = torch.nan
    assert encode(w, torch.zeros(8), 1).index.tolist() == [[5]]


@given(st.integers(1, 3), st.integers(2, 200), st.integers(0, 10**6))
def test_optimizer_steps_are_adamw(E, n, seed):
    torch.manual_seed(seed)
    p, q = (torch.nn.Parameter(torch.zeros(E, n, dtype=torch.float64)) for _ in range(2))
    with torch.no_grad(): p.normal_(); q.copy_(p)
    ours, theirs = SRAdamW({p: shared_expert(p.data)}, ratio=4, lr=.01, weight_decay=.1), torch.optim.AdamW([q], lr=.01, weight_decay=.1)
    for _ in range(3):
        p.grad = torch.randn_like(p); q.grad = p.grad.clone()
        ours.step(); theirs.step()
        assert torch.allclose(p, q, rtol=1e-12, atol=1e-14)
        r, left = ours.residual[p], p.data - decode(ours.residual[p], ours.shared[p])
        at = torch.zeros(E, n, dtype=torch.bool).scatter_(1, r.index.long(), r.value != 0)
        assert (left[at].abs() <= 1e-12).all()                               # what travelled arrived exactly


def test_frozen_experts_are_left_alone():
    p = torch.nn.Parameter(torch.randn(2, 6))
    opt, before = SRAdamW({p: shared_expert(p.data)}, ratio=2), p.detach().clone()
    opt.step()
    assert torch.equal(p, before) and not opt.residual


# ---- kernels on a GPU (under the interpreter they run in their notebook)
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("E, n, ratio", [(1, 7, 2), (3, 1000, 5), (8, 1 << 20, 50), (2, (1 << 22) + 13, 150)])
def test_kernels_match_the_plain_bodies(E, n, ratio, dtype):
    from moe_lab.bench.compress import check
    assert check(E, n, ratio, dtype, "cuda") < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.gpu
def test_decode_kernel_is_exact_and_repeats():
    torch.manual_seed(0)
    w = torch.randn(4, 300, 500, device="cuda")
    s = shared_expert(w)
    for k in (0, 1, 1500, 150_000):
        r = encode(w, s, k)
        with use("torch"): want = decode(r, s)
        got = decode(r, s)
        assert torch.equal(got, want) and torch.equal(got, decode(r, s))


@pytest.mark.gpu
def test_optimizer_follows_its_threshold_on_a_gpu():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(4, 1 << 18, device="cuda"))
    q = torch.nn.Parameter(p.detach().clone())
    ours, theirs = SRAdamW({p: shared_expert(p.data)}, ratio=50, lr=1e-3), torch.optim.AdamW([q], lr=1e-3)
    for _ in range(10):
        p.grad = torch.randn_like(p); q.grad = p.grad.clone()
        ours.step(); theirs.step()
    assert (p - q).abs().max() < 1e-5 and ours.exact <= 3
    left = (decode(ours.residual[p], ours.shared[p]) - p).norm()
    assert left <= (decode(encode(p.data, ours.shared[p], ours.places[p] // 2), ours.shared[p]) - p).norm()

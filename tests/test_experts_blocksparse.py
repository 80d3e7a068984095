"""Block-sparse: the format, the products and the expert MLP where a reader need not look."""
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st

from moe_lab.core.types import dispatch
from moe_lab.experts.activation import get_activation
from moe_lab.experts.blocksparse import block_rows, blocksparse_mlp
from moe_lab.experts.grouped import grouped_moe
from moe_lab.experts.products import _dsd, _sdd, dds, dsd, sdd
from moe_lab.experts.topology import Matrix, max_padded_rows, padded_offsets, topology_from_counts, topology_from_mask


def expert_mask(counts, C, block):
    n = [-(-c // block) for c in counts]
    return torch.block_diag(*[torch.ones(r, C) for r in n]).bool() if sum(n) else torch.zeros(0, C * len(counts), dtype=torch.bool)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 3), st.sampled_from([1, 4, 16]), st.integers(0, 3))
def test_closed_form_is_the_sort(counts, C, block, spare):
    c = torch.tensor(counts)
    a, b = topology_from_counts(c, C * block, block), topology_from_mask(expert_mask(counts, C, block), block)
    for x, y in zip(a.indices, b.indices): assert torch.equal(x, y)
    assert a.shape[0] == padded_offsets(c, block)[-1] <= max_padded_rows(sum(counts), len(counts), block)
    wide = topology_from_counts(c, C * block, block, rows=a.shape[0] + spare * block)        # storage behind the end
    for x, y in zip(a.indices, wide.indices): assert torch.equal(x, y[:len(x)])
    assert torch.equal(wide.transpose_indices.sort().values, torch.arange(wide.num_blocks, dtype=torch.int32))


def test_indices_pass_16_bits():                                                              # K01: stk's int16 overflows at block 256
    t = topology_from_counts(torch.tensor([128 * 300, 128 * 40000]), 128)
    last = t.row_indices[-1].long() * 128
    assert last == (300 + 40000 - 1) * 128 and t.row_offsets[-1] == 40300
    with pytest.raises(ValueError, match="int32"): topology_from_counts(torch.tensor([1]), 128 * 2**12, rows=128 * 2**20)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 9), st.sampled_from([0., .5, .9, 1.]), st.integers(0, 9))
def test_products_equal_dense(R, C, K, sparsity, seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(R, C, generator=g) >= sparsity
    topo = topology_from_mask(mask, 4)
    def randn(*s): return torch.randn(*s, generator=g, dtype=torch.float64)
    dense = randn(R * 4, C * 4) * mask.repeat_interleave(4, 0).repeat_interleave(4, 1)
    s = Matrix.from_dense(dense, topo)
    assert torch.equal(s.to_dense(), dense) and torch.equal(s.T.to_dense(), dense.t())
    b, a = randn(C * 4, K), randn(K, R * 4)
    torch.testing.assert_close(dsd(s, b), dense @ b)                                          # K11: one column too
    torch.testing.assert_close(dds(a, s), a @ dense)
    torch.testing.assert_close(dsd(s.T, a.t()), dense.t() @ a.t())
    torch.testing.assert_close(dds(b.t(), s.T), b.t() @ dense.t())
    torch.testing.assert_close(sdd(a.t(), b.t(), topo).to_dense(), (a.t() @ b.t()) * (dense != 0))


@pytest.mark.parametrize("m,k,n,sparsity", [(128, 128, 128, 0), (256, 256, 256, .5), (512, 128, 128, 0), (128, 128, 512, 0), (512, 512, 1024, .75)])
def test_gradients_at_the_original_sizes(m, k, n, sparsity):
    "The sizes of stk's own tests, forward and both gradients, float32 against float64 dense products."
    torch.manual_seed(0)
    mask = torch.rand(m // 128, n // 128) >= sparsity
    keep, topo = mask.repeat_interleave(128, 0).repeat_interleave(128, 1), topology_from_mask(mask, 128)
    a, b = (torch.randn(*s, requires_grad=True) for s in ((m, k), (k, n)))
    y = sdd(a, b, topo).to_dense()
    A, B = (t.detach().double().requires_grad_() for t in (a, b))
    Y = (A @ B) * keep
    g = torch.randn(m, n)
    y.backward(g); Y.backward(g.double())
    for x, X in ((y, Y), (a.grad, A.grad), (b.grad, B.grad)): torch.testing.assert_close(x.double(), X, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("op", ["sdd", "dsd", "dds"])
def test_operators_are_well_formed(op):
    topo = topology_from_counts(torch.tensor([5, 0, 3]), 8, 4, rows=16)
    x, w = torch.randn(16, 6, requires_grad=True), torch.randn(3, 6, 8, requires_grad=True)
    data = torch.randn(topo.num_blocks, 4, 4, requires_grad=True)
    if op == "sdd": torch.library.opcheck(_sdd, (x, w, topo.indices, 4, topo.width))
    elif op == "dsd": torch.library.opcheck(_dsd, (data, w.mT, topo.indices, topo.width, False, 0))
    else: torch.library.opcheck(_dsd, (data, x[None], topo.indices, topo.width, True, 3))


def case(counts, D, F, k=1, activation="swiglu", dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    E, halves = len(counts), get_activation(activation).halves
    expert = torch.repeat_interleave(torch.arange(E), torch.tensor(counts))
    expert = expert[torch.randperm(len(expert), generator=g)].view(-1, k)
    args = [torch.randn(*s, generator=g, dtype=dtype) for s in ((len(expert), D), (len(expert), k), (E, halves * F, D), (E, D, F))]
    return dispatch(expert, E), [a.requires_grad_() for a in args]


def both(d, args, activation="swiglu", **kw):
    out = []
    for f in (lambda x, w, up, down: blocksparse_mlp(x, d, w, up, down, activation, **kw),
              lambda x, w, up, down: grouped_moe(x, (d.expert, w), up, down, activation, dispatch=d)):
        y = f(*args)
        out.append([y, *torch.autograd.grad(y.square().sum(), args)])
    return out


@pytest.mark.parametrize("D,F", [(1, 8), (24, 40), (65, 96), (130, 1)])
def test_any_width(D, F):                                                                      # K02, K06
    d, args = case([1, 44, 127, 0, 20], D, F, k=2)
    for sync in (True, False):
        for a, b in zip(*both(d, args, block=64, sync=sync)): torch.testing.assert_close(a, b)


@pytest.fixture
def poisoned():
    "Memory that nobody has written holds NaN."
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.parametrize("sync", [True, False])
def test_padding_is_never_read(poisoned, sync):
    d, args = case([3, 0, 17, 1, 11], 8, 16)
    ours, want = both(d, args, block=16, sync=sync)
    for a, b in zip(ours, want): torch.testing.assert_close(a, b)
    for g in ours[3:]: assert (g[d.counts == 0] == 0).all()                                    # exactly: an expert without tokens


def test_padding_rows_do_not_reach_weights():
    "Garbage in the rows of padding, put there behind the gather's back, must not come out anywhere but there."
    d, (x, w, up, down) = case([3, 17], 8, 16, activation="gelu")
    topo = topology_from_counts(d.counts, 16, 16)
    rows, filled = block_rows(d, topo.shape[0], 16)
    rows = rows.flatten()
    buffer = torch.full((topo.shape[0], 8), float("nan"), dtype=x.dtype)
    buffer[rows] = x.detach()
    y = dsd(sdd(buffer, up.mT, topo).map(torch.relu), down.mT)
    want = torch.stack([down[e] @ (up[e] @ t).relu() for t, e in zip(x, d.expert.flatten())])
    torch.testing.assert_close(y[rows], want)
    assert filled.sum() == len(x)


def test_same_bits_twice():
    d, args = case([9, 0, 30], 12, 32, dtype=torch.float32)
    a, b = (both(d, args, block=16)[0] for _ in range(2))
    for x, y in zip(a, b): assert torch.equal(x, y)


def test_compiles_as_one_graph():
    d, args = case([9, 2, 30], 8, 16, dtype=torch.float32)
    f = torch.compile(lambda x, w, up, down: blocksparse_mlp(x, d, w, up, down, block=16), backend="aot_eager", fullgraph=True)
    y = f(*args)
    got = torch.autograd.grad(y.square().sum(), args)
    ours = both(d, args, block=16)[0]
    for a, b in zip([y, *got], ours): torch.testing.assert_close(a, b)


def test_autocast_and_checkpointing():
    d, args = case([9, 2, 30], 8, 16, dtype=torch.float32)
    plain = both(d, args, block=16)[0]
    y = torch.utils.checkpoint.checkpoint(lambda *a: blocksparse_mlp(a[0], d, *a[1:], block=16), *args, use_reentrant=False)
    for a, b in zip([y, *torch.autograd.grad(y.square().sum(), args)], plain): torch.testing.assert_close(a, b)
    with torch.autocast("cpu", torch.bfloat16): y = blocksparse_mlp(args[0], d, *args[1:], block=16)
    assert y.dtype == torch.bfloat16 and torch.autograd.grad(y.sum(), args)[2].dtype == torch.float32
    assert (y - plain[0]).norm() < .02 * plain[0].norm()
    with torch.inference_mode(): torch.testing.assert_close(blocksparse_mlp(args[0], d, *args[1:], block=16), plain[0])


INTERPRETED = """
import torch
torch.use_deterministic_algorithms(True, warn_only=True)              # fresh memory holds NaN
from moe_lab.core.backend import use
from tests.test_experts_blocksparse import case, blocksparse_mlp
d, args = case([5, 0, 17], 12, 16, dtype=torch.float32)
def run(name, sync):
    with use(name):
        y = blocksparse_mlp(args[0], d, *args[1:], block=16, sync=sync)
        return [y, *torch.autograd.grad(y.square().sum(), args)]
for sync in (True, False):
    for a, b in zip(run("triton", sync), run("torch", True)): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
"""

@pytest.mark.skipif(torch.cuda.is_available(), reason="the same kernels run compiled here")
def test_kernels_under_the_interpreter():
    pytest.importorskip("triton")
    root = os.path.dirname(os.path.dirname(__file__))
    env = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=root)
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env=env, cwd=root, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gpu_mlp(dtype, block):
    "Kernels against float64: all gradients, uneven experts, odd width, storage behind the end."
    d, args = case([300, 0, 129, 1, 128, 700], 200, 320, dtype=torch.float64)
    d, up = dispatch(d.expert.cuda(), 6), lambda t: t.cuda().to(dtype).detach().requires_grad_()
    scale = [1, 1, 200**-.5, 320**-.5]
    low = [up(a * s) for a, s in zip(args, scale)]
    high = [a.detach().double().requires_grad_() for a in low]
    with torch.no_grad(): g = torch.randn(len(args[0]), 200, device="cuda", dtype=torch.float64)
    want = blocksparse_mlp(high[0], d, *high[1:], block=block)
    want = [want, *torch.autograd.grad(want, high, g)]
    for sync in (True, False):
        y = blocksparse_mlp(low[0], d, *low[1:], block=block, sync=sync)
        for a, b in zip([y, *torch.autograd.grad(y, low, g.to(dtype))], want):
            assert (a.double() - b).norm() < (1e-5 if dtype == torch.float32 else 1e-2 if dtype == torch.bfloat16 else 2e-3) * b.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,block,N", [(torch.bfloat16, 64, 320), (torch.bfloat16, 128, 320), (torch.float16, 128, 200), (torch.bfloat16, 256, 65), (torch.float32, 128, 320)])
def test_gpu_products_on_any_pattern(dtype, block, N):
    "Every transposition against float64, on a pattern with an empty row and an empty column and on uneven experts, with storage behind the end."
    torch.manual_seed(0)
    mask = torch.rand(9, 12, device="cuda") < .4
    mask[3], mask[:, 5] = False, False
    counts = torch.tensor([300, 0, 129, 1, 128, 700], device="cuda")
    def randn(*s): return torch.randn(*s, device="cuda").to(dtype)
    def near(x, y): assert (x.double() - y).norm() < (1e-5 if dtype == torch.float32 else 5e-3) * y.norm()
    for topo in (topology_from_mask(mask, block), topology_from_counts(counts, 2 * block, block, rows=max_padded_rows(1258, 6, block))):
        (R, C), kept = topo.shape, int(topo.row_offsets[-1])
        a, b = randn(R, N), randn(N, C)
        s = sdd(a, b, topo)
        keep = Matrix(torch.ones_like(s.data), topo).to_dense().double()
        for x in (a, a.t().contiguous().t()):
            for y in (b, b.t().contiguous().t()): near(sdd(x, y, topo).to_dense(), (a.double() @ b.double()) * keep)
        assert (s.data[kept:] == 0).all()
        s.data[kept:] = float("nan")
        for m in (s, s.T):
            dense, right, left = m.to_dense().double(), randn(m.shape[1], N), randn(N, m.shape[0])
            for x in (right, right.t().contiguous().t()): near(dsd(m, x), dense @ right.double())
            for x in (left, left.t().contiguous().t()): near(dds(x, m), left.double() @ dense)


@pytest.mark.gpu
def test_gpu_cuda_graph():
    d = dispatch(torch.randint(0, 8, (1024, 2), device="cuda"), 8)
    x, w, up, down = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((1024, 256), (1024, 2), (8, 1024, 256), (8, 256, 512)))
    with torch.no_grad():
        for _ in range(2): want = blocksparse_mlp(x, d, w, up, down)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph): y = blocksparse_mlp(x, d, w, up, down)
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, want)


@pytest.mark.gpu
def test_gpu_more_than_2_31_elements():                                                        # K01
    free, _ = torch.cuda.mem_get_info()
    if free < 30 << 30: pytest.skip("needs 30 GiB of GPU memory")
    T, F, D = 131072 + 128, 16512, 64
    topo = topology_from_counts(torch.tensor([T], device="cuda"), F)
    x, w = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((T, D), (F, D)))
    h = sdd(x, w.t(), topo)
    assert h.data.numel() > 2**31
    end = h.data.view(T // 128, F // 128, 128, 128)[-1, -1]
    torch.testing.assert_close(end, x[-128:] @ w[-128:].t(), rtol=1e-2, atol=1e-2)
    y = dsd(h, w)
    torch.testing.assert_close(y[-128:], (x[-128:] @ w.t()) @ w, rtol=2e-2, atol=20.)


@pytest.mark.parametrize("change,error,says", [
    (dict(weight=lambda t: t / 0), ValueError, "weight must be finite"), (dict(weight=lambda t: t.long()), TypeError, "weight must be floating"),
    (dict(weight=lambda t: t[:, :1]), ValueError, "weight must have shape"), (dict(weight=lambda t: t.to("meta")), ValueError, "weight must be on x's device"),
    (dict(x=lambda t: t[1:]), ValueError, r"d.expert must have shape \(T, k\) with T = 5"), (dict(d=lambda d: (d.expert, d.counts)), TypeError, "d must be Dispatch")])
def test_bad_arguments_are_named(change, error, says):                                          # as grouped_moe, which takes the same
    a = dict(x=torch.randn(6, 4), d=dispatch(torch.randint(3, (6, 2)), 3), weight=torch.rand(6, 2), up=torch.randn(3, 16, 4), down=torch.randn(3, 4, 8))
    a |= {k: f(a[k]) for k, f in change.items()}
    with pytest.raises(error, match=says): blocksparse_mlp(*a.values(), block=16)

"""What a reader need not see of the grouped experts: kernels at awkward grids (interpreter), compile, checkpointing, properties."""
import os
os.environ.setdefault("TRITON_INTERPRET", "1" if not __import__("torch").cuda.is_available() else "0")

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.checkpoint import checkpoint

from moe_lab.core import backend
from moe_lab.core.types import dispatch
from moe_lab.experts.activation import ACTIVATIONS
from moe_lab.experts.grouped import expert_mlp, expert_plan, grouped_moe, tile_table

DEV = "cuda" if torch.cuda.is_available() else "cpu"


def layer(T, D, F, E, k, act="swiglu", dtype=torch.float32, bias=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    r = lambda *s: torch.randn(s, generator=g).to(DEV, dtype)
    h = ACTIVATIONS[act].halves
    ids = torch.rand(T, E, generator=g).topk(k, -1)[1].to(DEV)
    weight = torch.rand(T, k, generator=g).to(DEV, torch.promote_types(dtype, torch.float32))
    return r(T, D), ids, weight, r(E, h * F, D) / D ** .5, r(E, D, F) / F ** .5, *((r(E, h * F), r(E, D)) if bias else (None, None))


def run(args, ids, act, body, d=None):
    with backend.use(body):
        a = [None if t is None else t.detach().clone().requires_grad_() for t in args]
        x, w, up, down, bu, bd = a
        y = grouped_moe(x, (ids, w), up, down, act, bu, bd, d)
        y.backward(torch.linspace(-1, 1, y.numel(), device=DEV).view_as(y).to(y.dtype))
        return [y.detach()] + [t.grad for t in a if t is not None]


def close(a, b, limit): return (a.double() - b.double()).norm() <= limit * b.double().norm() + 1e-12


@pytest.mark.parametrize("T,D,F,E,k,act,dtype,bias", [
    (3, 8, 8, 1, 1, "swiglu", torch.float32, False), (5, 16, 24, 4, 4, "geglu", torch.float32, True), (37, 24, 17, 3, 2, "gelu", torch.float16, True),
    (130, 40, 33, 2, 1, "relu2", torch.float16, False), (18, 7, 5, 6, 2, "swiglu_oai", torch.float32, True)])
def test_kernels_equal_the_plain_body(T, D, F, E, k, act, dtype, bias):
    x, ids, w, up, down, bu, bd = layer(T, D, F, E, k, act, dtype, bias)
    limit = 3e-3 if dtype == torch.float16 else 2e-5
    for a, b in zip(run((x, w, up, down, bu, bd), ids, act, "triton"), run((x, w, up, down, bu, bd), ids, act, "torch")): assert close(a, b, limit)


def test_a_planted_error_in_one_column_fails_the_comparison():                   # N11
    x, ids, w, up, down, *_ = layer(9, 16, 24, 4, 2)
    y = run((x, w, up, down, None, None), ids, "swiglu", "triton")[0]
    wrong = y.clone()
    wrong[:, 3] *= 1.01
    assert not close(wrong, y, 2e-5)


@pytest.mark.parametrize("body", ["torch", "triton"])
def test_an_expert_without_tokens_has_exactly_zero_gradients(body):              # Z02, Z03
    x, _, w, up, down, bu, bd = layer(10, 16, 24, 6, 1, bias=True)
    ids = torch.tensor([0] * 3 + [2] * 5 + [3] * 2, device=DEV)[:, None]         # 1, 4, 5 get nothing
    for _ in range(3):
        junk = torch.full((1 << 16,), float("nan"), device=DEV); del junk
        grads = run((x, w, up, down, bu, bd), ids, "swiglu", body)
        for g in grads[3:]:
            assert not g[[1, 4, 5]].count_nonzero() and g.isfinite().all()
    y = run((x.masked_fill(torch.arange(10, device=DEV)[:, None] == 4, float("nan")), w, up, down, bu, bd), ids, "swiglu", body)[0]
    assert y[4].isnan().all() and y[[0, 9]].isfinite().all()                     # a NaN fed in comes out, where it belongs


@pytest.mark.parametrize("body", ["torch", "triton"])
def test_no_token_and_no_expert(body):                                           # Z07, G15
    x, ids, w, up, down, *_ = layer(0, 16, 24, 4, 2)
    y, dx, dw, dup, ddown = run((x, w, up, down, None, None), ids, "swiglu", body)
    assert y.shape == (0, 16) and not dup.count_nonzero() and not ddown.count_nonzero()
    x, _, w, up, down, *_ = layer(1, 16, 24, 4, 2)
    ids = torch.tensor([[0, -1]], device=DEV)
    out = run((x, w, up, down, None, None), ids, "swiglu", body)
    one = run((x, w[:, :1], up, down, None, None), ids[:, :1], "swiglu", body)
    torch.testing.assert_close(out[0], one[0])
    assert out[2][0, 1] == 0 and not out[3][3].count_nonzero()


def test_float16_is_weighted_before_it_is_rounded():                             # N06
    up = torch.tensor([[[1.], [1.]]], dtype=torch.float16, device=DEV).expand(1, 2, 8).contiguous()
    x = torch.full((1, 8), 4., dtype=torch.float16, device=DEV)                  # swiglu of 32, 32: about 1024
    down = torch.full((1, 8, 1), 100., dtype=torch.float16, device=DEV)          # 102400 > 65504
    for body in ("torch", "triton"):
        with backend.use(body): y = grouped_moe(x, (torch.zeros(1, 1, dtype=torch.int64, device=DEV), torch.full((1, 1), .1, device=DEV)), up, down)
        torch.testing.assert_close(y, torch.full_like(y, 10240.), rtol=2e-3, atol=0)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 400), st.integers(1, 70), st.integers(1, 4), st.sampled_from([16, 64, 128]), st.integers(0, 5))
def test_plan_is_the_stable_order(T, E, k, tile, seed):                          # N07
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, E + 1, (T, k), generator=g)
    with backend.use("triton" if seed % 2 else "torch"):
        offsets, order, row, tiles = expert_plan(ids.to(DEV), E, tile)
        if not seed % 2: tiles = tile_table(offsets, T * k, tile)                # the plan has none where no kernel runs
    flat, order = ids.flatten(), order.cpu().long()
    key = torch.where((flat < 0) | (flat >= E), E, flat)
    assert order.tolist() == key.argsort(stable=True).tolist()
    n = int(offsets[-1])
    assert row.cpu().flatten()[order[:n]].tolist() == list(range(n)) and (row.cpu().flatten()[order[n:]] == -1).all()
    used = tiles.cpu()[:int(tiles[0, 3])]
    covered = [r for e, a, b, _ in used.tolist() for r in range(a, min(a + tile, b))]
    assert covered == list(range(n))


def test_a_dispatch_that_drops_is_the_routing_without_what_it_drops():
    x, ids, w, up, down, *_ = layer(30, 16, 24, 4, 2, dtype=torch.float64)
    d = dispatch(ids, 4, capacity=6)
    a = run((x, w, up, down, None, None), ids, "swiglu", "torch", d)
    b = run((x, w, up, down, None, None), torch.where(d.kept, ids, -1), "swiglu", "torch")
    for p, q in zip(a, b): torch.testing.assert_close(p, q)


def test_compile_without_graph_break_checkpointing_and_inference():
    x, ids, w, up, down, *_ = layer(12, 16, 24, 4, 2)
    f = lambda x, w, up, down: grouped_moe(x, (ids, w), up, down)
    def grads(f):
        a = [t.detach().clone().requires_grad_() for t in (x, w, up, down)]
        y = f(*a)
        y.square().sum().backward()
        return [y.detach()] + [t.grad for t in a]
    want = grads(f)
    for g in (torch.compile(f, fullgraph=True, backend="aot_eager"), lambda *a: checkpoint(f, *a, use_reentrant=False)):
        for p, q in zip(grads(g), want): assert torch.equal(p, q)
    with torch.inference_mode(): assert torch.equal(f(x, w, up, down), want[0])


def test_frozen_weights_need_no_gradient_and_non_contiguous_inputs_work():
    x, ids, w, up, down, *_ = layer(12, 16, 24, 4, 2, dtype=torch.float64)
    x = torch.cat([x, x], 1)[:, ::2].detach().requires_grad_()
    up = up.mT.contiguous().mT.requires_grad_()
    y = grouped_moe(x, (ids, w), up, down)
    y.sum().backward()
    assert down.grad is None and x.grad.shape == x.shape
    torch.testing.assert_close(y, grouped_moe(x.contiguous(), (ids, w), up.contiguous(), down))


@pytest.mark.parametrize("D,F,dtype", [(16, 24, torch.float16), (7, 5, torch.float32)])      # the second is padded for the kernels
def test_weight_gradients_add_up_in_float32_buffers(D, F, dtype):
    x, ids, w, up, down, *_ = layer(20, D, F, 4, 2, dtype=dtype)
    for body in ("torch", "triton"):
        with backend.use(body):
            a = [t.detach().clone().requires_grad_() for t in (x, up, down)]
            want = torch.autograd.grad(grouped_moe(a[0], (ids, w), *a[1:]).float().square().sum(), a[1:])
            main = tuple(torch.ones(t.shape, device=DEV) for t in a[1:])
            grouped_moe(a[0], (ids, w), *a[1:], main_grads=main).float().square().sum().backward()
        for m, g, p in zip(main, want, a[1:]):
            assert close(m - 1, g, 3e-3 if dtype == torch.float16 else 2e-5) and p.grad is None


def test_main_gradients_with_frozen_weights_and_no_token():
    x, ids, w, up, down, *_ = layer(20, 16, 24, 4, 2)
    main = tuple(torch.ones(t.shape, device=DEV) for t in (up, down))
    down = down.detach().requires_grad_()
    for n in (20, 0): grouped_moe(x[:n], (ids[:n], w[:n]), up.detach(), down, main_grads=main).square().sum().backward()
    assert (main[0] == 1).all() and (main[1] != 1).any() and down.grad is None


def test_rows_of_no_expert_are_zero():
    x, _, _, up, down, *_ = layer(20, 16, 24, 3, 1)
    offsets = torch.tensor([0, 4, 4, 13], device=DEV)
    for body in ("torch", "triton"):
        with backend.use(body): y = expert_mlp(x, offsets, up, down)
        assert not y[13:].count_nonzero() and y[:13].count_nonzero()


@pytest.mark.parametrize("change,error,says", [
    (dict(up=lambda t: t[:, :-1]), ValueError, "up must have shape"), (dict(down=lambda t: t.double()), TypeError, "down must have x's dtype"),
    (dict(x=lambda t: t[0]), ValueError, r"x must be \(T, D\)"), (dict(ids=lambda t: t.int()), TypeError, "expert must be int64"),
    (dict(ids=lambda t: t[:-1]), ValueError, "expert must have shape"), (dict(weight=lambda t: t.long()), TypeError, "weight must be floating"),
    (dict(up=lambda t: t.to("meta")), ValueError, "up must be on x's device"), (dict(ids=lambda t: t.to("meta")), ValueError, "expert must be on x's device"),
    (dict(weight=lambda t: t.to("meta")), ValueError, "weight must be on x's device"),
    (dict(x=lambda t: t.long()), TypeError, "x must be bfloat16, float16"), (dict(x=lambda t: t.to(torch.float8_e4m3fn)), TypeError, "x must be bfloat16, float16"),
    (dict(up=lambda t: t[:, :0], down=lambda t: t[:, :, :0]), ValueError, "must not be empty"), (dict(up=lambda t: t[0]), ValueError, "up and down must have 3 dimensions")])
def test_bad_arguments_are_named(change, error, says):
    a = dict(zip(("x", "ids", "weight", "up", "down"), layer(6, 16, 24, 4, 2)))
    a |= {k: f(a[k]) for k, f in change.items()}
    with pytest.raises(error, match=says): grouped_moe(a["x"], (a["ids"], a["weight"]), a["up"], a["down"])


@pytest.mark.parametrize("body", ["torch", "triton"])
def test_a_plan_or_dispatch_that_does_not_fit_is_refused(body):
    x, ids, w, up, down, *_ = layer(6, 16, 24, 4, 2)
    with backend.use(body):
        for d in (dispatch(ids[:3], 4), dispatch(ids, 7)):
            with pytest.raises(ValueError, match="dispatch must be of ids"): grouped_moe(x, (ids, w), up, down, dispatch=d)
        with pytest.raises(ValueError, match="expert must be"): expert_plan(ids[:, 0], 4, 16)
        for bad in (ids.int(), w):
            with pytest.raises(TypeError, match="expert must be int64"): expert_plan(bad, 4, 16)


@pytest.mark.parametrize("change,says", [
    (lambda ids, w: (ids + 3, w), "expert must lie in"), (lambda ids, w: (ids - 3, w), "expert must lie in"),
    (lambda ids, w: (ids, w * torch.nan), "weight must be finite"), (lambda ids, w: (ids, w / 0), "weight must be finite")])
def test_values_out_of_range_raise_where_looking_is_free_or_asked_for(change, says, monkeypatch):
    if DEV == "cuda": monkeypatch.setenv("MOE_LAB_CHECK", "1")
    x, ids, w, up, down, *_ = layer(6, 16, 24, 4, 2)
    with pytest.raises(ValueError, match=says): grouped_moe(x, change(ids, w), up, down)


@pytest.mark.parametrize("body", ["torch", "triton"])
def test_an_id_out_of_range_is_never_followed(body, monkeypatch):
    "Without the check, as on a GPU: such an id counts as no expert."
    monkeypatch.setattr("moe_lab.experts.grouped._check_values", lambda *a: None)
    x, ids, w, up, down, *_ = layer(6, 16, 24, 4, 2)
    wild = ids.clone()
    wild[0, 0], wild[1, 1], wild[2, 0] = 4, -7, 2**40
    with backend.use(body):
        want = grouped_moe(x, (torch.where(wild == ids, ids, -1), w), up, down)
        assert torch.equal(grouped_moe(x, (wild, w), up, down), want)


@pytest.mark.parametrize("offsets,error,says", [
    (lambda t: t.float(), TypeError, "offsets must be integers"), (lambda t: t.to("meta"), ValueError, "offsets must be on the rows' device"),
    (lambda t: t[:-1], ValueError, "offsets must have shape")])
def test_bad_offsets_are_named(offsets, error, says):
    x, _, _, up, down, *_ = layer(20, 16, 24, 3, 1)
    with pytest.raises(error, match=says): expert_mlp(x, offsets(torch.tensor([0, 4, 4, 13], device=DEV)), up, down)


def test_bad_main_gradients_are_named():
    x, ids, w, up, down, *_ = layer(6, 16, 24, 4, 2)
    for bad in (t.to(DEV) for t in (torch.zeros(2), torch.zeros(down.shape).half(), torch.zeros(*down.shape[:1], *down.shape[:0:-1]).mT)):
        with pytest.raises(ValueError, match="main_grads of down must be"): grouped_moe(x, (ids, w), up, down, main_grads=(torch.zeros(up.shape, device=DEV), bad))
    one = torch.zeros(up.shape, device=DEV)
    for bad in (one, (one,), (one, None), (one, one, one)):            # found in backward before, if at all
        for f in (lambda: grouped_moe(x, (ids, w), up, down, main_grads=bad), lambda: expert_mlp(x, torch.tensor([0, 2, 2, 4, 6], device=DEV), up, down, main_grads=bad)):
            with pytest.raises(TypeError, match=r"main_grads must be a pair of tensors \(of up, of down\), got (Tensor|tuple)"): f()


def test_a_routing_of_another_form_is_named():
    x, ids, w, up, down, *_ = layer(6, 16, 24, 4, 2)
    for bad, got in ((ids, "Tensor"), ((ids, w, w), "tuple of Tensor, Tensor, Tensor"), ((ids, None), "tuple of Tensor, NoneType"), (None, "NoneType")):
        with pytest.raises(TypeError, match=rf"routing must be a pair of tensors \(expert, weight\), got {got}"): grouped_moe(x, bad, up, down)
    with pytest.raises(TypeError, match="dispatch must be Dispatch or None"): grouped_moe(x, (ids, w), up, down, dispatch=(ids, w))


def test_compiled_backward_adds_to_main_buffers():
    x, ids, w, up, down, *_ = layer(12, 16, 24, 4, 2)
    main = tuple(torch.zeros(t.shape, device=DEV) for t in (up, down))
    f = lambda x, up, down: grouped_moe(x, (ids, w), up, down, main_grads=main)
    a = [t.detach().clone().requires_grad_() for t in (x, up, down)]
    want = torch.autograd.grad(grouped_moe(a[0], (ids, w), *a[1:]).square().sum(), a)
    torch.compile(f, fullgraph=True, backend="aot_eager")(*a).square().sum().backward()
    assert torch.equal(a[0].grad, want[0]) and a[1].grad is None
    for m, g in zip(main, want[1:]): assert close(m, g, 2e-5)


@pytest.mark.gpu
def test_gpu_cuda_graph_of_a_training_step():
    x, ids, w, up, down, *_ = layer(600, 128, 192, 4, 2, dtype=torch.bfloat16)
    a = [t.detach().clone().requires_grad_() for t in (x, w, up, down)]
    def step():
        y = grouped_moe(a[0], (ids, a[1]), *a[2:])
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), a)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side): step()                      # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): out = step()
    with torch.no_grad(): a[0].neg_(); ids.copy_(ids.flip(0))         # other numbers, other experts, same graph
    graph.replay()
    for got, want in zip(out, step()): assert torch.equal(got, want)


@pytest.mark.gpu
def test_gpu_more_than_2_31_elements():                                           # K01
    T, D, F, E, k = 140_000, 256, 1024, 16, 8                 # pre-activations: 2.3e9
    g = torch.Generator("cuda").manual_seed(0)
    r = lambda *s, c=1.: torch.randn(s, device="cuda", generator=g, dtype=torch.bfloat16).mul_(c).requires_grad_()
    x, up, down = r(T, D), r(E, 2 * F, D, c=D**-.5), r(E, D, F, c=F**-.5)
    ids, w = torch.rand(T, E, device="cuda", generator=g).topk(k, -1)[1], torch.rand(T, k, device="cuda", generator=g)
    y = grouped_moe(x, (ids, w), up, down)
    dx, dup = torch.autograd.grad(y.sum(), [x, up])
    for some in (slice(0, 64), slice(T - 64, T)):             # first and last tokens, alone
        part = x[some].detach().requires_grad_()
        z = grouped_moe(part, (ids[some], w[some]), up, down)
        assert close(y[some], z, 1e-2) and close(dx[some], torch.autograd.grad(z.sum(), part)[0], 1e-2)
    halves = [torch.autograd.grad(grouped_moe(x[s], (ids[s], w[s]), up, down).sum(), up)[0].float() for s in (slice(0, T // 2), slice(T // 2, T))]
    assert close(dup, sum(halves), 1e-2)

"""The MoE layer against loops: every activation, gate options, dtypes, padding, idle experts, compile, recompute."""
import copy
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from moe_lab import MoE, Routing, TopKGate
from moe_lab.experts.activation import ACTIVATIONS, get_activation
from moe_lab.experts.layer import _Activate, Experts, Local
from moe_lab.routing.expert_choice import ExpertChoiceGate
from moe_lab.routing.gate import Gaussian


class Fixed(nn.Module):
    "A gate that sends tokens where it is told."
    def __init__(self, expert, weight, num_experts):
        super().__init__()
        self.expert, self.weight, self.E = expert, nn.Parameter(weight), num_experts

    def forward(self, x, mask=None):
        p = torch.full((x.shape[0], self.E), 1 / self.E, dtype=self.weight.dtype)
        return Routing(self.expert, self.weight.masked_fill(self.expert < 0, 0), p, p.log(), mask)


def by_loop(experts, x_TD, r):
    "sum_j weight * expert(x), token by token; differentiable."
    act, out = get_activation(experts.activation), []
    for x, ids, ws in zip(x_TD, r.expert.tolist(), r.weight):
        y = torch.zeros_like(x)
        for e, w in zip(ids, ws):
            if e < 0: continue
            pre = experts.up[e] @ x + (0 if experts.up_bias is None else experts.up_bias[e])
            y = y + w * (experts.down[e] @ act.forward(pre) + (0 if experts.down_bias is None else experts.down_bias[e]))
        out.append(y)
    return torch.stack(out) if out else x_TD * 0


@pytest.mark.parametrize("factor", [None, 0., 8.])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_every_activation_with_all_gradients(activation, factor):
    torch.manual_seed(0)
    moe = MoE(5, 7, 4, 2, activation=activation, bias=True, capacity_factor=factor).double()
    nn.init.normal_(moe.experts.up_bias); nn.init.normal_(moe.experts.down_bias)
    x = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    y, aux = moe(x)
    want = by_loop(moe.experts, x, aux.routing)
    torch.testing.assert_close(y, want)
    g = torch.randn_like(y)
    inputs = [x, *moe.parameters()]
    for a, b in zip(torch.autograd.grad(y, inputs, g, retain_graph=True), torch.autograd.grad(want, inputs, g)): torch.testing.assert_close(a, b)


@given(st.integers(0, 7), st.integers(1, 4), st.integers(1, 4), st.sampled_from([None, 0., .5, 1.]), st.integers(1, 3), st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_any_size(T, E, k, factor, D, seed):
    "What a token gets is the sum over the choices that were kept."
    torch.manual_seed(seed)
    moe = MoE(D, 3, E, min(k, E), capacity_factor=factor)
    x = torch.randn(T, D)
    y, aux = moe(x)
    r = aux.routing
    if factor is not None:
        d = Local(factor)(x, r, moe.experts)[1]
        r = Routing(torch.where(d.kept, r.expert, -1), r.weight, r.probs, r.logits)
        dropped = 1 - d.kept.float().mean() if T else 0.
        assert aux.dropped.item() == pytest.approx(float(dropped))
    else: assert aux.dropped == 0
    torch.testing.assert_close(y, by_loop(moe.experts, x, r), rtol=1e-4, atol=1e-5)
    assert aux.counts.sum() == T * moe.gate.top_k


@pytest.mark.parametrize("factor", [None, 0.])
@pytest.mark.parametrize("counts", [[2, 0, 2], [3, 0, 5, 2, 0, 1], [0, 4]])
def test_idle_experts_get_exact_zeros(counts, factor):  # Z02, Z03, T05
    E, T = len(counts), sum(counts)
    expert = torch.arange(E).repeat_interleave(torch.tensor(counts))[:, None]
    moe = MoE(16, 24, E, bias=True, gate=Fixed(expert, torch.rand(T, 1), E), capacity_factor=factor)
    for _ in range(5):
        junk = [torch.full_like(p, torch.nan) for p in moe.parameters() for _ in range(3)]
        del junk
        moe.zero_grad(set_to_none=False)
        y, _ = moe(torch.randn(T, 16))
        (y * torch.randn(T, 16)).sum().backward()
        for p in moe.experts.parameters():
            for e, n in enumerate(counts): assert torch.isfinite(p.grad[e]).all() and bool(p.grad[e].any()) == (n > 0)
    y, _ = moe(torch.full((T, 16), torch.nan))
    assert y.isnan().all()


@pytest.mark.parametrize("factor", [None, 1., 0.])
def test_sentinel_goes_nowhere(factor):  # G15
    w = torch.tensor([[.6, .4]])
    moe = MoE(4, 6, 4, gate=Fixed(torch.tensor([[0, -1]]), w, 4), capacity_factor=factor)
    x = torch.randn(1, 4)
    y, aux = moe(x)
    torch.testing.assert_close(y, .6 * moe.experts(x[None].expand(4, 1, 4))[0])
    y.sum().backward()
    assert aux.counts.tolist() == [1, 0, 0, 0] and not moe.experts.up.grad[3].any()


@pytest.mark.parametrize("factor", [None, 4.])
def test_gate_weighs_the_output_not_the_input(factor):  # G16
    moe = MoE(1, 1, 1, 1, activation="relu2", gate=Fixed(torch.tensor([[0]]), torch.tensor([[.5]]), 1), capacity_factor=factor)
    with torch.no_grad(): moe.experts.up.fill_(1.); moe.experts.down.fill_(1.)
    assert moe(torch.tensor([[2.]]))[0].item() == 2.


@pytest.mark.parametrize("factor", [None, 0.])
def test_all_experts_chosen_is_the_dense_sum(factor):  # Z10
    for E in (1, 4):
        moe = MoE(6, 8, E, E, capacity_factor=factor)
        x = torch.randn(5, 6)
        y, aux = moe(x)
        each = moe.experts(x.expand(E, -1, -1))
        torch.testing.assert_close(y, torch.einsum("te,etd->td", aux.routing.probs, each), rtol=1e-4, atol=1e-5)


def test_hot_expert():  # Z12
    gate = TopKGate(4, 4, 1)
    with torch.no_grad(): gate.router.weight.zero_()[0, 0] = 9.
    moe = MoE(4, 6, 4, gate=gate)
    x = torch.cat([torch.ones(8, 1), torch.randn(8, 3)], 1)
    y, aux = moe(x)
    assert aux.counts.tolist() == [8, 0, 0, 0] and aux.dropped == 0
    torch.testing.assert_close(aux.balance, 4 * aux.routing.probs[0, 0])
    torch.testing.assert_close(y, by_loop(moe.experts, x, aux.routing))
    assert MoE(4, 6, 4, gate=gate, capacity_factor=1.)(x)[1].dropped == .75


@pytest.mark.parametrize("lost", ["zero", "pass"])
def test_capacity_zero_and_lost_tokens(lost):  # C06
    gate = Fixed(torch.zeros(4, 1, dtype=torch.int64), torch.rand(4, 1), 2)
    moe = MoE(3, 5, 2, gate=gate, exchange=Local(.5, rule="switch", lost=lost))
    x = torch.randn(4, 3, requires_grad=True)
    y, aux = moe(x)                                             # one row an expert: token 0 stays
    assert aux.dropped == .75
    assert torch.equal(y[1:], torch.zeros(3, 3) if lost == "zero" else x[1:])
    y.sum().backward()
    assert gate.weight.grad.flatten().bool().tolist() == [True, False, False, False]
    none = MoE(3, 5, 2, gate=gate, exchange=Local(.1, rule="tutel"))
    assert not none(x)[0].any() and none(x)[1].dropped == 1


def test_prioritised_routing_with_just_enough_room_drops_nothing():
    for seed in range(20):
        torch.manual_seed(seed)
        moe = MoE(6, 4, 8, 2, exchange=Local(0., policy="batch"))
        assert moe(torch.randn(64, 6))[1].dropped == 0


@pytest.mark.parametrize("factor", [None, 1.])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("x32", [False, True])
def test_half_precision_and_autocast(dtype, factor, x32):  # N09
    torch.manual_seed(0)
    ref = MoE(16, 24, 4, capacity_factor=factor, shared_experts=1, bias=True)
    x = torch.randn(20, 16).to(dtype).float()
    half = copy.deepcopy(ref)
    half.experts.to(dtype); half.shared.to(dtype)
    for model, autocast, xin in ((half, False, x if x32 else x.to(dtype)), (copy.deepcopy(ref), True, x)):
        xin = xin.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=autocast): y, aux = model(xin)
        want, _ = ref(x)
        assert y.dtype == xin.dtype
        assert ((y - want).norm() / want.norm()) < (2e-2 if dtype == torch.bfloat16 else 3e-3)
        (y.float().square().mean() + aux.balance).backward()
        assert xin.grad.dtype == xin.dtype
        assert all(p.grad.dtype == p.dtype and torch.isfinite(p.grad).all() for p in model.parameters())
        assert torch.equal(aux.routing.expert, ref(x)[1].routing.expert)        # N01: routed in float32


def test_fp16_with_loss_scale():  # N10
    torch.manual_seed(0)
    moe = MoE(16, 16, 4, shared_experts=1).half()
    x = (350 * torch.randn(32, 16)).half().requires_grad_()     # a residual stream, normalised on its way in
    y = x + moe(nn.functional.layer_norm(x, (16,)))[0]
    (y.float().square().mean().sqrt() * 65536).backward()
    assert all(torch.isfinite(p.grad).all() for p in [x, *moe.parameters()])


@pytest.mark.parametrize("factor", [None, 2.])
def test_strided_input(factor):  # K08
    moe = MoE(8, 8, 4, capacity_factor=factor)
    for x in (torch.randn(3, 16)[:, ::2], torch.randn(8, 3).t(), torch.randn(1, 8).expand(3, 8), torch.randn(2, 6, 8).transpose(0, 1)):
        torch.testing.assert_close(moe(x)[0], moe(x.contiguous())[0])


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_activations_have_the_same_gradient(name, dtype):  # T03; PyTorch 2.11 gave another without a word
    torch._dynamo.reset()
    pre = torch.randn(5, 16, dtype=dtype, requires_grad=True)
    plain = lambda p: _Activate.apply(p, name)
    want, got = (torch.autograd.grad(f(pre).square().sum(), pre)[0] for f in (plain, torch.compile(plain, fullgraph=True, backend="eager")))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("factor, sizes", [(None, (5, 7, 0)), (1.25, (5, 7))])
def test_compile_without_breaks(factor, sizes):  # T03
    torch._dynamo.reset()
    torch.manual_seed(0)
    moe = MoE(8, 16, 4, capacity_factor=factor, shared_experts=1)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    for T in sizes:
        x = torch.randn(T, 8, requires_grad=True)
        grads = []
        for f in (moe, compiled):
            y, aux = f(x)
            grads.append(torch.autograd.grad(y.square().sum() + aux.balance + aux.z, [x, *moe.parameters()]))
        for a, b in zip(*grads): torch.testing.assert_close(a, b)


def test_nothing_is_kept_between_steps():  # L11
    import gc, weakref
    moe = MoE(8, 8, 4)
    seen = []
    for step in (lambda y, aux: (y.sum() + aux.balance).backward(), lambda y, aux: None):
        y, aux = moe(torch.randn(6, 8))
        step(y, aux)
        seen += [weakref.ref(t) for t in (y, aux.balance, aux.z, aux.routing.probs, aux.routing.logits)]
        del y, aux
    gc.collect()
    assert all(r() is None for r in seen)


def test_state_dict_moves_between_layers_and_is_strict():  # X05, X09
    a, b = MoE(6, 8, 4, bias=True, shared_experts=1), MoE(6, 8, 4, bias=True, shared_experts=1)
    b.load_state_dict(a.state_dict())
    x = torch.randn(5, 6)
    assert torch.equal(a(x)[0], b(x)[0])
    assert set(a.state_dict()) == {"gate.router.weight", *(f"{m}.{n}" for m in ("experts", "shared") for n in ("up", "down", "up_bias", "down_bias"))}
    missing = {k: v for k, v in a.state_dict().items() if k != "experts.down"}
    with pytest.raises(RuntimeError, match="experts.down"): b.load_state_dict(missing)


def test_same_seed_same_layer_and_every_expert_its_own():  # D14
    make = lambda **kw: (torch.manual_seed(3), Experts(6, 8, 5, **kw))[1]
    a, b = make(), make()
    assert torch.equal(a.up, b.up) and torch.equal(a.down, b.down)
    for e in range(5): assert torch.equal(make(ids=[e]).up[0], a.up[e])
    flat = a.up.flatten(1)
    assert torch.unique(flat, dim=0).shape[0] == 5 and flat.abs().max() <= 6 ** -.5
    torch.manual_seed(3); Experts(6, 8, 5); after = torch.rand(())
    torch.manual_seed(3); Experts(6, 8, 5, ids=[4]); assert torch.rand(()) == after     # ranks stay in step


def test_any_gate():
    x = torch.randn(12, 8)
    for gate in (ExpertChoiceGate(8, 4, 1.5), TopKGate(8, 4, 2, score="sigmoid", scale=2.5, bias=True), TopKGate(8, 4, 2, noise=Gaussian(.1))):
        moe = MoE(8, 8, 4, gate=gate)
        y, aux = moe(x)
        torch.testing.assert_close(y, by_loop(moe.experts, x, aux.routing), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="belongs to the gate"): MoE(8, 8, 4, gate=gate, renormalize=False)


def test_top1_learns_its_router_from_the_task():  # G03
    moe = MoE(8, 8, 4, 1)
    moe(torch.randn(6, 8))[0].sum().backward()
    assert moe.gate.router.weight.grad.any()
    with pytest.raises(ValueError, match="never learns"): MoE(8, 8, 4, 1, renormalize=True)


@pytest.mark.parametrize("factor", [None, 2., -1.])
def test_nan_in_padding_reaches_no_gradient(factor):  # T06
    torch.manual_seed(0)
    moe, x, mask = MoE(8, 6, 4, capacity_factor=factor, shared_experts=1), torch.randn(6, 8), torch.ones(6, dtype=torch.bool)
    x[2], mask[2] = torch.nan, False
    y, aux = moe(x, mask)
    (y.sum() + aux.balance + aux.z).backward()
    assert y.isfinite().all() and all(p.grad.isfinite().all() for p in moe.parameters())


@pytest.mark.parametrize("options", [dict(capacity_factor=math.nan), dict(capacity_factor=math.inf), dict(capacity_factor="1"), dict(exchange_rule="x")])
def test_bad_capacity_is_refused_when_the_layer_is_made(options):
    with pytest.raises((TypeError, ValueError), match="factor|rule"):
        Local(1., rule="x") if "exchange_rule" in options else MoE(4, 4, 2, **options)

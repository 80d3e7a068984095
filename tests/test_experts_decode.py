"""The decode path at awkward sizes (kernels under the interpreter where there is no GPU), and when the layer takes it."""
import os
os.environ.setdefault("TRITON_INTERPRET", "1" if not __import__("torch").cuda.is_available() else "0")

import pytest
import torch
from hypothesis import given, settings, strategies as st

from moe_lab.core.backend import use
from moe_lab.experts import layer as layer_module
from moe_lab.experts.activation import ACTIVATIONS
from moe_lab.experts.decode import MAX_TOKENS, decode_experts, decode_gate
from moe_lab.experts.layer import MoE

DEV = "cuda" if torch.cuda.is_available() else "cpu"


def problem(T, D, F, E, act="swiglu", dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    r = lambda *s: torch.randn(s, generator=g).to(DEV, dtype)
    return r(T, D), r(E, D) / D ** .5, r(E, ACTIVATIONS[act].halves * F, D) / D ** .5, r(E, D, F) / F ** .5


@pytest.mark.parametrize("T,D,F,E,k,act,dtype", [(1, 7, 5, 1, 1, "relu2", torch.float32), (1, 40, 33, 130, 8, "swiglu", torch.float16), (2, 16, 16, 3, 3, "silu", torch.float16),
                                                 (33, 24, 17, 6, 2, "swiglu_oai", torch.float32), (MAX_TOKENS, 16, 8, 4, 1, "geglu", torch.float32)])
def test_kernels_equal_the_plain_body(T, D, F, E, k, act, dtype):
    x, router, up, down = problem(T, D, F, E, act, dtype)
    with use("torch"): want = decode_gate(x, router, k); y = decode_experts(x, want, up, down, act)
    with use("triton"): plan = decode_gate(x, router, k); z = decode_experts(x, plan, up, down, act)
    assert torch.equal(plan.expert, want.expert) and torch.equal(plan.active, want.active)
    torch.testing.assert_close(plan.weight, want.weight)
    torch.testing.assert_close(z, y, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=2e-3 if dtype == torch.float16 else 1e-5)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 20), st.integers(1, 9), st.data())
def test_the_table_holds_every_choice_once(T, E, data):
    k = data.draw(st.integers(1, E))
    x, router, *_ = problem(T, 4, 4, E, seed=T * E)
    router[data.draw(st.integers(0, E - 1))] = router[0]                         # ties
    for body in ("torch", "triton"):
        with use(body): p = decode_gate(x, router, k)
        n = int(p.active[-1])
        assert (p.active[n:-1] == -1).all() and (p.active[1:n] > p.active[:max(n - 1, 0)]).all()
        ids = p.expert.flatten().tolist()
        for s in range(n):
            line = p.table[s].tolist()
            mine = [a for a, e in enumerate(ids) if e == p.active[s]]
            assert mine and line == mine + [-1] * (T - len(mine))


def test_ties_go_to_the_lowest_id_and_broken_logits_weigh_nothing():              # N01-like
    x = torch.tensor([[1., 0.], [float("nan"), 0.], [1., 0.]], device=DEV)
    router = torch.tensor([[1., 0.], [1., 0.], [1., 0.]], device=DEV)
    for body in ("torch", "triton"):
        with use(body): p = decode_gate(x, router, 2)
        assert p.expert.tolist() == [[0, 1]] * 3 and p.weight[1].tolist() == [0, 0] and p.probs[1].tolist() == [0, 0, 0]
        assert p.weight[0].tolist() == [.5, .5]


@pytest.mark.parametrize("kw", [dict(top_k=2), dict(top_k=1), dict(top_k=3, shared_experts=1, activation="gelu")])
def test_the_layer_takes_it_by_itself(kw, monkeypatch):
    torch.manual_seed(0)
    moe, calls = MoE(16, 24, 5, **kw).to(DEV).eval(), []
    original = layer_module.decode_experts
    monkeypatch.setattr(layer_module, "decode_experts", lambda *a: calls.append(1) or original(*a))
    x = torch.randn(2, 3, 16, device=DEV)
    with torch.no_grad(), use("torch"): want, aux = moe(x)
    assert not calls
    with torch.no_grad(), use("triton"): y, ours = moe(x)
    assert calls == [1]
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((ours.balance, ours.z, ours.counts, ours.dropped), (aux.balance, aux.z, aux.counts, aux.dropped))
    with use("triton"):
        moe(x)                                                                   # gradients wanted
        with torch.no_grad(): moe(x, torch.ones(2, 3, dtype=torch.bool, device=DEV)); moe(torch.randn(MAX_TOKENS + 1, 16, device=DEV))
    assert calls == [1]


def test_no_graph_break():
    x, router, up, down = problem(3, 8, 8, 4)
    def f(x): return decode_experts(x, decode_gate(x, router, 2), up, down)
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x))


def test_strides_do_not_matter():                                                # K08
    x, router, up, down = problem(3, 16, 8, 4)
    wide, tall = torch.cat([x, x], 1)[:, :16], up.mT.contiguous().mT
    for body in ("torch", "triton"):
        with use(body): torch.testing.assert_close(decode_experts(wide, decode_gate(wide, router, 2), tall, down), decode_experts(x, decode_gate(x, router, 2), up, down))


@pytest.mark.parametrize("body", ["torch", "triton"])
def test_what_does_not_belong_together_is_refused(body):                          # a plan of more experts would be read out of bounds
    x, router, up, down = problem(3, 16, 8, 4)
    with use(body):
        plan = decode_gate(x, router, 2)
        for call, error, says in ((lambda: decode_gate(x, router.half(), 2), TypeError, "router must have x's dtype"), (lambda: decode_gate(x, router, 2, gain=x[0, :3]), ValueError, "gain must be"),
                                  (lambda: decode_experts(x, decode_gate(x, problem(3, 16, 8, 9)[1], 2), up, down), ValueError, "plan must be of 3 tokens and 4 experts"),
                                  (lambda: decode_experts(x[:2], plan, up, down), ValueError, "plan must be of 2 tokens"), (lambda: decode_experts(x, plan, up.half(), down), TypeError, "share a dtype"),
                                  (lambda: decode_experts(x, plan, up, down, residual=x[:2]), ValueError, "residual must be"), (lambda: decode_experts(x, plan, up, down, gain=x), ValueError, "gain must be")):
            with pytest.raises(error, match=says): call()

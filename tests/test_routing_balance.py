"""Balance losses: the stated formula on the right tokens, once per layer and step, however the batch is split."""
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moe_lab.core.types import Routing
from moe_lab.routing.balance import (balance_loss, deepspeed_loss, expert_share, first_choice_loss, gshard_loss, importance_load_loss,
                                     importance_loss, load_loss, losses, mean_probs, over_layers, z_loss)
from moe_lab.routing.expert_choice import ExpertChoiceGate
from moe_lab.routing.gate import Gaussian, NoisyRouting, RandomSecond, TopKGate


def routed(probs, k=1, mask=None, **options):
    p = torch.as_tensor(probs, dtype=torch.float64)
    gate = TopKGate(p.shape[1], p.shape[1], k, router=nn.Identity(), **options)
    return gate(p.log(), None if mask is None else torch.as_tensor(mask))


def test_constant_only_when_balanced():                                         # L01
    assert routed([[.25] * 4] * 6).expert.eq(0).all()   # ties: all on expert 0, and still
    assert balance_loss(routed([[.25] * 4] * 6)).item() == pytest.approx(1.)
    x = torch.tensor([[.7, .1, .1, .1]] * 6).log().requires_grad_()
    loss = balance_loss(TopKGate(4, 4, 1, router=nn.Identity())(x))
    loss.backward()
    assert loss.item() == pytest.approx(2.8) and x.grad.abs().min() > 0


def test_layers_are_judged_apart():                                             # L02
    A, B = routed([[.9, .1]] * 4), routed([[.1, .9]] * 4)
    assert over_layers([A, B]).item() == pytest.approx(1.8)
    assert over_layers([A, B], gshard_loss).item() == pytest.approx(1.8 / 4)


def test_k_is_divided_out():                                                    # L03
    assert balance_loss(routed([[.4, .3, .2, .1]] * 5, k=2)).item() == pytest.approx(1.4)
    for k in (1, 2, 3): assert balance_loss(routed([[1/3] * 3] * 5, k)).item() == pytest.approx(1.)


def test_logits_are_logits():                                                   # L05
    r = TopKGate(2, 2, 1, router=nn.Identity())(torch.tensor([[math.log(9), 0.]] * 3, dtype=torch.float64))
    assert balance_loss(r).item() == pytest.approx(1.8)
    assert r.logits.sum(1).tolist() == pytest.approx([math.log(9)] * 3)


@pytest.mark.parametrize("loss", [*losses.values(), z_loss])
def test_padding_counts_nowhere(loss):                                          # L06
    rows = [[.8, .2], [.2, .8], [.9, .1], [.9, .1]]
    masked, short = routed(rows, mask=[True, True, False, False]), routed(rows[:2])
    assert loss(masked).item() == pytest.approx(loss(short).item())
    assert loss(routed(rows, mask=[True] * 4)).equal(loss(routed(rows)))
    x = torch.tensor(rows).log(); x[2:] = math.nan      # rubbish in padding
    x.requires_grad_()
    gate = TopKGate(2, 2, 1, router=nn.Identity())
    got = loss(gate(x, torch.tensor([True, True, False, False])))
    assert got.item() == pytest.approx(loss(short).item(), rel=1e-6)
    got.backward() if got.requires_grad else None
    assert x.grad is None or (x.grad[2:].eq(0).all() and x.grad.isfinite().all())
    nobody = loss(gate(x, torch.zeros(4, dtype=torch.bool)))
    assert nobody.item() == 0


def test_masked_balance_value():                                                # L06
    rows = [[.8, .2], [.2, .8], [.9, .1], [.9, .1]]
    assert balance_loss(routed(rows, mask=[True, True, False, False])).item() == pytest.approx(1.)
    assert balance_loss(routed(rows)).item() == pytest.approx(1.2)


def test_no_tokens_give_zero_in_the_graph():                                    # Z07
    gate = TopKGate(8, 4, 2)
    for loss in [*losses.values(), z_loss]:
        value = loss(gate(torch.zeros(0, 8)))
        assert value.item() == 0
    (balance_loss(gate(torch.zeros(0, 8))) + z_loss(gate(torch.zeros(0, 8)))).backward()
    assert gate.router.weight.grad.eq(0).all()


def test_half_probs_do_not_overflow():                                          # N03
    T = 131072
    half = torch.full((T, 2), .5, dtype=torch.float16)
    r = Routing(torch.zeros(T, 1, dtype=torch.int64), half[:, :1], half, half, torch.ones(T, dtype=torch.bool))
    assert balance_loss(r).item() == 1. and balance_loss(r).dtype == torch.float32


def test_hot_expert():                                                          # Z12
    r = TopKGate(4, 4, 1, router=nn.Identity())(torch.tensor([[9., 0., 0., 0.]] * 32))
    assert balance_loss(r).item() == pytest.approx(4 * r.probs[0, 0].item())


@given(st.integers(0, 999), st.integers(1, 6), st.integers(1, 20))
@settings(max_examples=30, deadline=None)
def test_formulas_against_loops(seed, E, T):
    torch.manual_seed(seed)
    k = int(torch.randint(1, E + 1, ()))
    mask = torch.rand(T) < .8
    r = TopKGate(E, E, k, router=nn.Identity())(torch.randn(T, E, dtype=torch.float64), mask)
    real = [t for t in range(T) if mask[t]]
    n = max(len(real), 1)
    P = [sum(r.probs[t, e].item() for t in real) / n for e in range(E)]
    every = [sum(e in r.expert[t].tolist() for t in real) / (n * k) for e in range(E)]
    first = [sum(r.expert[t, 0].item() == e for t in real) / n for e in range(E)]
    dot = lambda f: sum(a * b for a, b in zip(f, P))
    assert expert_share(r).tolist() == pytest.approx(every) and mean_probs(r).tolist() == pytest.approx(P)
    assert balance_loss(r).item() == pytest.approx(E * dot(every))
    assert first_choice_loss(r).item() == pytest.approx(E * dot(first))
    assert gshard_loss(r).item() == pytest.approx(dot(first) / E)
    assert deepspeed_loss(r).item() == pytest.approx(E * dot(first if k <= 2 else every))
    z = [math.log(sum(math.exp(v) for v in r.logits[t].tolist())) ** 2 for t in real]
    assert z_loss(r).item() == pytest.approx(sum(z) / n)
    if E > 1 and real:
        s = torch.tensor(P) * n
        assert importance_loss(r).item() == pytest.approx((s.var() / s.mean() ** 2).item(), rel=1e-5)


def test_random_second_keeps_balanced_at_one():
    torch.manual_seed(0)
    r = routed([[.25] * 4] * 4000, k=2, noise=RandomSecond())
    assert r.expert[:, 1].eq(-1).sum() == 0             # 2 * 0.5 > U always
    assert balance_loss(r).item() == pytest.approx(1.)


def test_load_against_fresh_noise():
    "The expected load is what drawing the noise again gives on average."
    torch.manual_seed(0)
    std, logits = .5, torch.randn(1, 6, dtype=torch.float64)
    noisy = logits + std * torch.randn_like(logits)
    order = noisy[0].argsort(descending=True)
    theta = noisy[0, order[1]].item()                   # k = 2
    draws = logits + std * torch.randn(200_000, 6, dtype=torch.float64)
    loads = (draws > theta).double().mean(0)
    r = NoisyRouting(order[None, :2], logits.new_ones(1, 2), logits.softmax(1), logits, None, noisy, std)
    assert load_loss(r).item() == pytest.approx((loads.var() / loads.mean() ** 2).item(), rel=.02)


def test_load_without_noise_is_that_of_the_counts():                            # G13
    for std in (0., .1):
        gate = TopKGate(8, 4, 2, noise=Gaussian(std))
        for train in (True, False):
            assert importance_load_loss(gate.train(train)(torch.randn(20, 8))).isfinite()
    gate = TopKGate(8, 4, 2, noise=Gaussian(.1))
    load_loss(gate(torch.randn(20, 8))).backward()
    assert gate.router.weight.grad.abs().sum() > 0
    r = ExpertChoiceGate(8, 4)(torch.randn(20, 8))
    assert load_loss(r).item() == 0 and balance_loss(r).isfinite()


def test_one_expert_is_balanced():
    for k, loss in ((1, loss) for loss in losses.values()):
        assert loss(TopKGate(8, 1, k)(torch.randn(5, 8))).item() == pytest.approx(0. if loss is importance_load_loss else 1.)


def test_z_loss_off_is_a_no_op_and_nan_shows():                                 # L17
    gate = TopKGate(4, 4, 1, router=nn.Identity())
    assert z_loss(gate(torch.zeros(5, 4))).item() == pytest.approx(1.921812, rel=1e-6)
    assert z_loss(gate(torch.tensor([[0., math.nan, 0., 0.]]))).isnan()


def test_gradient_is_proportional_to_the_coefficient():                         # L12
    torch.manual_seed(0)
    gate, x = TopKGate(8, 4, 2), torch.randn(30, 8)
    grads = []
    for c in (.5, 1.):
        gate.zero_grad()
        r = gate(x)
        (0 * r.weight.sum() + c * balance_loss(r)).backward()
        grads.append(gate.router.weight.grad.clone())
    assert grads[0].abs().sum() > 0
    torch.testing.assert_close(2 * grads[0], grads[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_does_not_double(reentrant):                              # L11
    torch.manual_seed(0)
    layers = nn.ModuleList(TopKGate(8, 4, 2) for _ in range(2))

    def layer(gate, x):
        r = gate(x)
        return x * (1 + r.weight.sum(1, keepdim=True)), balance_loss(r)

    def run(wrap):
        layers.zero_grad()
        x, total = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).requires_grad_(), 0.
        for gate in layers:
            x, loss = wrap(gate, x)
            total = total + loss / len(layers)
        (x.square().mean() + total).backward()
        return total.item(), [g.router.weight.grad.clone() for g in layers]

    plain = run(layer)
    saved = run(lambda gate, x: checkpoint(layer, gate, x, use_reentrant=reentrant))
    assert plain[0] == saved[0] and all(a.equal(b) for a, b in zip(plain[1], saved[1]))


class Largest(TorchDispatchMode):
    "The largest tensor that any operation makes, in bytes."
    bytes = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor): self.bytes = max(self.bytes, t.numel() * t.element_size())
        return out


def test_no_one_hot():                                                          # L16
    T, k, E = 131072 // 1000, 8, 128
    r = TopKGate(E, E, k, router=nn.Identity())(torch.randn(T, E))
    for loss in losses.values():
        with Largest() as mode: loss(r)
        assert mode.bytes <= 4 * T * E < 8 * T * k * E      # never more than the probabilities themselves


def _router_grad(loss_name, W_rows, weight, x, mask):
    import torch.distributed as dist
    from moe_lab.routing.balance import losses, z_loss
    rank = dist.get_rank()
    start = sum(W_rows[:rank])
    mine = slice(start, start + W_rows[rank])
    gate = TopKGate(8, 4, 2, noise=Gaussian(0.)).double()
    gate.router.weight.data.copy_(weight)
    loss = (z_loss if loss_name == "z" else losses[loss_name])(gate(x[mine], mask[mine]), group=dist.group.WORLD)
    loss.backward() if loss.requires_grad else None
    g = gate.router.weight.grad
    g = torch.zeros_like(weight) if g is None else g
    dist.all_reduce(g)
    return loss.item(), g / dist.get_world_size()


@pytest.mark.parametrize("name", ["switch", "tutel", "gshard", "importance_load", "z"])
def test_same_batch_on_any_number_of_ranks(ranks, name):                        # L14
    torch.manual_seed(0)
    x, mask, weight = torch.randn(24, 8).double(), torch.rand(24) < .8, torch.randn(4, 8).double()
    gate = TopKGate(8, 4, 2).double()
    gate.router.weight.data.copy_(weight)
    want = (z_loss if name == "z" else losses[name])(gate(x, mask))
    want.backward()
    for rows in ([12, 12], [24, 0], [5, 9, 4, 6]):
        for value, grad in ranks.run(_router_grad, name, rows, weight, x, mask, n=len(rows)):
            assert value == pytest.approx(want.item(), rel=1e-12)
            torch.testing.assert_close(grad, gate.router.weight.grad, rtol=1e-9, atol=1e-12)

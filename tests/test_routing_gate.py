"""Gates: the stated rule in the stated order, ties, noise, bad numbers, degenerate sizes."""
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from moe_lab.core.types import dispatch
from moe_lab.routing.expert_choice import ExpertChoiceGate, expert_choice
from moe_lab.routing.gate import (CosineRouter, Gaussian, Gumbel, Jitter, LinearRouter, RandomSecond, TopKGate,
                                  limit_groups, sigmoid, softmax, softmax_topk, topk)


def on_logits(logits, top_k, **options):
    "A float32 gate whose router is the identity, and its decision on `logits`."
    logits = torch.as_tensor(logits)
    gate = TopKGate(logits.shape[1], logits.shape[1], top_k, router=nn.Identity(), **options)
    return gate(logits)


# --- top-k ---------------------------------------------------------------------------------------------------------

@given(st.data())
@settings(max_examples=60, deadline=None)
def test_topk_is_the_stable_sort(data):
    E = data.draw(st.integers(1, 40)); k = data.draw(st.integers(1, E)); T = data.draw(st.integers(0, 4))
    some = st.sampled_from([-math.inf, -1., -0., 0., .5, 1., math.inf])         # few values: many ties
    s = torch.tensor([[data.draw(some) for _ in range(E)] for _ in range(T)]).reshape(T, E)
    assert topk(s, k)[1].equal(s.argsort(dim=-1, descending=True, stable=True)[:, :k])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("E", [64, 384])
def test_ties_take_the_lowest_id(dtype, E):                                     # G08
    for _ in range(20): assert topk(torch.zeros(1, E, dtype=dtype), 2)[1].tolist() == [[0, 1]]
    assert topk(torch.zeros(3, E, dtype=dtype), 32)[1].tolist() == [list(range(32))] * 3


def test_fused_topk_refuses_what_its_kernel_cannot_read():
    for bad, error in ((torch.zeros(4), ValueError), (torch.zeros(2, 4).long(), TypeError), (torch.zeros(2, 4).bfloat16(), TypeError)): pytest.raises(error, softmax_topk, bad, 2, True)


def test_topk_refuses_a_wrong_k():                                              # Z10
    for k in (0, 5): pytest.raises(ValueError, topk, torch.zeros(2, 4), k)


# --- the routing rule ----------------------------------------------------------------------------------------------

def test_every_E_and_k_against_a_loop():                                        # G17
    torch.manual_seed(0)
    for E in (1, 2, 3, 8, 16, 48, 64, 128, 256, 384):
        logits = torch.randn(3, E, dtype=torch.float64)
        for k in range(1, min(E, 16) + 1):
            r = on_logits(logits, k)
            for t in range(3):
                row = logits[t].tolist()
                ids = sorted(range(E), key=lambda e: (-row[e], e))[:k]
                p = [math.exp(row[e]) / sum(map(math.exp, row)) for e in ids]
                w = [v / sum(p) for v in p] if k > 1 else p
                assert r.expert[t].tolist() == ids
                assert r.weight[t].tolist() == pytest.approx(w, rel=1e-12) and (r.weight[t] > 0).all()


def test_orders_of_softmax_and_topk():                                          # G04, G06
    close = lambda w, v: torch.testing.assert_close(w, torch.tensor([v]), rtol=1e-6, atol=1e-6)
    close(on_logits([[2., 1., 0.]], 2).weight, [.7310586, .2689414])
    close(on_logits([[2., 1., 0.]], 2, score_first=False).weight, [.7310586, .2689414])
    close(on_logits([[2., 1., 0.]], 2, renormalize=False).weight, [.6652409, .2447285])
    close(on_logits([[2., 1., 0.]], 2, scale=2.5).weight, [1.827647, .672354])
    close(on_logits([[2., 1., 0.]], 2, scale=2.5, renormalize=False).weight, [1.663102, .611821])


def test_k1_keeps_its_axis_and_its_gradient():                                  # G03, G07
    logits = torch.tensor([[math.log(3), 0.], [0., 0.]], requires_grad=True)
    r = TopKGate(2, 2, 1, router=nn.Identity())(logits)
    assert r.weight.shape == (2, 1) and r.weight.flatten().tolist() == pytest.approx([.75, .5])
    r.weight[0].sum().backward()
    torch.testing.assert_close(logits.grad[0], torch.tensor([.1875, -.1875]))
    for options in (dict(renormalize=True), dict(score_first=False), dict(renormalize=True, score="sigmoid")):
        with pytest.raises(ValueError, match="never learns"): TopKGate(2, 2, 1, **options)
    TopKGate(2, 1, 1, renormalize=True)                 # one expert: nothing to learn


def test_bias_chooses_but_never_weighs():                                       # G02
    gate = TopKGate(2, 2, 1, score="sigmoid", bias=True, router=nn.Identity())
    gate.bias += torch.tensor([0., .5])
    x = torch.tensor([[.8, .6]]).logit().requires_grad_()
    r = gate(x)
    assert r.expert.item() == 1 and r.weight.item() == pytest.approx(.6)
    r.weight.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[0., .24]]))
    assert not gate.bias.requires_grad and r.probs[0].tolist() == pytest.approx([.8 / 1.4, .6 / 1.4])
    both = TopKGate(2, 2, 2, score="sigmoid", bias=True, router=nn.Identity())
    both.bias += torch.tensor([0., .5])
    assert both(x).expert.tolist() == [[1, 0]] and both(x).weight[0].tolist() == pytest.approx([.6 / 1.4, .8 / 1.4])


def test_bias_update_counts_what_it_is_given():                                 # L19
    gate = TopKGate(8, 4, 2, bias=True)
    x = torch.randn(32, 8)
    total = torch.zeros(4, dtype=torch.int64)
    for mode in (True, False, True):                    # train, eval, train
        gate.train(mode)
        counts = torch.utils.checkpoint.checkpoint(lambda x: gate(x).counts(), x, use_reentrant=False)
        if mode: total += counts
    assert total.sum() == 2 * 32 * 2 and gate.bias.eq(0).all()      # forward, recompute and eval leave no trace
    gate.update_bias(torch.tensor([10, 2, 6, 6]), .01)
    assert gate.bias.tolist() == pytest.approx([-.01, .01, 0, 0])
    gate.update_bias(torch.zeros(4, dtype=torch.int64))             # an idle layer does not drift
    assert gate.bias.tolist() == pytest.approx([-.01, .01, 0, 0])
    with pytest.raises(ValueError, match="bias=True"): TopKGate(8, 4).update_bias(total)
    with pytest.raises(ValueError, match="counts"): gate.update_bias(total[:2])


def test_bias_balances_a_skewed_stream():
    torch.manual_seed(0)
    gate = TopKGate(16, 8, 2, score="sigmoid", bias=True)
    gate.router.weight.data[0] += .2                    # expert 0 is everybody's favourite
    x = torch.randn(512, 16) + 1
    load = lambda: gate(x).counts().max().item() / (512 * 2 / 8)
    before = load()
    for _ in range(600): gate.update_bias(gate(x).counts(), 2e-3)
    assert before > 3 and load() < 1.2


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_groups_against_brute_force(data):
    per, groups = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    keep = data.draw(st.integers(1, groups))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    keys = torch.randint(0, 4, (2, per * groups), generator=g).double()
    got = limit_groups(keys, groups, keep)
    for t in range(2):
        score = [sum(sorted(keys[t, i * per:(i + 1) * per].tolist())[-2:]) for i in range(groups)]
        best = sorted(range(groups), key=lambda i: (-score[i], i))[:keep]
        assert [e for e in range(per * groups) if got[t, e] > -math.inf] == [e for e in range(per * groups) if e // per in best]


def test_group_limited_gate_stays_inside_its_groups():
    torch.manual_seed(0)
    r = TopKGate(16, 32, 4, score="sigmoid", groups=8, keep_groups=2, bias=True)(torch.randn(50, 16))
    assert max(len(set((row // 4).tolist())) for row in r.expert) <= 2
    torch.testing.assert_close(r.weight.sum(1), torch.ones(50))


# --- bad numbers, degenerate sizes ---------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [{}, dict(score="sigmoid"), dict(score_first=False), dict(score="sigmoid", bias=True),
                                     dict(score="sigmoid", groups=4, keep_groups=2), dict(renormalize=False)])
@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_bad_rows_stay_alone(options, bad):                                     # G11
    torch.manual_seed(0)
    good = torch.randn(1, 8)
    r = on_logits(torch.cat([torch.full((1, 8), bad), good]), 3, **options)
    alone = on_logits(good, 3, **options)
    assert sorted(set(r.expert[0].tolist())) == sorted(r.expert[0].tolist()) and 0 <= r.expert.min() and r.expert.max() < 8
    assert r.weight[0].tolist() == [0., 0., 0.] and r.probs.isfinite().all()
    assert r.expert[1].equal(alone.expert[0]) and r.weight[1].equal(alone.weight[0])


def test_one_nan_logit_is_never_chosen():                                       # G12
    x = torch.tensor([[math.nan, 1., 2., 3.]], requires_grad=True)
    r = TopKGate(4, 4, 2, router=nn.Identity())(x)
    assert r.expert.tolist() == [[3, 2]]
    torch.testing.assert_close(r.weight, torch.tensor([[.7310586, .2689414]]))
    (r.weight[0, 0] + r.probs.square().sum()).backward()
    assert x.grad.isfinite().all() and x.grad[0, 0] == 0
    wanted = on_logits([[math.nan, math.nan, math.nan, 3.]], 2)     # too few usable: chosen last, weight 0
    assert wanted.expert.tolist() == [[3, 0]] and wanted.weight.tolist() == [[1., 0.]]


def test_no_tokens():                                                           # Z07
    for gate in (TopKGate(8, 4, 2), TopKGate(8, 4, 2, noise=(Jitter(), Gaussian(.1), RandomSecond())), ExpertChoiceGate(8, 4)):
        for train in (True, False):
            x = torch.zeros(0, 8, requires_grad=True)
            r = gate.train(train)(x)
            assert r.expert.shape[0] == 0 and r.probs.shape == (0, 4) and r.expert.dtype == torch.int64
            (r.weight.sum() + r.probs.sum()).backward()
            assert gate.router.weight.grad.eq(0).all() and x.grad.shape == (0, 8)


@pytest.mark.parametrize("E,k", [(4, 5), (4, 0), (0, 1), (4, -1)])
def test_impossible_sizes_are_refused(E, k):                                    # Z10
    with pytest.raises(ValueError, match="num_experts|top_k"): TopKGate(8, E, k)


def test_all_experts_equal_the_dense_softmax():                                 # Z10
    torch.manual_seed(0)
    r = TopKGate(8, 4, 4)(torch.randn(5, 8))
    torch.testing.assert_close(torch.zeros(5, 4).scatter(1, r.expert, r.weight), r.probs)
    one = TopKGate(8, 1, 1)(torch.randn(5, 8))
    assert one.weight.eq(1).all() and one.expert.eq(0).all()


@pytest.mark.parametrize("options,match", [
    (dict(score="relu"), "sigmoid"), (dict(scale=0.), "scale"), (dict(groups=3, keep_groups=1), "divide"), (dict(groups=2), "together"),
    (dict(groups=4, keep_groups=5), "keep_groups"), (dict(noise=3), "noise|iterable"), (dict(noise=(1,)), "noise"),
    (dict(top_k=3, noise=RandomSecond()), "RandomSecond"), (dict(bias=True, noise=Gumbel()), "Gumbel"), (dict(top_k=2.), "top_k"),
    (dict(groups=8, keep_groups=1, top_k=2), "keep_groups")])
def test_wrong_options_are_named(options, match):
    with pytest.raises((ValueError, TypeError), match=match): TopKGate(8, 8, **{"top_k": 2, **options})


def test_wrong_inputs_are_named():
    gate = TopKGate(8, 4)
    for x, mask in ((torch.zeros(3, 7), None), (torch.zeros(2, 3, 8), None), (torch.zeros(3, 8, dtype=torch.int64), None),
                    (torch.zeros(3, 8), torch.ones(3)), (torch.zeros(3, 8), torch.ones(2, dtype=torch.bool))):
        with pytest.raises((ValueError, TypeError), match="x must|mask must"): gate(x, mask)


def test_padding_has_no_expert_no_weight_and_no_gradient():
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    x[1] = math.nan                                     # rubbish in padding stays there
    x.requires_grad_()
    mask = torch.tensor([True, False, True, True, False, True])
    for gate in (TopKGate(8, 4, 2), ExpertChoiceGate(8, 4)):
        r = gate(x, mask)
        assert r.expert[~mask].eq(-1).all() and r.weight[~mask].eq(0).all() and r.mask is mask
        assert r.counts().sum() == r.expert.ge(0).sum() <= 8
    r = TopKGate(8, 4, 2)(x, mask)
    r.weight.square().sum().backward()
    assert x.grad[mask].isfinite().all() and x.grad[4].eq(0).all()


# --- noise ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("noise", [Jitter(.1), Gaussian(.5), Gumbel(), Gumbel(keep_first=True), RandomSecond(), (Jitter(.1), Gaussian(.5), RandomSecond())])
def test_noise_is_for_training_only(noise):                                     # G13
    torch.manual_seed(0)
    x = torch.randn(200, 8)
    plain, noisy = TopKGate(8, 4, 2), TopKGate(8, 4, 2, noise=noise)
    noisy.load_state_dict(plain.state_dict())
    a, b = noisy(x), noisy(x)
    assert not (a.expert.equal(b.expert) and a.weight.equal(b.weight))
    noisy.eval()
    a, b, c = noisy(x), noisy(x), plain(x)
    for name in ("expert", "weight", "probs", "logits"):
        assert getattr(a, name).equal(getattr(b, name)) and getattr(a, name).equal(getattr(c, name))
    torch.manual_seed(1); p = noisy.train()(x)
    torch.manual_seed(1); q = noisy(x)
    assert p.expert.equal(q.expert) and p.weight.equal(q.weight)    # same seed, same bits


def test_gumbel_changes_the_choice_not_the_value():
    torch.manual_seed(0)
    r = TopKGate(8, 4, 1, noise=Gumbel())(x := torch.randn(100, 8))
    torch.testing.assert_close(r.weight, r.probs.gather(1, r.expert))
    assert (r.expert != r.logits.argmax(-1, keepdim=True)).any()
    r = TopKGate(8, 4, 2, noise=Gumbel(keep_first=True))(x)
    assert r.expert[:, 0].equal(r.logits.argmax(-1)) and (r.expert[:, 0] != r.expert[:, 1]).all()


def test_random_second_follows_gshard():
    torch.manual_seed(0)
    logits = torch.tensor([[.7, .2, .1]]).log().expand(20_000, 3)
    r = TopKGate(3, 3, 2, router=nn.Identity(), noise=RandomSecond())(logits)
    used = r.expert[:, 1].ge(0)
    assert used.double().mean().item() == pytest.approx(2 * .2 / .9, abs=.01)
    torch.testing.assert_close(r.weight[:, 0], torch.full((20_000,), 7 / 9))    # g1 keeps its share of the pair
    assert r.weight[~used, 1].eq(0).all()
    torch.manual_seed(0)
    scaled = TopKGate(3, 3, 2, router=nn.Identity(), noise=RandomSecond(), scale=3.)(logits)   # the rule is about shares, not about scaled weights
    assert scaled.expert.equal(r.expert)
    torch.testing.assert_close(scaled.weight, 3 * r.weight)


# --- numbers -------------------------------------------------------------------------------------------------------

def test_half_models_route_in_float32():                                        # N01
    w = torch.zeros(2, 16); w[:, 0] = torch.tensor([1., 1.]); w[1, 1] = 2 ** -9
    gate = TopKGate(16, 2, 1)
    gate.router.weight.data.copy_(w)
    x = torch.zeros(1, 16); x[0, 0] = 1.; x[0, 1] = .5              # logits 1 and 1 + 2^-10: equal in bf16
    r = gate.bfloat16()(x.bfloat16())
    assert r.expert.item() == 1 and r.logits.dtype == r.weight.dtype == torch.float32
    assert gate.double()(x.double()).weight.dtype == torch.float64


def test_jitter_is_not_rounded_to_bf16():
    x = torch.ones(1, 10_000, dtype=torch.bfloat16)
    y = Jitter(.01).on_input(x)
    assert y.dtype == torch.float32 and y.unique().numel() > 1000       # bf16 has 4 values there


def test_saturated_scores_do_not_hide_the_order():
    assert on_logits([[20., 30., 25.]], 2, score="sigmoid").expert.tolist() == [[1, 2]]     # all three are 1.0 in float32
    assert on_logits([[0., -200., -150.]], 2).expert.tolist() == [[0, 2]]                   # both underflow to 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype):                                       # N09
    torch.manual_seed(0)
    x = torch.randn(10, 16, requires_grad=True)
    for gate in (TopKGate(16, 4, 2), TopKGate(16, 4, 2, router=CosineRouter(16, 4, 8))):
        plain = gate(x)
        with torch.autocast("cpu", dtype):
            r = gate(x)
            grads = torch.autograd.grad(r.weight[:, 0].sum(), [x, *gate.parameters()])      # backward under autocast too
        assert r.logits.equal(plain.logits) and r.weight.equal(plain.weight)
        assert all(a.equal(b) for a, b in zip(grads, torch.autograd.grad(plain.weight[:, 0].sum(), [x, *gate.parameters()])))


def test_strided_input_equals_its_copy():                                       # K08
    torch.manual_seed(0)
    gate, big = TopKGate(8, 4, 2), torch.randn(16, 40)
    for x in (big[:, ::5], big[:, 3:11], big[:8, :16].t()[:, :8], big[:1, :8].expand(6, 8)):
        a, b = gate(x), gate(x.contiguous())
        assert a.expert.equal(b.expert)
        torch.testing.assert_close(a.weight, b.weight)


def test_derivatives_of_both_orders():                                          # T08
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for options in ({}, dict(score="sigmoid", scale=2.), dict(score_first=False), dict(router=CosineRouter(4, 3, 5))):
        gate = TopKGate(4, 3, 2, **options).double()
        f = lambda x, *p: gate(x).weight
        assert torch.autograd.gradcheck(f, (x, *gate.parameters()))
        assert torch.autograd.gradgradcheck(f, (x, *gate.parameters()))


def test_cosine_router():
    gate = CosineRouter(4, 3, 5, tau=.5)
    assert gate(torch.zeros(1, 4)).eq(0).all()
    gate.log_scale.data.fill_(99.)
    assert gate(torch.randn(9, 4)).abs().max() <= 100.001           # tau has a floor of 0.01
    with pytest.raises(ValueError, match="tau"): CosineRouter(4, 3, tau=0.)


def test_state_dict_has_what_a_resume_needs():
    assert list(TopKGate(8, 4, 2, bias=True).state_dict()) == ["bias", "router.weight"]
    assert list(TopKGate(8, 4, 2).state_dict()) == ["router.weight"]
    assert list(LinearRouter(8, 4, bias=True).state_dict()) == ["weight", "bias"]


def test_compiles_without_a_break():                                            # T03
    torch._dynamo.reset()
    gate = TopKGate(8, 4, 2, score="sigmoid", bias=True, groups=2, keep_groups=1)
    f = torch.compile(lambda x: gate(x).weight.sum() + gate(x).counts().sum(), fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (5, 7, 0):
        x = torch.randn(T, 8, requires_grad=True)
        torch.testing.assert_close(f(x), gate(x).weight.sum() + gate(x).counts().sum())


def test_recomputation_reuses_the_choice():                                     # T01
    torch.manual_seed(0)
    gate, x = TopKGate(8, 4, 2), torch.randn(20, 8)
    first = gate(x)
    flipped = gate(x.flip(0), expert=first.expert)                  # other numbers, same experts
    assert flipped.expert.equal(first.expert)
    torch.testing.assert_close(flipped.weight, torch.nn.functional.normalize(flipped.probs.gather(1, first.expert), p=1, dim=1))
    holes = first.expert.clone(); holes[:5, 1] = -1                 # a choice that was none stays none, and weighs nothing
    for options in ({}, dict(score_first=False)):
        again = TopKGate(8, 4, 2, router=gate.router, **options)(x, expert=holes)
        assert again.expert.equal(holes)
        torch.testing.assert_close(again.weight[:5], torch.tensor([[1., 0.]]).expand(5, 2))
        torch.testing.assert_close(again.weight[5:], first.weight[5:])
    with pytest.raises(ValueError, match="top_k=2"): gate(x, expert=first.expert[:, :1])
    with pytest.raises(ValueError, match="RandomSecond"): TopKGate(8, 4, 2, noise=RandomSecond())(x, expert=first.expert)


# --- expert choice -------------------------------------------------------------------------------------------------

@given(st.data())
@settings(max_examples=40, deadline=None)
def test_expert_choice_against_a_loop(data):
    T, E, C = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 5)), data.draw(st.integers(0, 10))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    s = torch.randint(0, 3, (T, E), generator=g).float()
    mask = torch.rand(T, generator=g) < .7 if data.draw(st.booleans()) else None
    real = [t for t in range(T) if mask is None or mask[t]]
    want = [sorted(real, key=lambda t: (-s[t, e], t))[:C] for e in range(E)]
    d = expert_choice(s, C, mask)
    k = d.expert.shape[1]
    assert d.counts.tolist() == [len(w) for w in want] and d.offsets.tolist() == [sum(map(len, want[:e])) for e in range(E + 1)]
    assert (d.order[: d.offsets[-1]] // k).tolist() == [t for w in want for t in w]
    assert sorted(d.order.tolist()) == list(range(T * k))
    rows, n = d.rows(), d.offsets[-1]
    assert rows.reshape(-1)[d.order[:n]].tolist() == list(range(n)) and d.expert.ge(0).equal(d.kept)
    assert dispatch(d.expert, E).counts.equal(d.counts)


def test_expert_choice_gate():
    torch.manual_seed(0)
    x = torch.randn(30, 8, requires_grad=True)
    gate = ExpertChoiceGate(8, 4, capacity_factor=1.1)
    r = gate(x)
    assert r.counts().tolist() == [9] * 4                           # ceil(1.1 * 30 / 4)
    got = r.expert >= 0
    torch.testing.assert_close(r.weight[got], r.probs.gather(1, r.expert.clamp(min=0))[got])
    r.weight.sum().backward()
    assert gate.router.weight.grad.abs().sum() > 0
    half = torch.arange(30) < 12
    assert gate(x, half).counts().tolist() == [4] * 4 and gate(x, half).expert[12:].eq(-1).all()
    assert gate(x, torch.zeros(30, dtype=torch.bool)).counts().tolist() == [0] * 4
    for f in (0., 5.): pytest.raises(ValueError, ExpertChoiceGate, 8, 4, f)


def test_scores_gradient_survives_bad_rows():
    x = torch.tensor([[math.nan, 0.], [-math.inf, -math.inf], [1., 2.]], requires_grad=True)
    (softmax(x) * torch.randn(3, 2)).sum().backward()
    assert x.grad.isfinite().all() and x.grad[2].abs().sum() > 0
    x.grad = None
    sigmoid(x).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("width", [3, 5])
def test_a_router_of_another_width_is_refused(width):
    with pytest.raises(ValueError, match="router must give"): TopKGate(16, 4, 2, router=torch.nn.Linear(16, width))(torch.randn(6, 16))

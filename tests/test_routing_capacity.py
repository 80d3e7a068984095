"""Capacity: an integer by one written rule; who is dropped, and what becomes of them."""
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from moe_lab.core.types import count_experts, dispatch
from moe_lab.routing.capacity import capacity, capacity_for, drop_priority, drop_share, fill_lost, kept_weight, lost_tokens, needed, round_up, rules
from moe_lab.routing.expert_choice import ExpertChoiceGate
from moe_lab.routing.gate import TopKGate


def routed(logits, k=1, mask=None, **options):
    logits = torch.as_tensor(logits)
    return TopKGate(logits.shape[1], logits.shape[1], k, router=nn.Identity(), **options)(logits, mask)


CASES = [(8, 4, 1, 1), (10, 4, 1, 1), (10, 4, 2, 1), (10, 4, 1, 1.25), (1, 64, 1, 1), (100, 2, 1, 1.1)]


def test_rounding_rules():                                                      # C07
    got = lambda rule: [capacity(T, E, k, f, rule=rule) for T, E, k, f in CASES]
    assert got("gshard") == got("switch") == [2, 3, 5, 4, 1, 55]    # floats would give 56
    assert got("deepspeed") == [4, 4, 5, 4, 4, 55]
    assert got("tutel") == [2, 3, 6, 3, 1, 55]
    assert got("fairseq") == [2, 3, 6, 3, 1, 55]
    assert got("fastmoe") == [2, 2, 5, 3, 0, 55]
    assert capacity(100, 3, 2, 4., rule="fairseq") == 2 * 34        # the factor does not enter


@given(st.integers(0, 10_000), st.integers(1, 300), st.integers(1, 8), st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_rules_against_exact_arithmetic(T, E, k, hundredths):
    f = hundredths / 100
    exact = Fraction(hundredths, 100) * k * T / E
    assert capacity(T, E, k, f, rule="switch") == math.ceil(exact)
    assert capacity(T, E, k, f, rule="deepspeed") == max(4, math.ceil(exact))
    assert capacity(T, E, k, f, rule="tutel") == k * (hundredths * math.ceil(Fraction(T, E)) // 100)
    assert capacity(T, E, k, f, rule="fastmoe") == math.ceil(Fraction(hundredths * T, 100)) * k // E


def test_fixed_needed_bounded():
    for f, want in ((1., 16), (0, 11), (0., 11), (-2., 11), (-.5, 8)): assert capacity(64, 8, 2, f, need=11) == want
    assert capacity(64, 8, 2, 0, need=0, multiple=8) == 0
    assert capacity(0, 8, 2, 1.) == 0


def test_alignment_keeps_zero():                                                # Z09
    assert [round_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert round_up(torch.tensor([0, 1, 8, 9]), 8).tolist() == [0, 8, 8, 16]
    assert capacity(64, 8, 2, 1., multiple=12) == 24


@pytest.mark.parametrize("wrong,match", [
    (dict(num_tokens=-1), "num_tokens"), (dict(num_experts=0), "num_experts"), (dict(top_k=0), "top_k"), (dict(factor=math.nan), "factor"),
    (dict(factor=math.inf), "factor"), (dict(factor=0), "need"), (dict(rule="ceil"), "deepspeed"), (dict(multiple=0), "multiple")])
def test_bad_arguments_are_named(wrong, match):
    with pytest.raises(ValueError, match=match): capacity(**{**dict(num_tokens=8, num_experts=4, top_k=1, factor=1.), **wrong})


def test_capacity_binds_at_the_last_token():                                    # C01
    r = routed([[9., 0., 0., 0.]] * 5)
    C = capacity_for(r, 1., rule="deepspeed")
    d = dispatch(r.expert, 4, C)
    assert C == 4 and d.slot.flatten().tolist() == [0, 1, 2, 3, -1] and d.counts.tolist() == [4, 0, 0, 0]


def test_importance_is_not_fooled_by_negative_logits():                         # C03
    r = routed([[-1., -2.], [-1., -2.], [-2., -1.], [-2., -1.]])
    for policy in ("probs", "batch", "random", "position"):
        assert dispatch(r.expert, 2, 2, drop_priority(r, policy)).kept.all()


def test_policy_names():                                                        # C08
    r = routed([[1., 0.]])
    assert drop_priority(r) is None
    for name in ("prob", "x"):
        with pytest.raises(ValueError, match="'probs'"): drop_priority(r, name)


def test_probs_policy_keeps_each_experts_best():
    torch.manual_seed(0)
    r = routed(torch.randn(40, 5), k=2)
    d = dispatch(r.expert, 5, 6, drop_priority(r, "probs"))
    for e in range(5):
        mine = r.expert == e
        best = r.weight[mine].sort(descending=True).values[:6]
        assert r.weight[mine & d.kept].sort(descending=True).values.equal(best)


def test_batch_priority_drops_the_unsure_first():
    torch.manual_seed(0)
    r = routed(torch.randn(60, 4) * 3)
    d = dispatch(r.expert, 4, 8, drop_priority(r, "batch"))
    for e in range(4):
        mine = r.expert[:, 0] == e
        p, kept = r.probs.amax(1)[mine], d.kept[:, 0][mine]
        if not kept.all(): assert p[kept].min() >= p[~kept].max()


@given(st.integers(0, 9999), st.sampled_from(["position", "batch", "probs", "random"]), st.sampled_from([0, -8.]), st.integers(1, 16))
@settings(max_examples=60, deadline=None)
def test_just_enough_drops_nothing(seed, policy, factor, multiple):
    torch.manual_seed(seed)
    E = int(torch.randint(1, 9, ())); k = int(torch.randint(1, E + 1, ())); T = int(torch.randint(0, 65, ()))
    mask = torch.rand(T) < .9
    r = routed(torch.randn(T, E) * 2, k, mask)
    C = capacity_for(r, factor, multiple=multiple)
    d = dispatch(r.expert, E, C, drop_priority(r, policy))
    assert d.counts.equal(r.counts()) and drop_share(d) == 0
    assert C == round_up(int(r.counts().max()), multiple)


def test_need_is_not_read_from_the_last_row_of_positions():
    "Tutel's shortcut, position of the last token + 1, is right in order of arrival and wrong after sorting by priority."
    torch.manual_seed(0)
    wrong = 0
    for _ in range(20):
        r = routed(torch.randn(64, 8) * 2)
        d = dispatch(r.expert, 8, None, drop_priority(r, "batch"))
        last = torch.stack([d.slot[r.expert == e].reshape(-1)[-1:].sum() for e in range(8)]).max() + 1
        wrong += int(last) < needed(r)
        assert capacity_for(r, 0) == needed(r) == count_experts(r.expert, 8).max()
    assert wrong > 0


def test_padding_takes_no_part():
    torch.manual_seed(0)
    mask = torch.arange(64) < 20
    r = routed(torch.randn(64, 4), 2, mask)
    assert capacity_for(r, 1.) == 2 * 5 and needed(r) == int(r.counts().max()) <= 20
    assert capacity_for(routed(torch.randn(0, 4), 2), 0) == 0
    assert capacity_for(r, None) is None
    e = ExpertChoiceGate(4, 4)(torch.randn(20, 4))
    assert capacity_for(e, 0) == 10


def _agree(rows, factor):
    import torch.distributed as dist
    rank = dist.get_rank()
    logits = torch.zeros(rows[rank], 4); logits[:, rank] = 1.
    r = routed(logits)
    return capacity_for(r, factor, group=dist.group.WORLD), needed(r), capacity_for(r, factor)


def test_ranks_agree_before_they_exchange(ranks):
    for rows, factor, want in (([2, 8], 0, 8), ([2, 8], 1., 2), ([0, 3], 0, 3), ([0, 0], 0, 0), ([8, 2, 4], -2., 4)):
        got = ranks.run(_agree, rows, factor, n=len(rows))
        assert [g[0] for g in got] == [want] * len(rows)
        assert [g[1] for g in got] == rows


def test_capacity_is_per_rank():                                                # C10
    "Rank 0 sends 2 to expert 0, rank 1 none: with one row per rank and expert, one is dropped; a global pool of 2 would drop none."
    one = [dispatch(torch.tensor(e).reshape(-1, 1), 2, capacity(2, 2, 1, 1.)) for e in ([0, 0], [1, 1])]
    assert [int((~d.kept).sum()) for d in one] == [1, 1]
    assert drop_share(dispatch(torch.tensor([[0], [0], [1], [1]]), 2, capacity(4, 2, 1, 1.))) == 0


def test_dropped_give_zero_or_their_input():                                    # C06
    r = routed([[1., 0.], [2., 0.], [3., 0.]], renormalize=False)
    for C in (0, 1):
        d = dispatch(r.expert, 2, C)
        x = torch.randn(3, 4)
        y = torch.where(lost_tokens(d)[:, None], 0., 2 * x)
        assert fill_lost(y, x, d).equal(y) and fill_lost(y, x, d, "pass")[C:].equal(x[C:])
        assert lost_tokens(d).tolist() == [t >= C for t in range(3)]
    w = torch.ones(3, 1, requires_grad=True)
    kept_weight(w, d).sum().backward()
    assert w.grad.flatten().tolist() == [1., 0., 0.]


def test_weights_after_a_drop():
    d = dispatch(torch.tensor([[0, 1], [0, 1], [0, -1]]), 2, capacity=1)
    w = torch.tensor([[.6, .4], [.5, .5], [1., 0.]])
    assert kept_weight(w, d).tolist() == [pytest.approx([.6, .4]), [0., 0.], [0., 0.]]
    d = dispatch(torch.tensor([[0, 1], [0, 2]]), 3, capacity=1)
    assert kept_weight(w[:2], d, renormalized=True).tolist() == [pytest.approx([.6, .4]), [0., 1.]]
    with pytest.raises(ValueError, match="k=1"): kept_weight(w[:, :1], dispatch(torch.zeros(3, 1, dtype=torch.int64), 1), True)
    with pytest.raises(ValueError, match="lost"): fill_lost(w, w, d, "keep")


def test_drop_share_of_nothing():
    for d in (dispatch(torch.empty(0, 2, dtype=torch.int64), 4), dispatch(torch.full((3, 1), -1), 4, 1)):
        assert drop_share(d).item() == 0 and lost_tokens(d).sum() == 0


def test_every_rule_has_a_name():
    assert sorted(rules) == ["deepspeed", "fairseq", "fastmoe", "gshard", "switch", "tutel"]


@pytest.mark.parametrize("kw, name", [(dict(top_k=4, rule="fairseq"), "fairseq"), (dict(need=-3, factor=0.), "need"), (dict(need=2.5, factor=0.), "need")])
def test_what_no_rule_knows_is_refused(kw, name):
    with pytest.raises((ValueError, TypeError), match=name): capacity(**dict(num_tokens=100, num_experts=8, top_k=2, factor=1.) | kw)

"""FasterMoE's gate and schedule, SmartMoE's pools, and an arena that has an answer for any load."""
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from moe_lab.cluster.groups import grid
from moe_lab.cluster.topology import h200_nvlink, nd_a100_v4
from moe_lab.comm.gradients import reduce_gradients
from moe_lab.comm.parallel import ExpertParallel
from moe_lab.core.types import Cluster, Device, Level, Placement
from moe_lab.experts.layer import MoE
from moe_lab.placement.arena import POLICIES, run
from moe_lab.placement.cost import Cost, step_seconds
from moe_lab.placement.rivals import eplb_placement, shadows, smartmoe_placement, symi_placement
from moe_lab.placement.smart_schedule import Pairwise, flows, smart_ops, smart_pass, smart_seconds
from moe_lab.placement.smartmoe import Plan, pool
from moe_lab.placement.topology_gate import TopologyGate, keep_near
from moe_lab.placement.vexpert import initial
from moe_lab.routing.gate import TopKGate
from moe_lab.sim.events import simulate


@given(st.integers(0, 40), st.integers(2, 9), st.integers(1, 3), st.integers(1, 4), st.floats(0, 1), st.integers(0, 10**6), st.booleans(), st.sampled_from(["softmax", "sigmoid"]))
def test_no_more_leave_than_may(T, E, k, N, outgoing, seed, padded, score):
    k, rng = min(k, E), np.random.default_rng(seed)
    near = torch.from_numpy(rng.random((N, E)) < .5)
    for row in near: row[torch.from_numpy(rng.permutation(E)[:k])] = True
    torch.manual_seed(seed)
    free = TopKGate(6, E, k, score=score)
    gate = TopologyGate(6, E, k, near=near, outgoing=outgoing, score=score); gate.load_state_dict(free.state_dict())
    x, mask = torch.randn(T, 6), torch.from_numpy(rng.random(T) < .7) if padded else None
    a, b = free(x, mask), gate(x, mask)
    part = torch.arange(T) * N // max(T, 1)
    real = torch.ones(T, dtype=torch.bool) if mask is None else mask
    far = lambda r: (~near[part].gather(1, r.expert.clamp(min=0)) & (r.expert >= 0)).any(1)
    for n in range(N):
        mine = (part == n)
        left, limit = int(far(b)[mine].sum()), int((outgoing * real[mine].sum().double()).floor())
        assert left == min(limit, int(far(a)[mine].sum()))                                  # never more, and no fewer than could
    same = far(b) | ~far(a)
    assert b.expert[same].equal(a.expert[same]) and b.weight[same].allclose(a.weight[same])  # who leaves, and who never wanted to, is untouched
    assert (b.expert[~real] == -1).all() and (b.weight[~real] == 0).all() and all(len(set(row)) == k for row in b.expert[real].tolist())
    assert gate(x, mask, b.expert).expert.equal(b.expert)


def test_a_gate_of_one_expert_and_of_bf16_tokens():
    near = torch.ones(1, 1, dtype=torch.bool)
    assert TopologyGate(4, 1, 1, near=near, outgoing=0.)(torch.randn(3, 4)).expert.tolist() == [[0]] * 3
    gate = TopologyGate(4, 4, 2, near=torch.tensor([[True, True, False, False]]), outgoing=0.).to(torch.bfloat16)
    assert gate(torch.randn(5, 4, dtype=torch.bfloat16)).expert.max() < 2


@given(st.integers(1, 5), st.integers(1, 6), st.floats(0, 1), st.integers(0, 10**6))
def test_counts_that_stay_near(G, E, outgoing, seed):
    rng = np.random.default_rng(seed)
    near, counts = rng.random((G, E)) < .6, rng.integers(0, 50, (G, E)) * (rng.random((G, E)) < .6)
    near[:, 0] |= ~near.any(1)
    kept = keep_near(counts, near, outgoing)
    assert (kept >= 0).all() and (kept.sum(1) == counts.sum(1)).all()
    assert (np.where(near, 0, kept).sum(1) <= np.maximum(np.floor(outgoing * counts.sum(1)), 0)).all() and (np.where(near, 0, kept) <= counts).all()


def pairwise(seeds):
    "The layer over pairs equals plain expert parallelism, whatever the sizes."
    W, r = dist.get_world_size(), dist.get_rank()
    for seed in seeds:
        rnd = random.Random(seed)
        E, factor, groups = rnd.choice([1, 2, W, 5, 8]), rnd.choice([None, None, .5, 1.5, 0.]), rnd.choice([n for n in range(1, W + 1) if W % n == 0])
        k, tokens, out = min(E, rnd.choice([1, 2])), [rnd.choice([0, 1, 6, 11]) for _ in range(W)], []
        for ex in (ExpertParallel(grid(), factor), Pairwise(grid(), groups, capacity_factor=factor)):
            torch.manual_seed(seed); moe = MoE(6, 8, E, k, exchange=ex, bias=seed % 2 == 0).double()
            torch.manual_seed(r); x = torch.randn(tokens[r], 6, dtype=torch.float64, requires_grad=True)
            y, aux = moe(x)
            y.pow(2).sum().backward(); reduce_gradients(moe)
            out.append((y.detach(), x.grad, moe.gate.router.weight.grad, *(p.grad if p.grad is not None else torch.zeros_like(p) for p in moe.experts.parameters()), aux.counts.double()))
        for a, b in zip(*out): assert torch.allclose(a, b, rtol=1e-11, atol=1e-13), (seed, E, k, factor, groups, tokens)
    return True

@pytest.mark.parametrize("W", [1, 2, 3, 4])
def test_rows_in_rounds_are_rows_all_at_once(ranks, W): assert all(ranks.run(pairwise, list(range(5 * W, 5 * W + 5)), n=W))


@settings(max_examples=40)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 8), st.integers(0, 10**6))
def test_the_recurrence_is_the_simulators_time(sizes, E, seed):
    rng = np.random.default_rng(seed)
    c = Cluster([Level(f"l{i}", n, bandwidth=10. * 3**i, latency=.01 * int(rng.integers(0, 2))) for i, n in enumerate(sizes)], Device("toy", 1., 1., 1.))
    G = c.num_devices
    if E < G and G % E: return
    cost, p = Cost(c, rng.uniform(5, 20, G), 1., 7.), initial(E, G, -(-E // G) + 1)
    counts = rng.integers(0, 30, (G, E)) * (rng.random() < .9)
    flow = flows(counts, p)
    np.testing.assert_allclose(flow.sum(1), counts.sum(1), atol=1e-9)
    for groups in [n for n in range(1, G + 1) if G % n == 0]:
        t = smart_pass(cost, flow, groups)
        assert t == pytest.approx(simulate(smart_ops(cost, flow, groups)).seconds, abs=1e-12) and t >= (flow.sum(0) / cost.tps).max() / 3 - 1e-12
    assert smart_seconds(cost, counts, p) >= 0


@pytest.mark.parametrize("cluster", [h200_nvlink(1), h200_nvlink(3), nd_a100_v4(2)], ids=lambda c: f"{c.name}-{c.num_devices}")
@pytest.mark.parametrize("E", [1, 7, 16])
def test_every_policy_has_an_answer_for_every_load(cluster, E):                             # P03
    G = cluster.num_devices
    if E < G and G % E:
        with pytest.raises(ValueError, match="must be a multiple of num_experts"): run("static", Cost.of_layer(cluster, 64, 64), np.zeros((2, E), int), 1)
        return
    one_hot, switch = np.zeros((3, E), int), np.zeros((3, E), int)
    one_hot[:, 0], switch[::2, 0], switch[1::2, -1] = 1000, 10**6, 3
    for trace in (np.zeros((3, E), int), one_hot, switch, np.full((3, E), 2**31 - 1), np.random.default_rng(0).integers(0, 30, (3, E))):
        for slots in (-(-E // G), -(-E // G) + 1):
            for policy in POLICIES:
                for s in run(policy, Cost.of_layer(cluster, 64, 64), trace, slots, every=1):
                    assert np.isfinite([s.seconds, s.moving, s.ratio, s.across]).all() and s.seconds >= 0 and s.ratio >= 1 - 1e-9 and 0 <= s.changed <= 1, (policy, trace.tolist())


def test_numbers_that_are_no_loads():
    cost, p = Cost.of_layer(h200_nvlink(2), 8, 8), Placement.expert_parallel(4, 2)
    for bad in (np.full((2, 4), np.nan), np.full((2, 4), -1.), np.full((2, 4), np.inf), np.ones((4, 2))):
        for f in (lambda: step_seconds(cost, bad, p), lambda: shadows(cost, bad, p), lambda: smartmoe_placement(cost, bad, p), lambda: smart_seconds(cost, bad, p)):
            with pytest.raises(ValueError, match="counts must be"): f()
    for f in (lambda x: eplb_placement(x, 2, 2), lambda x: symi_placement(x, 2, 2)):
        for bad in ([1., np.nan], [1., -1.], [np.inf, 1.]):
            with pytest.raises(ValueError, match="must be finite and >= 0"): f(bad)
    for bad in (np.ones((2, 4)), np.full((2, 4), np.nan), -np.ones((2, 4), int), np.ones((2, 0), int)):
        with pytest.raises(ValueError, match="trace must be"): run("EPLB", cost, bad, 2)


@given(st.integers(1, 24), st.integers(1, 6), st.sampled_from([1, 2, 6, 8]), st.floats(1, 9))
def test_every_plan_of_a_pool_fits(E, slots, G, bound):
    cost = Cost.of_layer(h200_nvlink(G), 64, 64)
    try: plans = pool(cost, E, slots, 1000, bound)
    except ValueError: assert slots * G < E; return
    assert all(p.memory(E) <= slots and np.isfinite(t) for p, t in plans) and [t for _, t in plans] == sorted(t for _, t in plans)
    assert Plan(G) in [p for p, _ in plans] or E < G or slots < -(-E // G)

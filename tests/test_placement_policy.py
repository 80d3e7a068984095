"""Plans: any load, devices that differ, devices that leave; and constants that come from a file."""
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from moe_lab.cluster.topology import h200_nvlink, nd_a100_v4
from moe_lab.core.types import Placement
from moe_lab.placement.cost import Cost, step_seconds
from moe_lab.cluster.launch import RankError
from moe_lab.placement.policy import schedule
from moe_lab.placement.profile import profile
from moe_lab.placement.rivals import eplb, eplb_placement, shadows, smartmoe_placement
from moe_lab.placement.tokens import route_tokens
from moe_lab.placement.vexpert import apply, balance_ratio, evacuate, initial, memory_slots


@given(st.integers(1, 10), st.integers(2, 6), st.integers(0, 10**6), st.booleans())
def test_unlike_devices_never_hold_more_than_they_can(E, G, seed, idle):
    rng = np.random.default_rng(seed)
    if E < G and G % E: return
    slots = rng.integers(0, 5, G)
    if slots.sum() < E:
        with pytest.raises(ValueError, match="hold fewer than"): initial(E, G, slots)
        return
    p0 = initial(E, G, slots)
    assert (p0.slots.numpy().sum(0) <= slots).all()
    cost = Cost(h200_nvlink(G), rng.uniform(1e5, 1e6, G), 128, 1e4)
    counts = np.zeros((G, E), int) if idle else rng.integers(0, 100, (G, E))                # P03: no load
    p1, moves = schedule(cost, counts, p0, slots, 1.01)
    assert (p1.slots.numpy().sum(0) <= slots).all() and (p1.slots.sum(1) >= 1).all()
    assert step_seconds(cost, counts, p1) <= step_seconds(cost, counts, p0) * (1 + 1e-9) and (moves == [] or not idle)
    assert apply(p0, moves, slots).slots.equal(p1.slots) and np.isfinite(balance_ratio(counts.sum(0), p1))


@given(st.integers(1, 8), st.integers(2, 5), st.integers(0, 10**6))
def test_whoever_leaves_every_expert_finds_a_place(E, G, seed):
    rng = np.random.default_rng(seed)
    if E < G and G % E: return
    slots = rng.integers(0, 5, G) + -(-E // G)
    p, gone = initial(E, G, slots), sorted(rng.permutation(G)[:int(rng.integers(1, G))].tolist())
    stay = [g for g in range(G) if g not in gone]
    if slots[stay].sum() < E:
        with pytest.raises(ValueError, match="must hold"): evacuate(p, gone, slots)
        return
    q = evacuate(p, gone, slots, rng.integers(0, 50, E)).slots.numpy()
    assert (q.sum(1) >= 1).all() and (q.sum(0) <= slots).all() and not q[:, gone].any()
    before = p.slots.numpy()
    kept = (before[:, stay] > 0).any(1)
    assert ((q[:, stay] > 0) <= (before[:, stay] > 0))[kept].all()                          # who had a home elsewhere moves nowhere


def test_a_slow_device_in_a_node_gets_its_share():
    speed = np.full(16, 1e6); speed[3] = .25e6
    cost = Cost(nd_a100_v4(2), speed, 128, 1e4)
    even = np.full((16, 32), 64)
    p, _ = schedule(cost, even, initial(32, 16, 4), 4, 1.05)
    tokens = (even.sum(0) / p.slots.numpy().sum(1)) @ p.slots.numpy()
    assert tokens[3] < .5 * np.delete(tokens, 3).mean()


@pytest.mark.parametrize("bad,message", [(dict(devices=3, nodes=2), "devices"), (dict(replicas=10), "multiple of devices"), (dict(replicas=4), "at least the number of experts")])
def test_plans_that_do_not_divide_say_so(bad, message):                                     # P02
    with pytest.raises(ValueError, match=message): eplb(np.ones((1, 8)), **dict(replicas=12, groups=4, nodes=2, devices=4) | bad)


def test_wrong_arguments():
    p = Placement.expert_parallel(4, 2)
    cost = Cost(h200_nvlink(2), 1e6, 1., 1.)
    for f, message in ((lambda: schedule(cost, np.ones((4, 2), int), p, 2), r"counts must be \(G, E\) = \(2, 4\)"), (lambda: schedule(cost, np.ones((2, 4), int), p, [2, 1]), "that device 1 already uses"),
                       (lambda: schedule(cost, np.ones((2, 4), int), p, 2, .5), "threshold must be >= 1"), (lambda: initial(4, 2, [5, -1]), "slots must be >= 0"),
                       (lambda: evacuate(p, [2], 4), "devices must be some of 2"), (lambda: memory_slots([-1.], 5), "memory must be finite"), (lambda: Cost(h200_nvlink(2), 1e6, 1., 1., fixed=-1.), "fixed must be")):
        with pytest.raises(ValueError, match=message): f()


@pytest.mark.parametrize("E,nodes,limit", [(256, 8, .005), (1024, 128, .2)])
def test_a_decision_is_quick(E, nodes, limit):
    "Columns of all experts and one exchange, in time of one core."
    import time
    from moe_lab.placement.policy import Planner
    cluster, seconds = nd_a100_v4(nodes), []
    w = np.full(E, .25 / (E - 10)); w[:10] = .075                                           # ten experts take three quarters
    cost, slots = Cost.of_layer(cluster, 1024, 4096), -(-2 * E // cluster.num_devices) + 2
    counts, p = np.random.default_rng(0).multinomial(4096, w, size=cluster.num_devices), initial(E, cluster.num_devices, slots)
    for _ in range(5):
        t = time.process_time()
        assert Planner(cost, counts, p, slots).plan()
        seconds.append(time.process_time() - t)
    assert min(seconds) < limit


def test_a_slow_device_gets_less_though_no_exchange_helps():
    cost, counts, p = Cost(h200_nvlink(4), np.array([1, 1, 1, .5]), 0, 0), np.full((4, 1), 7), initial(1, 4, 4)
    after, moves = schedule(cost, counts, p, 4)
    assert after.slots.tolist() == [[4, 4, 4, 2]] and [(m.kind, m.device) for m in moves] == [("shrink", 3)] * 2


def test_a_cost_of_another_cluster_and_sums_beyond_int64():
    cost, p = Cost(h200_nvlink(8), 1., 1., 1.), Placement.expert_parallel(4, 4)
    for f in (schedule, lambda *a: step_seconds(*a[:3]), lambda *a: shadows(*a[:3]), lambda *a: smartmoe_placement(*a[:3])):
        with pytest.raises(ValueError, match="cost must be of the placement's 4 devices"): f(cost, np.ones((4, 4)), p, 2)
    with pytest.raises(ValueError, match="below 2\\^31"): route_tokens(np.full((4, 4), 2**40), p)


def test_nothing_to_divide_by():
    for sizes in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="must be >= 1"): Placement.expert_parallel(*sizes)
    for name in ("groups", "nodes", "devices"):
        with pytest.raises(ValueError, match=f"{name} must be >= 1"): eplb(np.ones((1, 4)), 8, **dict(groups=1, nodes=1, devices=2) | {name: 0})


@given(st.integers(1, 6), st.integers(1, 2), st.integers(1, 6), st.integers(0, 99))
def test_the_cap_holds_or_is_refused(E, nodes, slots, seed):
    weight, devices = np.random.default_rng(seed).integers(0, 9, (1, E * nodes)), 2 * nodes
    if slots * devices < E * nodes: return
    if slots > E:
        with pytest.raises(ValueError, match="with cap"): eplb(weight, slots * devices, nodes, nodes, devices, cap=True)
    else: assert eplb(weight, slots * devices, nodes, nodes, devices, cap=True)[1].max() <= 2
    assert eplb_placement(weight[0], devices, slots, nodes).slots.sum() == slots * devices


def test_a_profile_lost_in_noise_is_not_kept(tmp_path, monkeypatch):
    class Noisy:
        def __init__(self, *a, **k): pass
        def __enter__(self): return self
        def __exit__(self, *a): pass
        def run(self, *a): raise RankError("rank 1 failed") from ValueError("the rate of the ring is lost in noise: larger --tokens")
    monkeypatch.setattr("moe_lab.placement.profile.Pool", Noisy)
    with pytest.raises(ValueError, match="lost in noise"): profile(2, out=str(tmp_path / "cost.json"))
    assert not list(tmp_path.iterdir())

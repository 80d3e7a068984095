"Virtual time: determinism, fairness, message-by-message against aggregated runs, conservation."
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from moe_lab.core.types import Cluster, Device, Level
from moe_lab.sim.events import Op, send, share_ports, simulate

GPU = Device("gpu", 300e12, 2e12, 80e9)


@st.composite
def programs(draw):
    "Random ops: earlier ones may be waited for, streams and ports are few, so that they collide."
    n, ops = draw(st.integers(1, 14)), []
    for i in range(n):
        after = draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else set()
        load = draw(st.dictionaries(st.sampled_from("abc"), st.sampled_from([.25, 1., 2.5]), max_size=2))
        ops.append(Op(f"o{i}", draw(st.integers(0, 1)), draw(st.sampled_from(["compute", "comm", None])), tuple(f"o{a}" for a in after),
                      draw(st.sampled_from([0., .5, 3.])), load, draw(st.integers(1, 4)), draw(st.sampled_from([0., .3])) if load else 0.))
    return ops


@given(programs())
@settings(max_examples=80, deadline=None)
def test_a_run_obeys_waits_streams_and_ports(ops):
    t = simulate(ops)
    assert t == simulate(ops)                                              # same ops, same bits
    at = {o.name: (s, e) for o, s, e in zip(t.ops, t.start, t.end)}
    for o in ops:
        s, e = at[o.name]
        assert e - s >= o.alone * (1 - 1e-9)
        assert all(at[a][1] <= s for a in o.after)
    lanes = {}
    for o in ops:
        if o.stream:
            assert lanes.get((o.device, o.stream), 0.) <= at[o.name][0]
            lanes[o.device, o.stream] = at[o.name][1]
    assert all(u <= 1 + 1e-9 for u in t.port_use().values())               # no port passes more than it can
    serial = sum(o.alone / .7 ** 14 for o in ops)
    assert max(o.alone for o in ops) <= t.seconds * (1 + 1e-9) <= serial * (1 + 1e-6)


@given(st.integers(2, 6), st.integers(2, 4), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_rates_are_max_min_fair(n_ops, n_ports, seed):
    g = np.random.default_rng(seed)
    load = g.uniform(.1, 2, (n_ops, n_ports)) * (g.random((n_ops, n_ports)) < .6)
    load[np.arange(n_ops), g.integers(0, n_ports, n_ops)] += .5
    op, port = load.nonzero()
    w = g.uniform(.5, 2, n_ops)
    rate = share_ports(load[op, port], op, port, w)
    use = rate @ load
    assert (use <= 1 + 1e-9).all()
    # each op has a full port on which no other one is ahead of it
    for i in range(n_ops):
        full = [p for p in range(n_ports) if load[i, p] and use[p] > 1 - 1e-9]
        assert any(all(rate[i] / w[i] >= rate[j] / w[j] * (1 - 1e-9) for j in range(n_ops) if load[j, p]) for p in full)


def test_many_taxes_slow_a_kernel_but_leave_a_number():
    "Their product falls below the smallest float: the kernel stands still until they end, no NaN."
    for n in (2, 200, 400):
        sends = [Op(f"s{i}", stream=f"{i}", load={f"p{i}": 1.}, tax=.99) for i in range(n)]
        t = simulate([Op("kernel", stream="compute", seconds=3.), Op("empty", stream="more"), *sends])
        assert t["kernel"][1] == pytest.approx(4. - .01**n) and t["empty"] == (0., 0.) and t.seconds == t["kernel"][1]


@pytest.mark.parametrize("ports", [1, 2, 4])
def test_aggregated_equals_message_by_message(ports):
    "Linear all-to-all over two levels: one op a level, against every message."
    levels = (Level("node", 3, 20e9, 5e-6, 1e5, ports=ports), Level("gpu", 4, 300e9, 5e-6, 1e5))
    c, S = Cluster(levels, GPU), 1e6
    every = simulate(send(c, a, b, S) for a in range(12) for b in range(12) if a != b).seconds
    share = 4 / ports
    far = Op("far", seconds=5e-6, load={"node": share * 8 * (S + 1e5) / 20e9, "gpu": 8 * S / 300e9}, messages=8)
    near = Op("near", seconds=5e-6, load={"gpu": 3 * (S + 1e5) / 300e9}, messages=3)
    assert simulate([far, near]).seconds == pytest.approx(every, rel=1e-9)


def test_bytes_are_kept():
    c = Cluster((Level("node", 2, 25e9), Level("gpu", 2, 300e9)), GPU)
    ops = [send(c, a, b, 1e6 * (a + 1)) for a in range(4) for b in range(4) if a != b]
    out, into = {}, {}
    for o in ops:
        for (level, way, port), s in o.load.items():
            d = out if way == "out" else into
            d[level] = d.get(level, 0) + s * c.levels[level].bandwidth
    assert out == pytest.approx(into)
    assert out[1] == pytest.approx(sum(o.bytes for o in ops))


def test_a_thousand_data_centres():
    "8,000 devices as two kinds of op."
    c = Cluster((Level("dc", 1000, 1.25e9, 10e-3), Level("gpu", 8, 100e9, 1e-5)), GPU)
    from moe_lab.sim.collectives import alltoall_phases, ops, seconds
    ph = alltoall_phases(c, 64e6, "hierarchical")
    assert simulate(ops(ph, "a")).seconds == pytest.approx(seconds(ph))
    assert seconds(ph) >= 8 * 64e6 * 999 / 1000 / 1.25e9

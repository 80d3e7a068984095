"Costs of collectives: closed forms, monotone, bytes kept, names of ranks do not matter."
import itertools
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from moe_lab.core.types import Cluster, Device, Level, Traffic
from moe_lab.sim import collectives as C

GPU = Device("gpu", 300e12, 2e12, 80e9, launch=4e-6)
ALL = {
    **{f"alltoall {a}": (lambda c, s, a=a: C.alltoall_phases(c, s, a)) for a in C.ALGORITHMS},
    "alltoall coordinated": lambda c, s: C.alltoall_phases(c, s, "coordinated", tensor=c.sizes[-1]),
    **{f"all_gather {a}": (lambda c, s, a=a: C.all_gather_phases(c, s, a)) for a in ("ring", "hierarchical")},
    **{f"all_reduce {a}": (lambda c, s, a=a: C.all_reduce_phases(c, s, a)) for a in ("ring", "tree", "hierarchical")},
    "broadcast": C.broadcast_phases,
}


@st.composite
def clusters(draw):
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3))
    levels, below = [], prod(sizes)
    for i, n in enumerate(sizes):
        below //= n
        ports = draw(st.sampled_from([p for p in (1, 2, 4, 8) if below % p == 0]))
        levels.append(Level(f"l{i}", n, draw(st.sampled_from([1e9, 25e9, 400e9])), draw(st.sampled_from([0., 2e-6, 1e-3])), draw(st.sampled_from([0., 1e5])), ports))
    return Cluster(tuple(levels), GPU)


@pytest.mark.parametrize("name", ALL)
@given(c=clusters(), size=st.sampled_from([0., 1., 1e3, 1e6, 1e9]), i=st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_more_bytes_or_less_bandwidth_is_never_faster(name, c, size, i):
    cost = lambda c, s: C.seconds(ALL[name](c, s))
    t = cost(c, size)
    assert np.isfinite(t) and t >= 0
    assert cost(c, 2 * size + 1) >= t
    i = min(i, len(c.levels) - 1)
    for change in (dict(bandwidth=c.levels[i].bandwidth / 2), dict(latency=c.levels[i].latency + 1e-6), dict(half_size=c.levels[i].half_size + 1e4)):
        worse = replace(c, levels=(*c.levels[:i], replace(c.levels[i], **change), *c.levels[i + 1:]))
        assert cost(worse, size) >= t * (1 - 1e-12)


def traffic(c, seed, hot=1.):
    b = torch.rand(c.num_devices, c.num_devices, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 1e6
    b[:, 0] *= hot
    return b


@given(clusters().filter(lambda c: 1 < c.num_devices <= 64), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_names_of_ranks_do_not_matter(c, seed):
    "Children of one parent may change places at every level (with several ports a rank's name says which one it has)."
    c = replace(c, levels=tuple(replace(l, ports=1) for l in c.levels))
    b, g = traffic(c, seed), np.random.default_rng(seed)
    places = np.arange(c.num_devices).reshape(c.sizes)
    for axis, n in enumerate(c.sizes): places = np.take(places, g.permutation(n), axis)
    p = torch.from_numpy(places.reshape(-1))
    for algo in C.ALGORITHMS:
        assert C.alltoall(c, Traffic(b[p][:, p]), algo) == pytest.approx(C.alltoall(c, Traffic(b), algo), rel=1e-9)


@given(clusters().filter(lambda c: 1 < c.num_devices <= 64), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_bytes_are_kept(c, seed):
    "Linear: what crosses is what leaves its device. By parts: each level's crossing is what has to change place there."
    b = traffic(c, seed)
    G, where = c.num_devices, np.array([c.location(d) for d in range(c.num_devices)])
    total = C.total(C.alltoall_phases(c, Traffic(b), "linear"))
    assert sum(total.values()) * G == pytest.approx(Traffic(b).crossing())
    total = C.total(C.alltoall_phases(c, Traffic(b), "hierarchical"))
    for i, l in enumerate(c.levels):
        moves = (where[:, None, i] != where[None, :, i])
        assert total.get(l.name, 0.) * G == pytest.approx(float(b.numpy()[moves].sum()))


@given(clusters().filter(lambda c: 1 < c.num_devices <= 64))
@settings(max_examples=40, deadline=None)
def test_an_even_matrix_is_the_uniform_case(c):
    S = 1e6 * c.num_devices
    even = Traffic(torch.full((c.num_devices,) * 2, 1e6, dtype=torch.float64))
    for algo in C.ALGORITHMS:
        assert C.alltoall(c, even, algo) == pytest.approx(C.alltoall(c, S, algo), rel=1e-9)
        a, b = C.alltoall_phases(c, even, algo), C.alltoall_phases(c, S, algo)
        assert C.total(a) == pytest.approx(C.total(b)) and C.total(a, "messages") == pytest.approx(C.total(b, "messages"))


def test_a_hot_receiver_is_never_faster():
    c = Cluster((Level("node", 4, 25e9, 5e-6, 1e5, ports=4), Level("gpu", 4, 300e9, 2e-6, 1e5)), GPU)
    even = torch.full((16, 16), 1e6, dtype=torch.float64)
    for algo, hot in itertools.product(C.ALGORITHMS, (2., 8.)):
        b = even.clone(); b[:, 3] *= hot; b *= even.sum() / b.sum()
        assert C.alltoall(c, Traffic(b), algo) > C.alltoall(c, Traffic(even), algo)


def test_incast():
    "n senders to one receiver take n times one."
    c = Cluster((Level("gpu", 8, 1e9),), replace(GPU, launch=0.))
    def t(n): b = torch.zeros(8, 8, dtype=torch.float64); b[1:n + 1, 0] = 1e6; return C.alltoall(c, Traffic(b))
    assert t(7) == pytest.approx(7 * t(1))


def test_shared_ports_and_rails():
    "Eight devices behind one port take eight times the wire time of a port each."
    one, eight = (Cluster((Level("node", 4, 25e9, ports=p), Level("gpu", 8, 1e15)), replace(GPU, launch=0.)) for p in (1, 8))
    assert C.alltoall(one, 1e9) == pytest.approx(8 * C.alltoall(eight, 1e9))


def test_hierarchical_volume_and_messages():
    "DS-07, DS-08 in claims: messages (G-1) + (p/G-1) against p-1; volume S(G-1)/G + S(p-G)/p against S(p-1)/p."
    for p, G in ((32, 8), (128, 8), (2048, 8)):
        c, S = Cluster((Level("node", p // G, 25e9), Level("gpu", G, 300e9)), GPU), 1e6
        m = {a: sum(C.total(C.alltoall_phases(c, S, a), "messages").values()) for a in C.ALGORITHMS}
        assert m == {"linear": p - 1, "2dh": G - 1 + p // G - 1, "hierarchical": G - 1 + p // G - 1}
        v = sum(C.total(C.alltoall_phases(c, S, "2dh")).values())
        assert v == pytest.approx(S * (G - 1) / G + S * (p - G) / p)


def test_coordinated_participants():
    "DS-09: among p/L instead of p, plus a gather of L."
    c = Cluster((Level("node", 16, 25e9, ports=8), Level("gpu", 8, 300e9)), GPU)
    ph = C.alltoall_phases(c, 1e6, "coordinated", tensor=8)
    assert [sum(p.messages.values()) for p in ph] == [15, 7]
    assert C.alltoall(c, 1e6, "coordinated", tensor=1) == C.alltoall(c, 1e6)


def test_cross_node_traffic_is_not_free():
    # M02: the factor of one slow level lies between full overlap of near and far and none
    for r in (2., 18., 100.):
        c = Cluster((Level("node", 2, 1e9 / r, ports=8), Level("gpu", 8, 1e9)), replace(GPU, launch=0.))
        one = Cluster((Level("gpu", 16, 1e9),), replace(GPU, launch=0.))
        f = C.alltoall(c, 1e6) / C.alltoall(one, 1e6)
        assert r * 8 / 15 <= f * (1 + 1e-12) and f <= (1 + (r - 1) * 8 / 15) * (1 + 1e-12)
        assert C.all_gather(c, 1e6) / C.all_gather(one, 1e6) == pytest.approx(1 + (r - 1) / 15)


def test_bad_numbers():
    # M08
    c = Cluster((Level("gpu", 8, 1e9, 1e-6),), GPU)
    for bad in (-1., float("nan"), float("inf")):
        with pytest.raises(ValueError, match="bytes"): C.alltoall(c, bad)
    for bad in (0., -1., float("nan"), float("inf")):
        with pytest.raises(ValueError, match="bandwidth"): Level("gpu", 8, bad)
    assert C.alltoall(c, 0.) == pytest.approx(GPU.launch + 1e-6)      # nothing to send costs latency
    with pytest.raises(ValueError, match="algo"): C.alltoall(c, 1., "magic")
    with pytest.raises(ValueError, match="group"): C.alltoall(c, 1., group=(16,))
    with pytest.raises(ValueError, match="tensor"): C.alltoall(c, 1., "coordinated", tensor=3)
    with pytest.raises(ValueError, match="devices"): C.alltoall(c, Traffic(torch.zeros(4, 4, dtype=torch.float64)))
    for bad in (0, 1.5, "2"):
        with pytest.raises((ValueError, TypeError), match="tensor"): C.alltoall(c, 1., "coordinated", tensor=bad)
        with pytest.raises((ValueError, TypeError), match="stride"): C.group_sizes(c, 2, bad)
    deep = Cluster(tuple(Level(f"l{i}", 2, 1e9) for i in range(7)), GPU)
    with pytest.raises(ValueError, match="6 levels"): C.alltoall(deep, Traffic(torch.ones(128, 128, dtype=torch.float64)), "hierarchical")


def test_large_matrices_are_quick():
    import time
    c = Cluster((Level("node", 128, 25e9, 5e-6, ports=8), Level("gpu", 8, 300e9, 2e-6)), GPU)
    b, t = traffic(c, 0), time.perf_counter()
    C.alltoall(c, Traffic(b))
    assert time.perf_counter() - t < 5

"A training step: monotone, consistent with its parts, honest about what does not fit."
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from moe_lab.core.types import Cluster, Device, Level
from moe_lab.models.zoo import Attention, Layer, Model
from moe_lab.sim.collectives import ALGORITHMS
from moe_lab.sim.step import BYTES, Strategy, exposed, layer_time, memory, step

GPU = Device("gpu", 312e12, 2e12, 80e9, launch=1e-5)


def cluster(nodes=2, inter=25e9, intra=300e9, dev=GPU):
    return Cluster((Level("node", nodes, inter, 5e-6, 2e5, ports=8), Level("gpu", 8, intra, 2e-6, 1e5)), dev)


MOE = Layer(1024, Attention(16, 64), experts=32, d_expert=2048, top_k=2, d_shared=1024, glu=True)
MODEL = Model("m", (Layer(1024, Attention(16, 64), 4096), replace(MOE, experts=8), MOE), 8000, tied=False)
strategies = st.builds(Strategy, expert=st.sampled_from([1, 2, 8, 16]), tensor=st.sampled_from([1, 2]), r=st.sampled_from([0, 1, 2]), degree=st.sampled_from([1, 2, 4]),
                       algo=st.sampled_from(list(ALGORITHMS)), capacity_factor=st.sampled_from([None, 1., 2.]), recompute=st.booleans(), zero=st.booleans(),
                       micro=st.sampled_from([1, 2]), dispatch=st.sampled_from(["index", "einsum"]), flexible=st.booleans())


@given(strategies, st.sampled_from([0, 2, 256, 4096]))
@settings(max_examples=60, deadline=None)
def test_any_strategy_adds_up(s, tokens):
    t = step(MODEL, cluster(), s, tokens)
    assert t.seconds == pytest.approx(sum(t.parts.values())) and t.seconds > 0
    assert all(v >= 0 for d in (t.parts, t.busy, t.bytes, t.memory, t.port) for v in d.values())
    assert all(t.parts[p] <= t.busy[p] * (1 + 1e-9) for p in t.parts)
    assert t.fits == (t.used <= t.capacity) and (t.missing > 0) != t.fits
    # slower wires, slower devices or more tokens never help, but for exchanges that a delay keeps out of each other's way
    for worse in (dict(inter=12e9), dict(intra=100e9), dict(dev=replace(GPU, flops=100e12)), dict(dev=replace(GPU, bandwidth=1e12)), dict(dev=replace(GPU, launch=1e-4))):
        assert step(MODEL, cluster(**worse), s, tokens).seconds >= t.seconds * .97, worse
    assert step(MODEL, cluster(), s, 2 * tokens).seconds >= t.seconds * .97 and step(MODEL, cluster(), s, tokens, 8192).seconds >= t.seconds * .97
    hot, same = step(MODEL, cluster(), s, tokens, imbalance=2.), all(s.busiest(l, 2.) == 1 for l in MODEL.layers)
    assert hot.seconds >= t.seconds * (1 - 1e-9) and hot.used >= t.used
    assert not same or hot == t                          # tokens at home or padded: an uneven load is nowhere
    assert same or not tokens or hot.memory["activations"] > t.memory["activations"]


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(list(ALGORITHMS)), st.booleans())
@settings(max_examples=20, deadline=None)
def test_overlap_moves_the_same_bytes_and_hides_at_most_all(degree, algo, back):
    one, many = (layer_time(MOE, cluster(), Strategy(expert=16, degree=d, algo=algo), 8192, back=back) for d in (1, degree))
    total = lambda t, part: sum(o.bytes for o in t.ops if o.name.startswith(part))
    assert total(many, "a2a") == pytest.approx(total(one, "a2a"))
    compute = sum(e - s for o, s, e in zip(many.ops, many.start, many.end) if o.stream == "compute")
    assert many.seconds >= compute * (1 - 1e-9)
    assert sum(exposed(many).values()) == pytest.approx(many.seconds)


def test_exact_exchanges():
    # M04: two exchanges a layer and direction; none without expert parallelism; none for r = 0
    def count(back, **kw): return len({o.name.rsplit(".", 1)[0] for o in layer_time(MOE, cluster(), Strategy(**kw), 64, back=back).ops if o.name.startswith("a2a")})
    for back in (False, True):
        assert count(back, expert=16) == 2 and count(back, expert=16, degree=4) == 8
        assert count(back, expert=1) == 0 and count(back, expert=16, r=0) == 0
    assert count(True, expert=16, recompute=True) == 4


def test_tutel_table_4_bytes():
    "EP+DP+MP: tokens C_g*r, weights P/E/r; DP: weights only (arXiv 2206.03382, Table 4, rows 1 and 7)."
    l, c, T = replace(MOE, experts=4, top_k=1), cluster(), 4096
    for r in (1, 2, 4):
        t = layer_time(l, c, Strategy(expert=16, r=r, capacity_factor=1.), T)
        bytes = {p: sum(o.bytes for o in t.ops if o.name.startswith(p)) for p in ("a2a", "weights")}
        assert bytes["a2a"] == pytest.approx(2 * T * r * 1024 * BYTES * 15 / 16)
        s = 4 // r
        assert bytes["weights"] == pytest.approx(l.expert() / 4 * BYTES * (s - 1))
    t = layer_time(l, c, Strategy(expert=16, r=0, capacity_factor=1.), T)
    assert sum(o.bytes for o in t.ops if o.name.startswith("weights")) == pytest.approx(4 * l.expert() / 16 * BYTES * 15)


def test_memory_by_hand():
    m = Model("m", (Layer(64, Attention(4, 16), experts=8, d_expert=128, top_k=2, norm=0),), 100, tied=False, norm=0)
    got = memory(m, cluster(), Strategy(expert=8), 32)
    dense, expert = 2 * 6400 + 4 * 64 * 64 + 8 * 64, 8 * 2 * 64 * 128 / 8
    assert got["weights"] == got["gradients"] == 2 * (dense + expert)
    assert got["optimizer"] == pytest.approx(12 * (dense / 16 + expert / 2))
    assert memory(m, cluster(), Strategy(expert=8, zero=False), 32)["optimizer"] == pytest.approx(12 * (dense + expert))


@pytest.mark.parametrize("kw, says", [(dict(expert=3), "expert"), (dict(tensor=3), "tensor"), (dict(expert=16, r=3), "r "), (dict(micro=3), "micro"), (dict(expert=12), "expert")])
def test_sizes_that_do_not_divide_are_named(kw, says):
    with pytest.raises(ValueError, match=says): step(replace(MODEL, layers=(replace(MOE, experts=4),)), cluster(), Strategy(**kw), 4096)


def test_groups_that_no_level_holds_are_named():
    odd = Cluster((Level("node", 6, 25e9), Level("gpu", 6, 300e9)), GPU)
    with pytest.raises(ValueError, match="stride"): step(MODEL, odd, Strategy(expert=4), 64)        # four of six, then every fourth
    assert step(MODEL, odd, Strategy(expert=2, tensor=2), 64).seconds > 0


def test_bad_workloads_are_named():
    # M08
    for bad in (.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="imbalance"): step(MODEL, cluster(), Strategy(), 64, imbalance=bad)
    for bad in (-1, 4096., "4096", None):
        for f in (lambda: step(MODEL, cluster(), Strategy(), bad), lambda: memory(MODEL, cluster(), Strategy(), bad), lambda: layer_time(MOE, cluster(), Strategy(), bad)):
            with pytest.raises((ValueError, TypeError), match="tokens"): f()
    for bad in (0, -1, .5, 2**30):
        with pytest.raises((ValueError, TypeError), match="seq"): step(MODEL, cluster(), Strategy(), 64, bad)


def test_shared_passes_change_nothing():
    known = {}
    for again in (False, True):
        for d, micro in ((1, 1), (4, 1), (4, 2)):
            s = Strategy(expert=16, degree=d, recompute=again, micro=micro)
            assert step(MODEL, cluster(), s, 4096, known=known) == step(MODEL, cluster(), s, 4096)
    assert len(known) == 30          # of 42 passes


@pytest.mark.parametrize("kw", [dict(expert=2.), dict(expert=True), dict(tensor="2"), dict(degree=10**6), dict(degree=0), dict(micro=-1), dict(r=.5), dict(algo=None),
                                dict(algo=["linear"]), dict(dispatch="sort"), dict(recompute="yes"), dict(zero=3), dict(capacity_factor="1"), dict(capacity_factor=float("nan"))])
def test_nonsense_is_named(kw):
    with pytest.raises((ValueError, TypeError), match=next(iter(kw))): Strategy(**kw)


def test_gathered_weights_cost_alike_in_time_and_memory():
    "Gathered once, kept of every layer; recomputed: gathered twice, kept of one."
    m = Model("m", (replace(MOE, experts=16),) * 5, 1000)
    for again, gathers, kept in ((False, 1, 5), (True, 2, 1)):
        s = Strategy(expert=16, r=0, recompute=again)
        times = sum(len({o.name.rsplit(".", 1)[0] for o in layer_time(m.layers[0], cluster(), s, 64, back=b).ops if o.name.startswith("weights")}) for b in (False, True))
        assert times == gathers + 1                      # and one scatter of gradients
        assert memory(m, cluster(), s, 64)["gathered"] == pytest.approx(BYTES * 16 * m.layers[0].expert() * (kept + 1))


def test_two_thousand_gpus_take_no_longer_than_sixteen():
    import time
    def took(nodes):
        t = time.perf_counter(); step(MODEL, cluster(nodes), Strategy(expert=32, degree=4, algo="2dh"), 4096); return time.perf_counter() - t
    took(4)
    assert took(256) < 1

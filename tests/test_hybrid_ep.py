"""HybridEP: compression and its kernels, migration on real ranks, faults, the planner's data centres."""
import pytest
import torch
from hypothesis import given, settings, strategies as st

from moe_lab.core.backend import use
from moe_lab.hybrid_ep.compress import AdamW, Residual, SRAdamW, decode, encode, shared_expert, step_and_select


# ---- compression
def slow_encode(w, shared, k):
    "The k largest differences by a stable sort: ties to the lowest index."
    r = (w - shared).flatten(1)
    index = r.abs().argsort(dim=1, descending=True, stable=True)[:, :k].sort(1).values
    return r.gather(1, index), index


@given(st.integers(1, 4), st.integers(1, 60), st.data())
def test_encode_is_the_stable_sort(E, n, data):
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    w, s = torch.randn(E, n).mul(2).round(), torch.randn(n).round()          # many ties
    k = data.draw(st.integers(0, n))
    got, (value, index) = encode(w, s, k), slow_encode(w, s, k)
    assert torch.equal(got.value, value) and torch.equal(got.index.long(), index)


def test_a_broken_expert_stays_visible():
    w = torch.zeros(1, 8); w[0, 5] = torch.nan
    assert encode(w, torch.zeros(8), 1).index.tolist() == [[5]]
    value, index, count = step_and_select(w, torch.zeros(1, 8), torch.zeros(1, 8), torch.zeros(1, 8), torch.zeros(8), torch.ones(1), 2, AdamW(.1, (.9, .99), 1e-8, 0., 1))
    assert count.tolist() == [1] and index[0, 0] == 5 and value[0, 0].isnan()


@pytest.mark.parametrize("k", [0, 2, 8])
def test_a_broken_mean_breaks_every_copy(k):
    w, s = torch.randn(3, 8), torch.zeros(8); s[2] = torch.nan
    full = decode(encode(w, s, k), s)
    assert full[:, 2].isnan().all() and not full[:, [i for i in range(8) if i != 2]].isnan().any()


@pytest.mark.parametrize("bad", [torch.int64, "shape", "dtype", "k", "index"])
def test_experts_that_are_none_are_refused(bad):
    import numpy as np
    w, s, k = torch.randn(3, 8), torch.zeros(8), 2
    if bad == torch.int64: w, s = w.long(), s.long()
    if bad == "shape": s = s[:7]
    if bad == "dtype": s = s.double()
    if bad == "k": k = np.int64(2)
    with pytest.raises((TypeError, ValueError), match={torch.int64: "w must be floating", "k": "k must be an int", "index": "index must be int32"}.get(bad, "shared must")):
        r = encode(w, s, k)
        Residual(r.value, r.index.long(), r.shape)


@pytest.mark.parametrize("name, wrong", [("g", lambda t: t[:, :7]), ("m", lambda t: t.double()), ("v", lambda t: t.t().contiguous().t()), ("w", lambda t: t.t().contiguous().t()), ("g", lambda t: t.to_sparse())])
def test_a_step_names_what_it_cannot_update_and_updates_nothing(name, wrong):
    a = {n: torch.rand(3, 8) for n in "wgmv"}
    a[name] = wrong(a[name])
    before = {n: t.clone() for n, t in a.items()}
    with pytest.raises(ValueError, match=f"^{name} must"): step_and_select(*a.values(), torch.zeros(8), torch.ones(3), 2, AdamW(.1, (.9, .99), 1e-8, 0., 1))
    assert all(torch.equal(t.to_dense(), before[n].to_dense()) for n, t in a.items())


def test_a_rank_without_experts_steps():
    p = torch.nn.Parameter(torch.randn(0, 8)); p.grad = torch.zeros(0, 8)
    opt = SRAdamW({p: torch.zeros(8)}, ratio=4)
    for _ in range(2): opt.step()
    assert opt.residual[p].value.shape == (0, 1) and decode(opt.residual[p], opt.shared[p]).shape == (0, 8)


@settings(max_examples=25)
@given(st.sampled_from([("normal", 1e-3), ("normal", 1e-5), ("heavy", 1e-3), ("light", 1e-5)]), st.floats(.6, 300), st.integers(0, 10**6))
def test_the_threshold_follows_its_count(case, ratio, seed): # one step moves an entry by less than the tail is wide; of a few dozen entries chance alone may leave the band
    (tail, lr), g = case, torch.Generator().manual_seed(seed)
    w = torch.randn(2, 65536, generator=g)
    p = torch.nn.Parameter(dict(normal=w, heavy=w ** 3, light=w.tanh())[tail].clone())
    opt = SRAdamW({p: torch.zeros(65536)}, ratio, lr=lr)
    for _ in range(10): p.grad = torch.randn(2, 65536, generator=g); opt.step()
    assert opt.exact <= 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("E, n, ratio", [(1, 1, 50), (3, 7, 1e30), (2, 40, 1e-30), (0, 5, 4)])
def test_compression_at_the_edges(E, n, ratio, dtype):
    from moe_lab.hybrid_ep.compress import places
    w, s = torch.randn(E, n).to(dtype), torch.zeros(n, dtype=dtype)
    k = places(torch.empty(max(E, 1), n, dtype=dtype), ratio)
    assert 1 <= k <= n
    r = encode(w, s, k)
    assert r.value.dtype == dtype and r.value.shape == (E, k)
    if k == n: assert torch.equal(decode(r, s), w)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_product_without_decoding_meets_empty_experts_and_no_rows(dtype):
    from moe_lab.hybrid_ep.compress import sr_product
    w = torch.randn(3, 5, 7).to(dtype)
    s = shared_expert(w)
    r = encode(w, s, 12)
    for counts in ([0, 0, 0], [0, 4, 0], [1, 0, 2]):
        offsets = torch.tensor([0, *counts]).cumsum(0)
        x = torch.randn(sum(counts), 7).to(dtype)
        want = torch.cat([a @ b.t() for a, b in zip(x.split(counts), decode(r, s))])
        assert torch.allclose(sr_product(x, offsets, r, s).double(), want.double(), atol=1e-12 if dtype == torch.float64 else 1e-5 if dtype == torch.float32 else .1)


# ---- the stream model
@given(st.floats(0, 1e300), st.floats(0, 1e300), st.integers(1, 10**9), st.floats(1e-300, 1e300), st.floats(0, 1e300))
def test_best_share_stands_absurd_sizes(d, e, g, b, t):
    from moe_lab.hybrid_ep.stream import Workload, best_p, best_p_training, latency
    w = Workload(d, e, g, b, t)
    p = best_p(w)
    assert 0 <= p <= 1 and 0 <= best_p_training(w) <= 1
    best = latency(w, p)
    assert best == best and all(best <= latency(w, q) * (1 + 1e-9) + 1e-15 * latency(w, 0.) for q in (0., .25, .5, .75, 1.))


def test_eight_thousand_gpus_in_a_thousand_data_centres():
    from moe_lab.hybrid_ep.domain import Domains, count_pairs, expert_order, groups, offset_groups, relation, route, traffic
    d = Domains((1000, 8), (50, 2))
    assert count_pairs(d) == {("AG", 0): 8000 * 49, ("A2A", 0): 8000 * 19, ("AG", 1): 8000, ("A2A", 1): 8000 * 3}
    for kind, level in count_pairs(d): assert sorted(m for g in groups(d, kind, level) for m in g) == list(range(8000))
    assert sorted(expert_order(d, 16000)) == list(range(16000)) and len(offset_groups(d)) == 100
    token, expert = route(d, 0, 7999)
    assert token[-1] == expert[-1] and all(relation(d, a, b)[0] == "A2A" for a, b in zip(token, token[1:]))
    assert traffic(d, 8e6, 1e6)[0]["experts"] == 49e6


@given(st.integers(1, 3), st.integers(2, 200), st.integers(0, 10**6))
def test_optimizer_steps_are_adamw(E, n, seed):
    torch.manual_seed(seed)
    p, q = (torch.nn.Parameter(torch.zeros(E, n, dtype=torch.float64)) for _ in range(2))
    with torch.no_grad(): p.normal_(); q.copy_(p)
    ours, theirs = SRAdamW({p: shared_expert(p.data)}, ratio=4, lr=.01, weight_decay=.1), torch.optim.AdamW([q], lr=.01, weight_decay=.1)
    for _ in range(3):
        p.grad = torch.randn_like(p); q.grad = p.grad.clone()
        ours.step(); theirs.step()
        assert torch.allclose(p, q, rtol=1e-12, atol=1e-14)
        r, left = ours.residual[p], p.data - decode(ours.residual[p], ours.shared[p])
        at = torch.zeros(E, n, dtype=torch.bool).scatter_(1, r.index.long(), r.value != 0)
        assert (left[at].abs() <= 1e-12).all()                               # what travelled arrived exactly


def test_frozen_experts_are_left_alone():
    p = torch.nn.Parameter(torch.randn(2, 6))
    opt, before = SRAdamW({p: shared_expert(p.data)}, ratio=2), p.detach().clone()
    opt.step()
    assert torch.equal(p, before) and not opt.residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
def test_a_resumed_optimizer_goes_on_to_the_bit(dtype, how):
    import copy, io, pickle
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(2, 4096).to(dtype))
    make = lambda p: SRAdamW({p: torch.zeros(4096, dtype=dtype)}, 20., lr=1e-3)
    opt, grads = make(p), torch.randn(8, 2, 4096).to(dtype)
    for g in grads[:3]: p.grad = g; opt.step()
    if how == "state_dict":
        new = make(torch.nn.Parameter(p.detach().clone()))
        file = io.BytesIO(); torch.save(opt.state_dict(), file); file.seek(0)
        new.load_state_dict(torch.load(file))
        assert not new.residual
    else: new = copy.deepcopy(opt) if how == "deepcopy" else pickle.loads(pickle.dumps(opt))
    q, = new.shared
    assert q is new.param_groups[0]["params"][0] and q is not p and new.state[q]["threshold"].dtype == torch.float32
    if how != "state_dict": assert torch.equal(new.residual[q].index, opt.residual[p].index) and new.exact == opt.exact
    start = opt.exact - new.exact
    for g in grads[3:]:
        for o, w in ((opt, p), (new, q)): w.grad = g; o.step()
        assert torch.equal(p, q) and torch.equal(opt.residual[p].index, new.residual[q].index) and torch.equal(opt.residual[p].value, new.residual[q].value)
        assert torch.equal(opt.state[p]["threshold"], new.state[q]["threshold"])
    assert opt.exact - new.exact == start


# ---- migration on real ranks
def _owned(E=2): return torch.nn.ParameterList([torch.randn(E, 4, 6), torch.randn(E, 6, 4)])


def _late(how):
    "Rank 2 of one domain never sends: it sleeps, or ends with an exception of its own."
    import time
    import torch.distributed as dist
    from moe_lab.cluster.launch import step
    from moe_lab.hybrid_ep.domain import Domains
    from moe_lab.hybrid_ep.migrate import Communicator
    comm, layer = Communicator(Domains((3,), (3,))), _owned()
    step("gather")
    if dist.get_rank() == 2:
        if how == "sleeps": time.sleep(120)
        raise OverflowError("its own")
    comm.send(layer)
    comm.open(comm.take(layer))


@pytest.mark.parametrize("how", ["sleeps", "raises"])
def test_a_rank_that_never_sends_ends_the_run(how):
    import time
    from moe_lab.cluster.launch import Pool, RankError
    with Pool(3, timeout=4, backend="gloo") as pool:
        start = time.monotonic()
        with pytest.raises(RankError) as e: pool.run(_late, how)
        assert time.monotonic() - start < 40
        if how == "raises": assert e.value.rank == 2 and "its own" in str(e.value)
        else: assert "gather" in str(e.value)
        assert pool.run(_sum_of_ranks) == [3, 3, 3]                          # the pool is usable again


def _sum_of_ranks():
    import torch.distributed as dist
    x = torch.tensor(dist.get_rank()); dist.all_reduce(x)
    return int(x)


def _accumulated(domains):
    "Gradients of two backwards, and of a layer that is used twice in one forward."
    import torch.distributed as dist
    from torch import nn
    from moe_lab.comm.gradients import reduce_gradients
    from moe_lab.experts.layer import MoE
    from moe_lab.hybrid_ep.domain import Domains
    from moe_lab.hybrid_ep.migrate import Communicator, HybridParallel
    torch.manual_seed(5); whole = MoE(8, 12, 4, 2).double()
    torch.manual_seed(5); part = MoE(8, 12, 4, 2, exchange=HybridParallel(Communicator(Domains((2, 2), domains)))).double()
    x, me = torch.randn(16, 8, dtype=torch.float64), dist.get_rank()
    mine = x.chunk(4)[me]
    for _ in range(2):
        (part(part(mine)[0])[0].square().sum() * 4).backward()
        sum(whole(whole(c)[0])[0].square().sum() for c in x.chunk(4)).backward()
    reduce_gradients(part)
    return max(float((p.grad - (q.grad[me:me + 1] if "experts" in n else q.grad)).abs().max()) for (n, p), q in zip(part.named_parameters(), whole.parameters()))


@pytest.mark.parametrize("domains", [(2, 1), (2, 2)])
def test_gradients_add_up_over_calls(ranks, domains): assert max(ranks.run(_accumulated, domains)) < 1e-11


def _no_graph():
    import torch.distributed as dist
    from torch import nn
    from moe_lab.experts.layer import MoE
    from moe_lab.hybrid_ep.domain import Domains
    from moe_lab.hybrid_ep.migrate import Communicator, HybridParallel, migrate
    comm = Communicator(Domains((2,), (2,)), ratio=10)
    model = migrate(nn.Sequential(MoE(8, 12, 4, 2, exchange=HybridParallel(comm))))
    with torch.no_grad(): y, _ = model(torch.randn(5, 8))
    return tuple(y.shape), y.requires_grad, len(comm.queue), comm.mean is None


def test_inference_sends_and_keeps_nothing(ranks): assert ranks.run(_no_graph, n=2) == [((5, 8), False, 0, True)] * 2


def _uneven():
    from moe_lab.experts.layer import MoE
    from moe_lab.hybrid_ep.domain import Domains
    from moe_lab.hybrid_ep.migrate import Communicator, HybridParallel
    MoE(8, 12, 5, 2, exchange=HybridParallel(Communicator(Domains((2,), (2,)))))(torch.randn(3, 8))


def _steps(ratio, dtype, bias):
    "Three steps of a layer on ranks of which one has no token; is everything finite, and do both sides agree on what travels?"
    import torch.distributed as dist
    from torch import nn
    from moe_lab.comm.gradients import reduce_gradients
    from moe_lab.experts.layer import MoE
    from moe_lab.hybrid_ep.domain import Domains
    from moe_lab.hybrid_ep.migrate import Communicator, HybridParallel, migrate
    comm = Communicator(Domains((2,), (2,)), ratio)
    torch.manual_seed(5)
    model, optimizer = migrate(nn.Sequential(MoE(8, 12, 4, 2, bias=bias, exchange=HybridParallel(comm)))).to(dtype), None
    for _ in range(3):
        y, _ = model(torch.randn(5 * dist.get_rank(), 8, dtype=dtype))
        y.float().square().sum().backward()
        reduce_gradients(model); comm.settle()
        optimizer = optimizer or SRAdamW(comm.shared, ratio)
        comm.residual = optimizer.residual
        optimizer.step(); optimizer.zero_grad()
    return all(bool(p.isfinite().all()) for p in model.parameters()), len(comm.queue)


@pytest.mark.parametrize("ratio, dtype, bias", [(1e9, torch.float32, False), (float("inf"), torch.float64, True), (1e-300, torch.float32, False), (10., torch.bfloat16, True)])
def test_absurd_ratios_and_odd_dtypes_migrate(ranks, ratio, dtype, bias): assert ranks.run(_steps, ratio, dtype, bias, n=2) == [(True, 0)] * 2


def _dies_in_backward():
    import os
    import torch.distributed as dist
    from torch import nn
    from moe_lab.experts.layer import MoE
    from moe_lab.hybrid_ep.domain import Domains
    from moe_lab.hybrid_ep.migrate import Communicator, HybridParallel, migrate
    model = migrate(nn.Sequential(MoE(8, 12, 4, 2, exchange=HybridParallel(Communicator(Domains((2,), (2,)))))))
    y, _ = model(torch.randn(4, 8))
    if dist.get_rank() == 1: os._exit(7)
    y.sum().backward()


def test_a_rank_that_dies_before_gradients_go_home_ends_the_run():
    import time
    from moe_lab.cluster.launch import Pool, RankError
    with Pool(2, timeout=5, backend="gloo") as pool:
        start = time.monotonic()
        with pytest.raises(RankError, match="rank 1 of 2 ended with exit code 7"): pool.run(_dies_in_backward)
        assert time.monotonic() - start < 30


def test_uneven_experts_are_refused(ranks):
    from moe_lab.cluster.launch import RankError
    with pytest.raises(RankError, match="experts must divide evenly over the 2 ranks, got 5"): ranks.run(_uneven, n=2)


def _a_copy_computes_the_same(ratio):
    import copy
    from moe_lab.hybrid_ep.training import Way, build
    from moe_lab.models.gpt import GPTConfig
    model, *_ = build(GPTConfig(20, 8, 2, 2, 8, experts=4, top_k=1), Way((2, 1), (2, 1), ratio), torch.float64)
    ids = torch.arange(6).view(2, 3)
    twin = copy.deepcopy(model)
    return torch.equal(model(ids)[0], twin(ids)[0])


@pytest.mark.parametrize("ratio", [None, 50.])
def test_a_copied_model_sends_its_own_experts(ranks, ratio): assert all(ranks.run(_a_copy_computes_the_same, ratio, n=2))


def _uneven_model():
    from moe_lab.hybrid_ep.training import Way, build
    from moe_lab.models.gpt import GPTConfig
    build(GPTConfig(20, 8, 2, 2, 8, experts=5, top_k=1), Way((2, 1), (2, 1)), torch.float64)


def test_uneven_experts_are_refused_before_anything_is_sent(ranks):
    from moe_lab.cluster.launch import RankError
    with pytest.raises(RankError, match="experts must divide evenly over the 2 ranks, got 5"): ranks.run(_uneven_model, n=2)


# ---- the planner across data centres
SMALL = dict(hidden_size=512, vocab_size=1000, num_attention_heads=8, num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=2, intermediate_size=512)

def _plan(tmp_path, *levels, memory="80 GB", extra=()):
    "Exit status of `moe-lab plan` on a YAML cluster; levels: (name, size, bandwidth)."
    import json
    from moe_lab.cli import main
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    text = "".join(f"  - {{name: {n}, size: {s}, bandwidth: {b}}}\n" for n, s, b in levels)
    (tmp_path / "c.yaml").write_text(f"device: {{name: some, flops: 300 TFLOP/s, bandwidth: 2 TB/s, memory: {memory}}}\nlevels:\n{text}")
    return main(["plan", str(tmp_path / "config.json"), str(tmp_path / "c.yaml"), "--tokens", "65536", "--seq", "256", "--top", "1", *extra])


def test_plan_answers_for_data_centres(tmp_path, capsys):
    import json
    levels = ("dc", 2, "1 Gb/s"), ("gpu", 4, "100 Gb/s")
    assert _plan(tmp_path, *levels) == 0
    out = capsys.readouterr().out
    for word in ("Across data centres (2 x 1 Gb/s)", "p* 0.00", "domains dc 2 of 2", "x over plain EP", "gradients", "compressing"): assert word in out
    assert _plan(tmp_path, *levels, extra=["--json"]) == 0
    far = json.loads(capsys.readouterr().out)["across"]
    assert far["exact"]["domains"][0] == 2 and far["speedup"] > 1 and far["sizes"] == [2, 4] and isinstance(far["compress"], bool)
    assert _plan(tmp_path, ("node", 2, "1 Gb/s"), levels[1], extra=["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["across"] is None


@pytest.mark.parametrize("levels, memory, status, says", [
    ([("dc", 2, "0 Gb/s"), ("gpu", 4, "100 Gb/s")], "80 GB", 2, "bandwidth [B/s] of level 'dc' must be finite"),
    ([("dc", 1, "1 Gb/s")], "80 GB", 0, "one GPU: nothing travels"),
    ([("dc", 1, "1 Gb/s"), ("gpu", 4, "100 Gb/s")], "80 GB", 0, "one data centre: nothing crosses"),
    ([("dc", 2, "1 Gb/s"), ("gpu", 8, "100 Gb/s")], "80 GB", 0, "no token has to leave it"),
    ([("dc", 2, "1 Gb/s"), ("gpu", 4, "100 Gb/s")], "1 MB", 2, "does not fit"),
])
def test_plan_at_the_edges(tmp_path, capsys, levels, memory, status, says):
    assert _plan(tmp_path, *levels, memory=memory) == status
    out = capsys.readouterr()
    assert says in out.out + out.err and "Traceback" not in out.err


def test_plan_is_quick_on_1024_gpus(capsys):
    import time
    from moe_lab.cli import main
    start = time.process_time()
    assert main(["plan", "deepseek-v3", "a800_dc:128", "--top", "3"]) == 0
    assert time.process_time() - start < 5
    assert "Across data centres" in capsys.readouterr().out


@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.floats(1e4, 1e9), st.floats(1e3, 1e8), st.sampled_from([None, 10., 50.]))
def test_the_best_domains_are_the_best_of_all(dcs, gpus, data, expert, ratio):
    from moe_lab.hybrid_ep.scale import Block, all_domains, best_domains, far_cluster, seconds
    b, c = Block(data, expert, 1, 1e-3, 1e-3), far_cluster(dcs, 10., gpus)
    d, t = best_domains(b, c, (dcs, gpus), ratio)
    assert t == min(seconds(b, c, o, ratio) for o in all_domains((dcs, gpus)))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**6))
def test_mixed_exchange_counts_every_token_once(size, domains, seed):
    import numpy as np
    from moe_lab.hybrid_ep.domain import Domains, route
    from moe_lab.hybrid_ep.scale import far_cluster, mixed_seconds
    from moe_lab.placement.cost import Cost
    G, rng = size * domains, np.random.default_rng(seed)
    cost, counts, d = Cost(far_cluster(G, 10.), rng.uniform(1e5, 1e6, G), 2048, 1.), rng.integers(0, 50, (G, G)), Domains((G,), (size,))
    rows, ins, outs = np.zeros((3, G))
    for g in range(G):                                                        # each token walks as `route` says
        for e in range(G):
            to = route(d, g, e)[0][-1]
            rows[to] += counts[g, e]
            if to != g: ins[to] += counts[g, e]; outs[g] += counts[g, e]
    want = (rows / cost.tps + cost.sends * 2048 / cost.bandwidth[0] * np.maximum(ins, outs)).max()
    assert mixed_seconds(cost, counts, size) == pytest.approx(want, rel=1e-9)


# ---- kernels on a GPU (under the interpreter they run in their notebook)
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("E, n, ratio", [(1, 7, 2), (3, 1000, 5), (8, 1 << 20, 50), (2, (1 << 22) + 13, 150)])
def test_kernels_match_the_plain_bodies(E, n, ratio, dtype):
    from moe_lab.bench.compress import check
    assert check(E, n, ratio, dtype, "cuda") < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.gpu
def test_decode_kernel_is_exact_and_repeats():
    torch.manual_seed(0)
    w = torch.randn(4, 300, 500, device="cuda")
    s = shared_expert(w)
    for k in (0, 1, 1500, 150_000):
        r = encode(w, s, k)
        with use("torch"): want = decode(r, s)
        got = decode(r, s)
        assert torch.equal(got, want) and torch.equal(got, decode(r, s))


@pytest.mark.gpu
def test_optimizer_follows_its_threshold_on_a_gpu():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(4, 1 << 18, device="cuda"))
    q = torch.nn.Parameter(p.detach().clone())
    ours, theirs = SRAdamW({p: shared_expert(p.data)}, ratio=50, lr=1e-3), torch.optim.AdamW([q], lr=1e-3)
    for _ in range(10):
        p.grad = torch.randn_like(p); q.grad = p.grad.clone()
        ours.step(); theirs.step()
    assert (p - q).abs().max() < 1e-5 and ours.exact <= 3
    left = (decode(ours.residual[p], ours.shared[p]) - p).norm()
    assert left <= (decode(encode(p.data, ours.shared[p], ours.places[p] // 2), ours.shared[p]) - p).norm()


def _on_gpus(domains, ratio):
    "Largest difference to the layer of one process, float32 on GPUs, and whether SRAdamW's residuals are used up."
    import torch.distributed as dist
    from torch import nn
    from moe_lab.comm.gradients import reduce_gradients
    from moe_lab.experts.layer import MoE
    from moe_lab.hybrid_ep.domain import Domains
    from moe_lab.hybrid_ep.migrate import Communicator, HybridParallel, migrate
    comm, me = Communicator(Domains((2,), domains), ratio), dist.get_rank()
    torch.manual_seed(5); whole = MoE(64, 128, 4, 2).cuda()
    torch.manual_seed(5); part = migrate(nn.Sequential(MoE(64, 128, 4, 2, exchange=HybridParallel(comm)))).cuda()
    for w, v in zip(part[0].experts.parameters(), whole.experts.parameters()): w.data.copy_(v.data.chunk(2)[me])
    part[0].gate.load_state_dict(whole.gate.state_dict())
    x = torch.randn(256, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    y, want = part(x.chunk(2)[me])[0], whole(x)[0]
    (y.square().sum() * 2).backward(); want.square().sum().backward()
    reduce_gradients(part); comm.settle()
    torch.cuda.synchronize()
    diff = [(y - want.chunk(2)[me]).detach().abs().max() / want.detach().abs().max()]
    for (n, p), q in zip(part[0].named_parameters(), whole.parameters()):
        g = q.grad.chunk(2)[me] if "experts" in n else q.grad
        diff.append((p.grad - g).abs().max() / g.abs().max())
    return max(map(float, diff))


@pytest.mark.gpu2
@pytest.mark.parametrize("domains, ratio", [((2,), None), ((1,), None), ((2,), .5)])
def test_migration_through_nccl(domains, ratio):
    from moe_lab.cluster.launch import Pool
    with Pool(2, timeout=60, backend="nccl") as pool: assert max(pool.run(_on_gpus, domains, ratio)) < 5e-3

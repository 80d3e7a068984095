"""Served models over several ranks: layouts for any degrees, the coordinated exchange, dense slices, faults."""
import math
import os
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, strategies as st

from moe_lab.cluster.groups import grid
from moe_lab.cluster.launch import RankError, launch, rank_device
from moe_lab.cluster.topology import nd_a100_v4
from moe_lab.comm.alltoall import Wire
from moe_lab.comm.parallel import ExpertParallel
from moe_lab.experts.layer import MoE
from moe_lab.inference.coordinated import Coordinated, exchange_cost
from moe_lab.inference.generate import Sampling, generate
from moe_lab.inference.serve import generate_sliced, slice_model
from moe_lab.inference.slicing import Layout
from moe_lab.models.gpt import GPT, GPTConfig
from moe_lab.sim.collectives import alltoall_phases, total

powers = st.sampled_from([1, 2, 4, 8, 16])


@given(powers, powers, powers, st.integers(1, 4), powers)
def test_every_group_partitions_the_gpus_and_every_expert_is_whole(tensor, slicing, more, per_place, spread):
    p = max(tensor, slicing) * more
    E = p // slicing * per_place
    lay = Layout(p, E, tensor, slicing)
    for kind in ("tensor", "data", "slices", "expert", "column", "row"):
        assert sorted(r for g in lay.groups(kind) for r in g) == list(range(p))
    for near, far in (("tensor", "data"), ("slices", "expert"), ("row", "column")):        # two that meet in one rank
        assert all(len({*a} & {*b}) == 1 for a in lay.groups(near) for b in lay.groups(far))
    for slice in lay.groups("expert"): assert sorted(e for r in slice for e in lay.ids(r)) == list(range(E))
    for g in lay.groups("slices"): assert len({tuple(lay.ids(r)) for r in g}) == 1


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 16), st.integers(1, 16))
def test_a_layout_is_right_or_says_why(p, E, L, s):
    fits = p % s == 0 and p % L == 0 and E % (p // s if p % s == 0 else 1) == 0 and max(L, s) % min(L, s) == 0
    if fits: assert Layout(p, E, L, s).copies * L == p
    else:
        with pytest.raises(ValueError, match="must"): Layout(p, E, L, s)


@given(powers, st.sampled_from([8, 16, 32]), st.floats(1, 1e9))
def test_participants_fall_by_the_tensor_degree_and_bytes_agree_with_the_simulator(tensor, nodes, size):
    assume(tensor <= 8)
    lay = Layout(nodes * 8, nodes * 8, tensor)
    plain, coord = exchange_cost(lay, size, False), exchange_cost(lay, size)
    assert coord["participants"] * tensor == plain["participants"] == lay.world
    sent = sum(total(alltoall_phases(nd_a100_v4(nodes), size, "coordinated", tensor=tensor)).values())         # one way, and the gather
    once = coord["bytes"] - size / tensor * (lay.world // tensor - 1) / (lay.world // tensor)
    assert math.isclose(sent, once, rel_tol=1e-9)


def wired(E, L):
    "Bytes and messages of a layer on this rank: ours, and the exchange over all ranks."
    W, D, T, k = dist.get_world_size(), 16, 64, 1
    lay, out = Layout(W, E, L), []
    torch.manual_seed(0)
    x = torch.randn(T, D)                                                        # the same tokens everywhere: only the way differs
    for ex in (Coordinated.of(lay), ExpertParallel(grid())):
        moe = (torch.manual_seed(1), MoE(D, 8, E, k, exchange=ex).eval())[1]
        with torch.no_grad():
            with Wire() as w: y = moe(x)[0]
        out.append((y, int(w.bytes.sum()), sorted(r for r, n in enumerate(w.messages.tolist()) if n)))
    return out


@pytest.mark.parametrize("L,partners", [(2, [[1, 2], [0, 3], [0, 3], [1, 2]]), (1, [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]])])
def test_partners_and_bytes_on_real_ranks(ranks, L, partners):
    for r, ((y, sent, to), (want, all_sent, to_all)) in enumerate(ranks.run(wired, 4, L)):
        assert torch.equal(y, want)
        assert to == partners[r] and len(to_all) == 3
        if L > 1: assert sent < all_sent


def layer(seeds):
    "Random degrees, experts, tokens, k: equal to one process."
    p, worst = dist.get_world_size(), 0.
    for seed in seeds:
        rnd = random.Random(seed)
        L, s = rnd.choice([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4), (4, 4)] if p == 4 else [(1, 1), (2, 1), (1, 2), (2, 2)])
        E = p // s * rnd.choice([1, 2, 3])
        k, lay = rnd.randint(1, E), Layout(p, E, L, s)
        make = lambda ex: (torch.manual_seed(seed), MoE(6, 8, E, k, exchange=ex, activation=rnd2, shared_experts=seed % 2).double().eval())[1]
        rnd2 = rnd.choice(["swiglu", "gelu"])
        T = [rnd.choice([0, 1, 5, 9]) for _ in range(lay.copies)][dist.get_rank() // L]
        x = torch.randn(T, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank() // L)).to(rank_device())
        part, whole = make(Coordinated.of(lay)).to(rank_device()), make(None).to(rank_device())
        with torch.no_grad(): worst = max([worst, *(part(x)[0] - whole(x)[0]).abs().flatten().tolist()])
    return worst


@pytest.mark.parametrize("W", [2, 4])
def test_a_layer_equals_one_process(ranks, W): assert max(ranks.run(layer, range(12), n=W)) < 1e-12


@pytest.mark.gpu2
def test_a_layer_equals_one_process_through_nccl(gpus): assert max(gpus.run(layer, range(12))) < 1e-12


def pr_moe():
    "Layers with different numbers of experts, a dense one, a fixed MLP beside the experts."
    config = GPTConfig(40, d_model=16, num_layers=3, num_heads=2, d_hidden=8, experts=(0, 2, 4), top_k=1, residual="mix")
    make = lambda: (torch.manual_seed(0), GPT(config).double().eval().to(rank_device()))[1]
    layout = Layout(dist.get_world_size(), 4, tensor=2)
    part, prompts = slice_model(make(), layout), [[1, 2, 3], [4]]
    return generate_sliced(part, layout, prompts, 5, Sampling(temperature=0)) == generate(make(), prompts, 5, Sampling(temperature=0))


@pytest.mark.parametrize("W", [2, 4])
def test_pyramid_residual_models_write_the_same_text(ranks, W): assert all(ranks.run(pr_moe, n=W))


@pytest.mark.gpu2
def test_text_through_nccl(gpus): assert all(gpus.run(pr_moe))


def broken(where):
    "A rank whose expert weights are NaN."
    config = GPTConfig(20, d_model=16, num_layers=1, num_heads=2, d_hidden=8, experts=2, top_k=2)
    part = slice_model(GPT(config).eval(), Layout(2, 2))
    if dist.get_rank() == where: torch.nn.init.constant_(part.blocks[0].ffn.experts.down, float("nan"))
    generate_sliced(part, Layout(2, 2), [[1, 2], [3]], 4)


def test_nan_weights_of_one_rank_end_the_run_on_all_and_say_so(ranks):
    with pytest.raises(RankError, match="request 0, step 0: the model's logits are not finite"): ranks.run(broken, 1, n=2)


def dies(when):
    config = GPTConfig(20, d_model=16, num_layers=2, num_heads=2, d_hidden=8, experts=4, top_k=2)
    part, seen = slice_model(GPT(config).eval(), Layout(2, 4, tensor=2)), []
    if dist.get_rank() == 1:
        part.blocks[1].attention.register_forward_hook(lambda *a: seen.append(1) or (os._exit(3) if len(seen) == when else None))
    generate_sliced(part, Layout(2, 4, tensor=2), [[1, 2]], 9, Sampling(temperature=0))


def test_a_rank_that_exits_between_two_layers_names_itself_and_the_token():
    with pytest.raises(RankError) as e: launch(dies, 2, 4, timeout=10, backend="gloo")
    assert (e.value.rank, e.value.step) == (1, "token 3")


@pytest.mark.parametrize("prompts,why", [([[]], "prompt 0 is empty"), ([[1], [20]], "token id 20 is outside"), ([[1] * 9], "exceed the context of 10")])
def test_bad_requests_end_on_every_rank_without_a_hang(ranks, prompts, why):
    def run():
        config = GPTConfig(20, d_model=16, num_layers=1, num_heads=2, d_hidden=8, experts=2, top_k=1)
        part = slice_model(GPT(config).eval(), Layout(2, 2))
        try: generate_sliced(part, Layout(2, 2), prompts, 4, context=10)
        except ValueError as e: return str(e)
    said = ranks.run(run, n=2)
    assert all(why in s for s in said), said


def test_what_cannot_be_cut(ranks):
    def run():
        out = []
        for kw, lay in ((dict(capacity_factor=1.), Layout(2, 2)), (dict(num_heads=1), Layout(2, 2, tensor=2)), (dict(experts=2, d_expert=7), Layout(2, 2, slicing=2))):
            config = GPTConfig(**dict(vocab_size=20, d_model=16, num_layers=1, num_heads=2, d_hidden=8, experts=2) | kw)
            try: slice_model(GPT(config), lay); out.append("")
            except ValueError as e: out.append(str(e))
        try: Coordinated.of(Layout(4, 4))
        except ValueError as e: out.append(str(e))
        return out
    for said in ranks.run(run, n=2):
        for s, why in zip(said, ("dropless Local", "tensor must divide 1 heads", "d_hidden must be a multiple of the 2", "layout must be for the 2 ranks"), strict=True): assert why in s

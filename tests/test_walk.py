"""Training that is saved, killed, resumed, resharded and whose experts move, all at random, keeps the losses of a run that nothing disturbed; ranks that die never hang the others."""
import os, random, signal, time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_lab import MoE
from moe_lab.cluster.groups import grid
from moe_lab.cluster.launch import Pool, RankError, step
from moe_lab.comm import checkpoint
from moe_lab.comm.gradients import check_copies, clip_grad_norm, reduce_gradients
from moe_lab.comm.parallel import ExpertParallel
from moe_lab.comm.switch import Switchable
from moe_lab.core.types import Placement
from moe_lab.placement.execute import move, placed_layers
from moe_lab.placement.placed import Placed
from test_comm_parallel import differences
from test_placement_execute import some_placement

D, E, N, STEPS = 4, 2, 11, 8                # r 2 of four ranks: two experts, two ranks to each
LAYOUTS = {"one": (1, lambda _: ExpertParallel(grid())), "ep 2": (2, lambda _: ExpertParallel(grid())), "ep 3": (3, lambda _: ExpertParallel(grid())), "ep 2 x 2 copies": (4, lambda _: ExpertParallel(grid(ep=2))),
           "placed 2": (2, lambda rnd: Placed(grid(), some_placement(rnd, E, 2, 3))), "placed 3": (3, lambda rnd: Placed(grid(), some_placement(rnd, E, 3, 2))),
           "placed 4": (4, lambda rnd: Placed(grid(), some_placement(rnd, E, 4, 2))),
           "r 0": (4, lambda _: Switchable(grid(), 0)), "r 1": (4, lambda _: Switchable(grid(), 1)), "r 2": (4, lambda _: Switchable(grid(), 2))}

IDLE = {"idle": (2, lambda _: Placed(grid(), Placement(torch.tensor([[1, 0], [1, 0]]))))}         # the second rank has no expert until one moves there


class Model(nn.Module):
    def __init__(self, exchange):
        super().__init__()
        self.inp, self.moe, self.out = nn.Linear(D, D), MoE(D, 6, E, 2, exchange=exchange, bias=True), nn.Linear(D, 1)
    def forward(self, x):
        x = self.inp(x)
        y, aux = self.moe(x)
        return self.out(x + y)[:, 0], aux


def kill(): os.kill(os.getpid(), signal.SIGKILL)


def advance(layout, folder, first, last, seed=0, fault=None, victim=0):
    """Steps first..last-1 on global batches, uneven over the ranks, between them moves of placed experts; loads step `first`, saves `last`, even while
    experts move. `fault`: where the victim is killed in the last step. Losses, and copies that moved."""
    W, rank, rnd, moved = dist.get_world_size(), dist.get_rank(), random.Random(seed), 0
    torch.manual_seed(0)
    model = Model((LAYOUTS | IDLE)[layout][1](rnd)).double()
    opt = torch.optim.AdamW(model.parameters(), lr=.05)
    if first: assert checkpoint.load(folder, model, opt, first) == {"at": first}
    losses = []
    for i in range(first, last):
        g = torch.Generator().manual_seed(i)
        x, target = torch.randn(N, D, generator=g, dtype=torch.float64), torch.randn(N, generator=g, dtype=torch.float64)
        mine = torch.randint(0, W, (N,), generator=g).eq(rank)                # some ranks have nothing
        doomed = fault if i == last - 1 and rank == victim % W else None
        if doomed == "forward": model.moe.experts.register_forward_pre_hook(lambda *_: kill())
        if doomed == "backward": model.out.weight.register_hook(lambda _: kill())
        step(f"step {i}")
        opt.zero_grad()
        loss = (model(x[mine])[0] - target[mine]).square().sum() / N
        (loss * W).backward()
        reduce_gradients(model); clip_grad_norm(model, 1.); opt.step()
        if doomed == "move": dist.batch_isend_irecv = lambda *_: kill()
        if placed_layers(model) and (fault == "move" or rnd.random() < .7): moved += move(model, opt, [some_placement(rnd, E, W, 6 // W + 1)], i + 1)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    if not (placed_layers(model) and model.moe.exchange.moving): check_copies(model)
    if fault == "save" and rank == victim % W: checkpoint._quietly = lambda *a, **k: kill()
    checkpoint.save(folder, last, model, opt, {"at": last})
    return losses, moved


def walk(ranks, folder, seed, record_property, most_faults):
    rnd, at, count = random.Random(seed), 0, Counter()
    want, _ = ranks.run(advance, "one", folder / "undisturbed", 0, STEPS, n=1)[0]
    while at < STEPS:
        layout, last = rnd.choice(list(LAYOUTS)), min(STEPS, at + rnd.randint(1, 3))
        fault = rnd.choice(["forward", "backward", "save"] + ["move"] * ("placed" in layout)) if count["faults"] < most_faults and rnd.random() < .5 else None
        W, victim, start = LAYOUTS[layout][0], rnd.randrange(4), time.monotonic()
        job = advance, layout, folder / "walk", at, last, rnd.randrange(99)
        if fault:
            with pytest.raises(RankError) as e: ranks.run(*job, fault, victim, n=W, timeout=10)
            assert e.value.rank == victim % W and time.monotonic() - start < 60
            assert checkpoint.steps(folder / "walk")[-1:] == ([at] if at else [])     # what was saved stays, nothing half-written counts
            count["faults"] += 1
            continue
        for losses, moved in ranks.run(*job, n=W): assert losses == pytest.approx(want[at:last], rel=1e-9), (seed, layout, at)
        at, count["pieces"], count["moves"] = last, count["pieces"] + 1, count["moves"] + moved
    for what, n in count.items(): record_property(what, n)


def test_a_walk(ranks, tmp_path, record_property): walk(ranks, tmp_path, 25, record_property, 2)


def test_a_rank_without_experts_counts_steps(ranks, tmp_path):
    "Found by a walk: a checkpoint was loaded, then experts moved to an idle rank, and its Adam began at step 1 (P06)."
    want, _ = ranks.run(advance, "one", tmp_path / "undisturbed", 0, 6, n=1)[0]
    ranks.run(advance, "ep 2", tmp_path / "walk", 0, 3, n=2)
    for losses, moved in ranks.run(advance, "idle", tmp_path / "walk", 3, 6, 1, n=2): assert moved and losses == pytest.approx(want[3:], rel=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_walks(ranks, tmp_path, seed, record_property): walk(ranks, tmp_path, seed, record_property, 6)


# --- random worlds, random deaths -----------------------------------------------------------------------------------

def exchanges(seed, W):
    "A random layer whose result must be one process's."
    rnd = random.Random(seed)
    E, f = rnd.choice([1, 2, 3, 5, 8]), rnd.choice([None, None, 0., .5, 1.25])
    tokens = [rnd.choice([0, 0, 1, 4, 9, 33]) for _ in range(W)]
    make = lambda: ExpertParallel(grid(), f, lost=rnd.choice(["zero", "pass"]), algo=rnd.choice(["linear", "hierarchical"]))
    return differences(make, E, tokens, k=rnd.choice([1, 2, E]), mask=rnd.random() < .5, capacity_factor=f)


def dies(seed, victim, after):
    "The same with a rank that is killed, or stops answering, at a random moment."
    import threading
    if dist.get_rank() == victim % dist.get_world_size():
        if seed % 3 == 2: time.sleep(1e6)                       # alive and silent
        threading.Timer(after, kill).start()
    for i in range(10**6):
        step(f"round {i}")
        exchanges(seed + i, dist.get_world_size())


def rounds(pool, seeds, worlds, record_property, deaths):
    faults = 0
    for seed in seeds:
        rnd = random.Random(seed)
        W, start = rnd.choice(worlds), time.monotonic()
        assert max(pool.run(exchanges, seed, W, n=W, timeout=30)) < 1e-12, (seed, W)
        if faults < deaths and W > 1:
            victim = rnd.randrange(W)
            with pytest.raises(RankError) as e: pool.run(dies, seed, victim, rnd.random(), n=W, timeout=5)
            assert set(e.value.failures) | set(e.value.running) == set(range(W)), e.value
            assert victim in e.value.running if seed % 3 == 2 else e.value.rank == victim, (seed, victim, e.value)
            faults += 1
        assert time.monotonic() - start < 60
    record_property("faults", faults)
    record_property("worlds", len(seeds))


def test_random_worlds(ranks, record_property): rounds(ranks, [5, *range(5)], [1, 2, 3, 4], record_property, 2)         # seed 5: three ranks, one silent; 0: four, one killed


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(100, 160, 10))
def test_many_random_worlds(first, record_property):
    with Pool(6, timeout=60, backend="gloo") as pool: rounds(pool, range(first, first + 10), [1, 2, 3, 4, 5, 6, 5, 6], record_property, 6)

"""Experts that live anywhere and move during training change nothing but where the work is done."""
import json, os, random, signal, time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_lab.cluster.groups import grid
from moe_lab.cluster.launch import RankError
from moe_lab.cluster.launch import step as note_step
from moe_lab.comm.checkpoint import load, save, steps
from moe_lab.comm.gradients import check_copies, clip_grad_norm, grad_norm, reduce_gradients
from moe_lab.comm.parallel import ExpertParallel
from moe_lab.core.types import Placement
from moe_lab.experts.layer import MoE
from moe_lab.placement.execute import _Rows, _check_state, move, placed_layers, rebalance, transfers
from moe_lab.placement.placed import Placed
from moe_lab.placement.vexpert import initial, moved_copies

f64 = torch.float64


def some_placement(rnd, E, W, slots):
    "Every expert somewhere, the other slots anywhere or free."
    p = torch.zeros(E, W, dtype=torch.int64)
    free = [w for w in range(W) for _ in range(slots)]
    rnd.shuffle(free)
    for i, w in enumerate(free):
        if i < E: p[i, w] += 1
        elif rnd.random() < .7: p[rnd.randrange(E), w] += 1
    return Placement(p)


# One layer, all options ----------------------------------------------------------------------------------------------

def matrix(W, compute, algo):
    "Placements x capacities for one way to compute and one to send: all equal to plain expert parallelism."
    r, rnd = dist.get_rank(), random.Random(f"{W} {compute} {algo}")
    g = grid(node=2, gpu=W // 2) if W % 2 == 0 else grid()
    for factor in (None, .5, 1.25, 0.):
        E, k, D = rnd.choice([1, 3, 5, 8]), rnd.choice([1, 2]), 6
        k, p = min(E, k), some_placement(rnd, E, W, -(-E // W) + 1)
        tokens = [rnd.choice([0, 1, 4, 9]) for _ in range(W)]
        make = lambda ex: (torch.manual_seed(1), MoE(D, 8, E, k, exchange=ex, bias=compute != "block-sparse").to(f64))[1]
        out = []
        for m in (make(Placed(g, p, capacity_factor=factor, compute=compute, algo=algo)), make(ExpertParallel(g, factor))):
            torch.manual_seed(r); x = torch.randn(tokens[r], D, dtype=f64, requires_grad=True)
            y, aux = m(x)
            y.pow(2).sum().backward(); reduce_gradients(m)
            out.append((y.detach(), x.grad, m.gate.router.weight.grad, grad_norm(m), aux.dropped.double(), aux.counts.double()))
            if isinstance(m.exchange, Placed): check_copies(m)
        for a, b in zip(*out): assert torch.allclose(a, b, rtol=1e-10, atol=1e-12), (factor, E, k, p.slots.tolist(), tokens)
    return True

@pytest.mark.parametrize("compute", ["grouped", "padded", "block-sparse"])
@pytest.mark.parametrize("algo", ["linear", "2dh", "hierarchical", "auto"])
def test_any_placement_any_product_any_all_to_all(ranks, compute, algo): assert all(ranks.run(matrix, 4, compute, algo))

@pytest.mark.parametrize("W", [1, 2, 3])
def test_any_number_of_ranks(ranks, W): assert all(ranks.run(matrix, W, "grouped", "linear", n=W))


def test_replicas_split_one_to_three(ranks):                                            # P10
    def run():
        p = Placement(torch.tensor([[1, 3], [1, 0]]))
        torch.manual_seed(0); moe = MoE(4, 8, 2, 1, exchange=Placed(grid(), p)).to(f64)
        torch.manual_seed(0); one = MoE(4, 8, 2, 1, exchange=ExpertParallel(grid())).to(f64)
        with torch.no_grad():
            for m in (moe, one): m.gate.router.weight.zero_()                            # ties: all tokens go to expert 0
        for m in (moe, one):
            opt = torch.optim.SGD(m.parameters(), lr=.1)
            torch.manual_seed(5 + dist.get_rank()); m(torch.randn(8, 4, dtype=f64))[0].pow(2).sum().backward(); reduce_gradients(m)
            opt.step()
        check_copies(moe)
        want = one.experts.up.detach()[:1].clone() if dist.get_rank() == 0 else torch.zeros_like(moe.experts.up[:1])
        dist.broadcast(want, 0)
        return (moe.experts.up[0] - want[0]).abs().max().item(), moe.exchange.seen.tolist()
    for difference, seen in ranks.run(run, n=2): assert difference < 1e-15 and seen == [[8, 0], [8, 0]]


# Moves ---------------------------------------------------------------------------------------------------------------

def test_sources_are_near_and_take_turns():
    p = torch.zeros(1, 8, dtype=torch.int64); p[0, [1, 6]] = 1
    got = transfers(Placement(p), Placement(torch.ones(1, 8, dtype=torch.int64)), (2, 2, 2))
    assert got == [(0, 1, 0), (0, 1, 2), (0, 1, 3), (0, 6, 4), (0, 6, 5), (0, 6, 7)]
    assert [s for _, s, _ in transfers(Placement(p), Placement(torch.ones(1, 8, dtype=torch.int64)))] == [1, 6, 1, 6, 1, 6]


class Model(nn.Module):
    "Dense, two layers with experts of different number, dense."
    def __init__(self, placements, D=6):
        super().__init__()
        make = lambda p, k: MoE(D, 8, p.num_experts, k, exchange=Placed(grid(), p), bias=k == 1)
        self.inp, self.a, self.b, self.out = nn.Linear(D, D), make(placements[0], 2), make(placements[1], 1), nn.Linear(D, 1)
    def forward(self, x):
        x = self.inp(x)
        for m in (self.a, self.b): x = x + m(x)[0]
        return self.out(x).pow(2).mean()

def starts(W): return [initial(5, W, 5) if W > 5 else Placement.expert_parallel(5, W), Placement.expert_parallel(6, W)]
def make_model(W): torch.manual_seed(0); return Model(starts(W)).to(f64)
optimizers = {"adamw": lambda p: torch.optim.AdamW(p, lr=.03, weight_decay=.1), "amsgrad": lambda p: torch.optim.Adam(p, lr=.03, amsgrad=True, fused=True),
              "momentum": lambda p: torch.optim.SGD(p, lr=.03, momentum=.9)}

def train(model, opt, first, last, plans=lambda step: None, save_at=(), root=None, batch=12):
    "Losses of the steps first..last over one batch that the ranks share; `plans(step)` may begin a move after it."
    W, r, losses = dist.get_world_size(), dist.get_rank(), []
    for step in range(first, last + 1):
        x = torch.randn(batch, 6, dtype=f64, generator=torch.Generator().manual_seed(step))
        note_step(f"step {step}")
        loss = model(x.view(W, -1, 6)[r])
        opt.zero_grad(); loss.backward(); reduce_gradients(model); clip_grad_norm(model, .5); opt.step()
        if step in save_at: save(root, step, model, opt)
        if (p := plans(step)) is not None: move(model, opt, p, step)
        total = loss.detach().clone(); dist.all_reduce(total); losses.append(total.item() / W)
    return losses

def wander(how, moving, seed=0):
    "Training in which both layers take random placements, all the time or never; losses and what moved."
    W, rnd, copies = dist.get_world_size(), random.Random(seed), []
    model = make_model(W); opt = optimizers[how](model.parameters())
    def plans(step):
        if not moving: return None
        ps = [some_placement(rnd, m.num_experts, W, 4) for m in placed_layers(model)]
        copies.append(sum(len(moved_copies(m.exchange.placement, p)) for m, p in zip(placed_layers(model), ps)))
        return ps
    losses = train(model, opt, 1, 12, plans)
    check_copies(model)
    return losses, sum(copies)

@pytest.mark.parametrize("W,how", [(2, "momentum"), (3, "amsgrad"), (4, "adamw")])
def test_training_with_moves_is_training_without(ranks, W, how):                          # P06
    still, moved = ranks.run(wander, how, False, n=W), ranks.run(wander, how, True, n=W)
    assert moved[0][1] > 20 and len(set(still[0][0])) == 12
    for losses, _ in moved: assert losses == pytest.approx(still[0][0], rel=0, abs=1e-9)


def test_the_scheduler_moves_experts_and_changes_no_loss(ranks):
    def run(threshold):
        from moe_lab.cluster.topology import h200_nvlink
        from moe_lab.placement.cost import Cost
        model = make_model(4); opt = optimizers["adamw"](model.parameters())
        cost, losses, moves = Cost(h200_nvlink(4), 1e5, 48, 1e3), [], 0
        for step in range(1, 9):
            losses += train(model, opt, step, step)
            moves += sum(map(len, rebalance(model, opt, cost, 3, step, threshold)))
        return losses, moves
    still, moved = ranks.run(run, 1e9), ranks.run(run, 1.05)
    assert still[0][1] == 0 < moved[0][1]
    assert moved[0][0] == pytest.approx(still[0][0], abs=1e-9, rel=0) and all(m == moved[0] for m in moved)


def test_before_the_first_step_only_weights_move(ranks):
    def run():
        model = make_model(2); opt = optimizers["adamw"](model.parameters())
        n = move(model, opt, [Placement(torch.ones(5, 2, dtype=torch.int64)), model.b.exchange.placement], 0)
        return n, train(model, opt, 1, 3), len(model.a.experts.ids), len(model.b.experts.ids)
    still = ranks.run(wander, "adamw", False, n=2)[0][0][:3]
    for n, losses, a, b in ranks.run(run, n=2): assert n == 5 and a == 5 and b == 3 and losses == pytest.approx(still, abs=1e-12, rel=0)


def test_accumulated_backwards_and_a_frozen_expert_layer(ranks):
    def run():
        model = make_model(2); model.b.experts.requires_grad_(False)
        opt = optimizers["adamw"](p for p in model.parameters() if p.requires_grad)
        move(model, opt, [Placement(torch.ones(5, 2, dtype=torch.int64)), Placement(torch.ones(6, 2, dtype=torch.int64))], 0)
        for _ in range(2): model(torch.ones(3, 6, dtype=f64)).backward()
        reduce_gradients(model); opt.step(); check_copies(model)
        return model.b.experts.up.requires_grad, len(model.b.experts.up), model.b.experts.up.grad, model.b.exchange.moving
    assert ranks.run(run, n=2) == [(False, 6, None, None)] * 2


# Checkpoints and deaths ----------------------------------------------------------------------------------------------

def continued(root, W_first, seed):
    "Load a checkpoint of other ranks and another placement, go on."
    W, rnd = dist.get_world_size(), random.Random(seed)
    torch.manual_seed(9); model = Model([some_placement(rnd, E, W, 4) for E in (5, 6)]).to(f64)
    opt = optimizers["adamw"](model.parameters())
    load(root, model, opt)
    return train(model, opt, steps(root)[-1] + 1, 12)

def saved_while_moving(root):
    rnd, W = random.Random(1), dist.get_world_size()
    model = make_model(W); opt = optimizers["adamw"](model.parameters())
    train(model, opt, 1, 7, lambda step: [some_placement(rnd, m.num_experts, W, 4) for m in placed_layers(model)], (7,), root)

def test_checkpoint_of_any_placement_opens_on_any_other(ranks, tmp_path):
    ranks.run(saved_while_moving, tmp_path, n=3)
    want = ranks.run(wander, "adamw", False, n=4)[0][0]
    for W in (2, 4):
        for losses in ranks.run(continued, tmp_path, 3, W, n=W): assert losses == pytest.approx(want[7:], abs=1e-9, rel=0)


def dies_in_a_move(root, when):
    "Rank 1 is killed when its copies leave, or before it has heard of their arrival."
    rnd, W = random.Random(2), dist.get_world_size()
    model = make_model(W); opt = optimizers["adamw"](model.parameters())
    die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    def plans(step):
        if step == 6 and dist.get_rank() == 1:
            if when == "sending": dist.batch_isend_irecv = die
            else: type(model.a.exchange).join_replicas = die
        return [some_placement(rnd, m.num_experts, W, 4) for m in placed_layers(model)]
    train(model, opt, 1, 12, plans, (4,), root)

@pytest.mark.parametrize("when", ["sending", "landing"])
def test_killed_in_a_move(ranks, tmp_path, when):
    t = time.monotonic()
    with pytest.raises(RankError) as e: ranks.run(dies_in_a_move, tmp_path, when, n=3, timeout=10)
    assert time.monotonic() - t < 25 and e.value.rank == 1 and "SIGKILL" in str(e.value)
    assert e.value.step == ("move after step 6" if when == "sending" else "step 7")
    assert set(e.value.failures) | set(e.value.running) == {0, 1, 2} and steps(tmp_path) == [4]
    want = ranks.run(wander, "adamw", False, n=4)[0][0]
    for losses in ranks.run(continued, tmp_path, 3, 5, n=2): assert losses == pytest.approx(want[4:], abs=1e-9, rel=0)


# Leaving -------------------------------------------------------------------------------------------------------------

def leaves(root, how, victim, last=12):
    "Training that goes on when `victim` is killed in step 8; `how`: 'copies' everywhere, 'one' copy of each, 'goodbye': emptied first."
    from moe_lab.placement.survive import recover, regroup
    from moe_lab.placement.vexpert import evacuate
    everywhere = [Placement(torch.ones(m, 3, dtype=torch.int64)) for m in (5, 6)]
    torch.manual_seed(0); model = Model(everywhere if how == "copies" else starts(3)).to(f64)
    opt, losses, step, events = optimizers["adamw"](model.parameters()), {}, 0, []
    while step < last:
        try:
            if step == 7 and dist.get_rank() == victim and not events: type(model.b.exchange).join_replicas = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            losses[step + 1], = train(model, opt, step + 1, step + 1)
            step += 1
            if step == 4 and not steps(root): save(root, step, model, opt)
            if step == 5 and how == "goodbye": move(model, opt, [evacuate(m.exchange.placement, [victim], 6) for m in placed_layers(model)], step)
        except RuntimeError:
            members = regroup()
            step = recover(model, opt, members, step, root, 6)
            events.append([members, step])
    check_copies(model)
    open(f"{root}/after-{dist.get_rank()}.json", "w").write(json.dumps([list(losses.values()), events]))

@pytest.mark.parametrize("how,back_to", [("copies", 7), ("one", 4), ("goodbye", 7)])
def test_a_rank_leaves_and_training_goes_on(tmp_path, ranks, how, back_to):
    from moe_lab.cluster.launch import Pool
    want = ranks.run(wander, "adamw", False, n=3)[0][0]
    with Pool(3, timeout=3, backend="gloo") as pool:
        pool.grace = 60.
        with pytest.raises(RankError) as e: pool.run(leaves, tmp_path, how, 0)
    assert e.value.rank == 0 and not [f for f in e.value.failures if f != 0]
    for r in (0, 1):
        losses, events = json.loads((tmp_path / f"after-{r}.json").read_text())
        assert events == [[[1, 2], back_to]] and losses == pytest.approx(want, abs=1e-9, rel=0)


def test_lost_without_a_checkpoint(tmp_path):
    from moe_lab.cluster.launch import Pool
    def run(root):
        from moe_lab.placement.survive import recover, regroup
        model = make_model(2); opt = optimizers["adamw"](model.parameters())
        train(model, opt, 1, 1)
        if dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
        try: train(model, opt, 2, 2)
        except RuntimeError: members = regroup()
        try: recover(model, opt, members, 1, root, 6)
        except ValueError as e: open(f"{root}/said", "w").write(str(e))
    with Pool(2, timeout=3, backend="gloo") as pool:
        pool.grace = 60.
        with pytest.raises(RankError): pool.run(run, str(tmp_path))
    assert "experts are lost with ranks [1], and there is no checkpoint" in (tmp_path / "said").read_text()


def test_a_gpt_trains_on_moving_experts(ranks):
    "The models' own trainer step, with the layer swapped in."
    def run(moving):
        from moe_lab.models.gpt import GPT, GPTConfig
        config = GPTConfig(50, 16, 2, 2, 32, experts=(0, 4), top_k=2)
        make = lambda c, layer: MoE(c.d_model, c.expert_width, 4, c.top_k, exchange=Placed(grid(), initial(4, 2, 3)))
        torch.manual_seed(0); gpt = GPT(config, make).to(f64)
        opt, out, rnd = torch.optim.AdamW(gpt.parameters(), lr=.01), [], random.Random(0)
        for step in range(5):
            ids = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(step))[2 * dist.get_rank():][:2]
            logits, aux = gpt(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + .01 * aux[1].z
            opt.zero_grad(); loss.backward(); reduce_gradients(gpt); opt.step()
            if moving: move(gpt, opt, [some_placement(rnd, 4, 2, 3)], step)
            t = loss.detach().clone(); dist.all_reduce(t); out.append(t.item())
        return out
    still, moved = ranks.run(run, False, n=2)[0], ranks.run(run, True, n=2)[0]
    assert moved == pytest.approx(still, abs=1e-9, rel=0) and len(set(still)) == 5


def test_factored_state_travels_or_is_refused():
    "Adafactor's rows and columns are an expert's own for (E, D, F); for a bias (E, F) its columns are of all experts together."
    params = dict(up=nn.Parameter(torch.ones(3, 4, 5)), bias=nn.Parameter(torch.ones(3, 4)))
    for p in params.values(): p.grad = torch.ones_like(p)
    rows = _Rows(); rows.params, rows.optimizer = dict(up=params["up"]), torch.optim.Adafactor(params.values())
    rows.optimizer.step()
    assert {k: tuple(t.shape) for (_, k), t in rows._stacks()} == dict(weight=(3, 4, 5), row_var=(3, 4, 1), col_var=(3, 1, 5))
    _check_state([params["up"]], rows.optimizer)
    with pytest.raises(ValueError, match="optimizer state 'col_var' must have a row for each of 3 experts"): _check_state(params.values(), rows.optimizer)

"""What the other files show on gloo ranks, on two GPUs through NCCL: exchanges, layers, switch, pipeline, training, checkpoints, a killed rank."""
import time

import pytest
import torch
import torch.distributed as dist

from moe_lab.bench.alltoall import run_layer, run_switch
from moe_lab.cluster.groups import grid
from moe_lab.cluster.launch import RankError, rank_device
from moe_lab.comm.checkpoint import load, save, steps
from moe_lab.comm.parallel import ExpertParallel
from moe_lab.comm.pipeline import Pipelined
from moe_lab.experts.layer import MoE
from test_comm_alltoall import even, uneven
from test_comm_parallel import Model, load_values, save_filled, step_with_a_death, sweep, switched, trained
from test_comm_pipeline import _layer

pytestmark = pytest.mark.gpu2


def test_every_algorithm_is_the_collective_bit_for_bit(gpus): assert all(n >= 18 for n in gpus.run(even, 2))
def test_uneven_parts(gpus): assert all(gpus.run(uneven, 2, range(6)))
def test_expert_parallel_equals_one_process(gpus): assert all(gpus.run(sweep, range(8), 2))
def test_every_r_equals_one_process(gpus): assert all(gpus.run(switched, 1, 2, (None, .5, 0.))) and all(gpus.run(switched, 5, 2, (None, 1.)))


@pytest.mark.parametrize("E, r, f, degree", [(8, 1, 1., 2), (5, 1, 0., 8), (1, 2, 1., 3), (1, 0, 0., 2)])
def test_pipelined_equals_the_plain_exchange(gpus, E, r, f, degree): assert max(gpus.run(_layer, E, r, [5, 9], f, degree, "linear", False)) < 1e-12


def _differences(run, shapes): return [values["difference"] for _, values in run(shapes, 1)]

def test_bf16_kernels_across_devices(gpus):
    "The kernels that a GPU runs, odd sizes: expert parallel and every r against one device."
    for d in gpus.run(_differences, run_layer, [(300, 64, 96, 6, 2)]) + gpus.run(_differences, run_switch, [(300, 64, 96, 1)]): assert max(d) < .02


def test_training_is_the_same_in_ddp_and_fsdp(gpus):
    want = trained("one", 1, batches=2)
    for how in ("plain", "ddp", "fsdp"):
        for norms in gpus.run(trained, how, 2): assert norms == pytest.approx(want, rel=1e-10), how


def test_checkpoint_from_gpus_opens_anywhere(gpus, ranks, tmp_path):
    make = lambda: ExpertParallel(grid())
    gpus.run(save_filled, tmp_path / "gpus", 5, 1)
    ranks.run(save_filled, tmp_path / "cpus", 5, 1, n=3)
    for (ids, values), in ranks.run(load_values, tmp_path / "gpus", 5, make, 1, n=3) + gpus.run(load_values, tmp_path / "cpus", 5, make, 1):
        assert values == [[e + 1.] for _ in range(4) for e in ids]


@pytest.mark.parametrize("where", ["forward", "backward", "save step 2"])
def test_killed_rank(gpus, tmp_path, where):
    torch.manual_seed(0); save(tmp_path, 1, Model())
    t = time.monotonic()
    with pytest.raises(RankError) as e: gpus.run(step_with_a_death, where, tmp_path, timeout=20)
    assert time.monotonic() - t < 40 and e.value.rank == 1 and e.value.step == where
    assert steps(tmp_path) == [1] and load(tmp_path, Model()) == {}
    assert gpus.run(dist.get_rank) == [0, 1]                # the pool is whole again


def _replayed(E, r, degree, dtype):
    "Three steps of a layer recorded as graphs, and of the same layer launched one by one: the same bits?"
    layers, outs = [], []
    for graph in (False, True):
        torch.manual_seed(0)
        layers.append(MoE(64, 96, E, 1, exchange=Pipelined(grid(), r, 1., degree=degree, graph=graph)).to(rank_device(), dtype))
    opts = [torch.optim.SGD(m.parameters(), lr=.1) for m in layers]
    for step in range(3):
        torch.manual_seed(step * 2 + dist.get_rank())
        x = torch.randn(128, 64).to(rank_device(), dtype)
        for m, opt in zip(layers, opts):
            opt.zero_grad()
            z = x.clone().requires_grad_()
            y, _ = m(z)
            y.square().sum().backward(); opt.step()
            with torch.no_grad(): outs.append([m(x)[0].clone(), y.detach().clone(), z.grad, *(p.grad.clone() for p in m.parameters())])
    return all(torch.equal(*o) for a, b in zip(outs[::2], outs[1::2]) for o in zip(a, b))


@pytest.mark.parametrize("E, r, degree, dtype", [(4, 1, 1, torch.bfloat16), (4, 1, 4, torch.bfloat16), (1, 2, 2, torch.float64), (1, 1, 2, torch.float64), (1, 0, 1, torch.float64)])
def test_replayed_layers_learn_the_same(gpus, E, r, degree, dtype): assert gpus.run(_replayed, E, r, degree, dtype) == [True, True]

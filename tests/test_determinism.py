"""Same seed, same bits: 20 runs in one process, and again in others. Only the number of threads may change the last bits, and says so here."""
import hashlib, json, os, subprocess, sys

import pytest
import torch

CODE = """
import hashlib, json, sys
import torch
from moe_lab import MoE
from moe_lab.core.types import dispatch
from moe_lab.experts.blocksparse import blocksparse_mlp
from moe_lab.experts.dispatch import decode, encode
from moe_lab.experts.grouped import grouped_moe
from moe_lab.routing.gate import Gaussian, TopKGate

def digest(tensors): return hashlib.sha256(b"".join(t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)).hexdigest()

def operators(dtype):
    torch.manual_seed(0)
    T, D, F, E, k = 70, 24, 40, 5, 2
    expert = torch.rand(T, E).argsort(1)[:, :k]
    d, c = dispatch(expert, E), dispatch(expert, E, 20)
    args = [(torch.randn(*s) * .2).to(dtype).requires_grad_() for s in ((T, D), (E, 2 * F, D), (E, D, F))]
    w = torch.rand(T, k).requires_grad_()
    for f in (lambda x, up, down: grouped_moe(x, (expert, w), up, down), lambda x, up, down: blocksparse_mlp(x, d, w, up, down, block=16),
              lambda x, up, down: decode(encode(x, c, w), c, w)):
        y = f(*args)
        yield from [y, *(g for g in torch.autograd.grad(y.float().square().sum(), [*args, w], allow_unused=True) if g is not None)]

def training(factor):
    torch.manual_seed(1)
    moe = MoE(16, 24, 4, gate=TopKGate(16, 4, 2, noise=Gaussian(.25)), capacity_factor=factor, shared_experts=1)
    opt = torch.optim.AdamW(moe.parameters(), lr=.01)
    for _ in range(3):
        y, aux = moe(torch.randn(64, 16))
        opt.zero_grad(); (y.square().mean() + .01 * aux.balance).backward(); opt.step()
    return [y, *moe.parameters()]

def all_bits(): return [digest(operators(t)) for t in (torch.float64, torch.float32, torch.bfloat16)] + [digest(training(f)) for f in (None, 1., 0.)]
"""
exec(CODE)


def test_twenty_runs_and_two_more_processes(record_property):
    runs = {tuple(all_bits()) for _ in range(20)}
    assert len(runs) == 1
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "MKL_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": os.pathsep.join(sys.path)}
    for seed in "01":                                           # another hash seed, too
        out = subprocess.run([sys.executable, "-c", CODE + "print(json.dumps(all_bits()))"], env=env | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        runs.add(tuple(json.loads(out.stdout)))
    assert len(runs) == 1
    record_property("runs", 22)


def ranks_bits():
    from moe_lab import MoE
    from moe_lab.cluster.groups import grid
    from moe_lab.comm.gradients import reduce_gradients
    from moe_lab.comm.parallel import ExpertParallel
    torch.manual_seed(0)
    moe = MoE(16, 24, 5, 2, exchange=ExpertParallel(grid(), 1.))
    y, aux = moe(torch.randn(30, 16))
    (y.square().mean() + aux.balance).backward()
    reduce_gradients(moe)
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in [y, *(p.grad for p in moe.parameters())])).hexdigest()


def test_ranks_too(ranks, record_property):
    runs = {tuple(ranks.run(ranks_bits, n=3)) for _ in range(5)}
    assert len(runs) == 1
    record_property("runs", 5)

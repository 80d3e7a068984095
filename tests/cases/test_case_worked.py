"""K, M, P, R, S, X, D, Z: cases that came as a worked example, with its numbers."""
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import silu

from moe_lab import MoE
from moe_lab.cluster.groups import grid
from moe_lab.comm.checkpoint import export_safetensors, import_safetensors, save
from moe_lab.comm.gradients import grad_norm
from moe_lab.comm.parallel import ExpertParallel
from moe_lab.core.files import open_tensors
from moe_lab.experts.grouped import grouped_moe
from moe_lab.experts.topology import padded_offsets, topology_from_counts
from moe_lab.integrations.hf import upcycle
from moe_lab.placement.rivals import eplb
from moe_lab.routing.gate import TopKGate
from moe_lab.sim.workload import active_experts, balanced


def test_padding_of_blocks_and_their_owners():                                          # K04
    counts = torch.tensor([2, 3, 0, 6, 8])
    assert padded_offsets(counts, 4).diff().tolist() == [4, 4, 0, 8, 8]
    topology = topology_from_counts(counts, 4, 4, rows=32)
    assert topology.column_indices[topology.stored()].tolist() == [0, 1, 3, 3, 4, 4] and topology.row_offsets.tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 6]


def test_even_routing_loads_every_rank():                                               # M01
    assert np.bincount(np.ravel(balanced(8, 8, 256)) // 16, minlength=16).tolist() == [4] * 16


def test_distinct_experts_of_a_batch():                                                 # M05
    assert [active_experts(8, k, tokens) for k, tokens in ((2, 3), (2, 0), (2, 1), (8, 1))] == [4.625, 0, 2, 8]


@pytest.mark.parametrize("cap, counts, loads", [(False, [3, 1], [200 / 3, 103 / 3]), (True, [2, 2], [50.5, 50.5])])
def test_replicas_of_a_hot_expert(cap, counts, loads):                                  # P01
    slots, n = eplb([[100, 1]], 4, 1, 1, 2, cap=cap)
    assert n.tolist() == [counts] and [sum([100, 1][e] / n[0, e] for e in slots[0, d:d + 2]) for d in (0, 2)] == pytest.approx(loads)


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("renormalize", [True, False])
def test_an_upcycled_model_begins_as_the_dense_one(zero, renormalize):                  # R09
    torch.manual_seed(0)
    x, gate, up, down = (torch.randn(s, dtype=torch.float64) for s in ((7, 16), (24, 16), (24, 16), (16, 24)))
    router = TopKGate(16, 4, 2, renormalize=renormalize).double()
    if zero: nn.init.zeros_(router.router.weight)
    r, w = router(x), upcycle(gate, up, down, 4)
    scale = 1. if renormalize else .5 if zero else r.weight.sum(1, keepdim=True)
    torch.testing.assert_close(grouped_moe(x, r, w["up"], w["down"]), scale * ((silu(x @ gate.t()) * (x @ up.t())) @ down.t()))


def layer(**options):
    torch.manual_seed(0)
    return MoE(4, 8, 4, 1, exchange=ExpertParallel(grid()), **options).double()


def test_norms_over_ranks(ranks):                                                       # S05
    def norms():
        moe = layer()
        for p in moe.parameters(): p.grad = torch.zeros_like(p)
        moe.experts.up.grad[0, 0, 0] = 3. + dist.get_rank()
        return [grad_norm(moe, t).item() for t in (2., 1., math.inf)]
    for got in ranks.run(norms, n=2): assert got == pytest.approx([5., 7., 4.])


def test_rows_come_by_source_and_are_computed_by_expert(ranks):                         # D08
    def run():
        moe = layer(bias=True, activation="relu2")
        with torch.no_grad():
            for name, p in moe.experts.named_parameters(): p.zero_()
            for mine, e in enumerate(moe.experts.ids): moe.experts.down_bias[mine] = 1 + e
            moe.gate.router.weight.copy_(torch.eye(4))
        y, aux = moe(torch.eye(4, dtype=torch.float64))                                 # token t is expert t's
        return (y / aux.routing.weight)[:, 0].tolist()
    for got in ranks.run(run, n=2): assert got == pytest.approx([1, 2, 3, 4])


def test_a_rank_that_gets_no_rows_ends_its_backward(ranks):                             # Z05
    def run():
        moe = layer()
        nn.init.zeros_(moe.gate.router.weight)                                          # ties: all go to expert 0
        x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
        moe(x)[0].sum().backward()
        return x.grad.isfinite().all().item(), [None if p.grad is None else bool(p.grad.count_nonzero()) for p in moe.experts.parameters()]
    assert ranks.run(run, n=2, timeout=30) == [(True, [True, True]), (True, [False, False])]


def test_stacked_and_back_with_names_that_only_look_like_experts(tmp_path):             # X06, X08
    def net():
        model = nn.Module()
        model.moe, model.my_expert_norm, model.gamma_proj = MoE(4, 8, 3, 2), nn.LayerNorm(4), nn.Linear(4, 1)
        model.register_buffer("experts_mask", torch.randn(3))
        return model
    one, two = net(), net()
    with torch.no_grad(): one.moe.experts.up[:, :8], one.moe.experts.up[:, 8:] = 1, 2
    file = export_safetensors(save(tmp_path, 1, one), tmp_path / "model.safetensors")      # stacked, an expert each, stacked
    with open_tensors(file) as f: assert set(f.keys()) == set(one.state_dict())
    import_safetensors(file, two)
    assert all(a.equal(b) for a, b in zip(one.state_dict().values(), two.state_dict().values()))

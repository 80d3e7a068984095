"""D, P, R, T: what ranks share, what a load statistic counts, how a fixed MLP and experts are mixed, what recomputation gets again."""
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moe_lab import MoE
from moe_lab.cluster.groups import grid
from moe_lab.comm.gradients import check_copies
from moe_lab.comm.parallel import ExpertParallel
from moe_lab.models.gpt import ResidualMoE


def test_shared_parameters_are_the_same_bits_and_memory_of_groups_is_apart(ranks):     # D16
    def run():
        torch.manual_seed(0)
        moe = MoE(6, 8, 4, 2, shared_experts=1, exchange=ExpertParallel(grid(ep=2)))
        check_copies(moe)
        a, b = grid(ep=2), grid(ep=4)
        a.memo["x"] = 1
        said = None
        with torch.no_grad(): moe.shared.up[0, 0, 0] += dist.get_rank() == 2
        try: check_copies(moe)
        except ValueError as e: said = str(e)
        return [moe.shared.down.sum().item(), "x" in b.memo, a is grid(ep=2), said]
    out = ranks.run(run)
    assert len({o[0] for o in out}) == 1 and [o[1:3] for o in out] == [[False, True]] * 4
    assert all("shared.up of rank 2" in o[3] for o in out)


def test_load_counts_real_tokens_once(ranks):                                          # P05
    def run():
        torch.manual_seed(0)
        moe = MoE(6, 8, 4, 1, exchange=ExpertParallel(grid()))
        mask = torch.tensor([True] * 4 + [False] * 4)
        counts = moe(torch.randn(8, 6), mask)[1].counts
        dist.all_reduce(counts)
        return counts.sum().item()
    assert ranks.run(run, n=2) == [2 * 4] * 2


class Constant(nn.Module):
    def __init__(self, value, aux=False): super().__init__(); self.value, self.aux = value, aux
    def forward(self, x, mask=None): return (torch.full_like(x, self.value), "aux") if self.aux else torch.full_like(x, self.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_and_fixed_mlp_are_mixed_in_this_order(dtype):                         # R01
    layer = ResidualMoE(Constant(8.), Constant(4., True), 3, "mix").to(dtype)
    for logits, want in (([0., 0.], 6.), ([torch.log(torch.tensor(3.)).item(), 0.], 5.)):
        with torch.no_grad(): layer.mix.weight.zero_(); layer.mix.bias.copy_(torch.tensor(logits))
        torch.testing.assert_close(layer(torch.ones(2, 3, dtype=dtype))[0], torch.full((2, 3), want, dtype=dtype), rtol=8e-3, atol=0)


def test_a_checkpointed_layer_takes_the_routing_that_was_saved():                      # T01
    class Drifting(nn.Module):
        "All experts tied; from the second call on, 1e-7 in favour of others."
        def __init__(self):
            super().__init__()
            self.weight, self.drift, self.calls = nn.Parameter(torch.zeros(4, 6)), torch.arange(4.), 0
        def forward(self, x):
            self.calls += 1
            return x @ self.weight.t() + 1e-7 * (self.calls > 1) * self.drift
    torch.manual_seed(0)
    moe, x = MoE(6, 8, 4, 2), torch.randn(20, 6)
    moe.gate.router = Drifting()
    def gradients(**options):
        moe.gate.router.calls = 0
        y = checkpoint(moe, x, use_reentrant=False, **options)[0] if options else moe(x)[0]
        return torch.autograd.grad(y.square().sum(), list(moe.parameters()))
    want = gradients()
    keep = lambda: create_selective_checkpoint_contexts([torch.ops.moe_lab.softmax_topk.default])
    assert all(map(torch.equal, gradients(context_fn=keep), want)) and moe.gate.router.calls == 2
    assert not any(map(torch.equal, gradients(determinism_check="none"), want))       # nobody keeps it: other experts get the gradients

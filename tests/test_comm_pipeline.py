"The pipelined exchange on real ranks, and the dictionary that chooses it."
import json

import pytest
import torch
import torch.distributed as dist

from moe_lab.cluster.groups import grid
from moe_lab.cluster.launch import RankError
from moe_lab.comm.parallel import ExpertParallel
from moe_lab.comm.pipeline import Choice, Dictionary, Pipelined, measured, pipelined, search, trials
from moe_lab.experts.layer import Experts, MoE


def _layer(E, tokens, f, degree, algo, frozen):
    "Largest difference between the pipelined layer and the plain exchange: outputs, gradients of input, gate and experts."
    r, sizes, out = dist.get_rank(), dict(node=2, gpu=2) if dist.get_world_size() == 4 else {}, []
    for ex in (ExpertParallel(grid(**sizes), f, algo=algo), Pipelined(grid(**sizes), f, degree=degree, algo=algo)):
        torch.manual_seed(5)
        moe = MoE(6, 4, E, min(2, E), exchange=ex).double()
        if frozen: moe.experts.down.requires_grad_(False)
        x = torch.randn(tokens[r], 6, dtype=torch.float64, generator=torch.Generator().manual_seed(r)).requires_grad_()
        y, aux = moe(x)
        (y.square().sum() + aux.balance).backward()
        out.append([y, x.grad, *(p.grad for p in moe.parameters()), aux.dropped])
    assert all((a is None) == (b is None) for a, b in zip(*out))
    return max([(a - b).abs().max().item() for a, b in zip(*out) if a is not None and a.numel()], default=0.)


@pytest.mark.parametrize("E, f, degree, algo, frozen", [
    (8, 1., 2, "linear", False), (8, 0., 4, "2dh", False), (6, 1.5, 3, "hierarchical", False), (5, 0., 8, "linear", True), (2, 1., 2, "linear", False), (8, 0., 100, "2dh", False)])
def test_equals_the_plain_exchange(ranks, E, f, degree, algo, frozen):
    "Uneven experts, fewer experts than ranks, more parts than rows, a rank without tokens, frozen weights."
    assert max(ranks.run(_layer, E, [5, 0, 9, 1], f, degree, algo, frozen)) < 1e-12


def test_three_ranks(ranks):
    assert max(ranks.run(_layer, 7, [4, 3, 0], 0., 2, "linear", False, n=3)) < 1e-12


def _twice():
    x = torch.randn(4, 2, 3, requires_grad=True)
    y = pipelined(x, torch.nn.Linear(3, 3), lambda x: x, lambda x: x, 2)
    torch.autograd.grad(y.sum(), x, create_graph=True)


def test_second_derivatives_are_refused(ranks):
    with pytest.raises(RankError, match="differentiated once"): ranks.run(_twice)


def _broken(rank):
    def there(x):
        if dist.get_rank() == rank: raise OSError("cable")
        return x
    pipelined(torch.randn(4, 2, 3), torch.nn.Linear(3, 3), there, lambda x: x, 2)


def test_a_failing_lane_raises_where_it_is_waited_for(ranks):
    with pytest.raises(RankError, match="rank 2.*cable"): ranks.run(_broken, 2)


def _no_grad():
    x = torch.randn(4, 6, 3)
    with torch.no_grad(): y = pipelined(x, torch.nn.Linear(3, 3), lambda x: x, lambda x: x, 3)
    return y.requires_grad


def test_inference_keeps_nothing(ranks): assert ranks.run(_no_grad) == [False] * 4


def _fill():
    g, r = grid(), dist.get_rank()
    book, mine = Dictionary(window=8, degrees=(1, 2), algos=("linear",)), Experts(8, 8, 4, ids=[r])
    def run(o): Pipelined(g, degree=o.degree, algo=o.algo).through(torch.randn(4, 8, 8), mine).sum().backward()
    return [book(c, measured(run, repeats=1)) for c in (8, 9, 40)], book.choices


def test_ranks_fill_the_same_dictionary(ranks):
    out = ranks.run(_fill)
    assert all(o == out[0] for o in out) and set(out[0][1]) == {1, 5} and out[0][0][0] == out[0][0][1]


def test_search_never_needs_more_than_the_papers_count():
    for s in range(1, 400):
        rs = [r for r in range(1, s + 1) if s % r == 0]
        for bottom in (0, rs[0], rs[len(rs) // 2], rs[-1]):
            order = [0, *rs]
            got, made = search(lambda o: abs(order.index(o.r) - order.index(bottom)) + .1 * o.degree, s)
            assert got.r == bottom and len(made) <= trials(s) + 1e-9


def test_files_survive_and_foreign_ones_are_refused(tmp_path):
    book = Dictionary(slices=2)
    book(100, lambda o: o.degree)
    book.save(tmp_path / "b.json")
    assert Dictionary.load(tmp_path / "b.json").choices == {0: Choice(0, 1, "2dh")}
    for bad in ("", "{}", json.dumps(dict(slices=1, window=8, degrees=[1], algos=["linear"], choices={"x": {}})), "[1]"):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(ValueError): Dictionary.load(tmp_path / "bad.json")


def test_bad_arguments():
    with pytest.raises(ValueError, match="window"): Dictionary(window=0)
    with pytest.raises(ValueError, match="slices"): trials(0)
    with pytest.raises(ValueError, match="degree"): pipelined(torch.zeros(1, 1, 1), torch.nn.Identity(), None, None, 0)

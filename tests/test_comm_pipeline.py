"The pipelined exchange on real ranks, and the dictionary that chooses it."
import json

import pytest
import torch
import torch.distributed as dist

from moe_lab.cluster.groups import grid
from moe_lab.cluster.launch import RankError, rank_device
from moe_lab.comm.pipeline import Adaptive, Choice, Dictionary, Pipelined, pipelined, search, trials
from moe_lab.comm.switch import Switchable
from moe_lab.experts.layer import MoE


def _layer(E, r, tokens, f, degree, algo, frozen):
    "Largest difference between the pipelined layer and the plain exchange: outputs, gradients of input, gate and experts."
    me, sizes, out = dist.get_rank(), dict(node=2, gpu=2) if dist.get_world_size() == 4 else {}, []
    for ex in (Switchable(grid(**sizes), r, f, algo=algo), Pipelined(grid(**sizes), r, f, degree=degree, algo=algo)):
        torch.manual_seed(5)
        moe = MoE(6, 4, E, min(2, E), exchange=ex).to(rank_device(), torch.float64)
        if frozen: moe.experts.down.requires_grad_(False)
        x = torch.randn(tokens[me], 6, dtype=torch.float64, generator=torch.Generator().manual_seed(me)).to(rank_device()).requires_grad_()
        y, aux = moe(x)
        (y.square().sum() + aux.balance).backward()
        out.append([y, x.grad, *(p.grad for p in moe.parameters()), aux.dropped])
    assert all((a is None) == (b is None) for a, b in zip(*out))
    return max([(a - b).abs().max().item() for a, b in zip(*out) if a is not None and a.numel()], default=0.)


@pytest.mark.parametrize("E, r, f, degree, algo, frozen", [
    (8, 1, 1., 2, "linear", False), (8, 0, 0., 4, "2dh", False), (6, 1, 1.5, 3, "hierarchical", False), (5, 1, 0., 8, "linear", True), (2, 2, 1., 2, "linear", False),
    (2, 1, 1., 4, "2dh", True), (2, 0, 1., 2, "linear", False), (1, 2, 0., 3, "linear", False), (8, 1, 0., 100, "2dh", False)])
def test_equals_the_plain_exchange(ranks, E, r, f, degree, algo, frozen):
    "Uneven experts, fewer experts than ranks, more parts than rows, a rank without tokens, frozen weights."
    assert max(ranks.run(_layer, E, r, [5, 0, 9, 1], f, degree, algo, frozen)) < 1e-12


def test_three_ranks(ranks):
    assert max(ranks.run(_layer, 7, 1, [4, 3, 0], 0., 2, "linear", False, n=3)) < 1e-12


def _flat(): Adaptive(Pipelined(grid()), Dictionary())


def test_two_levels_are_asked_for(ranks):
    with pytest.raises(RankError, match="one level"): ranks.run(_flat)


def _twice():
    x = torch.randn(4, 2, 3, requires_grad=True)
    f = torch.nn.Linear(3, 3)
    y = pipelined(x, f, lambda x: x, lambda x: x, f.parameters(), 2)
    torch.autograd.grad(y.sum(), x, create_graph=True)


def test_second_derivatives_are_refused(ranks):
    with pytest.raises(RankError, match="differentiated once"): ranks.run(_twice)


def _broken(rank):
    def there(x):
        if dist.get_rank() == rank: raise OSError("cable")
        return x
    pipelined(torch.randn(4, 2, 3), torch.nn.Linear(3, 3), there, lambda x: x, (), 2)


def test_a_failing_lane_raises_where_it_is_waited_for(ranks):
    with pytest.raises(RankError, match="rank 2.*cable"): ranks.run(_broken, 2)


def _no_grad():
    x = torch.randn(4, 6, 3)
    with torch.no_grad(): y = pipelined(x, f := torch.nn.Linear(3, 3), lambda x: x, lambda x: x, f.parameters(), 3)
    return y.requires_grad


def test_inference_keeps_nothing(ranks): assert ranks.run(_no_grad) == [False] * 4


def _adapt(tune):
    g, r = grid(), dist.get_rank()
    book = Dictionary(window=8, degrees=(1, 2), algos=("linear",))
    moe = MoE(8, 8, 4, exchange=Adaptive(Pipelined(g), book, tune))
    if not tune: book.choices[3] = Choice(1, 4)
    for T in (4, 5 + r, 64): moe(torch.randn(T, 8))[0].sum().backward()
    with torch.no_grad(): moe(torch.randn(200, 8))
    return book.choices


def test_ranks_fill_the_same_dictionary(ranks):
    out = ranks.run(_adapt, True)
    assert all(o == out[0] for o in out) and len(out[0]) >= 3


def test_without_tuning_the_nearest_answers_and_nothing_is_added(ranks): assert ranks.run(_adapt, False) == [{3: Choice(1, 4)}] * 4


def _trial_leaves_no_trace():
    moe = MoE(8, 8, 4, exchange=Adaptive(Pipelined(grid(node=2, gpu=2)), Dictionary(degrees=(1, 2))))
    x = torch.randn(16, 8)
    moe(x)[0].sum().backward()
    first = [p.grad.clone() for p in moe.parameters()]
    moe.zero_grad(); moe(x)[0].sum().backward()             # this time the key is known
    return all(torch.allclose(a, p.grad) for a, p in zip(first, moe.parameters()))


def test_trials_leave_no_gradient_behind(ranks): assert all(ranks.run(_trial_leaves_no_trace))


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
    for bad in ("", "{}", json.dumps(dict(slices=1, window=8, degrees=[1], algos=["linear"], choices={"x": {}})), "[1]",
                *(json.dumps(dict(slices=2, window=8, degrees=[1], algos=["linear"], choices={"1": dict(r=1, degree=1, algo="linear")}) | wrong) for wrong in (
                    dict(slices="2"), dict(window=8.), dict(window=-8), dict(degrees=["a"]), dict(degrees=[]), dict(degrees=3), dict(algos=["magic"]), dict(choices=[]), dict(choices={"-1": dict(r=1, degree=1, algo="linear")}),
                    *(dict(choices={k: dict(r=1, degree=1, algo="linear")}) for k in (" 1 ", "1_0", "01", "+1", "")),
                    *(dict(choices={"1": dict(r=1, degree=1, algo="linear") | c}) for c in (dict(r=-1), dict(r=3), dict(r="1"), dict(degree=0), dict(degree=2), dict(algo="2dh"), dict(degree=None), dict(algo="magic"), dict(algo=[]), dict(more=1)))))):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(ValueError): Dictionary.load(tmp_path / "bad.json")


def test_bad_arguments():
    with pytest.raises(ValueError, match="window"): Dictionary(window=0)
    with pytest.raises(ValueError, match="slices"): trials(0)
    for bad in (0, 2.5, True):
        with pytest.raises((ValueError, TypeError), match="degree"): Pipelined(None, degree=bad)
    for bad in (0, 2.5):
        with pytest.raises((ValueError, TypeError), match="slices"): search(lambda o: 1., bad)
    assert search(lambda o: o.degree, 4, iter((1, 2)), iter(("linear",)))[1].keys() == {Choice(r, d) for r in (0, 1, 2, 4) for d in (1, 2)}       # a list that is read once
    for none in (dict(degrees=()), dict(algos=())):
        with pytest.raises(ValueError, match="at least one each"): search(lambda o: 1., **none)
    book = Dictionary()
    with pytest.raises(ValueError, match="none of 16 can run"): book(100, lambda o: float("inf"))
    assert not book.choices
    with pytest.raises(ValueError, match="degree"): pipelined(torch.zeros(1, 1, 1), None, None, None, (), 0)

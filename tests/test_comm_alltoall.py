"""All-to-all: every algorithm equals torch's collective, for every split; bad input fails on all ranks."""
import random

import pytest
import torch
import torch.distributed as dist

from moe_lab.cluster.groups import grid
from moe_lab.cluster.launch import rank_device
from moe_lab.comm.alltoall import Table, Wire, all_to_all, all_to_all_v, cost, flexible, flexible_back, share, stride_order, two_dh

GRIDS = {2: [dict(node=2, gpu=1), dict(node=1, gpu=2)], 3: [dict(node=1, gpu=3)], 4: [dict(node=2, gpu=2), dict(dc=2, node=2, gpu=1)],
         5: [dict(node=5, gpu=1)], 6: [dict(node=2, gpu=3), dict(node=3, gpu=2)], 7: [dict(node=1, gpu=7)],
         8: [dict(node=2, gpu=4), dict(node=4, gpu=2), dict(dc=2, node=2, gpu=2)]}


def algorithms(g): return ["linear", "hierarchical"] + ["2dh"] * (len(g.sizes) == 2)


def reference(x, send=None, recv=None):
    y = x.new_empty(x.shape if recv is None else (sum(recv), *x.shape[1:]))
    dist.all_to_all_single(y, x.contiguous(), recv, send)
    return y


def even(W):
    "Each grid, algorithm, size and dtype, against the collective; returns how many were compared."
    done, device = 0, rank_device()
    for sizes in GRIDS[W]:
        g = grid(**sizes)
        for rows, D, dtype in [(W, 3, torch.float32), (3 * W, 5, torch.bfloat16), (0, 4, torch.float16), (2 * W, 0, torch.float32),
                               (W, 1, torch.int64), (5 * W, 2, torch.bool), (W, 7, torch.float64)]:
            x = (torch.randn(rows, D) * 8 + dist.get_rank()).to(device, dtype)
            y = reference(x)
            for algo in algorithms(g): assert torch.equal(all_to_all(x, g, algo), y), (sizes, algo, rows, dtype); done += 1
        x = torch.randn(2 * W, 6, device=device).t().contiguous().t()                          # not contiguous
        for algo in algorithms(g): assert torch.equal(all_to_all(x, g, algo, check=False), reference(x)); done += 1
        x = torch.randn(W, 4).to(device, torch.float8_e4m3fn)                           # D05: gloo knows no fp8
        for algo in algorithms(g): assert torch.equal(all_to_all(x, g, algo).view(torch.uint8), reference(x.view(torch.uint8))); done += 1
    return done


def uneven(W, seeds):
    r = dist.get_rank()
    for sizes in GRIDS[W]:
        g = grid(**sizes)
        for seed in seeds:
            rnd = random.Random(seed)
            sends = [[rnd.choice([0, 0, 1, 2, 5]) for _ in range(W)] for _ in range(W)]
            if seed % 3 == 0: sends[rnd.randrange(W)] = [0] * W                 # a rank that sends nothing
            if seed % 3 == 1:
                idle = rnd.randrange(W)                                        # a rank that gets nothing
                for row in sends: row[idle] = 0
            recv = [row[r] for row in sends]
            x = torch.stack([torch.full((sum(sends[r]),), r), torch.arange(sum(sends[r]))], 1).to(rank_device(), torch.float64).requires_grad_()
            y = reference(x.detach(), sends[r], recv)
            w = torch.randn(y.shape, dtype=torch.float64, device=y.device)
            gx = reference(w, recv, sends[r])                                   # gradients go back the way rows came
            for algo in algorithms(g):
                z, back = all_to_all_v(x, torch.tensor(sends[r]) if seed % 2 else sends[r], g, algo)
                assert torch.equal(z, y) and back == recv, (sizes, algo, sends)
                assert torch.equal(torch.autograd.grad(z, x, w)[0], gx)
    return True


@pytest.mark.parametrize("W", [2, 3, 4])
def test_even(ranks, W): assert all(n >= 18 for n in ranks.run(even, W, n=W))         # D05

@pytest.mark.parametrize("W", [2, 3, 4])
def test_uneven(ranks, W): assert ranks.run(uneven, W, range(6), n=W) == [True] * W   # D06


@pytest.mark.slow
@pytest.mark.parametrize("W", [5, 6, 7, 8])
def test_up_to_eight_ranks(ranks8, W):                                          # D05, D06
    ranks8.run(even, W, n=W)
    ranks8.run(uneven, W, range(6), n=W)


def test_second_derivative(ranks):
    "Gradients of gradients cross the wire too: float64 gradcheck of a function whose every rank must do the same."
    def check():
        g, W = grid(node=2, gpu=2), 4
        x = torch.arange(8., dtype=torch.float64).view(4, 2).add(dist.get_rank()).requires_grad_()
        y = two_dh(x, g)
        d, = torch.autograd.grad((y ** 3).sum(), x, create_graph=True)          # 3 x^2: values come home unchanged
        dd, = torch.autograd.grad(d.sum(), x)
        return torch.allclose(d, 3 * x ** 2) and torch.allclose(dd, 6 * x)
    assert ranks.run(check) == [True] * 4


def test_messages_and_bytes_of_uneven_parts(ranks):
    def count():
        g, r = grid(), dist.get_rank()
        x = torch.zeros(3, 8)
        send = [[0, 3, 0], [1, 1, 1], [3, 0, 0]][r]
        with Wire() as w: all_to_all_v(x, send, g)
        header = 2 * 8                                                          # (rows, bytes a row) for each rank
        assert w.messages.tolist() == [(o != r) * (1 + (send[o] > 0)) for o in range(3)]
        assert w.bytes.tolist() == [(o != r) * (header + send[o] * 32) for o in range(3)]
        return True
    assert ranks.run(count, n=3) == [True] * 3


def test_backward_is_counted(ranks):
    def count():
        g, x = grid(), torch.zeros(4, 8, requires_grad=True)
        with Wire() as w: all_to_all(x, g, check=False).sum().backward()
        return w.calls["all_to_all"], w.bytes.sum().item()
    assert ranks.run(count) == [(2, 2 * 3 * 32)] * 4


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 8), (5, 1)])
def test_two_dh_on_paper(sizes):
    "The four phases on any rows x columns without ranks: chunk (source, destination) ends where it should."
    N, m = sizes
    W, T = N * m, stride_order
    state = [[(s, d) for d in range(W)] for s in range(W)]

    def permute(chunks, order):
        out = [None] * W
        for i, j in enumerate(order): out[j] = chunks[i]
        return out

    def swap(state, members, size):                                             # an exchange inside each group
        out = [None] * W
        for group in members:
            for i, r in enumerate(group): out[r] = sum((state[s][i * size:(i + 1) * size] for s in group), [])
        return out

    state = [permute(c, T(N, m)) for c in state]
    state = swap(state, [[n * m + g for g in range(m)] for n in range(N)], N)
    state = [permute(c, T(m, N)) for c in state]
    state = swap(state, [[n * m + g for n in range(N)] for g in range(m)], m)
    assert state == [[(s, d) for s in range(W)] for d in range(W)]


@pytest.mark.parametrize("E,W,expect", [(30, 8, [4] * 6 + [3] * 2), (128, 6, [22, 22, 21, 21, 21, 21]), (5, 2, [3, 2]), (3, 4, [1, 1, 1, 0])])
def test_share(E, W, expect): assert share(E, W) == expect                      # D09


def test_flexible_is_its_own_way_back(ranks):
    def there_and_back():
        for sizes in GRIDS[4] + [dict(ep=2)]:
            g = grid(**sizes)
            for E, C in [(8, 2), (6, 3), (3, 1), (4, 0), (1, 2)]:
                x = torch.randn(E, C, 3, dtype=torch.float64, requires_grad=True)
                for algo in algorithms(g):
                    y = flexible(x, g, algo)
                    assert y.shape == (share(E, g.size)[g.rank], g.size * C, 3)
                    z = flexible_back(y * 2, E, g, algo)
                    assert torch.equal(z, 2 * x) and torch.equal(torch.autograd.grad(z.sum(), x)[0], torch.full_like(x, 2))
        return True
    assert ranks.run(there_and_back) == [True] * 4


def test_refusals_reach_every_rank(ranks):                                     # D03, D04
    def refusals():
        g, r, said = grid(node=2, gpu=2), dist.get_rank(), []
        ones = [1] * 4
        for f in [lambda: all_to_all(torch.zeros(4 + (r == 2), 3), g), lambda: all_to_all(torch.zeros(4, 3 + (r == 2)), g, "2dh"),
                  lambda: all_to_all(torch.zeros(4, 3).to(torch.float64 if r == 2 else torch.float32), g),
                  lambda: all_to_all_v(torch.zeros(4, 2), [2, 1, 0, 0] if r == 2 else ones, g), lambda: all_to_all_v(torch.zeros(4, 2), [5, -1, 0, 0] if r == 2 else ones, g),
                  lambda: all_to_all_v(torch.zeros(4, 2), [1, 1, 2] if r == 2 else ones, g), lambda: all_to_all_v(torch.zeros(4, 2), [1., 1, 1, 1] if r == 2 else ones, g),
                  lambda: all_to_all(torch.zeros(4, 3, dtype=torch.int32 if r == 2 else torch.float32), g), lambda: all_to_all(torch.zeros(4, 2, 3) if r == 2 else torch.zeros(4, 3, 2), g),
                  lambda: all_to_all(torch.zeros(4, 2), g, "3d" if r == 2 else "linear"), lambda: all_to_all(torch.zeros(4, 2), g, "2dh" if r == 2 else "linear"),
                  lambda: all_to_all_v(torch.zeros(4, 2), ones, g, "3d" if r == 2 else "linear"), lambda: all_to_all_v(torch.zeros(4, 2), None if r == 2 else ones, g),
                  lambda: all_to_all_v(torch.zeros(4, 2), torch.tensor(4) if r == 2 else ones, g), lambda: all_to_all_v(torch.zeros(4, 2), [[1, 1, 1, 1]] if r == 2 else ones, g),
                  lambda: all_to_all(torch.zeros(4, 2), g, "3d"), lambda: all_to_all(torch.zeros(4, 2), grid(), "2dh")]:
            try: f()
            except ValueError as e: said.append(str(e))
            else: said.append(None)
        return said
    for said in ranks.run(refusals): assert all(said), said


def test_what_has_no_answer_is_refused():
    for algo in ("xx", "auto"):
        with pytest.raises(ValueError, match="algo must be one of"): cost(algo, (2, 2), 1)
    for bad in ((-1, 3), (3, 0), (2.5, 1)):
        with pytest.raises((TypeError, ValueError), match="num_experts|ranks"): share(*bad)
    for bad in ({}, {"linear": {}}, {"linear": {1: 1.}, "2dh": {2: 1.}}):
        with pytest.raises(ValueError, match="seconds must hold"): Table(bad)


def test_cost_of_one_rank(): assert cost("linear", (1, 1), 8) == cost("2dh", (1, 1), 8) == (0, 0)

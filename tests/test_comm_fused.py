"""Fused operators: the plain bodies over ranks equal one process, values and gradients; the hand-shake under many schedules; refusals.
The Triton kernels run between processes here, in the interpreter and over shared memory; all of them run in the benchmark `fused` on two
GPUs, poisoned and with a late rank, before any time is taken."""
import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist

from moe_lab.bench.fused import at_home
from moe_lab.cluster.launch import NO_MULTICAST, launch
from moe_lab.comm import fused
from moe_lab.comm.fused_protocol import Protocol, first_failure, run_schedule, tile_order

SHAPES = [(1, 3, 4, 5), (2, 1, 3, 2), (2, 0, 4, 3)]       # E, C, K, N; C = 0: nothing to send


def gemm(W):
    "Rows of every source, computed at home and sent: what a rank receives equals the product of what the others had."
    rank, done = dist.get_rank(), 0
    for E, C, K, N in SHAPES:
        g = torch.Generator().manual_seed(1)
        x_all = torch.randn(W, W, E, C, K, generator=g, dtype=torch.float64)      # [source, destination]
        w_all = torch.randn(W, E, N, K, generator=g, dtype=torch.float64)
        dy = torch.randn(W, W, E, C, N, generator=g, dtype=torch.float64)         # [receiver, source]
        x, w = x_all[rank].clone().requires_grad_(), w_all[rank].clone().requires_grad_()
        y = fused.gemm_all_to_all(x, w)
        assert torch.allclose(y, torch.einsum("seck,senk->secn", x_all[:, rank], w_all))
        y.backward(dy[rank])
        sent = dy[:, rank]                                                         # [destination]: what came back for my rows
        assert torch.allclose(x.grad, torch.einsum("decn,enk->deck", sent, w_all[rank]))
        assert torch.allclose(w.grad, torch.einsum("decn,deck->enk", sent, x_all[rank]))
        done += 1
    return done


def embedding(W):
    rank, (t, V, B, L, D) = dist.get_rank(), (2, 7, 3 * W, 3, 4)
    g = torch.Generator().manual_seed(2)
    tables = torch.randn(W, t, V, D, generator=g, dtype=torch.float64)
    index = torch.randint(V, (W, t, B, L), generator=g)
    table = tables[rank].clone().requires_grad_()
    y = fused.embedding_all_to_all(table, index[rank])
    mine = slice(rank * B // W, (rank + 1) * B // W)
    want = torch.stack([tables[r, i][index[r, i, mine]].sum(1) for r in range(W) for i in range(t)], 1)
    assert torch.allclose(y, want)
    (y * (rank + 1)).sum().backward()
    grad = torch.zeros(t, V, D, dtype=torch.float64)
    for i in range(t):
        for b in range(B): grad[i].index_add_(0, index[rank, i, b], torch.full((L, D), float(b * W // B + 1), dtype=torch.float64))
    assert torch.allclose(table.grad, grad)


def gemv(W):
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(3)
    xs, ws = torch.randn(W, 2, 6, generator=g, dtype=torch.float64), torch.randn(W, 5, 6, generator=g, dtype=torch.float64)
    x, w = xs[rank].clone().requires_grad_(), ws[rank].clone().requires_grad_()
    y = fused.gemv_all_reduce(x, w)
    assert torch.allclose(y, torch.einsum("rmk,rnk->mn", xs, ws))
    y.sum().backward()
    assert torch.allclose(x.grad, ws[rank].sum(0).expand(2, -1)) and torch.allclose(w.grad, xs[rank].sum(0).expand(5, -1))


def falls_back():
    "Asked for a fused call without GPUs: the plain body, and one warning."
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        for _ in range(3): fused.gemm_all_to_all(torch.ones(2, 1, 1, 2), torch.ones(1, 2, 2), overlap="fused")
    return [str(x.message) for x in w if "falls back" in str(x.message)]


@pytest.mark.parametrize("W", [2, 3])
def test_over_ranks_equals_one_process(ranks, W):
    assert ranks.run(gemm, W, n=W) == [len(SHAPES)] * W
    ranks.run(embedding, W, n=W)
    ranks.run(gemv, W, n=W)


def test_falls_back_with_one_warning(ranks):
    for messages in ranks.run(falls_back, n=2): assert len(messages) == 1 and "write each other's memory" in messages[0]


def test_wrong_arguments():
    x, w = torch.ones(1, 2, 3, 4), torch.ones(2, 5, 4)
    for f, why in ((lambda: fused.gemm_all_to_all(x[0], w), "x must be"), (lambda: fused.gemm_all_to_all(x, w[:, :, :2]), "weight must be"),
                   (lambda: fused.embedding_all_to_all(torch.ones(1, 2, 3), torch.zeros(1, 3, 1, dtype=torch.int64), overlap="coarse"), "coarse"),
                   (lambda: fused.gemv_all_reduce(torch.ones(2, 3), torch.ones(2, 4)), "share K"), (lambda: tile_order(0, 2, 3, r=2, p=1), "r must be in")):
        with pytest.raises(ValueError, match=why): f()


def test_multicast_must_be_off():
    "A process without the variables may not make symmetric memory: multicast can take a shared host's GPUs down."
    env = {k: v for k, v in os.environ.items() if k not in NO_MULTICAST}
    code = "from moe_lab.comm.fused import PeerBuffer\ntry: PeerBuffer(None, 8)\nexcept RuntimeError as e: print(e)"
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout
    assert all(k in out for k in NO_MULTICAST)


def without_multicast(): return all(os.environ.get(k) == v for k, v in NO_MULTICAST.items())

def test_every_rank_starts_without_multicast(ranks): assert ranks.run(without_multicast) == [True] * 4


def test_order_mixes_evenly():
    "Never more than one tile off the asked share, and nothing twice."
    for tiles, world, r, p in ((8, 2, 1, 2), (3, 8, 2, 3), (10, 3, 3, 5)):
        remote = [int(d != 0) for d, _ in tile_order(0, world, tiles, r, p)]
        c = [sum(remote[:t]) for t in range(len(remote) + 1)]
        assert all(abs(x - t * r / p) < 1 for t, x in enumerate(c) if t - x < tiles and x < c[-1])


@pytest.mark.parametrize("world,tiles,slices,programs,resident", [(2, 6, 3, 4, 2), (3, 4, 2, 3, 3), (4, 2, 1, 2, 2), (3, 4, 0, 3, 1)])
def test_protocol(world, tiles, slices, programs, resident):
    kw = dict(world=world, tiles=tiles, slices=slices, programs=programs, resident=resident)
    assert first_failure(Protocol(), 40, **kw) is None
    assert first_failure(Protocol(release=False), 40, **kw)[1].startswith("AssertionError")
    if slices: assert first_failure(Protocol(store_first=False), 40, **kw) is not None          # without slices nothing is counted on the way


def test_words_need_their_programs_resident():
    "Only the last program of a sending kernel waits for data, so any grid ends; a program of words holds its place until its twins are there, so there the grid must fit."
    assert first_failure(Protocol(), 20, programs=4, resident=1) is None
    assert first_failure(Protocol(words=True), 20, programs=3, resident=3) is None
    assert first_failure(Protocol(words=True, buffers=1), 40)[1].startswith("TimeoutError")


@pytest.mark.parametrize("kw", [dict(), dict(slices=0), dict(proto=Protocol(words=True))])
def test_a_killed_rank_leaves_no_wrong_row(kw):
    "Its peers finish or give up; a model that never stored anything would do so as well, so the broken ones must still be told by their rows."
    ends = [first_failure(schedules=1, start=seed, world=3, tiles=2, killed=2, **({"proto": Protocol()} | kw)) for seed in range(40)]
    assert {e and e[1].split(":")[0] for e in ends} == {None, "TimeoutError"}
    if not kw: assert any("AssertionError" in (first_failure(Protocol(release=False), 1, seed, killed=1) or ("", ""))[1] for seed in range(20))
    for wrong in (3, -1):
        with pytest.raises(ValueError, match="killed"): run_schedule(0, world=3, killed=wrong)


@pytest.mark.slow
def test_protocol_thousands():
    for order in ((1, 2), (1, 1), (0, 1), (2, 3)):
        for seed in range(2000): run_schedule(seed, r=order[0], p=order[1], slices=2 * (seed % 2))
    for seed in range(2000): run_schedule(seed, world=2 + seed % 2, proto=Protocol(words=True), calls=4)
    for seed in range(500): run_schedule(seed, world=4, tiles=4, slices=2, programs=5, resident=3, calls=5)
    for seed in range(2000):
        why = first_failure(Protocol(words=seed % 3 == 0), 1, seed, world=2 + seed % 2, slices=2 * (seed % 4 > 1), killed=seed % 2)
        assert why is None or why[1].startswith("TimeoutError"), (seed, why)


class SharedMemory(fused.PeerBuffer):
    "A PeerBuffer of CPU ranks: every rank maps the files of all. Only what the kernels see."
    def __init__(self, folder, rank, world, nbytes=1 << 18, half=1 << 13):
        size = fused._FLAGS + 16 * half + nbytes
        self.all = [torch.from_file(f"{folder}/{r}", shared=True, size=size, dtype=torch.uint8) for r in range(world)]
        at = lambda o: torch.tensor([m.data_ptr() + o for m in self.all], dtype=torch.int64)
        self.rank, self.world, self.half, self.plans, mine = rank, world, half, {}, self.all[rank]
        self.flags, self.flag_table, self.word_table, self.memories = mine[:fused._FLAGS].view(torch.int32), at(0), at(fused._FLAGS), at(fused._FLAGS + 16 * half)
        self.state, self.count, self.err = (torch.zeros(n, dtype=torch.int32) for n in (2, world * fused.SLICES, 1))

    def view(self, peer, shape, dtype):
        return self.all[peer][fused._FLAGS + 16 * self.half:].view(dtype)[:torch.Size(shape).numel()].view(shape)


def kernels_over_processes(folder, W):
    "The interpreted kernels of every rank against the plain bodies; several calls on one buffer, in a mixed order."
    rank = dist.get_rank()
    buf = SharedMemory(folder, rank, W)
    g = torch.Generator().manual_seed(rank)
    ints = lambda *s: torch.randint(-2, 3, s, generator=g).float()
    half = lambda *s: torch.randint(-2, 3, s, generator=g).half()
    for turn in range(2):
        table, index = ints(3, 9, 16), torch.randint(9, (3, 6 * W, 3), generator=g)
        for kw in (dict(order=(1, 1)), dict(order=(1, 2), slices=3)):
            y = fused.embedding_send(table, index, buf, programs=3, samples=4, **kw).clone()
            assert torch.equal(y, fused._embedding_plain(table, index, None)), (turn, kw)
        y = fused.embedding_send(table, index, at_home(buf), programs=3, samples=4)                       # the benchmark's lookup before NCCL: all of it stays here
        assert torch.equal(y, torch.stack([w[i].sum(1) for w, i in zip(table, index)], 1)), turn
        for M, phases in ((1, 1), (1, 2), (3, 1), (3, 2)):
            x, w = ints(M, 24), ints(37, 24)
            y = fused.gemv_reduce(x, w, buf, phases, programs=2, BN=8 if M == 1 else 16, BK=16)
            assert torch.equal(y, fused._gemv_plain(x, w, None)), (turn, M, phases)
        for E, C in ((1, 5), (2, 4)):
            x, w = half(W, E, C, 24), half(E, 40, 24)
            for z in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):        # rows by destination, rows by expert
                assert torch.equal(fused.gemm_few(z, w, buf, BN=32, BK=16), fused._gemm_plain(x, w, None)), (turn, E, C)
    buf.check()
    closed = int(buf.state[0])
    buf.err.fill_(1)                                                                                      # as a kernel does that gave up on a peer
    for call in (buf.check, lambda: fused.gemv_reduce(ints(1, 24), ints(37, 24), buf)):                   # the next call says so, and is not made
        with pytest.raises(TimeoutError, match=f"rank {rank} of {W}: a peer's data did not arrive"): call()
    assert int(buf.state[0]) == closed
    return closed


def test_kernels_over_processes(ranks, tmp_path, W=3):
    if torch.cuda.is_available(): pytest.skip("needs Triton's interpreter; on GPUs the notebook's gpu2 cell does this")
    assert ranks.run(kernels_over_processes, str(tmp_path), W, n=W) == [2 * (2 + 4 + 4)] * W


def operators_on_gpus(W):
    "Each operator, every overlap: values and gradients of the plain body, bit for bit with whole numbers; the second call has a plan."
    ints = lambda *s: torch.randint(-2, 3, s, device="cuda").to(torch.bfloat16)
    def same(op, x, w, overlaps):
        want = None
        for overlap in ("none", *overlaps, *overlaps):
            x, w = x.detach().requires_grad_(x.is_floating_point()), w.detach().requires_grad_(w.is_floating_point())
            y = op(x, w, overlap=overlap)
            g = torch.arange(y.numel(), device="cuda").reshape(y.shape).remainder(3).to(y.dtype)
            now = [y, *torch.autograd.grad(y, [t for t in (x, w) if t.requires_grad], g)]
            want = want or now
            for a, b in zip(now, want): assert torch.equal(a, b), (op.__name__, overlap)
    for E, C, K, N in ((1, 256, 64, 512), (2, 128, 64, 256), (1, 13, 64, 40), (3, 24, 128, 96)):
        same(fused.gemm_all_to_all, ints(W, E, C, K), ints(E, N, K), ("fused", "coarse", "auto"))
    same(fused.embedding_all_to_all, ints(2, 30, 16), torch.randint(30, (2, 8 * W, 3), device="cuda"), ("fused", "auto"))
    for M in (1, 3): same(fused.gemv_all_reduce, ints(M, 64) * (dist.get_rank() + 1), ints(90, 64).sign(), ("fused", "auto"))
    fused.peer_buffer(None).check()


def sharing_a_gpu(f, *args):
    "Ranks of one GPU: their kernels take turns on it, so nothing is fast, and everything must be right."
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return f(*args)


def layer_on_gpus(W, tokens):
    "Largest relative differences of output and gradients between a layer with overlap 'none' and others."
    from moe_lab import MoE
    from moe_lab.cluster.groups import grid
    from moe_lab.comm.parallel import ExpertParallel
    def run(overlap):
        torch.manual_seed(0)
        moe = MoE(256, 512, 2 * W, 2, exchange=ExpertParallel(grid(), 1.5, multiple=128 if tokens > 64 else 1, overlap=overlap)).to("cuda", torch.bfloat16)
        torch.manual_seed(1 + dist.get_rank())
        x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y, aux = moe(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *[p.grad for p in moe.parameters()]]
    want = run("none")
    return max(((a - b).float().norm() / b.float().norm()).item() for o in ("fused", "coarse", "auto") for a, b in zip(run(o), want))


@pytest.mark.gpu
@pytest.mark.parametrize("W", [2, 3])
def test_operators_on_one_gpu(W): launch(sharing_a_gpu, W, operators_on_gpus, W, backend="gloo")

@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [512, 16])
def test_layer_on_one_gpu(tokens): assert max(launch(sharing_a_gpu, 2, layer_on_gpus, 2, tokens, backend="gloo")) < .01

@pytest.mark.gpu2
def test_operators_on_gpus(): launch(operators_on_gpus, 2, 2, backend="nccl")          # fresh processes, as symmetric memory wants them

@pytest.mark.gpu2
@pytest.mark.parametrize("tokens", [512, 16])
def test_layer_on_gpus(tokens): assert max(launch(layer_on_gpus, 2, 2, tokens, backend="nccl")) < .01


def test_fused_calls_are_differentiable_once():
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((1, 1, 2, 3), (1, 4, 3)))
    g, = torch.autograd.grad(fused.gemm_all_to_all(x, w).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|differentiate twice"): g.sum().backward()


@pytest.mark.parametrize("obstacle, shapes", [(fused._gemv_obstacle, ((2, 8), (4, 8))), (fused._embedding_obstacle, ((1, 4, 8), (1, 2, 2)))])
def test_kernels_are_for_narrow_floats(obstacle, shapes):
    "float64 would lose digits, whole numbers their last ones, and eight bits are no number for a sum."
    for wrong in (torch.float64, torch.int32, torch.complex64, torch.float8_e4m3fn): assert str(wrong) in obstacle(wrong, *shapes)
    for right in (torch.float32, torch.float16, torch.bfloat16): assert obstacle(right, *shapes) is None


def test_slices_and_orders_that_no_kernel_ends_with():
    "Slices below zero: nobody would raise a flag, everybody would wait for one."
    for slices in (-1, 3, 17, 32):
        with pytest.raises(ValueError, match="slices must be at most 16 and divide the 32 tiles"): fused._tiles_fit((1, 2), slices, 32)
    for order in ((2, 1), (-1, 2), (1, 0)):
        with pytest.raises(ValueError, match="must be"): fused._tiles_fit(order, 0, 32)
    for slices in (0, 1, 16): fused._tiles_fit((1, 2), slices, 32)


def test_who_can_be_reached(monkeypatch):
    "All ranks answer alike: what one of them may not write, none calls reachable. A device a rank, unless it is said that they share."
    def ask(*places, here=0, closed=()): # (host, devices that it sees, its own); this rank's device; pairs that cannot write to each other
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: len(places))
        monkeypatch.setattr(dist, "all_gather_object", lambda out, _, group=None: out.__setitem__(slice(None), places))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: here)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} not in closed)
        return fused._reach.__wrapped__(None)
    three = ("a", 8, 0), ("a", 8, 1), ("a", 8, 2)
    assert ask(*three)
    for here in range(3): assert not ask(*three, here=here, closed=[{1, 2}])        # rank 0 could write to both
    assert not ask(("a", 8, 0), ("b", 8, 1))
    assert not ask(("a", 1, 0), ("a", 8, 1))                                        # they do not see the same devices
    assert not ask(("a", 1, 0), ("a", 1, 0))                                        # one visible device each: symmetric memory takes them for one
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert ask(("a", 1, 0), ("a", 1, 0))


def test_frozen_weights_cost_no_product():
    x, w, dy = torch.ones(1, 3), torch.ones(4, 3), torch.ones(1, 4)
    dx, dw = fused._gemv_back(dy, x, w, None, (True, False))
    assert dw is None and torch.equal(dx, 4 * torch.ones(1, 3)) and fused._gemv_back(dy, x, w, None, (False, True))[0] is None


@pytest.mark.parametrize("kw", [dict(world=0), dict(tiles=0), dict(slices=-1), dict(programs=0), dict(resident=0), dict(calls=0), dict(proto=Protocol(buffers=0))])
def test_no_protocol_runs_with_nothing(kw):
    with pytest.raises(ValueError, match="buffers" if "proto" in kw else next(iter(kw))): run_schedule(0, **kw)
    with pytest.raises(ValueError, match="schedules"): first_failure(Protocol(release=False), -3)

"""Fused operators between ranks that share one GPU: right or wrong, not how fast, for processes take turns on it.

    PYTHONPATH=. OUT=out BUDGET=150 python .ci/gpu/shared_gpu.py          from the repository root; 112 s on an H200
Writes OUT/shared_gpu.cuda.json after every section, which belongs in nbs/bench/results/; OUT/shared_gpu.log.jsonl has every check as it ends, and why it failed.
"""
import json, os, subprocess, sys, threading, time, traceback, warnings
from contextlib import contextmanager
from pathlib import Path

os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1", TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")
HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path: sys.path.insert(0, HERE)

import torch
import torch.distributed as dist

OUT = Path(os.environ.get("OUT", "."))
LOG = OUT / "shared_gpu.log.jsonl"
START = time.time()
DEV, BF = "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16


# ---------------------------------------------------------------------------------------- the calls, with what must come out
def ints(g, *s, dtype=None, top=3): return torch.randint(-2, top, s, generator=g, device=DEV).to(dtype or BF)


def gemm_case(name, E, C, K, N, run, by_expert=False, dtype=None):
    def make(g, W):
        x = ints(g, *((E, W, C, K) if by_expert else (W, E, C, K)), dtype=dtype)
        return (x.transpose(0, 1) if by_expert else x), ints(g, E, N, K, dtype=dtype)
    want = lambda data, r: torch.stack([torch.einsum("eck,enk->ecn", x[r].float(), w.float()) for x, w in data]).to(dtype or BF)
    return name, make, run, want


def embedding_case(name, t, V, D, B, L, run, dtype=None):
    make = lambda g, W: (ints(g, t, V, D, dtype=dtype), torch.randint(V, (t, B * W, L), generator=g, device=DEV))
    def want(data, r): return torch.stack([w[i].float()[index[i, r * B:(r + 1) * B]].sum(1) for w, index in data for i in range(t)], 1).to(dtype or BF)
    return name, make, run, want


def gemv_case(name, M, K, N, run, dtype=None):
    make = lambda g, W: (ints(g, M, K, dtype=dtype), ints(g, N, K, dtype=dtype, top=2))
    want = lambda data, r: sum(x.float() @ w.float().t() for x, w in data).to(dtype or BF)
    return name, make, run, want


def cases(W, light=False):
    from moe_lab.comm import fused as f
    out, half, full = [], torch.float16, torch.float32
    add = lambda kind, *a, **kw: out.append(kind(*a, **kw))
    for order, slices in (((1, 2), 0), ((1, 1), 0), ((0, 1), 0), ((2, 3), 0), ((3, 5), 4), ((1, 1), 16))[:2 if light else None]:
        add(embedding_case, f"embedding {order} slices {slices}", 4, 50, 64, 64, 4, lambda x, w, b, o=order, s=slices: f.embedding_send(x, w, b, order=o, slices=s))
    for phases, M in ((1, 1), (2, 1), (1, 3), (2, 3)): add(gemv_case, f"gemv phases {phases} tokens {M}", M, 512, 1000, lambda x, w, b, p=phases: f.gemv_reduce(x, w, b, p))
    add(gemm_case, "few rows, one expert", 1, 5, 192, 40, lambda x, w, b: f.gemm_few(x, w, b))
    add(gemm_case, "few rows, by expert", 3, 128 // W // 2, 136, 96, lambda x, w, b: f.gemm_few(x, w, b), by_expert=True)
    for order, slices in (((1, 2), 0), ((1, 1), 0), ((0, 1), 0), ((2, 3), 0), ((1, 2), 4), ((1, 1), 8))[:2 if light else None]:
        add(gemm_case, f"gemm {order} slices {slices}", 1, 512, 192, 1024, lambda x, w, b, o=order, s=slices: f.gemm_send(x, w, b, order=o, slices=s))
    add(gemm_case, "gemm by expert, two", 2, 128, 192, 512, lambda x, w, b: f.gemm_send(x, w, b), by_expert=True)
    if light: return out
    add(gemm_case, "gemm wide tile", 1, 512, 256, 1024, lambda x, w, b: f.gemm_send(x, w, b, tile=f.WIDE))
    add(gemm_case, "gemm odd rows and columns", 1, 301, 200, 328, lambda x, w, b: f.gemm_send(x, w, b))
    add(gemm_case, "gemm few programs", 1, 512, 192, 1024, lambda x, w, b: f.gemm_send(x, w, b, programs=3))
    for pieces in (1, 4): add(gemm_case, f"copy engine, {pieces} pieces", 1, 512, 192, 1024, lambda x, w, b, p=pieces: f.gemm_coarse(x, w, b, p))
    add(gemm_case, "copy engine, experts", 4, 32, 192, 256, lambda x, w, b: f.gemm_coarse(x, w, b, 2))
    for dtype in (half, full):
        add(embedding_case, f"embedding {dtype}", 3, 50, 24, 35, 3, lambda x, w, b: f.embedding_send(x, w, b), dtype=dtype)
        add(gemv_case, f"gemv {dtype}", 1, 264, 123, lambda x, w, b: f.gemv_reduce(x, w, b), dtype=dtype)
    add(gemv_case, "gemv 16 tokens float32", 16, 264, 123, lambda x, w, b: f.gemv_reduce(x, w, b, 2), dtype=full)
    return out


# ---------------------------------------------------------------------------------------- checks on the ranks
class Checks:
    "Every check ends on all ranks together; a rank that raises is heard by all, flags are put in step again."
    def __init__(self, section):
        self.section, self.rank, self.world, self.rows, self.buf = section, dist.get_rank(), dist.get_world_size(), [], None

    def __call__(self, name, fn):
        t, why, says = time.time(), "", None
        try:
            says = fn()
            torch.cuda.synchronize()
        except BaseException as e: why = f"{type(e).__name__}: {str(e)[:300]} @ " + " < ".join(f"{f.name}:{f.lineno}" for f in traceback.extract_tb(e.__traceback__)[:-4:-1])
        all_ = [None] * self.world
        dist.all_gather_object(all_, (why, says))
        row = dict(section=self.section, check=name, ok=not any(w for w, _ in all_), why=[w for w, _ in all_ if w], says=[s for _, s in all_ if s is not None], seconds=round(time.time() - t, 3))
        self.rows.append(row)
        if self.rank == 0:
            print(f"{'ok  ' if row['ok'] else 'FAIL'} {self.section}: {name} ({row['seconds']} s) {row['says'] or ''} {row['why'][:2] or ''}", flush=True)
            with open(LOG, "a") as log: log.write(json.dumps(row) + "\n")
        if not row["ok"]: self.in_step()
        return row["ok"]

    def in_step(self):
        "After a failure: all ranks at the same call number, no flag or word of the past."
        if self.buf is None: return
        torch.cuda.synchronize(); dist.barrier()
        e = [None] * self.world
        dist.all_gather_object(e, int(self.buf.state[0]))
        self.buf.flags.zero_(); self.buf.words.zero_(); self.buf.count.zero_(); self.buf.err.zero_()
        self.buf.state.copy_(torch.tensor([max(e) + 100, 0], dtype=torch.int32))
        torch.cuda.synchronize(); dist.barrier()


@contextmanager
def environment(**kw):
    old = {k: os.environ.get(k) for k in kw}
    os.environ.update(kw)
    try: yield
    finally: [os.environ.pop(k) if v is None else os.environ.update({k: v}) for k, v in old.items()]


def raises(kind, words, fn):
    try: fn()
    except kind as e:
        if words not in str(e): raise AssertionError(f"says {e!s:.120}, not {words!r}")
        return
    raise AssertionError(f"{kind.__name__} expected ({words})")


def seeded(*key): return torch.Generator(device=DEV).manual_seed(hash(key) % (1 << 31))


def begin(section, nbytes=1 << 24, half=1 << 17):
    from moe_lab.comm import fused as f
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    c = Checks(section)
    def buffer():
        assert f.peers_reachable(), "peers are not reachable"
        c.buf = f.peer_buffer(dist.group.WORLD, nbytes, half)
        assert c.buf.handle.multicast_ptr == 0
        return dict(pointers=len(set(c.buf.handle.buffer_ptrs)), torch=torch.__version__, err_pinned=c.buf.err.is_pinned())
    return c if c("symmetric memory on one device, multicast off", buffer) else None


def one(case, buf, turns=2):
    "Right in every turn, with poisoned memory and one rank late."
    name, make, run, want = case
    W, rank = buf.world, buf.rank
    for turn in range(turns):
        data = [make(seeded(11, turn, r), W) for r in range(W)]
        expect = want(data, rank)
        buf.memory.fill_(0xFF); buf.words.fill_(0xFF)
        torch.cuda.synchronize(); dist.barrier()
        if turn % W == rank: torch.cuda._sleep(3_000_000)
        got = run(*data[rank], buf)
        torch.cuda.synchronize()
        buf.check()
        bad = int((got != expect).sum())
        if bad: raise AssertionError(f"turn {turn}: {bad} of {got.numel()} differ; first {got[got != expect][:3].tolist()} for {expect[got != expect][:3].tolist()}")
        dist.barrier()


def kernels(light=False):
    c = begin(f"kernels, {dist.get_world_size()} ranks")
    if c is None: return []
    for case in cases(c.world, light): c(case[0], lambda: one(case, c.buf, 1 if light else 2))
    return c.rows


def operators():
    "Through autograd: every overlap gives the plain body's values and gradients; the refusals; derivatives of derivatives."
    from moe_lab.comm import fused as f
    c = begin(f"operators, {dist.get_world_size()} ranks")
    if c is None: return []
    W = c.world
    gen = seeded(5, c.rank)

    def same(op, x, w, overlaps):
        want = None
        for overlap in ("none", *overlaps, *overlaps):
            x, w = x.detach().requires_grad_(x.is_floating_point()), w.detach().requires_grad_(w.is_floating_point())
            y = op(x, w, overlap=overlap)
            if overlap == "fused": assert type(y.grad_fn).__name__ == "_OpBackward", y.grad_fn
            g = torch.arange(y.numel(), device=DEV).reshape(y.shape).remainder(3).to(y.dtype)
            now = [y.detach(), *torch.autograd.grad(y, [t for t in (x, w) if t.requires_grad], g)]
            want = want or now
            for what, a, b in zip(("y", "dx", "dw"), now, want): assert torch.equal(a, b), (overlap, what, int((a != b).sum()), a.numel())
        with torch.no_grad():
            y = op(x, w, overlap=overlaps[0])
            assert y.grad_fn is None and torch.equal(y, want[0])
        return [len(overlaps), list(y.shape)]

    for E, C, K, N in ((1, 256, 64, 512), (2, 128, 64, 256), (1, 13, 64, 40), (3, 24, 128, 96)):
        c(f"gemm {E, C, K, N}: values and gradients", lambda: same(f.gemm_all_to_all, ints(gen, W, E, C, K), ints(gen, E, N, K), ("fused", "coarse", "auto")))
    c("embedding: values and gradients", lambda: same(f.embedding_all_to_all, ints(gen, 2, 30, 16), torch.randint(30, (2, 8 * W, 3), generator=gen, device=DEV), ("fused", "auto")))
    for M in (1, 3): c(f"gemv {M}: values and gradients", lambda: same(f.gemv_all_reduce, ints(gen, M, 64), ints(gen, 90, 64, top=2), ("fused", "auto")))

    def only_one():
        "Only the weight wants a gradient, then only the rows."
        for wants in (0, 1):
            t = [ints(gen, W, 1, 128, 64), ints(gen, 1, 256, 64)]
            t[wants].requires_grad_()
            grads = []
            for o in ("none", "fused"):
                t[wants].grad = None
                f.gemm_all_to_all(*t, overlap=o).float().sum().backward()
                grads.append(t[wants].grad)
            assert torch.equal(*grads) and t[1 - wants].grad is None
    c("gemm: one gradient only", only_one)

    def twice():
        for op, x, w in ((f.gemm_all_to_all, ints(gen, W, 1, 128, 64), ints(gen, 1, 256, 64)), (f.gemv_all_reduce, ints(gen, 1, 64), ints(gen, 90, 64)),
                         (f.embedding_all_to_all, ints(gen, 2, 30, 16), torch.randint(30, (2, 8 * W, 3), generator=gen, device=DEV))):
            x.requires_grad_()
            g, = torch.autograd.grad(op(x, w, overlap="fused").float().pow(2).sum(), x, create_graph=True)
            raises(RuntimeError, "differentiate twice", lambda: g.float().sum().backward())
    c("second derivatives raise", twice)

    bf = lambda *s: ints(gen, *s)
    c("float64 falls back to the plain body, with one warning", lambda: falls_back(f, lambda: f.gemv_all_reduce(bf(1, 64).double(), bf(90, 64).double(), overlap="fused"), "float64"))
    c("float64 tables as well", lambda: falls_back(f, lambda: f.embedding_all_to_all(bf(2, 30, 16).double(), torch.zeros(2, W, 1, dtype=torch.int64, device=DEV), overlap="fused"), "float64"))
    c("float32 products as well", lambda: falls_back(f, lambda: f.gemm_all_to_all(bf(W, 1, 8, 64).float(), bf(1, 16, 64).float(), overlap="fused"), "bf16"))
    c("K of 9 as well", lambda: falls_back(f, lambda: f.gemm_all_to_all(bf(W, 1, 8, 9), bf(1, 16, 9), overlap="fused"), "multiples of 8"))
    c("17 tokens as well", lambda: falls_back(f, lambda: f.gemv_all_reduce(bf(17, 64), bf(90, 64), overlap="fused"), "at most 16"))
    c("no rows at all", lambda: [tuple(f.gemm_all_to_all(bf(W, 1, 0, 64), bf(1, 16, 64), overlap=o).shape) for o in ("fused", "auto")])
    c("mixed dtypes refused", lambda: [raises(TypeError, "x's dtype", lambda: f.gemm_all_to_all(bf(W, 1, 8, 64), bf(1, 16, 64).half(), overlap="fused")),
                                      raises(TypeError, "x's dtype", lambda: f.gemv_all_reduce(bf(1, 64), bf(90, 64).float(), overlap="fused"))] and None)
    c("tensors of two devices refused", lambda: raises(ValueError, "current device", lambda: f.gemm_all_to_all(bf(W, 1, 8, 64), bf(1, 16, 64).cpu(), overlap="fused")))
    index = torch.zeros(2, 2 * W, 3, dtype=torch.int64, device=DEV)
    def out_of_range():
        with environment(MOE_LAB_CHECK="1"):
            for wrong in (-1, 30): raises(ValueError, "index must lie in [0, V=30)", lambda: f.embedding_all_to_all(bf(2, 30, 16), index + wrong, overlap="fused"))
            f.embedding_all_to_all(bf(2, 30, 16), index + 29, overlap="fused")
    c("indices out of range with MOE_LAB_CHECK=1", out_of_range)
    c("int32 indices refused", lambda: raises(TypeError, "int64", lambda: f.embedding_all_to_all(bf(2, 30, 16), index.int(), overlap="fused")))
    def no_orders():
        x, w, table = bf(W, 1, 256, 64), bf(1, 256, 64), bf(2, 30, 16)
        for order in ((2, 1), (-1, 2), (1, 0)):
            raises(ValueError, "must be", lambda: f.gemm_send(x, w, c.buf, order=order))
            raises(ValueError, "must be", lambda: f.embedding_send(table, index, c.buf, order=order))
        raises(ValueError, "slices must be", lambda: f.gemm_send(x, w, c.buf, slices=3))
        raises(ValueError, "slices must be", lambda: f.embedding_send(table, index, c.buf, slices=17))
        raises(ValueError, "half >=", lambda: f.gemv_reduce(bf(16, 64), bf(90_000, 64), c.buf))
        raises(ValueError, "must be even", lambda: f.gemm_few(bf(W, 1, 8, 64), bf(1, 15, 64), c.buf))
        raises(ValueError, "at most 128", lambda: f.gemm_few(bf(W, 1, 128, 64), bf(1, 16, 64), c.buf))
        raises(ValueError, "1 or 2", lambda: f.gemv_reduce(bf(1, 64), bf(90, 64), c.buf, phases=3))
    c("orders, slices and buffers that do not fit are refused before a launch", no_orders)
    c("coarse is for products only", lambda: raises(ValueError, "coarse", lambda: f.gemv_all_reduce(bf(1, 64), bf(90, 64), overlap="coarse")))
    def unaligned():
        "Rows that start at an odd address and weights that are no block: copied, not misread."
        x, w = bf(W * 128 * 64 + 1)[1:].view(W, 1, 128, 64), bf(1, 64, 256).transpose(1, 2)
        assert torch.equal(f.gemm_all_to_all(x, w, overlap="fused"), f.gemm_all_to_all(x, w, overlap="none"))
        v, m = bf(65)[1:].view(1, 64), bf(64, 90).t()
        assert torch.equal(f.gemv_all_reduce(v, m, overlap="fused"), f.gemv_all_reduce(v, m, overlap="none"))
    c("unaligned rows, strided weights", unaligned)
    c("nobody gave up", c.buf.check)
    return c.rows


def falls_back(f, call, word):
    f._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        a, b = call(), call()
    said = [str(w.message) for w in seen if "falls back" in str(w.message)]
    assert len(said) == 1 and word in said[0], said
    return None


def reuse(calls=60):
    "Many calls of all kinds in flight on one buffer, ranks at their own pace; results are read on the device. Then a larger buffer."
    from moe_lab.comm import fused as f
    c = begin(f"reuse, {dist.get_world_size()} ranks")
    if c is None: return []
    W, rank, kinds = c.world, c.rank, [k for k in cases(c.world, True)]
    data = [[make(seeded(3, i, r), W) for r in range(W)] for i, (_, make, *_) in enumerate(kinds)]
    wants = [want(d, rank) for d, (*_, want) in zip(data, kinds)]
    def flight():
        bad, pick = torch.zeros((), dtype=torch.int64, device=DEV), torch.Generator().manual_seed(1)     # the same calls on all ranks
        pace = torch.Generator().manual_seed(rank)
        for _ in range(calls):
            i = int(torch.randint(len(kinds), (), generator=pick))
            if int(torch.randint(4, (), generator=pace)) == 0: torch.cuda._sleep(int(torch.randint(2_000_000, (), generator=pace)))
            bad += (kinds[i][2](*data[i][rank], c.buf) != wants[i]).sum()
        c.buf.check()
        assert int(bad) == 0, f"{int(bad)} wrong numbers"
        return calls
    c("calls of all kinds in flight, no host in between", flight)
    def larger():
        old = c.buf
        c.buf = f.peer_buffer(dist.group.WORLD, 1 << 25, 1 << 18)
        assert c.buf is not old and c.buf.nbytes == 1 << 25
        flight()
        bad = int((kinds[0][2](*data[0][rank], old) != wants[0]).sum())
        old.check()
        assert bad == 0
    c("a larger buffer; the old one still works", larger)
    def graph():
        for i in range(len(kinds)):
            call = lambda: kinds[i][2](*data[i][rank], c.buf)
            call(); torch.cuda.synchronize(); dist.barrier()
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g, capture_error_mode="thread_local"): y = call()
            for _ in range(2):
                y.zero_(); torch.cuda.synchronize(); dist.barrier()
                g.replay(); torch.cuda.synchronize()
                assert torch.equal(y, wants[i]), kinds[i][0]
                dist.barrier()
        c.buf.check()
        return len(kinds)
    c("every kind captured and replayed", graph)
    return c.rows


def layer():
    "An expert-parallel layer: every overlap gives the plain layer's output and gradients."
    from moe_lab import MoE
    from moe_lab.cluster.groups import grid
    from moe_lab.comm.parallel import ExpertParallel
    c = begin(f"layer, {dist.get_world_size()} ranks")
    if c is None: return []
    def run(overlap, tokens):
        torch.manual_seed(0)
        moe = MoE(256, 512, 2 * c.world, 2, exchange=ExpertParallel(grid(), 1.5, multiple=128 if tokens > 64 else 1, overlap=overlap)).to(DEV, BF)
        torch.manual_seed(1 + c.rank)
        x = torch.randn(tokens, 256, device=DEV, dtype=None, requires_grad=True)
        y, aux = moe(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *[p.grad for p in moe.parameters()]]
    for tokens in (512, 16):
        def same():
            want = run("none", tokens)
            worst = max(((a - b).float().norm() / b.float().norm()).item() for o in ("fused", "coarse", "auto") for a, b in zip(run(o, tokens), want))
            assert worst < .01, worst
            return round(worst, 5)
        c(f"{tokens} tokens a rank", same)
    return c.rows


def alone():
    "One rank: nothing to send, no symmetric memory."
    from moe_lab.comm import fused as f
    c = Checks("one rank")
    g = seeded(1)
    def run():
        assert not f.peers_reachable()
        for o in ("none", "fused", "auto"):
            x, w = ints(g, 1, 2, 8, 64), ints(g, 2, 16, 64)
            assert torch.equal(f.gemm_all_to_all(x, w, overlap=o)[0], torch.bmm(x[0], w.mT))
            v, m = ints(g, 1, 64), ints(g, 90, 64)
            assert torch.equal(f.gemv_all_reduce(v, m, overlap=o), torch.nn.functional.linear(v, m))
            t, i = ints(g, 2, 30, 16), torch.randint(30, (2, 8, 3), device=DEV)
            assert torch.equal(f.embedding_all_to_all(t, i, overlap=o), torch.stack([t[k][i[k]].sum(1) for k in range(2)], 1))
        assert not f._buffers
    c("plain bodies, no buffer", run)
    return c.rows


def without_switch():
    "Two ranks on one device, and torch may not share it: not reachable, so the plain body, with a warning; no crash in rendezvous."
    os.environ.pop("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", None)
    from moe_lab.comm import fused as f
    c = Checks("shared device without the switch")
    g = seeded(1, c.rank)
    def run():
        assert not f.peers_reachable()
        falls_back(f, lambda: f.gemm_all_to_all(ints(g, c.world, 1, 8, 64), ints(g, 1, 16, 64), overlap="fused"), "write each other")
        assert not f._buffers
    c("falls back", run)
    return c.rows


def short():
    "Kernels that give up after 4 million polls, not after minutes; before anything is compiled."
    from moe_lab.comm import fused_kernels as k
    k._SPINS = k.tl.constexpr(1 << 22)


def death():
    "The last rank is killed; what the others' calls do then, and for how long. No collective after that."
    import signal
    from moe_lab.comm import fused as f
    short()
    c = begin(f"death, {dist.get_world_size()} ranks")
    if c is None: return []
    W, rank, kinds = c.world, c.rank, cases(c.world, True)
    mine = [make(seeded(3, i, rank), W) for i, (_, make, *_) in enumerate(kinds)]
    def warm():
        for (*_, run, _), d in zip(kinds, mine): run(*d, c.buf)
        c.buf.check()
    if not c("all alive", warm): return c.rows
    dist.barrier()
    if rank == W - 1: os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(.5)
    done = set()
    for (name, _, run, _), d in zip(kinds, mine):
        kind = name.split(" (")[0]
        if kind in done: continue
        done.add(kind)
        c.buf.err.zero_()
        t = time.time()
        try:
            run(*d, c.buf); torch.cuda.synchronize()
            took = time.time() - t
            try: run(*d, c.buf); then = "the next call ran: nothing was said"
            except TimeoutError as e: then = str(e)
        except BaseException as e: took, then = time.time() - t, f"{type(e).__name__}: {e}"
        ok = "did not arrive" in then
        row = dict(section=c.section, check=f"{name}: the call of a rank whose peer is dead", ok=ok, why=[] if ok else [then], says=[then], seconds=round(took, 2))
        c.rows.append(row)
        if rank == 0:
            print(f"{'ok  ' if ok else 'FAIL'} {row['check']} (4 million polls a wait) ends after {took:.2f} s; then: {then[:120]}", flush=True)
            with open(LOG, "a") as log: log.write(json.dumps(row) + "\n")
    return c.rows


# ---------------------------------------------------------------------------------------- compile while others run
class Paper:
    "A buffer that only compiles: what a rank of W would launch."
    def __init__(self, W):
        self.rank, self.world, self.half, self.plans = 0, W, 1 << 17, {}
        i32 = lambda n: torch.zeros(n, dtype=torch.int32, device=DEV)
        self.state, self.count, self.flags, self.err = i32(2), i32(W * 16), i32(2048), torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.memories = self.word_table = self.flag_table = torch.zeros(W, dtype=torch.int64, device=DEV)
        self.memory = torch.zeros(1 << 24, dtype=torch.uint8, device=DEV)
    def view(self, peer, shape, dtype): return self.memory.view(dtype)[:torch.Size(shape).numel()].view(shape)
    def launch(self, key, kernel, programs, args, **options):
        if key not in self.plans: self.plans[key] = kernel.warmup(*args, grid=(programs,), **options)


def warm(W, how):
    if how == "short": short()
    buf = Paper(W)
    for name, make, run, _ in cases(W, bool(how)):
        if name.startswith("copy"): continue
        try: run(*make(seeded(0), W), buf)
        except Exception as e: print(f"warm {W}: {name}: {type(e).__name__} {str(e)[:200]}", flush=True)
    print(f"compiled for {W} ranks {how} after {time.time() - START:.0f} s", flush=True)


SECTIONS = (("kernels", 2, ()), ("operators", 2, ()), ("reuse", 2, ()), ("alone", 1, ()), ("death", 2, ()), ("without_switch", 2, ()), ("layer", 2, ()), ("kernels", 3, ()),
            ("reuse", 3, (30,)), ("operators", 3, ()), ("kernels", 8, (True,)), ("death", 3, ()))

def main():
    import shared_gpu as me
    from moe_lab.bench.harness import Report, machine
    from moe_lab.cluster.launch import Pool, RankError
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "shared_gpu.cuda.json").unlink(missing_ok=True)
    LOG.write_text("")
    budget, report = float(os.environ.get("BUDGET", 150)), Report("shared_gpu", OUT, machine("cuda"))
    warmers = [subprocess.Popen([sys.executable, __file__, "warm", str(W), how]) for W, how in ((2, ""), (3, ""), (2, "short"), (8, "light"))]
    def stop():                                                          # a section that hangs: what there is is written already
        print("out of time: stopped", flush=True)
        for w in warmers: w.kill()
        os._exit(3)
    timer = threading.Timer(budget + 25, stop); timer.daemon = True; timer.start()
    Pool.grace = 60.                                                     # survivors of a killed rank have something to measure
    for name, W, args in SECTIONS:
        t, before = time.time(), LOG.read_text().count("\n")
        if budget - (t - START) < 4: report.add(dict(section=f"{name}, {W} ranks"), ended="not run: out of time"); continue
        try:
            with Pool(W, timeout=30., backend="gloo") as pool: pool.run(getattr(me, name), *args)
            ended = "ran"
        except RankError as e: ended = "ran; a rank was killed" if name == "death" and "SIGKILL" in str(e) else f"RankError: {str(e)[:1500]}"
        except Exception as e: ended = f"{type(e).__name__}: {str(e)[:500]}"
        rows = [json.loads(l) for l in LOG.read_text().splitlines()[before:]]
        report.rows += [dict(case=dict(section=r["section"], check=r["check"]), ok=r["ok"], seconds=r["seconds"]) for r in rows]
        report.add(dict(section=f"{name}, {W} ranks"), ended=ended, seconds=time.time() - t)
    timer.cancel()
    for w in warmers: w.poll() is None and w.kill()
    checks = [r for r in report.rows if "ok" in r]
    print(f"{sum(r['ok'] for r in checks)} of {len(checks)} checks passed, {time.time() - START:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["warm"]: warm(int(sys.argv[2]), sys.argv[3])
    else: main()

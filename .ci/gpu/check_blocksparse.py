"""Correctness of the Hopper kernels on patterns, tails, stacks, storage behind the end; memory poisoned. Prints ok / WRONG lines."""
import torch, time
from moe_lab.experts import products as P, products_hopper_kernels as H, products_kernels as T
from moe_lab.experts.topology import topology_from_counts, topology_from_mask, max_padded_rows
torch.backends.cuda.matmul.allow_tf32 = False
dev = "cuda"; t0 = time.time(); bad = n = none = 0
base = dict(HM=64, BN=256, BK=64, PART=128, YBUFS=1, STAGES=4, GROUP=8)
dds = dict(base, HM=128, BN=128, STAGES=3)
torch.manual_seed(0)
def poison(shape, dt):
    p = torch.full(shape, float("nan"), device=dev, dtype=dt); del p
def judge(label, y, ref, shape=None):
    global bad, n, none
    n += 1
    if y is None: none += 1; print("none ", label, flush=True); return
    err = float((y.double() - ref.double()).norm() / (ref.double().norm() + 1e-30))
    ok = err < 5e-3
    bad += not ok
    if not ok: print("WRONG", label, err, "nan" if y.isnan().any() else "", flush=True)
def case(name, topo, K, G, dt, mods=("hopper",)):
    (M, N), B = topo.shape, topo.block
    stored = int(topo.row_offsets[-1])
    r = lambda *s: torch.randn(*s, device=dev, dtype=dt)
    a, b = r(M, K), r(G, K, N // G)
    want = P._sdd_plain(a, b, *topo.indices[:3], B)
    for an, x in (("n", a), ("t", a.t().contiguous().t())):
        for bn, y in (("n", b), ("t", b.mT.contiguous().mT)):
            for mod, f in [m for m in (("hopper", lambda: H.sdd(x, y, topo.indices, B, topo.width, 132)), ("triton", lambda: T.sdd(x, y, topo.indices, B, topo.width, tiles=T.default_tiles("sdd", dt, B, topo.width * B or B)))) if m[0] in mods]:
                poison(want.shape, dt)
                judge(f"{name} {dt} {mod} sdd {an}{bn} K{K} G{G}", f(), want)
    data = want.to(dt); data[stored:] = float("nan")
    for tr in (False, True):
        rows, cols = (N, M) if tr else (M, N)
        g = 1 if tr else G
        d = r(g, cols // g, K)
        ref = P._dsd_plain(data, d, *topo.indices[:3], rows, tr)
        for dn, y in (("n", d), ("t", d.mT.contiguous().mT)):
            for mod in mods:
                f = (lambda st, t: H.dsd(data, y, topo.indices, topo.width, tr, st, 132)) if mod == "hopper" else (lambda st, t: T.dsd(data, y, topo.indices, topo.width, tr, st, tiles=T.default_tiles("dsd", dt, B, K) if not st else dict(T.default_tiles("dsd", dt, B, K), BN=128 if K > 64 else 64)))
                poison(ref.shape, dt); judge(f"{name} {dt} {mod} dsd{' T' if tr else ''} {dn} N{K} G{g}", f(0, base), ref)
                for st in (1, G) if tr else (1,):
                    poison((st, K, rows // st), dt)
                    y2 = f(st, dds)
                    judge(f"{name} {dt} {mod} dds{' T' if tr else ''} {dn} N{K} stack{st}", None if y2 is None else y2.mT.reshape(rows, K), ref)
counts = torch.tensor([300, 0, 129, 1, 128, 700, 0, 64], device=dev)
both = ("hopper", "triton")
dt = torch.bfloat16
case("experts", topology_from_counts(counts, 512), 512, 8, dt, both)
case("bound", topology_from_counts(counts, 256, rows=max_padded_rows(int(counts.sum()), 8)), 768, 8, dt)
case("odd width", topology_from_counts(counts, 384), 200, 8, dt, both)
case("narrow", topology_from_counts(counts, 128), 64, 8, dt)
case("256", topology_from_counts(counts, 512, 256), 256, 8, dt)
m = torch.rand(9, 12, device=dev) < .4; m[3] = False; m[:, 5] = False
case("pattern", topology_from_mask(m, 128), 320, 4, dt, both)
case("pattern 256", topology_from_mask(m, 256), 256, 3, dt)
case("experts", topology_from_counts(counts, 512), 512, 8, torch.float16)
print(f"products: checked {n}, wrong {bad}, not for TMA {none}, {time.time()-t0:.0f} s", flush=True)
# the MLP: kernels against float64, all gradients
from moe_lab.core.types import dispatch
from moe_lab.experts.blocksparse import blocksparse_mlp
def mlp(counts, D, F, k, dtype, block, sync, capture=False):
    g = torch.Generator().manual_seed(1)
    E = len(counts)
    e = torch.repeat_interleave(torch.arange(E), torch.tensor(counts)); e = e[torch.randperm(len(e), generator=g)].view(-1, k)
    d = dispatch(e.to(dev), E)
    low = [(torch.randn(*s, generator=g) * c).to(dev, dtype).requires_grad_() for s, c in (((len(e), D), 1), ((len(e), k), 1), ((E, 2 * F, D), D**-.5), ((E, D, F), F**-.5))]
    high = [a.detach().double().requires_grad_() for a in low]
    gy = torch.randn(len(e), D, generator=g).to(dev)
    want = blocksparse_mlp(high[0], d, *high[1:], block=block); want = [want, *torch.autograd.grad(want, high, gy.double())]
    junk = [torch.full((1 << 26,), float("nan"), device=dev) for _ in range(4)]; del junk
    y = blocksparse_mlp(low[0], d, *low[1:], block=block, sync=sync); got = [y, *torch.autograd.grad(y, low, gy.to(dtype))]
    errs = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want)]
    empty = [float(got[i][d.counts == 0].abs().sum()) for i in (3, 4)]
    again = blocksparse_mlp(low[0], d, *low[1:], block=block, sync=sync); again = [again, *torch.autograd.grad(again, low, gy.to(dtype))]
    same = all(torch.equal(a, b) for a, b in zip(got, again))
    tol = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    print("mlp", counts, D, F, k, dtype, block, sync, [f"{e:.1e}" for e in errs], "empty", empty, "same bits", same, "ok" if max(errs) < tol and not any(empty) and same else "WRONG", flush=True)
C = [300, 0, 129, 1, 128, 700]
for block in (64, 128, 256):
    for dtype in (torch.bfloat16, torch.float16, torch.float32): mlp(C, 200, 320, 1, dtype, block, dtype != torch.float16)
mlp([512, 0, 130, 126], 256, 512, 2, torch.bfloat16, 128, True); mlp([512, 0, 130, 126], 256, 512, 2, torch.bfloat16, 128, False); mlp([40, 8], 65, 96, 1, torch.bfloat16, 128, True)
# a CUDA graph: no sync inside
d = dispatch(torch.randint(0, 8, (1024, 2), device=dev), 8)
x, w, up, down = (torch.randn(*s, device=dev, dtype=dt) for s in ((1024, 256), (1024, 2), (8, 1024, 256), (8, 256, 512)))
with torch.no_grad():
    for _ in range(2): want = blocksparse_mlp(x, d, w, up, down)
    torch.cuda.synchronize(); gr = torch.cuda.CUDAGraph()
    with torch.cuda.graph(gr): y = blocksparse_mlp(x, d, w, up, down)
    y.fill_(float("nan")); gr.replay(); torch.cuda.synchronize()
    print("graph", "ok" if torch.equal(y, want) else "WRONG", flush=True)
# more than 2^31 elements
T_, F_ = 131072 + 128, 16512
topo = topology_from_counts(torch.tensor([T_], device=dev), F_)
x, w = (torch.randn(*s, device=dev, dtype=dt) for s in ((T_, 64), (F_, 64)))
h = P.sdd(x, w.t(), topo)
end = h.data.view(T_ // 128, F_ // 128, 128, 128)[-1, -1]
y, dw = P.dsd(h, w)[-128:], P.dsd(h.T, x)[-128:]
ref = x.double() @ w[-128:].double().t()
e1 = float((end.double() - ref[-128:]).norm() / ref[-128:].norm()); e2 = float((y.double() - (x[-128:].double() @ w.double().t()) @ w.double()).norm() / y.double().norm()); e3 = float((dw.double() - ref.t() @ x.double()).norm() / dw.double().norm())
print("2^31 elements", h.data.numel() > 2**31, e1, e2, e3, "ok" if max(e1, e2, e3) < 1e-2 else "WRONG", flush=True)
print(f"{time.time()-t0:.0f} s", flush=True)

"""Small cases of every kernel of one device, for compute-sanitizer: odd sizes, empty experts, tails of tiles, no token."""
import torch
from moe_lab.core.types import dispatch
from moe_lab.experts import grouped_kernels, products as P, products_kernels as T
from moe_lab.experts.blocksparse import blocksparse_mlp
from moe_lab.experts.dispatch import decode, encode
from moe_lab.experts.grouped import expert_mlp, expert_plan, grouped_moe
from moe_lab.experts.topology import topology_from_mask
from moe_lab.routing.gate import softmax_topk

DEV = "cuda"
BF, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
torch.manual_seed(0)
bad = []

def finite(name, *tensors):
    lost = [i for i, t in enumerate(tensors) if not t.isfinite().all()]
    print(name, "finite" if not lost else f"NOT FINITE: outputs {lost}", flush=True)
    bad.extend([name] * bool(lost))

def rand(*shape, dtype, scale=1.): return (torch.randn(shape, device=DEV) * scale).to(dtype).requires_grad_()

def grouped():
    for T_, D, F, E, k, act, dtype, bias in [(700, 128, 192, 4, 2, "swiglu", BF, False), (300, 96, 80, 4, 2, "geglu", BF, True), (700, 768, 768, 3, 1, "swiglu", HALF, False),
                                             (90, 33, 20, 3, 3, "gelu", HALF, True), (60, 40, 24, 130, 2, "relu2", SINGLE, True), (0, 64, 64, 4, 2, "swiglu", BF, False)]:
        h = 2 if act in ("swiglu", "geglu") else 1
        a = [rand(T_, D, dtype=dtype), rand(T_, k, dtype=SINGLE), rand(E, h * F, D, dtype=dtype, scale=D**-.5), rand(E, D, F, dtype=dtype, scale=F**-.5)]
        b = [rand(E, h * F, dtype=dtype), rand(E, D, dtype=dtype)] if bias else [None, None]
        ids = torch.rand(T_, E, device=DEV).topk(k, -1)[1]
        if T_: ids[ids == 1] = -1                            # expert 1 stays empty
        leaves = a + [t for t in b if t is not None]
        name = f"grouped T{T_} D{D} F{F} E{E} {act} {dtype}"
        y = grouped_moe(a[0], (ids, a[1]), a[2], a[3], act, *b)
        finite(name, y, *torch.autograd.grad(y.float().square().mean() if T_ else y.sum(), leaves))
        with torch.no_grad(): finite(name + " inference", grouped_moe(a[0], (ids, a[1]), a[2], a[3], act, *b))
        main = tuple(torch.zeros(w.shape, device=DEV) for w in a[2:])
        grouped_moe(a[0], (ids, a[1]), a[2], a[3], act, *b, main_grads=main).float().sum().backward()
        offsets = torch.linspace(0, max(T_ - 3, 0), E + 1, device=DEV).long()
        y = expert_mlp(a[0], offsets, a[2], a[3], act, *b)
        finite(name + " rows", *main, y, *torch.autograd.grad(y.float().sum(), [a[0], *a[2:], *leaves[4:]]))

def routing():
    for T_, E, k in ((33, 13, 3), (70, 130, 17), (5, 1, 1), (0, 8, 2)):
        l = rand(T_, E, dtype=SINGLE)
        p, ids, w = softmax_topk(l, k, True)
        finite(f"gate E{E} k{k}", p, w, *torch.autograd.grad((p * p).sum() + (w * w).sum(), [l]))
        for tile in (16, 128): expert_plan(ids, E, tile)
        if T_:
            d = dispatch(ids, E, 4)
            x, s = rand(T_, 40, dtype=BF), rand(T_, k, dtype=SINGLE)
            y = decode(encode(x, d), d, s)
            finite("encode, decode", y, *torch.autograd.grad(y.float().sum(), [x, s]))
    expert_plan(torch.randint(-1, 1000, (3000, 8), device=DEV), 1000, 128)

def blocksparse():
    C = [300, 0, 129, 1]
    e = torch.repeat_interleave(torch.arange(4), torch.tensor(C))[torch.randperm(430)][:, None]
    for block, dtype, D, F in ((128, BF, 136, 256), (64, BF, 72, 64), (256, HALF, 256, 256), (128, SINGLE, 40, 128), (128, BF, 65, 96)):
        d = dispatch(e.to(DEV), 4)
        a = rand(430, D, dtype=dtype), rand(430, 1, dtype=dtype), rand(4, 2 * F, D, dtype=dtype, scale=D**-.5), rand(4, D, F, dtype=dtype, scale=F**-.5)
        for sync in (True, False):
            y = blocksparse_mlp(a[0], d, *a[1:], block=block, sync=sync)
            finite(f"block-sparse {block} D{D} F{F} {dtype} sync {sync}", y, *torch.autograd.grad(y.float().square().mean(), a))
    m = torch.rand(5, 7, device=DEV) < .5
    topo = topology_from_mask(m, 128)
    x, w = torch.randn(640, 72, device=DEV, dtype=BF), torch.randn(72, 896, device=DEV, dtype=BF)
    s = P.sdd(x, w, topo)
    P.dsd(s, w.t()); P.dsd(s.T, x); P.dds(x.t(), s); P.dds(w, s.T)
    T.sdd(x, w[None], topo.indices, 128, 0, T.default_tiles("sdd", x.dtype, 128, 128)); t = T.default_tiles("dsd", x.dtype, 128, 72)
    for tr, b in ((False, w.t()), (True, x)):
        T.dsd(s.data, b[None], topo.indices, 0, tr, 0, t); T.dsd(s.data, b[None], topo.indices, 0, tr, 1, t)

if __name__ == "__main__":
    for hopper in ({}, dict(dh=0, down=0, dx=0, dw=0)):      # plain kernels, then all of Hopper's
        grouped_kernels.HOPPER.clear(); grouped_kernels.HOPPER.update(hopper)
        grouped()
    routing(); blocksparse()
    torch.cuda.synchronize()
    print("not finite:", bad or "none", flush=True)

"""Small cases of every block-sparse kernel, for compute-sanitizer."""
import torch
from moe_lab.core.types import dispatch
from moe_lab.experts import products as P, products_kernels as T
from moe_lab.experts.blocksparse import blocksparse_mlp
from moe_lab.experts.topology import topology_from_mask
torch.manual_seed(0)
C = [300, 0, 129, 1]
e = torch.repeat_interleave(torch.arange(4), torch.tensor(C))[torch.randperm(430)][:, None]
for block, dtype, D, F in ((128, torch.bfloat16, 136, 256), (64, torch.bfloat16, 72, 64), (256, torch.float16, 256, 256), (128, torch.float32, 40, 128), (128, torch.bfloat16, 65, 96)):
    d = dispatch(e.cuda(), 4)
    a = [(torch.randn(*s, device="cuda") * c).to(dtype).requires_grad_() for s, c in (((430, D), 1), ((430, 1), 1), ((4, 2 * F, D), D**-.5), ((4, D, F), F**-.5))]
    for sync in (True, False):
        y = blocksparse_mlp(a[0], d, *a[1:], block=block, sync=sync)
        g = torch.autograd.grad(y.float().square().sum(), a)
        assert all(t.isfinite().all() for t in (y, *g))
m = torch.rand(5, 7, device="cuda") < .5
topo = topology_from_mask(m, 128)
x, w = torch.randn(640, 72, device="cuda", dtype=torch.bfloat16), torch.randn(72, 896, device="cuda", dtype=torch.bfloat16)
s = P.sdd(x, w, topo)
P.dsd(s, w.t()); P.dsd(s.T, x); P.dds(x.t(), s); P.dds(w, s.T)
T.sdd(x, w[None], topo.indices, 128, 0, T.default_tiles("sdd", x.dtype, 128, 128)); t = T.default_tiles("dsd", x.dtype, 128, 72)
for tr, b in ((False, w.t()), (True, x)):
    T.dsd(s.data, b[None], topo.indices, 0, tr, 0, t); T.dsd(s.data, b[None], topo.indices, 0, tr, 1, t)
torch.cuda.synchronize(); print("done", flush=True)

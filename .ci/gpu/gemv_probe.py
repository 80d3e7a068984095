"""Two ranks: variants of how gemv_one_phase reads its matrix, made by changing the kernels' text. Which is nearest to the memory's rate?

    PYTHONPATH=.:.ci/gpu OUT=FOLDER python .ci/gpu/gemv_probe.py      # from the root; writes gp_*.py here and FOLDER/gemv_probe.jsonl
"""
import importlib, json, os, sys, time
import torch, torch.distributed as dist
BASE = open("moe_lab/comm/fused_kernels.py").read().replace("from .fused_protocol", "from moe_lab.comm.fused_protocol").replace("from ..core", "from moe_lab.core")
EV = ', eviction_policy="evict_first"'
MASK_W = "wk = tl.load(w + n.to(tl.int64)[:, None] * K + (k0 + k)[None, :], mask=(n < N)[:, None] & in_k[None, :], other=0, eviction_policy=\"evict_first\")"
def shift(t): return t.replace("for k0 in tl.range(0, K, BK, num_stages=STAGES):\n        in_k", "for q in tl.range(0, K, BK, num_stages=STAGES):\n        k0 = (q + tl.program_id(0) * 7 * BK) % K\n        in_k")
VARIANTS = {"base": lambda t: t, "no eviction hint": lambda t: t.replace(EV, ""),
            "no mask": lambda t: t.replace(MASK_W, "wk = tl.load(w + n.to(tl.int64)[:, None] * K + (k0 + k)[None, :])"),
            "shifted start": shift, "shifted, no hint": lambda t: shift(t.replace(EV, ""))}
def rank(out):
    from moe_lab.bench.fused import _timed
    from moe_lab.comm import fused as fz
    buf = fz.peer_buffer(dist.group.WORLD, 4096, 1 << 18)
    sys.path.insert(0, os.getcwd())
    f = open(out, "a") if dist.get_rank() == 0 else None
    def say(**kw):
        if f: f.write(json.dumps(kw) + "\n"); f.flush(); print(kw, flush=True)
    for K, N in ((8192, 8192), (14336, 4096), (4096, 4096)):
        x, w = torch.randn(1, K, device="cuda").bfloat16(), torch.randn(N, K, device="cuda").bfloat16()
        y = torch.empty(1, N, device="cuda", dtype=torch.bfloat16)
        want = (x.float() @ w.float().t()); dist.all_reduce(want)
        say(K=K, N=N, variant="mm alone", **{k: v * 1e6 for k, v in _timed(lambda: torch.mm(x, w.t(), out=y), buf.handle.barrier).items()})
        big = torch.empty_like(w)
        say(K=K, N=N, variant="read by amax", **{k: v * 1e6 for k, v in _timed(lambda: w.view(torch.int32).amax(), buf.handle.barrier).items()})
        for name in VARIANTS:
            mod = importlib.import_module("gp_" + "".join(c for c in name if c.isalpha()))
            for BN, BK, stages, warps, per in ((8, 512, 4, 4, 4), (16, 256, 4, 4, 4), (8, 1024, 3, 8, 3), (32, 256, 3, 8, 2)):
                tiles = -(-N // BN)
                def call():
                    buf.launch((name, K, N, BN, BK, stages, warps, per), mod.gemv_one_phase, min(132 * per, tiles),
                               (x, w, y, buf.word_table, buf.state, buf.err, buf.rank, 1, N, K, buf.half, 1, BN, BK, stages, 2), num_warps=warps)
                try:
                    call(); torch.cuda.synchronize()
                    bad = float((y.float() - want).norm() / want.norm())
                    say(K=K, N=N, variant=name, tile=[BN, BK, stages, warps, per], error=bad, **{k: v * 1e6 for k, v in _timed(call, buf.handle.barrier, 11).items()})
                except Exception as e: say(K=K, N=N, variant=name, tile=[BN, BK, stages, warps, per], failed=str(e)[:200])
if __name__ == "__main__":
    for name, change in VARIANTS.items():
        t = change(BASE)
        assert name == "base" or t != BASE, name
        open("gp_" + "".join(c for c in name if c.isalpha()) + ".py", "w").write(t)
    import gemv_probe
    from moe_lab.cluster.launch import launch
    launch(gemv_probe.rank, 2, os.environ.get("OUT", ".") + "/gemv_probe.jsonl", backend="nccl")

"""Where a decode step's time goes, and tile sizes: one change at a time on an OLMoE-sized model. Writes $OUT/tune.json as it goes."""
import json, os, sys, time
import torch
from moe_lab.bench.decode import OLMOE, default_dtype
from moe_lab.bench.harness import copy_rate, measure
from moe_lab.experts import decode_kernels as dk
from moe_lab.inference import step_kernels as sk
from moe_lab.inference.generate import GPTDecoder
from moe_lab.models.gpt import GPT
T0, BUDGET, OUT = time.time(), float(os.environ.get("BUDGET", 110)), os.environ.get("OUT", ".")
rows = []
def log(**r):
    rows.append(r); print(f"{time.time()-T0:6.1f}", r, flush=True)
    json.dump(rows, open(f"{OUT}/tune.json", "w"), indent=0)
torch.manual_seed(0)
with torch.device("cuda"), default_dtype(torch.bfloat16): model = GPT(OLMOE).eval()
log(made=True, copy=copy_rate("cuda"))
@torch.no_grad()
def step_time(B, what, prompt=128, profile=False):
    try:
        d = GPTDecoder(model, B, prompt + 128)
        ids = torch.randint(0, 50304, (B, prompt), device="cuda")
        tok = d.start(ids, torch.ones_like(ids, dtype=torch.bool)).argmax(-1)
        d.step(tok)
        def run(): d.step(tok)
        t = measure({"s": run}, "cuda", 15)["s"].median
        log(B=B, what=what, us=round(t * 1e6, 1)); us = t * 1e6
        if profile:
            from torch.profiler import profile as prof, ProfilerActivity
            with prof(activities=[ProfilerActivity.CUDA]) as p:
                for _ in range(5): d.step(tok)
                torch.cuda.synchronize()
            for e in sorted(p.key_averages(), key=lambda e: -e.device_time_total)[:7]:
                log(kernel=e.key[:40], us_step=round(e.device_time_total / 5, 1), calls=e.count / 5)
        return us
    except Exception as e: log(B=B, what=what, failed=str(e).splitlines()[0][:160])
real = dk.pdl
def set_pdl(f): dk.pdl = f; sk.pdl = f
set_pdl(lambda x: False); step_time(1, "base, no PDL", profile=True); step_time(16, "base, no PDL", profile=True)
set_pdl(real)
V = {1: {"up": [(4,2048,8,1),(2,2048,8,1),(1,2048,2,1)], "down": [(2,8192,4,1),(1,8192,4,1)], "linear": [(4,None,4,3),(2,None,2,4)], "head": [(2,None,2,3)]},
     16: {"up": [(64,128,4,3),(32,128,4,4)], "down": [(64,128,4,4),(32,128,4,5)], "linear": [(64,64,4,5),(64,128,8,4)], "gate": [(16,128,2,5),(16,256,4,3)]},
     64: {"up": [(64,64,4,4),(32,64,4,5)], "down": [(64,128,4,4),(32,128,4,4)], "linear": [(32,128,4,4),(64,64,4,5)]}}
real_stretch = sk.stretch
for n in (128, 512):                                       # longer stretches of the cache
    sk.stretch = lambda size, heads, n=n: n
    step_time(1, f"attention in stretches of {n}")
sk.stretch = real_stretch
for B, kinds in V.items():
    best = step_time(B, "base", profile=B > 1)
    for kind, options in kinds.items():
        for o in options:
            if time.time() - T0 > BUDGET: log(stopped=True); sys.exit()
            old = dk.CONFIG[kind]
            dk.CONFIG[kind] = (o, old[1]) if B == 1 else (old[0], o)
            t = step_time(B, f"{kind} {o}")
            if t and best and t < best * .997: best = t
            else: dk.CONFIG[kind] = old
    log(B=B, best=best, config={k: v[B > 1] for k, v in dk.CONFIG.items()})

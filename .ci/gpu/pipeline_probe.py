"""Where a pipelined layer spends its host time, and what a CUDA graph of it takes. Two GPUs; from the root of a checkout: python pipeline_probe.py OUT"""
import sys, time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from moe_lab.bench.harness import Report, machine, section, timed
from moe_lab.cluster.groups import grid
from moe_lab.cluster.launch import Pool, rank_device
from moe_lab.comm.alltoall import exchange, flexible, flexible_back
from moe_lab.comm.pipeline import Pipelined, lane
from torch.func import functional_call

SHAPES = [(8192, 4096, 4096, 16, 2), (4096, 1024, 4096, 16, 2)]


def setup(T, D, F, E, k):
    g = grid()
    mine = Pipelined(g).experts(D, F, E, "gelu").to(rank_device(), torch.bfloat16)
    x = torch.randn(E, k * T // E, D, device=rank_device(), dtype=torch.bfloat16).requires_grad_()
    return g, mine, x


def host(rounds=30):
    "Host microseconds a call, queue not full: 10 calls after a synchronisation."
    for shape in SHAPES:
        g, mine, x = setup(*shape)
        ex, E, W = Pipelined(g, degree=1), shape[3], g.size
        flat = x.detach().flatten(0, 1); y = torch.empty_like(flat); weights = ex.weights(mine, E)
        part = x.detach().tensor_split(4, dim=1)[0].contiguous()
        there = flexible(part, g); l = lane(x.device)
        calls = {"collective": lambda: dist.all_to_all_single(y, flat), "exchange": lambda: exchange(flat, g.flat), "flexible": lambda: flexible(part, g),
                 "flexible back": lambda: flexible_back(there, E, g), "lane, identity": lambda: l.run(lambda x: x, part)(), "lane, flexible": lambda: l.run(lambda z: flexible(z, g), part)(),
                 "weights": lambda: ex.weights(mine, E), "experts": lambda: mine(there), "functional_call": lambda: functional_call(mine, weights, (there,)),
                 "bmm": lambda: torch.bmm(there, mine.up.transpose(1, 2)), "contiguous": lambda: x.detach().tensor_split(4, dim=1)[0].contiguous(), "cat": lambda: torch.cat([part] * 4, 1)}
        for name, f in calls.items():
            with torch.no_grad():
                f(); ts, gs = [], []
                for _ in range(rounds):
                    torch.cuda.synchronize(); dist.barrier(); torch.cuda.synchronize(); a = time.perf_counter()
                    for _ in range(4): f()
                    b = time.perf_counter(); torch.cuda.synchronize(); c = time.perf_counter()
                    ts.append((b - a) / 4e-6); gs.append((c - a) / 4e-6)
            yield dict(what="host", shape=str(shape), call=name), dict(us=sorted(ts)[rounds // 2], with_device_us=sorted(gs)[rounds // 2])


def profile(folder):
    for shape in SHAPES:
        g, mine, x = setup(*shape)
        for d in (1, 4):
            ex, E = Pipelined(g, degree=d), shape[3]
            def both(): ex.through(x, mine, ex.weights(mine, E)).backward(x.detach())
            for _ in range(4): both()
            torch.cuda.synchronize(); dist.barrier()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as p:
                for _ in range(5): both()
                torch.cuda.synchronize()
            if dist.get_rank() == 0:
                with open(f"{folder}/profile.txt", "a") as f:
                    print(shape, "degree", d, "five forward and backward passes", file=f)
                    print(p.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=60), file=f)
                    print(p.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60), file=f)
                if (shape, d) == (SHAPES[1], 4): p.export_chrome_trace(f"{folder}/trace.json.gz")
            a = time.perf_counter(); both(); host = time.perf_counter() - a
            yield dict(what="profile", shape=str(shape), degree=d), dict(host_ms=host * 1e3)


class Through(nn.Module):
    def __init__(self, ex, mine, E): super().__init__(); self.ex, self.mine, self.E = ex, mine, E
    def forward(self, x): return self.ex.through(x, self.mine, self.ex.weights(self.mine, self.E))


def graphs(rounds=10):
    for shape in SHAPES + [(8192, 2048, 2048, 16, 2), (16384, 2048, 2048, 64, 2)]:
        for d in (1, 2, 4, 8):
            g, mine, x = setup(*shape)
            m = Through(Pipelined(g, degree=d), mine, shape[3])
            def forward(f):
                with torch.no_grad(): f(x)
            def both(f):
                mine.zero_grad(set_to_none=True); x.grad = None; f(x).backward(x.detach())
            plain = dict(forward=timed(partial(forward, m), rounds, 3), both=timed(partial(both, m), rounds, 3))
            both(m); want = [x.grad.clone(), mine.up.grad.clone(), mine.down.grad.clone()]
            yield dict(what="plain", shape=str(shape), degree=d), plain
            fwd = torch.cuda.CUDAGraph()
            with torch.no_grad():
                m(x); torch.cuda.synchronize(); dist.barrier()
                with torch.cuda.graph(fwd): y = m(x)
            yield dict(what="graph forward", shape=str(shape), degree=d), dict(forward=timed(fwd.replay, rounds, 3), equal=torch.equal(y, m(x)))
            del fwd, y
            torch.cuda.synchronize(); dist.barrier()
            mine.zero_grad(set_to_none=True); x.grad = None
            graphed = torch.cuda.make_graphed_callables(m, (x,))
            both(graphed)
            same = [torch.equal(a, b) for a, b in zip((x.grad, mine.up.grad, mine.down.grad), want)]
            yield dict(what="graphed callable", shape=str(shape), degree=d), dict(forward=timed(partial(forward, graphed), rounds, 3), both=timed(partial(both, graphed), rounds, 3), equal=same)
            del graphed, m; torch.cuda.empty_cache()


if __name__ == "__main__":
    import pipeline_probe as me
    out = sys.argv[1]
    report = Report("pipeline_probe", out, machine("cuda"))
    with Pool(2, timeout=60, backend="nccl") as pool:
        section(report, "host", me.host, pool=pool, seconds=30)
        section(report, "profile", me.profile, out, pool=pool, seconds=40)
        section(report, "graphs", me.graphs, pool=pool, seconds=60)

"""HybridEP's figure 14 on one GPU: every arm of moe_lab.hybrid_ep.curves, several seeds, several runs at a time.

    python hybrid_curves.py REPO [OUT]      # REPO: a checkout of moe_lab; OUT: folder for results (default $OUT or .)

Writes hybrid_curves.cuda.json after every run; run again with the same OUT to go on. Text: see study.py.
JOBS: processes (default 9). SEEDS (default 3). LIMIT: seconds after which no new run starts (default 60).
"""
import os, sys, time
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path

import study

SCALE, DEVICE = os.environ.get("SCALE", "gpu"), os.environ.get("DEVICE", "cuda")      # to try this script on a CPU


def one(job):
    from moe_lab.hybrid_ep import curves
    t = time.time()
    return {**curves.run(curves.SCALES[SCALE], *job, study.corpus, study.out, DEVICE), "seconds": round(time.time() - t, 1)}


def main():
    repo, result = sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else os.environ.get("OUT", ".")) / "hybrid_curves.cuda.json"
    workers = int(os.environ.get("JOBS", 9))
    pool = study.workers(workers, repo)
    import torch
    from moe_lab.hybrid_ep.curves import SCALES, arms
    done = [o for o in study.runs_of(result) if "copies" in o]                          # earlier ones were not evaluated with copies: once more
    have = {(o["arm"], o["seed"]) for o in done}
    first = [["exact", "50x", "50x without shared"], ["10x", "10x without shared"], ["50x, experts start alike", "exact, experts start alike"],
             ["exact, lr 1e-4", "50x, lr 1e-4", "50x without shared, lr 1e-4"]]
    parts = [*first, [a for a in arms(SCALES[SCALE]) if a not in sum(first, [])]]     # the paper's own question before the others
    jobs = [(a, s) for part in parts for s in range(int(os.environ.get("SEEDS", 3))) for a in part if a in arms(SCALES[SCALE]) and (a, s) not in have]
    where = f"{torch.cuda.get_device_name() if DEVICE == 'cuda' else DEVICE}, PyTorch {torch.__version__}, text of Python 3.11"
    began, limit, running = time.time(), float(os.environ.get("LIMIT", 60)), set()
    with pool:
        while jobs or running:
            while jobs and len(running) < workers and time.time() - began < limit: running.add(pool.submit(one, jobs.pop(0)))
            if not running: break
            over, running = wait(running, return_when=FIRST_COMPLETED)
            for f in over:
                try: done.append(f.result())
                except Exception as e: print("FAILED", repr(e), flush=True); continue
                study.store(result, where, done, lambda o: (o["arm"], o["seed"]))
                print(f"{time.time() - began:6.1f} s", {k: v for k, v in done[-1].items() if k != "train"}, "last", done[-1]["train"][-1], flush=True)
    print(f"{time.time() - began:.1f} s, {len(jobs)} runs not started", flush=True)


if __name__ == "__main__": main()

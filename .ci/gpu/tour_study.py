"""Three seeds and a learning-rate sweep of the tour's five models, on one GPU: 80 runs of 1,000 steps, several at a time.

    python tour_study.py REPO [OUT]        # REPO: a checkout of moe_lab; OUT: folder for results (default $OUT or .)

Writes tour_study.json after every run; run again with the same OUT to go on. About 4 minutes on an H200 with 16 cores. Text: see study.py.
"""
import os, sys, time
from concurrent.futures import as_completed
from pathlib import Path

import study


def one(job):
    from moe_lab import tour
    t = time.time()
    return {**tour.study_run(job, study.corpus, study.out, device="cuda"), "seconds": round(time.time() - t, 1)}


def main():
    repo, result = sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else os.environ.get("OUT", ".")) / "tour_study.json"
    pool = study.workers(int(os.environ.get("JOBS", 10)), repo)
    import torch
    from moe_lab.tour import study_jobs
    assert torch.cuda.is_available(), "needs a GPU"
    done = study.runs_of(result)
    have = {(o["name"], o["seed"], o["rate"]) for o in done}
    jobs = [j for j in study_jobs() if j not in have]
    # the reported ones first: given rate, then the sweep's seed, then the rest
    jobs.sort(key=lambda j: (j[2] != 4e-3, j[1] != 3))
    where, began = f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, bf16 autocast; text of Python 3.11", time.time()
    with pool:
        for f in as_completed([pool.submit(one, j) for j in jobs]):
            try: done.append(f.result())
            except Exception as e: print("FAILED", repr(e), flush=True); continue
            study.store(result, where, done, lambda o: (o["name"], o["rate"], o["seed"]))
            print(f"{time.time() - began:6.1f} s  {len(done)}/{len(have) + len(jobs)}", done[-1], flush=True)


if __name__ == "__main__": main()

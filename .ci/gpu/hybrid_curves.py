"""HybridEP's figure 14 on one GPU: every arm of moe_lab.hybrid_ep.curves, several seeds, several runs at a time.

    python hybrid_curves.py REPO [OUT]      # REPO: a checkout of moe_lab; OUT: folder for results (default $OUT or .)

Reads stdlib311.tar.gz beside this file. Writes hybrid_curves.cuda.json after every run; run again with the same OUT to go
on. JOBS: processes (default 9). SEEDS (default 3). LIMIT: seconds after which no new run starts (default 60).
"""
import json, os, sys, tarfile, tempfile, time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCALE, DEVICE = os.environ.get("SCALE", "gpu"), os.environ.get("DEVICE", "cuda")      # to try this script on a CPU


def start(repo, data):
    global corpus, curves, out
    sys.path.insert(0, repo)
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    torch.set_num_threads(1)
    from moe_lab.hybrid_ep import curves
    from moe_lab.models.corpus import load_corpus
    corpus, out = load_corpus(data), tempfile.mkdtemp()


def one(job):
    t = time.time()
    return {**curves.run(curves.SCALES[SCALE], *job, corpus, out, DEVICE), "seconds": round(time.time() - t, 1)}


def main():
    repo, result = sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else os.environ.get("OUT", ".")) / "hybrid_curves.cuda.json"
    data = tempfile.mkdtemp()
    with tarfile.open(HERE / "stdlib311.tar.gz") as f: f.extractall(data, filter="data")
    sys.path.insert(0, repo)
    os.environ["RAYON_NUM_THREADS"] = "2"
    import torch
    from moe_lab.hybrid_ep.curves import SCALES, arms
    done = json.loads(result.read_text())["runs"] if result.exists() else []
    have = {(o["arm"], o["seed"]) for o in done}
    first = [["exact", "50x", "50x without shared"], ["10x", "10x without shared"], ["50x, experts start alike", "exact, experts start alike"],
             ["exact, lr 1e-4", "50x, lr 1e-4", "50x without shared, lr 1e-4"]]
    parts = [*first, [a for a in arms(SCALES[SCALE]) if a not in sum(first, [])]]     # the paper's own question before the others
    jobs = [(a, s) for part in parts for s in range(int(os.environ.get("SEEDS", 3))) for a in part if a in arms(SCALES[SCALE]) and (a, s) not in have]
    where = f"{torch.cuda.get_device_name() if DEVICE == 'cuda' else DEVICE}, PyTorch {torch.__version__}, text of Python 3.11"
    began, limit, workers, running = time.time(), float(os.environ.get("LIMIT", 60)), int(os.environ.get("JOBS", 9)), set()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=start, initargs=(repo, data)) as pool:
        while jobs or running:
            while jobs and len(running) < workers and time.time() - began < limit: running.add(pool.submit(one, jobs.pop(0)))
            if not running: break
            over, running = wait(running, return_when=FIRST_COMPLETED)
            for f in over:
                try: done.append(f.result())
                except Exception as e: print("FAILED", repr(e), flush=True); continue
                beside = result.with_suffix(".tmp")
                beside.write_text(json.dumps({"where": where, "runs": sorted(done, key=lambda o: (o["arm"], o["seed"]))}))
                os.replace(beside, result)
                print(f"{time.time() - began:6.1f} s", {k: v for k, v in done[-1].items() if k != "train"}, "last", done[-1]["train"][-1], flush=True)
    print(f"{time.time() - began:.1f} s, {len(jobs)} runs not started", flush=True)


if __name__ == "__main__": main()

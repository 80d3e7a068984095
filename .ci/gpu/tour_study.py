"""Three seeds and a learning-rate sweep of the tour's five models, on one GPU: 80 runs of 1,000 steps, several at a time.

    python tour_study.py REPO [OUT]        # REPO: a checkout of moe_lab; OUT: folder for results (default $OUT or .)

Reads stdlib311.tar.gz beside this file (the text of the reference run). Writes tour_study.json after every run, so that
a kill loses nothing; run again with the same OUT to go on. About 4 minutes on an H200 with 16 cores.
"""
import json, os, sys, tarfile, tempfile, time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent


def start(repo, data):
    global corpus, tour, out
    sys.path.insert(0, repo)
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    torch.set_num_threads(1)
    from moe_lab import tour
    from moe_lab.models.corpus import load_corpus
    corpus, out = load_corpus(data), tempfile.mkdtemp()


def one(job):
    t = time.time()
    return {**tour.study_run(job, corpus, out, device="cuda"), "seconds": round(time.time() - t, 1)}


def main():
    repo, result = sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else os.environ.get("OUT", ".")) / "tour_study.json"
    data = tempfile.mkdtemp()
    with tarfile.open(HERE / "stdlib311.tar.gz") as f: f.extractall(data, filter="data")
    sys.path.insert(0, repo)
    os.environ["RAYON_NUM_THREADS"] = "2"
    import torch
    from moe_lab.tour import study_jobs
    assert torch.cuda.is_available(), "needs a GPU"
    done = json.loads(result.read_text())["runs"] if result.exists() else []
    have = {(o["name"], o["seed"], o["rate"]) for o in done}
    jobs = [j for j in study_jobs() if j not in have]
    # the reported ones first: given rate, then the sweep's seed, then the rest
    jobs.sort(key=lambda j: (j[2] != 4e-3, j[1] != 3))
    where = f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, bf16 autocast; text of Python 3.11"
    began = time.time()
    with ProcessPoolExecutor(int(os.environ.get("JOBS", 10)), mp_context=get_context("spawn"), initializer=start, initargs=(repo, data)) as pool:
        for f in as_completed([pool.submit(one, j) for j in jobs]):
            try: done.append(f.result())
            except Exception as e: print("FAILED", repr(e), flush=True); continue
            beside = result.with_suffix(".tmp")
            beside.write_text(json.dumps({"where": where, "runs": sorted(done, key=lambda o: (o["name"], o["rate"], o["seed"]))}, indent=1))
            os.replace(beside, result)
            print(f"{time.time() - began:6.1f} s  {len(done)}/{len(done) + len(jobs)}", done[-1], flush=True)


if __name__ == "__main__": main()

"""Swin on digits, dense against experts, five seeds: python vision.py REPO [OUT]. Writes OUT/vision.json; about a minute on an H200.
DEVICE=cpu EPOCHS=2 SEEDS=1: to try it."""
import json, os, sys, time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

ARMS = {"dense": 0, "experts": 8}


def one(job):
    repo, arm, seed, epochs, device = job
    sys.path.insert(0, repo)
    import torch
    torch.set_num_threads(1)
    from moe_lab.models.vision import SwinConfig, train_digits
    t = time.time()
    return {"experiment": "digits", "arm": arm, "seed": seed, **train_digits(SwinConfig(experts=ARMS[arm]), epochs, seed, device=device), "seconds": round(time.time() - t, 1)}


def main():
    repo, out = sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else os.environ.get("OUT", ".")) / "vision.json"
    import torch
    device = os.environ.get("DEVICE", "cuda")
    where = (torch.cuda.get_device_name() if device == "cuda" else device) + f", PyTorch {torch.__version__}"
    jobs, runs = [(repo, a, s, int(os.environ.get("EPOCHS", 40)), device) for s in range(int(os.environ.get("SEEDS", 5))) for a in ARMS], []
    with ProcessPoolExecutor(int(os.environ.get("JOBS", 10)), mp_context=get_context("spawn")) as pool:
        for f in as_completed([pool.submit(one, j) for j in jobs]):
            runs.append(f.result())
            print(runs[-1], flush=True)
            out.write_text(json.dumps({"where": where, "runs": sorted(runs, key=lambda o: (list(ARMS).index(o["arm"]), o["seed"]))}, indent=1))


if __name__ == "__main__": main()

"""The papers' questions of moe_lab.models.ablations at scale 'gpu', three seeds each, several runs at a time.

    python ablations.py REPO [OUT] [EXPERIMENT ...]      # OUT: default $OUT or .; EXPERIMENT: default all

Text: the source of packages installed there (torch, numpy, networkx, ...; sympy for fine-tuning). Checkpoints go to
RUNS (default /tmp/ablations: kept while the machine is warm); after every run, results go to OUT/ablations.json and, with
the loss of each step, to OUT/ablations_logs.json.gz. Run again with the same OUT to go on. All GPUs that are visible are used. JOBS: processes a GPU (default 8). LIMIT: seconds after
which no new run starts (default 530). STEPS: of each run (default: as in SCALES). SCALE=cpu DEVICE=cpu JOBS=1: the size
of a CPU, as stored.
"""
import gzip, json, os, sys, time, traceback
from concurrent.futures import ProcessPoolExecutor, wait, FIRST_COMPLETED
from multiprocessing import get_context
from pathlib import Path

RUNS = os.environ.get("RUNS", "/tmp/ablations")
SEEDS, SCALE, DEVICE = int(os.environ.get("SEEDS", 3)), os.environ.get("SCALE", "gpu"), os.environ.get("DEVICE")


def scale_of(a):
    from dataclasses import replace
    s = a.SCALES[SCALE]
    if "STEPS" not in os.environ: return s
    steps = int(os.environ["STEPS"])
    return replace(s, train=replace(s.train, steps=steps, warmup=steps // 10, eval_every=steps // 4, save_every=steps))


def corpora(repo):
    "Made once, kept as tensors: every process would need half a minute for it."
    import torch
    from tokenizers import Tokenizer
    from moe_lab.models.ablations import texts
    from moe_lab.models.corpus import Corpus
    kept = Path(RUNS) / "corpora.pt"
    if not kept.exists():
        torch.save([{"parts": {k: getattr(c, k) for k in ("train", "tune", "valid")}, "docs": c.num_docs, "chars": c.num_chars, "tok": c.tokenizer.to_str()} for c in texts(SCALE)], str(kept) + ".tmp")
        os.replace(str(kept) + ".tmp", kept)
    return [Corpus(**o["parts"], tokenizer=Tokenizer.from_str(o["tok"]), num_docs=o["docs"], num_chars=o["chars"]) for o in torch.load(kept, weights_only=True)]


def start(repo, counter, gpus):
    global main_text, other_text, device, a
    sys.path.insert(0, repo)
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    torch.set_num_threads(1)
    with counter.get_lock(): device, counter.value = f"cuda:{counter.value % gpus}", counter.value + 1
    if DEVICE: device = DEVICE
    else: torch.cuda.set_device(device)
    from moe_lab.models import ablations as a
    main_text, other_text = corpora(repo)


def one(arm):
    t = time.time()
    return a.run_arm(arm, main_text, other_text, RUNS, device), round(time.time() - t, 1)


def main():
    repo, out = sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else os.environ.get("OUT", "."))
    result, limit, began = out / "ablations.json", float(os.environ.get("LIMIT", 530)), time.time()
    sys.path.insert(0, repo)
    Path(RUNS).mkdir(parents=True, exist_ok=True)
    import torch
    from moe_lab.models import ablations as a
    assert DEVICE or torch.cuda.is_available(), "needs a GPU"
    gpus, plan = torch.cuda.device_count() or 1, a.experiments(scale_of(a))
    chosen = sys.argv[3:] or list(plan)
    main_text, other_text = corpora(repo)
    print(f"{time.time() - began:.1f} s: {main_text!r}; {other_text!r}", flush=True)
    want = [(e, name, seed, a.seeded(arm, seed)) for seed in range(SEEDS) for e in chosen for name, arm in plan[e].items()]
    kept = Path(RUNS) / f"measured-{SCALE}.json"
    measured = json.loads(kept.read_text()) if kept.exists() else {}   # folder name -> what run_arm said
    key = lambda arm: a.folder(arm, "").name
    arms = {}
    for *_, arm in want:
        for o in (arm.needs, arm):
            if o: arms.setdefault(key(o), o)

    def write(note=""):
        rows = [{"experiment": e, "arm": n, "seed": s, **measured[key(arm)]} for e, n, s, arm in want if key(arm) in measured]
        where = f"{DEVICE or torch.cuda.get_device_name()}, PyTorch {torch.__version__}" + ", bf16 autocast" * (not DEVICE)
        about = {"scale": SCALE, "where": where, "text": {"main": repr(main_text), "other": repr(other_text)}}
        slim = [{k: v for k, v in o.items() if k not in ("loss", "curve")} for o in rows]
        for path, data in ((kept, json.dumps(measured).encode()), (result, json.dumps({**about, "runs": slim}, indent=1).encode()),
                           (out / "ablations_logs.json.gz", gzip.compress(json.dumps({**about, "runs": rows}).encode(), mtime=0))):
            path.with_suffix(".tmp").write_bytes(data)
            os.replace(path.with_suffix(".tmp"), path)

    spawn = get_context("spawn")
    counter = spawn.Value("i", 0)
    pool = ProcessPoolExecutor(int(os.environ.get("JOBS", 8)) * gpus, mp_context=spawn, initializer=start, initargs=(repo, counter, gpus))
    waiting, running = {k: o for k, o in arms.items() if k not in measured}, {}
    total, failed = len(waiting), set()
    while waiting or running:
        for k, o in list(waiting.items()):
            need = key(o.needs) if o.needs else None
            if time.time() - began > limit or need in failed: waiting.pop(k); failed.add(k)
            elif len(running) < pool._max_workers and (need is None or need in measured): running[pool.submit(one, waiting.pop(k))] = k
        if not running: break
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for f in done:
            k = running.pop(f)
            try: measured[k], seconds = f.result()
            except Exception: failed.add(k); traceback.print_exc(); continue
            write()
            names = sorted({f"{e}/{n}" for e, n, _, arm in want if key(arm) == k})
            print(f"{time.time() - began:6.1f} s  {len(measured)} of {total}  valid {measured[k]['valid']:.4f}  dropped {measured[k]['dropped']:.3f}  {measured[k]['seconds'] * 1e3:.1f} ms/step  run {seconds} s  seed {arms[k].train.seed}  {', '.join(names)}", flush=True)
    print(f"{time.time() - began:.1f} s, {len(measured)} measured, not done: {len(failed)}", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__": main()

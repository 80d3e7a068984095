"""What tour_study.py and hybrid_curves.py share: the same text in every worker, and a result that a kill cannot spoil.

The text is stdlib311.tar.gz beside these files: the `.py` files of Python 3.11's standard library, paths relative to its folder.
"""
import json, os, sys, tarfile, tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path


def workers(n, repo):
    "A pool of `n` processes, each of which has `study.corpus` and a folder of its own, `study.out`."
    data = tempfile.mkdtemp()
    with tarfile.open(Path(__file__).resolve().parent / "stdlib311.tar.gz") as f: f.extractall(data, filter="data")
    sys.path.insert(0, repo)
    os.environ["RAYON_NUM_THREADS"] = "2"
    return ProcessPoolExecutor(n, mp_context=get_context("spawn"), initializer=_start, initargs=(repo, data))


def _start(repo, data):
    global corpus, out
    sys.path.insert(0, repo)
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    torch.set_num_threads(1)
    from moe_lab.models.corpus import load_corpus
    corpus, out = load_corpus(data), tempfile.mkdtemp()


def runs_of(result): return json.loads(result.read_text())["runs"] if result.exists() else []


def store(result, where, runs, order):
    "Write all runs, one a line, beside the file, then rename."
    beside = result.with_suffix(".tmp")
    lines = ",\n  ".join(map(json.dumps, sorted(runs, key=order)))
    beside.write_text(f'{{"where": {json.dumps(where)}, "runs": [\n  {lines}\n]}}\n')
    os.replace(beside, result)

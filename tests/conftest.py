"""Marks (slow runs only with --slow, gpu and gpu2 only where the devices are), the ranks, and what runs beside what under `-n`."""
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# Kernels run in Triton's interpreter where there is no GPU. It must be chosen before any test file imports triton.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from hypothesis import settings

if os.environ["TRITON_INTERPRET"] == "1" and find_spec("triton"): import interpreter       # noqa: F401  (makes it faster)
from tally import pytest_configure, pytest_itemcollected      # noqa: F401  (hooks)

# The same examples on every run: a failure is one that anybody can see again.
settings.register_profile("lab", derandomize=True, deadline=None)
settings.load_profile("lab")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run what takes minutes")
    parser.addoption("--report", help="write cases tried, examples fuzzed and faults survived to this file")


def pytest_collection_modifyitems(config, items):
    gpus = torch.cuda.device_count()
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"): item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if "gpu" in item.keywords and gpus < 1: item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if "gpu2" in item.keywords and gpus < 2: item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The tests of a file share what they prepare, and the files with ranks share one pool: one worker runs them.
    Notebooks and fuzzed operators go one by one to whoever is free."""
    from xdist.scheduler import LoadScopeScheduling
    uses_ranks = {p.name for p in Path(__file__).parent.rglob("test_*.py") if re.search(r"def \w+\([^)]*\branks\b", p.read_text())}

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = Path(nodeid.partition("::")[0]).name
            return nodeid if file in ("test_notebooks.py", "test_fuzz.py") else "ranks" if file in uses_ranks else file

    return ByFile(config, log)


@pytest.fixture(scope="session")
def ranks():
    "Four gloo ranks, started once a run; `ranks.run(f, n=2)` uses the first two."
    from moe_lab.cluster.launch import Pool
    with Pool(4, timeout=60, backend="gloo") as pool: yield pool


@pytest.fixture(scope="session")
def gpus():
    "A rank on each of two GPUs, through NCCL; tests that use it are marked gpu2."
    from moe_lab.cluster.launch import Pool
    with Pool(2, timeout=60, backend="nccl") as pool: yield pool


@pytest.fixture(scope="session")
def ranks8():
    "Eight gloo ranks, for slow tests."
    from moe_lab.cluster.launch import Pool
    with Pool(8, timeout=60, backend="gloo") as pool: yield pool

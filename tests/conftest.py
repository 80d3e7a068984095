"""Marks (slow runs only with --slow, gpu and gpu2 only where the devices are), the ranks, and what runs beside what under `-n`."""
import pytest
from hypothesis import settings

# The same examples on every run: a failure is one that anybody can see again.
settings.register_profile("lab", derandomize=True, deadline=None)
settings.load_profile("lab")


def pytest_addoption(parser): parser.addoption("--slow", action="store_true", help="also run what takes minutes")


def pytest_collection_modifyitems(config, items):
    import torch
    gpus = torch.cuda.device_count()
    with_ranks = {item.path for item in items if "ranks" in item.fixturenames}
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"): item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if "gpu" in item.keywords and gpus < 1: item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if "gpu2" in item.keywords and gpus < 2: item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs"))
        # The tests of a file share what they prepare and those with ranks share one pool, so one worker runs them.
        # Notebooks go to whoever is free.
        group = "ranks" if item.path in with_ranks else item.path.stem
        if group != "test_notebooks": item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def ranks():
    "Four gloo ranks, started once a run; `ranks.run(f, n=2)` uses the first two."
    from moe_lab.cluster.launch import Pool
    with Pool(4, timeout=60, backend="gloo") as pool: yield pool


@pytest.fixture(scope="session")
def ranks8():
    "Eight gloo ranks, for slow tests."
    from moe_lab.cluster.launch import Pool
    with Pool(8, timeout=60, backend="gloo") as pool: yield pool

"""Ranks: how they start, fail and end; groups."""
import os, signal, subprocess, sys, textwrap, threading, time

import pytest
import torch
import torch.distributed as dist

from moe_lab.cluster.groups import grid, group, mesh
from moe_lab.cluster.launch import Pool, RankError, _Nursery, launch, step


def failure(ranks, f, *args, **kw):
    with pytest.raises(RankError) as e: ranks.run(f, *args, **kw)
    return e.value


def gone(pids):
    "Do they all end within ten seconds?"
    def alive(pid):
        try: return "Z" not in open(f"/proc/{pid}/stat").read().split(")")[1].split()[0]
        except FileNotFoundError: return False
    end = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < end: time.sleep(.05)
    return not any(map(alive, pids))


def add(x):
    y = torch.tensor([float(x)])
    dist.all_reduce(y)
    return y


def test_tensors_travel_and_workers_stay(ranks):
    first = ranks.run(os.getpid)
    assert [o.item() for o in ranks.run(add, 2)] == [8.] * 4
    assert ranks.run(os.getpid) == first


def test_every_rank_says_why(ranks):
    def refuse(): raise ValueError(f"rank {dist.get_rank()} refuses")
    e = failure(ranks, refuse, n=3)
    assert e.failures == {r: f"ValueError: rank {r} refuses" for r in range(3)} and not e.running


def test_what_cannot_be_sent_home_is_an_error(ranks):
    e = failure(ranks, lambda: threading.Lock(), n=2)
    assert "pickle" in e.failures[0]


def test_an_exception_that_does_not_pickle_keeps_its_text(ranks):
    class Odd(Exception):
        def __init__(self, a, b): super().__init__(f"{a} and {b}"); self.handle = open(os.devnull)
    def odd(): raise Odd(1, 2)
    assert failure(ranks, odd, n=1).failures[0] == "Odd: 1 and 2"


def test_exit_code_of_a_rank(ranks):
    def leave():
        if dist.get_rank() == 1: os._exit(3)
        dist.barrier()
    e = failure(ranks, leave, n=3)
    assert e.rank == 1 and e.failures[1] == "ended with exit code 3"


@pytest.mark.parametrize("victim", [0, 2])
def test_kill_during_a_collective(ranks, victim):
    def work():
        step("all-reduce")
        for i in range(10_000):
            if i == 50 and dist.get_rank() == victim: os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1000))
    t = time.monotonic()
    e = failure(ranks, work, timeout=10)
    assert e.rank == victim and e.step == "all-reduce" and str(e).startswith(f"rank {victim} of 4 was killed by SIGKILL")
    assert time.monotonic() - t < 10
    assert ranks.run(add, 1)[3].item() == 4


def test_a_rank_that_leaves_early_is_not_needed(ranks):
    def early():
        x = torch.full((1 << 20,), 1. + dist.get_rank())
        if dist.get_rank() == 0: dist.send(x, 1); return 0.
        time.sleep(.3); dist.recv(x, 0)
        return x[-1].item()
    assert ranks.run(early, n=2) == [0., 1.]


def test_no_orphan_when_the_starting_process_is_killed(tmp_path):
    "The parent dies by SIGKILL while its ranks wait in a collective: they end by themselves."
    script = tmp_path / "job.py"   # a plain script, no __main__ guard
    script.write_text(textwrap.dedent("""
        import os, time
        import torch.distributed as dist
        from moe_lab.cluster.launch import launch
        def work(path):
            open(f"{path}/{dist.get_rank()}.pid", "w").write(str(os.getpid()))
            if dist.get_rank() == 1: time.sleep(1000)
            dist.barrier()
        launch(work, 2, os.path.dirname(__file__), timeout=1000, backend="gloo")
    """))
    job = subprocess.Popen([sys.executable, str(script)], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    files, end = [tmp_path / f"{r}.pid" for r in (0, 1)], time.monotonic() + 60
    while not all(f.exists() and f.read_text() for f in files) and time.monotonic() < end: time.sleep(.1)
    pids = [int(f.read_text()) for f in files]
    job.kill(); job.wait()
    assert gone(pids)


def test_two_threads_may_launch():
    "Their questions to the one process that forks are not mixed up."
    told = {}
    def several(i): told[i] = [launch(lambda a, b: 10 * a + b + dist.get_rank(), 2, i, j, backend="gloo") for j in range(3)]
    threads = [threading.Thread(target=several, args=(i,)) for i in range(2)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert told == {i: [[10 * i + j, 10 * i + j + 1] for j in range(3)] for i in range(2)}


def test_a_pool_outlives_the_process_that_forks(monkeypatch):
    monkeypatch.setattr(_Nursery, "_one", None)
    with Pool(2, backend="gloo") as pool:
        pids = pool.run(os.getpid)
        _Nursery._one.process.kill(); _Nursery._one.process.wait()
        assert pool.run(os.getpid) == pids
    assert gone(pids)
    assert launch(dist.get_rank, 2, backend="gloo") == [0, 1]


@pytest.mark.parametrize("bad", [0, 5, True, 1.5])
def test_number_of_ranks_is_checked(ranks, bad):
    with pytest.raises((TypeError, ValueError), match="n must be"): ranks.run(os.getpid, n=bad)


@pytest.mark.parametrize("bad", [0, -1, float("inf"), float("nan"), "5", True])
def test_timeout_is_a_finite_number_of_seconds(ranks, bad):
    for f in (lambda: ranks.run(os.getpid, timeout=bad), lambda: Pool(2, timeout=bad)):
        with pytest.raises((TypeError, ValueError), match="timeout"): f()


def test_groups_set_up_twice(ranks):   # D17
    def twice():
        a, b = mesh(dp=2, ep=2), mesh(dp=2, ep=2)
        return a is b, group([0, 1]) is group([0, 1])
    assert ranks.run(twice) == [(True, True)] * 4
    assert ranks.run(twice) == [(True, True)] * 4   # and in the next run's world, with groups of its own


def test_bad_groups_are_refused_on_every_rank(ranks):
    for bad in ([], [0, 0], [0, 4], [-1]):
        assert set(failure(ranks, group, bad).failures) == {0, 1, 2, 3}


def test_ranks_and_sizes_are_ints(ranks):
    assert set(failure(ranks, group, [1.5]).failures.values()) == {"TypeError: ranks must be ints, got [1.5]"}
    assert ranks.run(lambda: group(torch.tensor([0, 1])) is group((0, 1))) == [True] * 4
    for f in (mesh, grid): assert all("sizes must be ints" in f for f in failure(ranks, lambda: f(a=True, b=4)).failures.values())


def test_collectives_of_made_groups_time_out(ranks):
    def late():
        g = group([0, 1])
        if dist.get_rank() == 0: dist.all_reduce(torch.ones(1), group=g)
        else: time.sleep(2)
    e = failure(ranks, late, n=2, timeout=1)
    assert e.rank == 0 and "ime" in e.failures[0]


def test_launch_is_fresh():
    assert launch(lambda: os.environ["RANK"], 2, backend="gloo") == ["0", "1"]

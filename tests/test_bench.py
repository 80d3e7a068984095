"""The benchmarks' command line, and that every stored result can be read."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_lab.bench.harness import names
from moe_lab.cli import main

RESULTS = Path(__file__).parent.parent / "nbs/bench/results"


def test_unknown_name_says_what_there_is(capsys):
    assert main(["bench", "no-such"]) == 2
    err = capsys.readouterr().err
    assert all(n in err for n in names())
    assert main(["bench", "list"]) == 0
    out = capsys.readouterr().out
    assert all(n in out for n in names())


def test_runs_without_fastcore_and_nbdev():
    code = "import sys; sys.modules['fastcore'] = sys.modules['nbdev'] = None; from moe_lab.bench.harness import names; import moe_lab.bench.many_gpus, moe_lab.bench.links; assert 'many_gpus' in names()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_stored_results_say_where_they_come_from(path):
    data = json.loads(path.read_text())
    if "machine" not in data: pytest.skip("a file of another form")
    assert data["machine"]["device"] and data["machine"]["versions"]["torch"] and data["rows"]

"""What a run says about public cases, fuzzed examples and faults: `pytest -m reliability --report FILE` writes it, nothing in it is typed.

A test tries a case when its source names the id in a comment or in its docstring (`# Z02`), a notebook when a code cell does.
Tests count their own work with pytest's `record_property`: examples, files, faults, pieces, moves, worlds, runs."""
import csv, inspect, io, json, platform, re, subprocess, tokenize
from collections import Counter
from datetime import date
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def table(name): return list(csv.DictReader((ROOT / "tests/cases" / name).read_text().splitlines()))

CASES = {r["id"]: r for r in table("cases.csv")}
KINDS = {r["kind"]: r for r in table("kinds.csv")}
COUNTS = ("files", "faults", "pieces", "moves", "worlds", "runs")


def named(text):
    "Case ids in the comments of Python source."
    try: comments = [t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    except (tokenize.TokenError, SyntaxError): comments = re.findall("#.*", text)           # cell magics
    return set(re.findall(r"\b[A-Z]\d\d\b", " ".join(comments))) & CASES.keys()


def cases_of(item):
    "What a collected test tries."
    path = getattr(item, "callspec", None) and item.callspec.params.get("path")
    if item.originalname == "test_runs_and_is_fresh":
        cells = json.loads(Path(path).read_text())["cells"]
        return set().union(*(named("".join(c["source"])) for c in cells if c["cell_type"] == "code"))
    return named(inspect.cleandoc("\n" + inspect.getsource(item.function))) | set(re.findall(r"\b[A-Z]\d\d\b", item.function.__doc__ or "")) & CASES.keys()


def pytest_itemcollected(item):
    if not isinstance(item, pytest.Function): return
    if ids := cases_of(item): item.user_properties.append(("cases", sorted(ids)))
    if ids or "record_property" in item.fixturenames: item.add_marker("reliability")


class Tally:
    "Gathers reports, of all workers, and writes the file at the end; what an earlier run wrote of other tests stays, so that a machine can run them in parts."
    def __init__(self, path):
        self.path = Path(path)
        self.tests = json.loads(self.path.read_text())["tests"] if self.path.exists() else {}
        git = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        self.commit = git.stdout.strip() or None

    def pytest_runtest_logreport(self, report):
        if not report.failed and (report.when != "call" or report.skipped): return
        row = self.tests[report.nodeid] = dict(passed=report.passed, commit=self.commit, date=f"{date.today()}")
        for name, value in report.user_properties: row[name] = row[name] + value if name in row else value

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workerinput"): return
        tried, counts, examples = {}, Counter(), {}
        for t in self.tests.values():
            for i in t.get("cases", ()): tried.setdefault(i, []).append(t["passed"])
            if not t["passed"]: continue
            counts.update({n: t[n] for n in COUNTS if n in t})
            if e := t.get("examples"): examples[e["what"]] = max(e.get("n", 0), examples.get(e["what"], 0))      # without n: from before empty draws were left out
        kinds = {k: dict(name=r["name"], mechanism=r["mechanism"], cases=sum(i[0] == k for i in CASES),
                         passed=sum(i[0] == k and all(t) for i, t in tried.items()), tests=sum(len(t) for i, t in tried.items() if i[0] == k)) for k, r in KINDS.items()}
        cases = {i: dict(case=r["case"], absent=r["absent"] or None, tests=len(tried.get(i, ())), passed=all(tried.get(i, [False]))) for i, r in CASES.items()}
        out = dict(python=platform.python_version(), torch=metadata.version("torch").partition("+")[0], triton=metadata.version("triton"), kinds=kinds, cases=cases,
                   examples=examples, counts={n: counts[n] for n in COUNTS}, passed=sum(t["passed"] for t in self.tests.values()), tests=self.tests)
        self.path.write_text(json.dumps(out, indent=1, sort_keys=True) + "\n")


def pytest_configure(config):
    config.addinivalue_line("markers", "reliability: tries a public case, or counts what it does")
    if path := config.getoption("--report"): config.pluginmanager.register(Tally(path), "tally")

"""Every public case is tried by a test or a notebook, or says why it does not apply here."""
import csv, re
from pathlib import Path

from tally import CASES, KINDS, ROOT, named, table


def sources():
    for p in (ROOT / "tests").rglob("test_*.py"): yield p.name, p.read_text()
    import json
    for p in (ROOT / "nbs").rglob("*.ipynb"):
        for c in json.loads(p.read_text())["cells"]:
            if c["cell_type"] == "code" and re.search(r"\b(assert|test_\w+\()", "".join(c["source"])): yield p.name, "".join(c["source"])


def test_every_case_is_accounted_for():
    tried = set().union(*(named(text) | set(re.findall(r'"(?:.*?)\b([A-Z]\d\d)\b.*?"', text)) & CASES.keys() for _, text in sources()))
    absent = {i for i, r in CASES.items() if r["absent"]}
    assert CASES.keys() - tried - absent == set(), "no test names them and no reason is given"
    assert tried & absent == set(), "named by a test, and said not to apply"


def test_the_list_is_whole():
    assert len(CASES) == len(table("cases.csv")) == 104 and {i[0] for i in CASES} | {"F"} == KINDS.keys()
    assert all(r["case"] and len(r["case"]) < 160 for r in CASES.values()) and all(r["mechanism"] for r in KINDS.values())

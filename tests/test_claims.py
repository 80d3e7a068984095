"The ledger of claims: rows, rules, verdicts, and what the command prints."
import csv, json
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import moe_lab.claims as ledger
from moe_lab.claims import COLUMNS, VERDICTS, evaluate, parse, verdict
from moe_lab.cli import main

ROOT = Path(__file__).resolve().parent.parent
ROWS = list(csv.DictReader((files("moe_lab") / "data" / "claims" / "claims.csv").read_text().splitlines()))


def row(**changed):
    return dict.fromkeys(COLUMNS, "") | dict(id="X-1", system="X", how="count", number="m:f", page="p", rule="absolute", target="3", bound="0.5") | changed


def test_every_row_is_whole():
    assert len(ROWS) == 98 and list(ROWS[0]) == COLUMNS
    claims = ledger.ledger()
    assert max(Counter(c.id for c in claims).values()) == 1
    for c in claims:
        assert c.source and c.paper and (c.number or c.note)
        if c.page: assert (ROOT / "nbs" / c.page).is_file(), f"{c.id} links to {c.page}, which is not there"


def test_no_verdict_is_typed():
    for r in ROWS: assert not set(r.values()) & set(VERDICTS)


@pytest.mark.parametrize("changed, words", [
    (dict(how="guess"), "how must be one of"), (dict(rule="near"), "rule must be one of"), (dict(rule=""), "rule must be one of"),
    (dict(number="f"), "module:function"), (dict(page=""), "page must be"), (dict(direction="up"), "direction must be one of"),
    (dict(target=""), "target must be"), (dict(target='"three"'), "target must be"), (dict(target="[1, true]"), "target must be"),
    (dict(target="3;4"), "JSON"), (dict(args="[1"), "JSON"), (dict(bound=""), "bound must be"), (dict(bound="[1, 2]"), "bound must be"),
    (dict(rule="relative", target="[1, 0]"), "zeros"), (dict(rule="range", target="[null, null]"), "low, high"), (dict(rule="range", target="5"), "low, high"),
    (dict(rule="order", bound="="), "bound must be one of"), (dict(rule="set", target="3"), "a list"), (dict(target="@no_table:x"), "table must be one of"),
    (dict(number="", rule=""), "the reason"), (dict(number="", note="no GPU"), "empty where there is no number"), (dict(id=""), "id must be")])
def test_a_malformed_row_says_what_is_wrong(changed, words):
    with pytest.raises(ValueError, match=words): parse(row(**changed))


def test_a_number_that_is_no_function():
    with pytest.raises(ValueError, match="function that exists"): evaluate(parse(row(number="moe_lab.claims:nothing")))


@given(st.floats(-100, 100), st.floats(.01, 10), st.floats(-20, 20))
def test_absolute_and_range_agree(target, bound, off):
    absolute = parse(row(target=json.dumps(target), bound=json.dumps(bound)))
    within = parse(row(rule="range", bound="", target=json.dumps([target - bound, target + bound])))
    if abs(abs(off) - bound) > 1e-6: assert verdict(absolute, target + off) == verdict(within, target + off) == ("reproduced" if abs(off) < bound else "not reproduced")


@given(st.lists(st.floats(.1, 100), min_size=1, max_size=5), st.floats(.9, 1.1))
def test_relative_is_scale_free(target, factor):
    c = parse(row(rule="relative", target=json.dumps(target), bound="0.05", direction=">0"))
    if abs(abs(factor - 1) - .05) > 1e-6: assert verdict(c, [t * factor for t in target]) == ("reproduced" if abs(factor - 1) < .05 else "direction only")
    assert verdict(c, target + [1.]) != "reproduced"          # one number too many


def test_missing_result_is_not_attempted(monkeypatch, tmp_path):
    gone = next(c for c in ledger.ledger() if c.id == "FU-01")
    assert evaluate(gone).verdict == "reproduced"
    module = __import__(gone.number.partition(":")[0], fromlist=["x"])
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    r = evaluate(gone)
    assert (r.verdict, r.own) == ("not attempted", None) and "fused.cuda.json" in r.why


def test_a_wrong_product_is_seen(monkeypatch):
    "A claim about EPLB's plan fails when the planner does something else."
    c = next(c for c in ledger.ledger() if c.id == "FM-07")
    assert evaluate(c).verdict == "reproduced"
    module = __import__(c.number.partition(":")[0], fromlist=["x"])
    right = module.eplb
    monkeypatch.setattr(module, "eplb", lambda *a: (right(*a)[0][:, ::-1], None))
    assert evaluate(c).verdict == "not reproduced"


def test_command(capsys):
    assert main(["claims", "--system", "fastermoe"]) == 0
    assert "FM-09" in capsys.readouterr().out
    assert main(["claims", "--system", "DeepSpeed-MoE", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert {o["system"] for o in got} == {"DeepSpeed-MoE"} and {o["verdict"] for o in got} <= set(VERDICTS)
    assert next(o for o in got if o["id"] == "DS-15")["verdict"] == "reproduced"
    assert main(["claims", "--system", "nobody"]) == 2
    assert "Tutel" in capsys.readouterr().err

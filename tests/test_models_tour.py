"""The tour: what it promises, and the page in a browser."""
import json

import pytest

import moe_lab.tour as t
from moe_lab.models.corpus import load_corpus


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_experts_beat_dense_at_equal_active_compute(tmp_path):
    t.tour(out=str(tmp_path / "tour.html"), runs=str(tmp_path / "runs"))
    rows = {r["name"]: r for r in json.loads((tmp_path / "runs" / "results.json").read_text())["rows"]}
    for name in ("top-1", "top-2", "residual", "dropless"): assert rows["dense"]["valid"] - rows[name]["valid"] > 0.05, rows
    assert rows["dropless"]["dropped"] == rows["top-2"]["dropped"] == 0 < rows["top-1"]["dropped"] < 0.2


def test_stored_study_supports_the_claim():
    study = t.stored_study()
    if study is None: pytest.skip("the study has not been run yet")
    s = t.summary(study["runs"])
    assert set(s) == set(t.variants()) and len(study["runs"]) == len(t.study_jobs())
    for name in ("top-1", "top-2", "residual", "dropless"): assert s["dense"]["given"][0] - s[name]["given"][0] > 0.05


def test_probe_needs_python(tmp_path):
    (tmp_path / "prose.txt").write_text("It isn't code (\n" * 3000)
    with pytest.raises(ValueError, match="tokens of Python"): t.Probe(load_corpus(tmp_path, 300))


def test_uneven_and_busy_words():
    assert t.uneven([1.0]) == "" and "times the median" in t.uneven([1, 1, 1, 1, 1, 1, 1, 3, 3, 3])

"""B: what the notebooks store shows on a page without a kernel; notebooks and modules stay in step."""
import json, re, subprocess, sys, tomllib
from collections import Counter

import pytest

from tally import ROOT

BOOKS = {p.relative_to(ROOT / "nbs").as_posix(): json.loads(p.read_text()) for p in sorted((ROOT / "nbs").rglob("*.ipynb")) if ".ipynb_checkpoints" not in p.parts}
FIGURE = "application/vnd.plotly.v1+json"


def bundles(book): return [o["data"] for c in book["cells"] if c["cell_type"] == "code" for o in c["outputs"] if "data" in o]


def test_every_figure_is_stored_as_data_and_as_html_once():                     # B01, B04, B19
    figures = 0
    for name, book in BOOKS.items():
        ids = []
        for data in bundles(book):
            if FIGURE not in data: continue
            figures += 1
            assert len(data[FIGURE]["data"]) > 0, f"{name}: a figure without traces"
            ids += re.findall(r'<div id="([^"]+)"[^>]*class="plotly-graph-div"', "".join(data["text/html"]))
        assert not [i for i, n in Counter(ids).items() if n > 1], name
        assert len(ids) == sum(FIGURE in data for data in bundles(book)), name
    assert figures > 20


def test_no_output_needs_a_kernel():                                            # B07, B10, B12
    for name, book in BOOKS.items():
        code = "\n".join("".join(c["source"]) for c in book["cells"] if c["cell_type"] == "code")
        assert "FigureWidget(" not in code, name
        assert not any("widget-view" in kind for data in bundles(book) for kind in data), name
        assert "widgets" not in book["metadata"], name


def test_what_shows_a_figure_comes_with_the_dev_extra():                        # B09
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    assert "nbformat" in extra
    import nbformat


def test_one_notebook_a_module():                                               # B15
    modules = [m for b in BOOKS.values() for c in b["cells"] if c["cell_type"] == "code" for m in re.findall(r"^#\| default_exp (\S+)", "".join(c["source"]), re.M)]
    assert len(modules) == len(set(modules)) > 50


@pytest.mark.parametrize("name", ["core/03_files.ipynb", "experts/01_dispatch.ipynb"])
def test_a_notebook_as_text_and_back(tmp_path, name):                           # B17
    text, book = tmp_path / "a.pct.py", tmp_path / "a.ipynb"
    book.write_text((ROOT / "nbs" / name).read_text())
    jupytext = [sys.executable, "-m", "jupytext"]
    subprocess.run([*jupytext, "--to", "py:percent", str(book), "-o", str(text)], check=True, capture_output=True)
    changed = text.read_text().replace('"', "'", 2) + "\n\n# %%\nadded = 1\n"
    text.write_text(changed)
    subprocess.run([*jupytext, "--update", "--to", "ipynb", str(text), "-o", str(book)], check=True, capture_output=True)
    before, after = BOOKS[name]["cells"], json.loads(book.read_text())["cells"]
    assert [(c["id"], c["cell_type"]) for c in before] == [(c["id"], c["cell_type"]) for c in after[:-1]]
    outputs = lambda cells: ["".join(o.get("text", "")) for c in cells if c["cell_type"] == "code" for o in c["outputs"]]
    assert outputs(before) == outputs(after)

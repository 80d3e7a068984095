"""The book has one shape: a page about a system asks, shows, checks, says where it ends and sets exercises; a benchmark says what it does not show."""
import re
from pathlib import Path

import nbformat
import pytest

NBS = Path(__file__).resolve().parent.parent / "nbs"
#: Notebooks of the rooms that are tools of the lab or belong to the page of their system, with no question of their own.
PLUMBING = {"core/02_backend", "core/03_files", "core/04_arguments", "experts/00_activation", "experts/03i_tuning", "experts/03z_kernel_diary", "models/03_train",
            "hybrid_ep/04_link", "placement/06d_traces"}
ROOMS = "core cluster routing experts comm models sim placement hybrid_ep inference integrations".split()      # as tests/test_house.py, and what stands on them
name = lambda p: p.relative_to(NBS).with_suffix("").as_posix()
SYSTEMS = sorted(n for room in ROOMS for p in (NBS / room).glob("[!_.]*.ipynb") if not (n := name(p)).endswith("kernels") and n not in PLUMBING)
SYSTEMS += ["92_tour", "94_plan", "94a_which", "compare"]
BENCHMARKS = sorted(name(p) for p in (NBS / "bench").glob("[!_.]*.ipynb") if p.stem != "00_harness")
#: Pages whose system has a paper with a number that ours can stand beside.
PAPERS = ["routing/03_capacity", "experts/01_dispatch", "experts/02_topology", "experts/02c_blocksparse", "experts/03_grouped", "experts/03g_decode",
          "inference/01a_coordinated", "inference/02_step", "bench/11_padding", "comm/01_alltoall", "comm/02b_switch", "comm/03_pipeline", "comm/04b_fused", "hybrid_ep/01_stream", "hybrid_ep/02_domain", "hybrid_ep/07_curves", "hybrid_ep/08_scale", "sim/02_collectives", "sim/04_step", "models/04_pr_moe", "models/05_distill", "models/06_zoo",
          "placement/02_tokens", "placement/04_policy", "placement/05_rivals", "placement/07_arena", "sim/06_dlrm", "sim/06_latency", "compare"]


def missing(nb) -> list[str]:
    "Parts of the shape that a notebook lacks."
    prose = "\n\n".join(c.source for c in nb.cells if c.cell_type == "markdown")
    opening = prose.partition("\n## ")[0].partition("\n>")[2]                       # behind title and subtitle, before the first section
    figure = any("text/html" in o.get("data", {}) and "plotly" in o.data["text/html"] for c in nb.cells for o in c.get("outputs", []))
    drawn = re.search(r"^```\n|^    \S|^\|.*\|\n\|[-|: ]+\|$|!\[.+\]\(", prose, re.M)
    exercises = prose.partition("\n## Exercise")[2]
    parts = {"a question before the first section": "?" in opening, "a picture (figure, drawing or table)": figure or drawn,
             "a check": any(re.search(r"\b(assert|test_eq|test_close|test_fail)\b", c.source) for c in nb.cells if c.cell_type == "code"),
             "a section Limits": "\n## Limits\n" in prose, "exercises with a hidden solution": "<details>" in exercises and "</details>" in exercises}
    return [what for what, there in parts.items() if not there]


@pytest.mark.parametrize("page", SYSTEMS)
def test_a_system_has_the_shape(page): assert missing(nbformat.read(NBS / f"{page}.ipynb", as_version=4)) == []


def test_a_gap_is_seen():
    import nbformat.v4 as v
    whole = ["# name\n> what it is", "Why?\n\n```\na -> b\n```", "## Limits\n\nSome.\n\n## Exercise\n\nDo.\n\n<details><summary>Solution</summary>\nDone.\n</details>"]
    book = lambda texts, code="assert 1": v.new_notebook(cells=[*map(v.new_markdown_cell, texts), v.new_code_cell(code)])
    assert missing(book(whole)) == []
    assert missing(book(whole[:2])) == ["a section Limits", "exercises with a hidden solution"]
    assert missing(book([whole[0], "So.", whole[2]], "x = 1")) == ["a question before the first section", "a picture (figure, drawing or table)", "a check"]


@pytest.mark.parametrize("page", PAPERS)
def test_a_paper_has_our_number_beside_it(page):
    assert any(c.cell_type == "markdown" and re.search(r"^## Beside the paper", c.source, re.M) for c in nbformat.read(NBS / f"{page}.ipynb", as_version=4).cells)


@pytest.mark.parametrize("page", BENCHMARKS)
def test_a_benchmark_says_what_it_does_not_show(page):
    assert any(c.cell_type == "markdown" and re.search(r"^## Limits", c.source, re.M) for c in nbformat.read(NBS / f"{page}.ipynb", as_version=4).cells)


def test_every_listed_page_is_there():
    for page in [*PLUMBING, *SYSTEMS, *PAPERS]: assert (NBS / f"{page}.ipynb").is_file(), page


def test_hidden_text_is_markdown_in_every_renderer():
    "A blank line ends the HTML of a summary: without it smalldocs and JupyterLab show backticks, dollars and links as typed; Quarto does not."
    prose = [(name(p), c.source) for p in sorted(NBS.rglob("[!_.]*.ipynb")) if ".ipynb_checkpoints" not in p.parts for c in nbformat.read(p, as_version=4).cells if c.cell_type == "markdown"]
    assert sum("<details>" in s for _, s in prose) > 50
    assert [(page, m[0]) for page, s in prose for m in re.finditer(r".*</summary>(?!\n\n).*|.*\S.*</details>", s)] == []

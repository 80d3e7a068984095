"""Every notebook runs, and what it stores is what it gives: one item a notebook, one execution for both."""
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if not any(x.startswith((".", "_")) for x in p.relative_to(ROOT).parts))
ids = [p.relative_to(ROOT / "nbs").as_posix() for p in NOTEBOOKS]
every = pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)

spec = spec_from_file_location("nb", ROOT / ".ci" / "nb.py")
nb = module_from_spec(spec)
spec.loader.exec_module(nb)


@every
def test_runs_and_is_fresh(path):
    stored = nb.read(path)
    stale = nb.stale(stored, nb.execute(stored, path.parent))
    assert not stale, "run `python .ci/nb.py run` on it:\n" + "\n".join(stale)


def test_a_kernel_begins_and_ends_clean(tmp_path):
    "Kernels are forks of one process: nothing of ours is loaded in it, they leave nothing behind, and a dead one is noticed."
    import nbformat.v4 as v
    from nbclient.exceptions import DeadKernelError
    cell = "import os, sys, tempfile\nkept = tempfile.TemporaryDirectory()\nprint(kept.name, os.getcwd(), os.environ.get('TRITON_INTERPRET'), *[m for m in ('moe_lab', 'triton', 'pytest') if m in sys.modules])"
    books = [nb.execute(v.new_notebook(cells=[v.new_code_cell(cell)]), tmp_path) for _ in range(2)]
    for book in books:
        folder, *rest = book.cells[0].outputs[0].text[:-1].split(" ")
        assert rest == [str(tmp_path), "None"] and not Path(folder).exists()
    with pytest.raises(DeadKernelError): nb.execute(v.new_notebook(cells=[v.new_code_cell("import os; os._exit(1)")]), tmp_path)


def test_freshness_sees_a_difference():
    assert nb.same("loss 0.1234 of 10", "loss 0.1235 of 10")        # the last digit may differ
    assert not nb.same("loss 0.1234 of 10", "loss 0.1254 of 10")
    assert not nb.same("loss 0.1234 of 10", "loss 0.1234 of 11")    # counts may not
    assert not nb.same("loss 0.5", "less 0.5")
    assert nb.same('"y": 1.00000001e-3', '"y": 1.00000002e-3')


@every
def test_public_symbols_are_asserted_on(path):
    assert nb.unasserted(nb.read(path)) == []


def test_asserted_follows_values():
    import nbformat.v4 as v
    book = v.new_notebook(cells=[v.new_code_cell(s) for s in (
        "#| export\nclass Made: pass\ndef g(): assert f\ndef f(x): return Made()", "y = f(1)\nz = h(2)", "test_eq(y, 1)")])
    assert {"f", "Made"} <= nb.asserted(book) and not {"g", "h"} & nb.asserted(book)


@every
def test_cells_leave_the_names_of_the_module_alone(path): assert nb.shadowed(nb.read(path)) == []


def test_shadowed_sees_loops_and_functions_but_not_imports():
    import nbformat.v4 as v
    cells = "#| export\nimport os\nfrom m import f, g, h, k", "import os\nfor f in [1]: pass", "def g(): k = 1\n[h for h in [1]]"
    assert nb.shadowed(v.new_notebook(cells=[v.new_code_cell(s) for s in cells])) == ["f", "g"]


@every
def test_stores_nothing_of_this_machine(path): assert nb.unfit(nb.read(path)) == []


def test_unfit_sees_warnings_and_dumps():
    import nbformat.v4 as v
    outs = v.new_output("stream", name="stderr", text="[library] be careful"), v.new_output("execute_result", data={"text/plain": "tensor(" + "0., " * 2000})
    assert [t.split(":")[0] for t in nb.unfit(v.new_notebook(cells=[v.new_code_cell("f()", outputs=list(outs))]))] == ["what was said on stderr", "8007 characters of a value's repr"]


def test_prose_is_spelled_right(tmp_path):
    for p in [*NOTEBOOKS, ROOT / "CONTRIBUTING.md"]:
        cells = [c.source for c in nb.read(p).cells if c.cell_type == "markdown"] if p.suffix == ".ipynb" else [p.read_text()]
        prose = re.sub(r"```.*?```|\$\$.*?\$\$|`[^`]*`|\$[^$]*\$|\]\([^)]*\)", "", "\n\n".join(cells), flags=re.S)
        (tmp_path / (p.relative_to(ROOT).as_posix().replace("/", "-") + ".md")).write_text(prose)
    found = subprocess.run([sys.executable, "-m", "codespell_lib", "-L", "coo", "."], cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout == "" and found.returncode == 0, found.stdout + found.stderr

"""Every notebook runs, and what it stores is what it gives: one item a notebook, one execution for both."""
import ast
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


def test_freshness_sees_a_difference():
    assert nb.same("loss 0.1234 of 10", "loss 0.1235 of 10")        # the last digit may differ
    assert not nb.same("loss 0.1234 of 10", "loss 0.1254 of 10")
    assert not nb.same("loss 0.1234 of 10", "loss 0.1234 of 11")    # counts may not
    assert not nb.same("loss 0.5", "less 0.5")
    assert nb.same('"y": 1.00000001e-3', '"y": 1.00000002e-3')


def asserted(book):
    """The names that some assertion of a notebook rests on: named in it, or used to make what it names.

    Exported classes and constants may also speak through the exported functions that use them; functions may not.
    """
    comes_from, found = {}, set()     # name -> the names it was made from
    def names(tree):
        direct = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        return direct.union(*(comes_from.get(n, ()) for n in direct))
    def binds(statement):
        bound = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        return bound | ({statement.name} if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else set())
    def checks(node):
        if isinstance(node, ast.Assert): return True
        called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        return called.startswith(("test_", "assert_")) or called == "gradcheck"
    exported, rest = [], []
    for c in book.cells:
        if c.cell_type != "code": continue
        kind = exported if re.search(r"^#\|\s*exports?\b", c.source, re.M) else rest
        kind += ast.parse(re.sub(r"^\s*[%!].*$", "", c.source, flags=re.M)).body
    made = set().union(*(binds(s) for s in exported if isinstance(s, (ast.ClassDef, ast.Assign, ast.AnnAssign))))
    for statement in exported * 2:      # twice: a function may use what is defined after it
        for n in binds(statement): comes_from[n] = comes_from.get(n, set()) | names(statement) & made
    for statement in rest:
        made_of = names(statement)
        for n in binds(statement): comes_from[n] = comes_from.get(n, set()) | made_of
        for node in ast.walk(statement):
            if checks(node): found |= names(node)
    return found


@every
def test_public_symbols_are_asserted_on(path):
    book = nb.read(path)
    exp = re.search(r"^#\|\s*default_exp\s+(\S+)", "\n".join(c.source for c in book.cells), re.M)
    if not exp: return
    module = (ROOT / "moe_lab" / (exp[1].replace(".", "/") + ".py")).read_text()
    public = next((ast.literal_eval(s.value) for s in ast.parse(module).body if isinstance(s, ast.Assign) and s.targets[0].id == "__all__"), [])
    missing = set(public) - asserted(book)
    assert not missing, f"no assertion of the notebook rests on {sorted(missing)}"


def test_asserted_follows_values():
    import nbformat.v4 as v
    book = v.new_notebook(cells=[v.new_code_cell(s) for s in (
        "#| export\nclass Made: pass\ndef g(): assert f\ndef f(x): return Made(g())", "y = f(1)\nz = h(2)", "test_eq(y, 1)")])
    assert {"f", "Made"} <= asserted(book) and not {"g", "h"} & asserted(book)


@every
def test_stores_nothing_of_this_machine(path):
    for c in nb.read(path).cells:
        for o in c.get("outputs", []):
            text = str(o)
            assert o.get("name") != "stderr" or "Warning" not in text, f"a warning is stored: {text[:300]}"
            assert o.output_type != "error", "an error is stored"
            assert not re.search(r"(?<![\w/])/(root|home|work|tmp|usr|Users)/", text), f"a path is stored by: {c.source[:200]}"
            assert len(text) < 3_000_000, f"a {len(text) / 1e6:.1f} MB output: a figure should be smaller"


def test_prose_is_spelled_right(tmp_path):
    for p in [*NOTEBOOKS, ROOT / "CONTRIBUTING.md"]:
        cells = [c.source for c in nb.read(p).cells if c.cell_type == "markdown"] if p.suffix == ".ipynb" else [p.read_text()]
        prose = re.sub(r"```.*?```|\$\$.*?\$\$|`[^`]*`|\$[^$]*\$|\]\([^)]*\)", "", "\n\n".join(cells), flags=re.S)
        (tmp_path / (p.relative_to(ROOT).as_posix().replace("/", "-") + ".md")).write_text(prose)
    found = subprocess.run([sys.executable, "-m", "codespell_lib", "-L", "coo", "."], cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout == "" and found.returncode == 0, found.stdout + found.stderr

"""Notebooks as text: make, run, clean and export them.

    python .ci/nb.py edit nbs/core/01_types.ipynb        # writes nbs/core/01_types.pct.py beside it (git-ignored)
    python .ci/nb.py save nbs/core/01_types.pct.py       # text -> notebook (ids and outputs kept), run, clean, export
    python .ci/nb.py run  nbs/core/01_types.ipynb ...    # run again and store outputs; cells flagged slow/gpu keep theirs
    python .ci/nb.py check nbs/core/01_types.ipynb ...   # run again and say where the stored outputs differ
    python .ci/nb.py readme                              # README.md from nbs/index.ipynb
"""
import ast, base64, copy, json, math, os, re, subprocess, symtable, sys, tempfile
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / ".ci"))
import warm

# A cell with one of these directives is not run: its stored output stays.
KEEPS = re.compile(r"^#\|\s*(eval:\s*false|slow|gpu2?)\s*$", re.M)


def read(path): return nbformat.read(path, as_version=4)


def execute(nb, cwd, timeout=600):
    "A copy of `nb` with fresh outputs; cells that `KEEPS` matches are left as they are."
    from jupyter_client.provisioning import local_provisioner
    from nbclient import NotebookClient
    local_provisioner.launch_kernel = warm.start
    run = copy.deepcopy(nb)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}     # a notebook chooses by itself
    code = [c for c in run.cells if c.cell_type == "code"]
    for c in code:
        if KEEPS.search(c.source) or "nbdev_export()" in c.source: c.metadata["tags"] = ["skip-execution"]
    kept = {c.id: c.outputs for c in code if "tags" in c.metadata}
    client = NotebookClient(run, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(cwd)}},
                            skip_cells_with_tag="skip-execution", store_widget_state=False)
    client.on_notebook_start = lambda notebook: client.kc.hb_channel.stop()     # nobody listens to the heart, and its channel takes a second to leave a kernel that has ended
    client.create_kernel_manager()
    with tempfile.TemporaryDirectory() as sockets:
        client.km.transport, client.km.ip = "ipc", f"{sockets}/kernel"      # no port that another process may take first
        client.execute(env=env)
    run.metadata.pop("widgets", None)   # ids are random, and a page has no kernel: what it shows are frames
    for c in code:
        c.metadata.pop("tags", None)
        c.metadata.pop("execution", None)
        c.execution_count = None
        if c.id in kept: c.outputs = kept[c.id]
        c.outputs = merge_streams(c.outputs)
    return run


def merge_streams(outputs):
    "Neighbouring pieces of one stream as one output, so that timing does not show in the file."
    out = []
    for o in outputs:
        if out and o.output_type == "stream" == out[-1].output_type and o.name == out[-1].name: out[-1].text += o.text
        else: out.append(o)
    return out


def edit(path):
    path = Path(path)
    text = path.with_suffix("").with_suffix(".pct.py")
    subprocess.run(["jupytext", "--to", "py:percent", str(path), "-o", str(text)], check=True)
    return text


def save(path):
    path = Path(path)
    nb = path.with_name(path.name.removesuffix(".pct.py") + ".ipynb")
    update = ["--update"] if nb.exists() else []
    subprocess.run(["jupytext", *update, "--to", "ipynb", str(path), "-o", str(nb)], check=True)
    # Export first: the notebook may import what its own module has just gained.
    subprocess.run(["nbdev_export"], check=True, cwd=ROOT)
    run(nb)


def run(*paths):
    for p in map(Path, paths):
        print(f"running {p}", flush=True)
        nb = execute(read(p), p.parent)
        nb.metadata["kernelspec"] = {"name": "python3", "display_name": "python3", "language": "python"}
        nbformat.write(nb, p)
    subprocess.run(["nbdev_clean"], check=True, cwd=ROOT)
    subprocess.run(["nbdev_export"], check=True, cwd=ROOT)
    for p in paths:
        for name in unasserted(read(p)): print(f"{p}: no assertion rests on {name}")
        for name in shadowed(read(p)): print(f"{p}: a cell outside the module assigns its {name}")
        for text in unfit(read(p)): print(f"{p}: stores {text}")


NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
RANDOM = re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b|\b[0-9a-f]{32}\b| at 0x[0-9a-f]+")


def plain(value):
    "JSON of a figure with Plotly's packed arrays as lists, so that they compare as numbers."
    if isinstance(value, list): return [plain(v) for v in value]
    if not isinstance(value, dict): return value
    if set(value) >= {"bdata", "dtype"}:
        import numpy as np
        return np.frombuffer(base64.b64decode(value["bdata"]), dtype=value["dtype"]).tolist()
    return {k: plain(v) for k, v in value.items() if k != "template"}     # the look of all figures may change at once


def normal(output):
    "An output as text, without what changes from run to run; '' for stderr. A figure is its JSON: the html says the same."
    if output.output_type == "stream": return "" if output.name == "stderr" else RANDOM.sub("", output.text)
    if output.output_type == "error": return f"{output.ename}: {output.evalue}"
    data = {k: "an image" if k.startswith("image/") else v for k, v in output.data.items()}
    figure = "application/vnd.plotly.v1+json"
    if figure in data: data = {figure: plain(data[figure])}
    return RANDOM.sub("", json.dumps(data, sort_keys=True, indent=0, ensure_ascii=False))


def same(a, b):
    "Are two texts equal, numbers with a fraction up to one in their last digit or 1e-4? Processors round differently."
    def close(x, y):
        if x == y: return True
        if not set(x + y) & set(".eE"): return False
        last = 10.0 ** -min(len(v.partition(".")[2]) if "e" not in v.lower() else 99 for v in (x, y))
        return math.isclose(float(x), float(y), rel_tol=1e-4, abs_tol=max(1.01 * last, 1e-9))
    return NUMBER.sub("#", a) == NUMBER.sub("#", b) and all(map(close, NUMBER.findall(a), NUMBER.findall(b)))


def stale(stored, fresh):
    "Where stored outputs differ from fresh ones: one text a cell, empty when all are the same."
    out = []
    for old, new in zip(stored.cells, fresh.cells, strict=True):
        a, b = ([t for o in c.get("outputs", []) if (t := normal(o))] for c in (old, new))
        if len(a) != len(b) or not all(map(same, a, b)):
            show = lambda texts: "\n".join(texts)[:1500] or "(nothing)"
            out.append(f"--- {old.source[:200]}\nstored:\n{show(a)}\nfresh:\n{show(b)}")
    return out


def code_cells(book):
    "(is it exported, its code without magics) of each code cell."
    for c in book.cells:
        if c.cell_type == "code": yield bool(re.search(r"^#\|\s*exports?\b", c.source, re.M)), re.sub(r"^\s*[%!].*$", "", c.source, flags=re.M)


def shadowed(book):
    "Names of the module that a cell outside it assigns: from there on the exported functions see another thing than users do."
    module, rest = set(), set()
    for exported, code in code_cells(book):
        names = symtable.symtable(code, "cell", "exec").get_symbols()
        if exported: module |= {s.get_name() for s in names if s.is_assigned() or s.is_imported()}
        else: rest |= {s.get_name() for s in names if s.is_assigned() and not s.is_imported()}
    return sorted(module & rest - {"_"})


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
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):     # it may write to its arguments
            bound |= {a.id for a in statement.value.args if isinstance(a, ast.Name)}
        return bound | ({statement.name} if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else set())
    def checks(node):
        if isinstance(node, ast.Assert): return True
        called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        return called.startswith(("test_", "assert_")) or called == "gradcheck"
    exported, rest = [], []
    for of_module, code in code_cells(book):
        (exported if of_module else rest).extend(ast.parse(code).body)
    made = set().union(*(binds(s) for s in exported if isinstance(s, (ast.ClassDef, ast.Assign, ast.AnnAssign))))
    for statement in exported * 4:      # several times: a function may use what is defined after it
        for n in binds(statement): comes_from[n] = comes_from.get(n, set()) | names(statement) & made
    for statement in rest:
        made_of = names(statement)
        for n in binds(statement): comes_from[n] = comes_from.get(n, set()) | made_of
        for node in ast.walk(statement):
            if checks(node): found |= names(node)
    return found


def unasserted(book):
    "The public names of a notebook's module that no assertion of the notebook rests on."
    exp = re.search(r"^#\|\s*default_exp\s+(\S+)", "\n".join(c.source for c in book.cells), re.M)
    if not exp: return []
    module = ast.parse((ROOT / "moe_lab" / (exp[1].replace(".", "/") + ".py")).read_text()).body
    public = next((ast.literal_eval(s.value) for s in module if isinstance(s, ast.Assign) and s.targets[0].id == "__all__"), [])
    return sorted(set(public) - asserted(book))


def unfit(book):
    "What a notebook should not store: warnings and other asides, errors, paths of a machine, outputs of megabytes."
    out = []
    for c in book.cells:
        for o in c.get("outputs", []):
            text = str(o)
            if o.get("name") == "stderr": out.append(f"what was said on stderr: {text[:300]}")
            if len(dump := "".join(o.get("data", {}).get("text/plain", ""))) > 4000: out.append(f"{len(dump)} characters of a value's repr: {dump[:100]}")
            if o.output_type == "error": out.append(f"an error: {text[:300]}")
            if found := re.search(r"(?<![\w/])/(root|home|work|tmp|usr|Users)/[^\s\"']*", text): out.append(f"a path: {found[0]}")
            if len(text) > 3_000_000: out.append(f"{len(text) / 1e6:.1f} MB from: {c.source[:200]}")
    return out


def check(*paths):
    bad = [t for p in map(Path, paths) for t in stale(read(p), execute(read(p), p.parent))]
    if bad: sys.exit("\n".join(bad))


def readme_text():
    "README.md: nbs/index.ipynb as nbdev shows it, links to notebooks relative to the top."
    import yaml
    from nbconvert import MarkdownExporter
    from nbdev.processors import FilterDefaults
    from nbdev.serve_drv import exec_nb
    with tempfile.TemporaryDirectory() as tmp:
        exec_nb(ROOT / "nbs/index.ipynb", Path(tmp) / "index.ipynb", FilterDefaults)
        d = json.loads((Path(tmp) / "index.ipynb").read_text())
    for c in d["cells"]: c.pop("has_sd", None)
    nb = nbformat.reads(json.dumps(d), as_version=4)
    front = yaml.safe_load(nb.cells.pop(0).source.strip().strip("-"))
    nb.metadata["language_info"] = {"name": "python"}      # or code blocks lose their language
    body = MarkdownExporter().from_notebook_node(nb)[0]
    body = re.sub(r"\]\((?!https?:|#)([^()\s]+\.ipynb)", r"](nbs/\1", body)
    return re.sub(r"\n{3,}", "\n\n", f"# {front['title']}\n\n> {front['description']}\n\n{body}").strip() + "\n"


def readme(to=ROOT / "README.md"): sys.stdout.write(readme_text()) if to == "-" else Path(to).write_text(readme_text())


if __name__ == "__main__":
    verbs = dict(edit=edit, save=save, run=run, check=check, readme=readme)
    if len(sys.argv) < 2 or sys.argv[1] not in verbs: sys.exit(__doc__)
    verbs[sys.argv[1]](*sys.argv[2:])

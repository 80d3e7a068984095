"""Notebooks as text: make, run, clean and export them.

    python .ci/nb.py edit nbs/core/01_types.ipynb        # writes nbs/core/01_types.pct.py beside it (git-ignored)
    python .ci/nb.py save nbs/core/01_types.pct.py       # text -> notebook (ids and outputs kept), run, clean, export
    python .ci/nb.py run  nbs/core/01_types.ipynb ...    # run again and store outputs; cells flagged slow/gpu keep theirs
"""
import copy, re, subprocess, sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
# A cell with one of these directives is not run: its stored output stays.
KEEPS = re.compile(r"^#\|\s*(eval:\s*false|slow|gpu2?)\s*$", re.M)


def read(path): return nbformat.read(path, as_version=4)


def execute(nb, cwd, timeout=600):
    "A copy of `nb` with fresh outputs; cells that `KEEPS` matches are left as they are."
    from nbclient import NotebookClient
    run = copy.deepcopy(nb)
    code = [c for c in run.cells if c.cell_type == "code"]
    for c in code:
        if KEEPS.search(c.source) or "nbdev_export()" in c.source: c.metadata["tags"] = ["skip-execution"]
    kept = {c.id: c.outputs for c in code if "tags" in c.metadata}
    NotebookClient(run, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(cwd)}},
                   skip_cells_with_tag="skip-execution", store_widget_state=False).execute()
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


if __name__ == "__main__":
    verbs = dict(edit=edit, save=save, run=run)
    if len(sys.argv) < 3 or sys.argv[1] not in verbs: sys.exit(__doc__)
    verbs[sys.argv[1]](*sys.argv[2:])

"""Merge what `fuzz.py` and `sanitize.py` wrote on a GPU into the figures of the reliability page.

    python .ci/gpu/reliability.py          from the repository root; reads .ci/gpu/reliability/KIND-COMMIT.json, writes nbs/reliability.cuda.json

A file stays as the run wrote it; its name says which code ran. A group lists the kernel files that differ now from that commit: its figures are of older kernels.
"""
import ast, json, subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).with_suffix("")
GROUPED, BLOCKS = ["experts/grouped"], ["experts/blocksparse"]
#: Group of a run -> the public modules whose kernels it launches.
RUNS = dict(encode=["experts/dispatch"], decode=["experts/dispatch"], grouped=GROUPED, rows=GROUPED, blocksparse=BLOCKS, products=["experts/products"], step=["experts/decode"],
            gate=["routing/gate"], capacity=[], compress=["hybrid_ep/compress"], layer=["experts/layer"], generate=["inference/generate"], large=["experts/dispatch", *GROUPED], training=["experts/layer"],
            grouped_plain=GROUPED, grouped_hopper=GROUPED, routing=["routing/gate", "experts/dispatch", *GROUPED], steps=["experts/decode"], control=[])


@cache
def imported(path):
    "Files of the package that a file imports, at its top or in a function."
    out = []
    for n in ast.walk(ast.parse(path.read_text())):
        if not isinstance(n, ast.ImportFrom): continue
        base = path.parents[n.level - 1] if n.level else ROOT
        base = base.joinpath(*(n.module or "").split("."))
        out += [f for f in (base.with_suffix(".py"), *(base / f"{a.name}.py" for a in n.names)) if f.is_relative_to(ROOT / "moe_lab") and f.exists()]
    return out


def kernels(group):
    "Kernel files that a group can reach."
    found, todo = set(), [ROOT / f"moe_lab/{m}.py" for m in RUNS[group]]
    while todo:
        if (f := todo.pop()) not in found: found.add(f); todo += imported(f)
    return {str(f.relative_to(ROOT)) for f in found if f.stem.endswith("_kernels")}


def git(*args): return subprocess.run(["git", "-C", ROOT, *args], check=True, capture_output=True, text=True).stdout.strip()


def program(source):
    "What a file does: its tree without comments and docstrings."
    tree = ast.parse(source)
    for n in ast.walk(tree):
        if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(n) is not None: n.body = n.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def merge(path):
    kind, commit = path.stem.split("-")
    raw, files = json.loads(path.read_text()), lambda how: git("diff", "--name-only", f"--diff-filter={how}", commit, "HEAD", "--", "moe_lab/**.py").splitlines()
    differ = {*files("A"), *(f for f in files("M") if program(git("show", f"{commit}:{f}")) != program(git("show", f"HEAD:{f}")))}
    changed = lambda group: sorted(Path(f).stem for f in kernels(group) & differ)
    out = dict(kind=kind, commit=commit, date=git("log", "-1", "--format=%cs", commit), **{k: raw[k] for k in ("device", "torch", "triton")})
    if kind == "sanitize":
        tools = {t: {g: dict(cases=r["finite"], ended=r["cases"], summary=r["summary"], findings=r["findings"], changed=changed(g)) for g, r in raw[t].items()} for t in ("memcheck", "racecheck") if t in raw}
        return out | dict(version=raw["version"], tools=tools)
    groups = {}
    for name, r in raw.items():                                  # a run that was cut off left a group in parts
        if not isinstance(r, dict) or "examples" not in r: continue
        g = groups.setdefault(name.split()[0], dict(examples=0, failures=[]))
        g["examples"] += r["examples"]; g["failures"] += r["failures"]
    same = {n: r | dict(changed=changed(n.split()[0].rstrip(","))) for n, r in raw.get("determinism", {}).items()}
    return out | dict(seconds=raw["seconds"], groups={n: g | dict(changed=changed(n)) for n, g in groups.items()}, large=dict(result=raw["large"], changed=changed("large")) if "large" in raw else None, determinism=same)


if __name__ == "__main__":
    runs = [merge(p) for p in HERE.glob("*.json")]
    runs.sort(key=lambda r: git("log", "-1", "--format=%ct", r["commit"]))
    (ROOT / "nbs/reliability.cuda.json").write_text(json.dumps(dict(merged_at=git("rev-parse", "--short", "HEAD"), runs=runs), indent=1) + "\n")
    for r in runs:
        for g, v in (r.get("groups") or r["tools"]["memcheck"]).items(): print(r["kind"], r["commit"], g, v.get("examples", v.get("cases")), v["changed"] or "kernels as they are")

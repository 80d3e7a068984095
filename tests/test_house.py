"""What keeps the repository whole: sources, generated files, versions and imports agree."""
import ast, configparser, importlib.util, os, re, shutil, subprocess, sys, tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(p.relative_to(ROOT).with_suffix("") for p in (ROOT / "moe_lab").rglob("*.py") if p.stem not in ("__init__", "__main__", "_modidx", "_prerender"))
ROOMS = "core cluster routing experts comm models sim placement hybrid_ep inference".split()    # DESIGN's order


def python(code, **env):
    "Run `code` in a fresh interpreter on this checkout; what it prints."
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)} | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "The sources in another folder, cleaned and exported there."
    to = tmp_path_factory.mktemp("copy")
    skip = shutil.ignore_patterns("__pycache__", "*.pct.py", ".ipynb_checkpoints")
    for d in ("nbs", "moe_lab"): shutil.copytree(ROOT / d, to / d, ignore=skip)
    for f in ("settings.ini", "pyproject.toml"): shutil.copy(ROOT / f, to)
    for command in ("nbdev_clean", "nbdev_export"):
        subprocess.run([Path(sys.executable).with_name(command)], cwd=to, env=os.environ | {"PYTHONPATH": str(to)}, check=True)
    return to


@pytest.mark.parametrize("folder, kind", [("nbs", "*.ipynb"), ("moe_lab", "*.py")])
def test_clean_and_export_change_nothing(copy, folder, kind):                    # B15
    files = lambda top: {p.relative_to(top): p.read_text() for p in (top / folder).rglob(kind) if ".ipynb_checkpoints" not in p.parts}
    here, there = files(ROOT), files(copy)
    assert here.keys() == there.keys()
    assert [str(f) for f in here if here[f] != there[f]] == []


def test_readme_is_fresh():
    done = subprocess.run([sys.executable, ".ci/nb.py", "readme", "-"], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (ROOT / "README.md").read_text() == done.stdout, "run `python .ci/nb.py readme`"


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    settings = configparser.ConfigParser(); settings.read(ROOT / "settings.ini")
    settings = settings["DEFAULT"]
    lock = dict(line.split("==") for line in (ROOT / ".ci/lock.txt").read_text().split())
    lock = {re.sub(r"[-_.]+", "-", k).lower(): v for k, v in lock.items()}
    wanted = {"requirements": project["dependencies"], "dev_requirements": project["optional-dependencies"]["dev"]}
    for key, listed in wanted.items():
        listed = list(map(Requirement, listed))
        plain = {f"{r.name}{r.specifier}" for r in listed if not r.marker}      # settings.ini knows no markers
        assert {str(Requirement(r)) for r in settings[key].split()} == {str(Requirement(r)) for r in plain}, key
        for r in listed:
            locked = lock[re.sub(r"[-_.]+", "-", r.name).lower()]
            assert r.specifier.contains(locked), f"{r} but the lock has {locked}"
            if not r.marker or r.marker.evaluate(): assert r.specifier.contains(metadata.version(r.name)), f"{r}: installed is {metadata.version(r.name)}"
    import moe_lab
    assert settings["version"] == moe_lab.__version__
    assert settings["min_python"] == project["requires-python"].removeprefix(">=")
    assert settings["description"] == project["description"]


@pytest.mark.parametrize("remote", ["https://github.com/ann/lab.git", "git@github.com:ann/lab.git", "ssh://git@github.com/ann/lab", "https://ann:token@github.com/ann/lab/"])
def test_addresses_come_from_the_remote(remote):
    spec = importlib.util.spec_from_file_location("addresses", ROOT / ".ci/addresses.py")
    module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
    new = module.addresses(remote)
    assert (new["user"], new["repo"], new["doc_baseurl"], new["doc_host"]) == ("ann", "lab", "/lab", "https://%(user)s.github.io")
    assert module.addresses("git@code.example.org:team/group/lab.git")["git_url"] == "https://code.example.org/%(user)s/%(repo)s"
    with pytest.raises(ValueError, match="remote"): module.addresses("")


def test_import_is_cheap():
    "With all its top-level names under 0.5 s beyond torch, and no library that only some readers need."
    heavy = "plotly ipywidgets transformers triton nbdev fastcore IPython pandas".split()
    out = python(f"""
import sys, time, torch
loaded, t = set(sys.modules), time.process_time()
import moe_lab
for name in moe_lab.__all__: getattr(moe_lab, name)
print(time.process_time() - t, [m for m in {heavy} if m in sys.modules and m not in loaded])""")
    seconds, found = out.split(maxsplit=1)
    assert float(seconds) < 0.5
    assert found.strip() == "[]"


def test_imports_from_a_plain_checkout():
    "Every room imports where torch and numpy are, and neither triton nor any tool of the notebooks."
    rooms = [".".join(m.parts) for m in MODULES if m.parts[1] in ROOMS and not m.name.endswith("kernels")]
    python(f"""
import sys, importlib
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('triton', 'nbdev', 'fastcore', 'execnb', 'plotly', 'ipywidgets', 'IPython', 'transformers', 'sklearn'):
            raise ModuleNotFoundError('No module named ' + repr(name), name=name)
sys.meta_path.insert(0, Absent())
for m in {rooms}: importlib.import_module(m)""")


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_modules_are_small(path): assert len((ROOT / path).with_suffix(".py").read_text().splitlines()) <= 400


def test_top_level_names():
    import moe_lab
    for name in moe_lab.__all__: assert getattr(moe_lab, name).__name__ == name
    with pytest.raises(AttributeError, match="Nothing"): moe_lab.Nothing


def imports(path):
    "The modules of moe_lab that a module imports anywhere."
    package = path.parts[:-1]
    for node in ast.walk(ast.parse((ROOT / path.with_suffix(".py")).read_text())):
        if isinstance(node, ast.Import): yield from (a.name for a in node.names)
        if isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            yield module
            yield from (f"{module}.{a.name}" for a in node.names)


@pytest.mark.parametrize("path", [m for m in MODULES if m.parts[1] in ROOMS], ids=str)
def test_a_room_imports_only_rooms_above_it(path):
    allowed = ROOMS[: ROOMS.index(path.parts[1]) + 1]
    rooms = {m.split(".")[1] for m in imports(path) if m.startswith("moe_lab.") and m.count(".") > 1}
    assert rooms <= set(allowed), f"{path} imports {sorted(rooms - set(allowed))}; it may import {allowed}"

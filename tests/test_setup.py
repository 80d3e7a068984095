"""What happens before the first line of Python runs: the Makefile, `.ci/install`, the workflows."""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LOCKED = dict(line.split("==") for line in (ROOT / ".ci/lock.txt").read_text().split())["torch"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def script(path, text):
    "An executable shell script."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def make(*args):
    "What `make` prints, as from a shell: also when the tests are run by `make test`."
    env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    return subprocess.run(["make", *args], cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout


def installed(tmp_path, gpu, cpu_build=True):
    "The arguments of each call of pip that `.ci/install` makes, with a stand-in for nvidia-smi and for the environment's Python."
    log = tmp_path / "log"
    script(tmp_path / "bin/nvidia-smi", f"exit {0 if gpu else 9}\n")
    script(tmp_path / "venv/bin/python", f'echo "$*" >> "{log}"\ncase "$*" in *"{LOCKED}+cpu") {"exit 0" if cpu_build else "exit 1"};; esac\n')
    subprocess.run([ROOT / ".ci/install", tmp_path / "venv"], check=True, env=os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable})
    return [line.split() for line in log.read_text().splitlines()]


def test_a_gpu_gets_the_cuda_build(tmp_path):
    torch, rest = installed(tmp_path, gpu=True)
    wanted = Requirement(torch[-1]).specifier
    assert wanted.contains(LOCKED) and wanted.contains(f"{LOCKED}+cu130") and not wanted.contains(f"{LOCKED}+cpu")
    assert "-c" in torch and rest[-2:] == ["-e", ".[dev]"]                       # what follows keeps the build: the lock names no other version


@pytest.mark.parametrize("offered", [True, False])
def test_without_a_gpu_the_cpu_build_where_the_index_has_it(tmp_path, offered):
    torch = [call[-1] for call in installed(tmp_path, gpu=False, cpu_build=offered)[:-1]]
    assert torch == [f"torch=={LOCKED}+cpu"] + [f"torch=={LOCKED}"] * (not offered)


def test_an_old_python_is_refused_in_words(tmp_path):
    for name in ("python3", "python3.13", "python3.12", "python3.11"): script(tmp_path / f"bin/{name}", "exit 1\n")
    done = subprocess.run([ROOT / ".ci/install", tmp_path / "venv"], env=os.environ | {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PYTHON": ""}, capture_output=True, text=True)
    assert done.returncode == 1 and "needs Python 3.11 or newer" in done.stderr


@pytest.mark.parametrize("target, tool", [("tour", "moe-lab"), ("test", "pytest"), ("lab", "jupyter"), ("docs", "python")])
def test_a_second_call_only_runs_the_tool(tmp_path, target, tool):
    "With an environment that is up to date, `make` is at its tool in well under the 3 s that set-up may cost."
    script(tmp_path / f"bin/{tool}", 'echo "here: $0"\n')
    (tmp_path / ".ready").touch()
    start = time.process_time(), os.times().children_user + os.times().children_system
    out = make(target, f"VENV={tmp_path}")
    spent = time.process_time() - start[0] + os.times().children_user + os.times().children_system - start[1]
    assert out.strip() == f"here: {tmp_path}/bin/{tool}" and spent < 3            # CPU time: the machine may have other work


def test_a_changed_lock_installs_again(tmp_path):
    (tmp_path / ".ready").touch(); os.utime(tmp_path / ".ready", (1, 1))
    assert f'.ci/install "{tmp_path}"' in make("-n", "tour", f"VENV={tmp_path}")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_workflows_say_what_exists(path):
    "The keys GitHub knows, actions with a version, and commands that are in this checkout."
    flow = yaml.safe_load(path.read_text())
    flow["on"] = flow.pop(True)                                                  # YAML reads `on` as true
    assert flow.keys() <= {"name", "on", "permissions", "concurrency", "env", "jobs"} and flow["jobs"]
    events = set(flow["on"])
    assert events <= {"push", "pull_request", "workflow_dispatch"}
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    for job in flow["jobs"].values():
        assert job.keys() <= {"runs-on", "timeout-minutes", "environment", "env", "steps", "needs", "if", "strategy"} and "runs-on" in job
        for step in job["steps"]:
            assert step.keys() <= {"uses", "run", "with", "id", "name", "env", "if"} and ("uses" in step) != ("run" in step)
            if "uses" in step: assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])
            for command in step.get("run", "").splitlines():
                tool, what, *_ = command.split()
                assert what in targets if tool == "make" else tool in ("python", "bash") and (ROOT / what).is_file(), command
                if tool == "bash": subprocess.run(["bash", "-n", ROOT / what], check=True)
        used = set(re.findall(r"steps\.(\w+)\.", str(job)))
        assert used <= {s.get("id") for s in job["steps"]}


# What Quarto's schema lets stand there (quarto-cli, src/resources/schema/project.yml and definitions.yml: both objects are closed), as far as we use it.
QUARTO = {"": {"project", "website", "format", "execute"}, "project": {"type", "output-dir", "render", "pre-render"},
          "website": {"title", "description", "site-url", "repo-url", "repo-branch", "favicon", "page-navigation", "back-to-top-navigation", "search", "sidebar"},
          "sidebar": {"style", "contents"}, "html": {"theme", "css", "toc", "toc-depth", "html-math-method", "respect-user-color-scheme", "grid"}, "front matter": {"title", "description", "output-file"}}

# What Quarto puts before outputs in HTML (core/jupyter/widgets.ts): require.js and jQuery, from the one or the other address by its version.
HEAD = """<script src="https://cdn.jsdelivr.net/npm/requirejs@2.3.6/require.min.js" crossorigin="anonymous"></script>
<script src="https://cdnjs.cloudflare.com/ajax/libs/jquery/3.5.1/jquery.min.js" crossorigin="anonymous" data-relocate-top="true"></script>
<script type="application/javascript">define('jquery', [],function() {return window.jQuery;})</script>"""


@pytest.fixture(scope="module")
def quarto(tmp_path_factory):
    "A checkout after `make docs` with a stand-in for Quarto that writes a page for each notebook it is given, and what was printed."
    top = tmp_path_factory.mktemp("quarto")
    skip = shutil.ignore_patterns("__pycache__", "*.pct.py", ".ipynb_checkpoints")
    for d in ("nbs/core", "moe_lab", ".ci"): shutil.copytree(ROOT / d, top / d, ignore=skip)
    for f in ("settings.ini", "pyproject.toml", "_quarto.yml", "nbs/index.ipynb", *(f"nbs/{p.name}" for p in (ROOT / "nbs").iterdir() if p.is_file() and p.suffix != ".ipynb")): shutil.copy(ROOT / f, top / f)
    script(top / "bin/quarto", f"head={shlex.quote(HEAD)}\n" + 'echo "$*" > called\nmkdir -p _docs/site_libs\nfor f in */*.ipynb; do mkdir -p "_docs/${f%/*}"; (echo "<html>$head<body><pre>"; cat "$f"; echo "</pre></body></html>") > "_docs/${f%.ipynb}.html"; done\n')
    done = subprocess.run([sys.executable, ".ci/site.py"], cwd=top, env=os.environ | {"PATH": f"{top / 'bin'}:{os.environ['PATH']}"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return top, done.stdout


def test_docs_go_through_quarto_where_there_is_one(quarto):
    "It gets processed notebooks, and its pages become the site."
    top, said = quarto
    assert (top / "_proc/called").read_text() == "render --no-cache\n"
    pages = sorted((top / "_docs/core").glob("*.html"))
    assert len(pages) == len(list((ROOT / "nbs/core").glob("*.ipynb"))) and f"{len(pages)} pages in _docs/" in said
    assert not any("#| export" in p.read_text() for p in pages)
    assert not any("<script" in p.read_text().partition("<body>")[0] for p in pages)


def test_quarto_gets_what_its_schema_allows(quarto):
    "One configuration for both renderers: with the keys that Quarto knows, and files that are there."
    proc = quarto[0] / "_proc"
    own = yaml.safe_load((proc / "_quarto.yml").read_text())
    assert own == {"metadata-files": ["../_quarto.yml", "nbdev.yml", "sidebar.yml"]}         # Quarto merges them in this order
    parts = [yaml.safe_load((proc / f).read_text()) for f in own["metadata-files"]]
    for part in parts:
        website, html = part.get("website", {}), part.get("format", {}).get("html", {})
        for where, found in (("", part), ("project", part.get("project", {})), ("website", website), ("sidebar", website.get("sidebar", {})), ("html", html)):
            assert found.keys() <= QUARTO[where], (where, sorted(found.keys() - QUARTO[where]))
        for f in [website.get("favicon"), html.get("css")]: assert f is None or (proc / f).is_file(), f
    assert parts[0]["project"]["type"] == "website" and parts[0]["execute"] == {"enabled": False} and parts[0]["format"]["html"]["html-math-method"] == "mathml"
    def listed(contents): return [f for c in contents for f in (listed(c["contents"]) if isinstance(c, dict) else [c])]
    pages = listed(parts[2]["website"]["sidebar"]["contents"])
    assert sorted(pages) == sorted(p.relative_to(proc).as_posix() for p in proc.rglob("*.ipynb"))


def test_quarto_can_read_the_notebooks(quarto):
    "Front matter of known keys in a raw cell of its own; a figure is an HTML output of one piece, with the library from a tag that every renderer keeps."
    names = []
    for p in (quarto[0] / "_proc").rglob("*.ipynb"):
        first, *rest = json.loads(p.read_text())["cells"]
        front = yaml.safe_load("".join(first["source"]).strip().strip("-"))
        assert first["cell_type"] == "raw" and {"title", "output-file"} <= front.keys() <= QUARTO["front matter"], p
        assert all(isinstance(c["source"], list) for c in rest), p                               # it puts lines together, and a string is no list of lines
        assert not re.search(r"[\\/]", front["output-file"]) and not any(c["cell_type"] == "raw" for c in rest)
        names.append((p.parent / front["output-file"]).as_posix())
    assert len(set(names)) == len(names)
    book = json.loads((ROOT / "nbs/viz/01_render.ipynb").read_text())
    drawn = ["".join(o["data"]["text/html"]) for c in book["cells"] for o in c.get("outputs", []) if "text/html" in o.get("data", {})]
    figures = [h for h in drawn if "plotly-graph-div" in h]
    assert figures and all(h.count("https://cdn.plot.ly/") == 1 and 'role="figure" aria-label="' in h for h in figures)

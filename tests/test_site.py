"""The site builds, and every page opens in a browser: no error, no request to the outside, figures live, on a phone too."""
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from browser import DRAWN, SETTLED, chromium, crowded, move_slider, needs_browser, serve, watch

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p.relative_to(ROOT / "nbs") for p in (ROOT / "nbs").rglob("*.ipynb") if not any(x.startswith((".", "_")) for x in p.relative_to(ROOT).parts))
PAGES = [p.with_name(re.sub(r"^\d+[a-z]?_", "", p.stem) + ".html").as_posix() for p in NOTEBOOKS]
pytestmark = pytest.mark.timeout(900)       # the first test waits for the build


@pytest.fixture(scope="module")
def docs(tmp_path_factory):
    "The site, built in a copy of the sources."
    to = tmp_path_factory.mktemp("site")
    skip = shutil.ignore_patterns("__pycache__", "*.pct.py", ".ipynb_checkpoints")
    for d in ("nbs", "moe_lab", ".ci"): shutil.copytree(ROOT / d, to / d, ignore=skip)
    for f in ("settings.ini", "pyproject.toml", "_quarto.yml"): shutil.copy(ROOT / f, to)
    done = subprocess.run([sys.executable, ".ci/site.py"], cwd=to, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (to / "said").write_text(done.stdout)
    return to / "_docs"


@pytest.fixture(scope="module")
def site(docs):
    with serve(docs) as address: yield address


@pytest.fixture(scope="module")
def browser():
    with chromium() as b: yield b


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport=dict(width=1300, height=900))
    yield context.new_page()
    context.close()


def test_builds_without_a_warning(docs):
    assert [line for line in (docs.parent / "said").read_text().splitlines() if line.startswith("warning")] == []


def test_every_notebook_is_a_page(docs):
    assert sorted(p.relative_to(docs).as_posix() for p in docs.rglob("*.html")) == sorted(PAGES)


def test_sidebar_lists_every_page(docs):
    bar = re.search(r'<nav[^>]*id="quarto-sidebar".*?</nav>', (docs / "index.html").read_text(), re.S)[0]
    listed = [unquote(h).removeprefix("./") for h in re.findall(r'href="([^"#]+\.html)"', bar)]
    assert set(listed) == set(PAGES)
    assert listed.index("core/types.html") < listed.index("core/backend.html") < listed.index("routing/gate.html")     # by number and room


def test_links_and_alt_texts(docs):
    ids = {p: set(re.findall(r'\bid="([^"]+)"', p.read_text())) for p in docs.rglob("*.html")}
    bad = []
    for p in ids:
        html = re.sub(r"<script\b.*?</script>", "", p.read_text(), flags=re.S)
        for href in map(unescape, re.findall(r'<a\b[^>]*\bhref="([^"]*)"', html)):
            if re.match(r"[a-z]+:", href) or not href: continue
            file, _, anchor = href.partition("#")
            to = (p.parent / unquote(file)).resolve() if file else p
            if to.is_dir(): to /= "index.html"
            if not to.exists() or (anchor and to in ids and unquote(anchor) not in ids[to]): bad.append(f"{p.relative_to(docs)}: {href}")
        bad += [f"{p.relative_to(docs)}: {tag}" for tag in re.findall(r"<img\b[^>]*>", html) if not re.search(r'alt="[^"]+"', tag)]
    assert not bad


@needs_browser
@pytest.mark.parametrize("name", PAGES)
def test_page(site, page, name):                                                 # B01, B06, B19
    wrong = watch(page)
    page.goto(f"{site}/{name}", wait_until="load")
    page.wait_for_function(f"{DRAWN} && {SETTLED}")
    for figure in page.locator(".plotly-graph-div:has(.slider-container)").all():
        assert move_slider(page, figure), f"the slider of {figure.get_attribute('id')} changes nothing"
    text = page.evaluate("""() => { const m = document.querySelector('main').cloneNode(true);
        m.querySelectorAll('pre, code, script, style').forEach(e => e.remove()); return m.textContent }""")
    assert not re.search(r"\\(frac|sum|text|mathbb|begin)\b|\$\$|\{#(eq|fig|tbl)-|@(eq|fig|tbl)-|Unable to display output", text)
    assert crowded(page) == []
    page.set_viewport_size(dict(width=390, height=800))
    page.wait_for_timeout(300)
    page.wait_for_function(SETTLED)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert crowded(page) == [], "at 390 px"
    assert wrong == []


@needs_browser
def test_dark_search_and_next(browser, site):
    context = browser.new_context(viewport=dict(width=1300, height=900), color_scheme="dark")
    page = context.new_page()
    page.goto(f"{site}/viz/render.html")
    brightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number).reduce((a, b) => a + b)")
    assert brightness < 3 * 64
    page.locator("input[type=search]").first.fill("Squares")
    assert page.locator("a[href*='render.html']:visible").count() > 0
    page.keyboard.press("Escape")
    assert page.locator(".page-navigation a, .nav-page a").count() >= 1
    context.close()

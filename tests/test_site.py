"""The site builds, and every page opens in a browser: no error, no request to the outside, figures live, on a phone too."""
import ast
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
PAGES = [p.with_name(re.sub(r"^\d+[a-z]?_", "", p.stem) + ".html").as_posix() for p in NOTEBOOKS] + ["reference.html"]
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


def test_names_lead_to_what_they_mean(docs):
    "A name that its page makes leads there, a parameter nowhere, and code has no links."
    text = (docs / "placement/arena.html").read_text()
    assert 'href="../hybrid_ep/curves.html#run"' not in text and ">across</code></a>" not in text
    assert [p.relative_to(docs).as_posix() for p in docs.rglob("*.html")
            if any("[`" in c and "](" in c[c.index("[`"):].partition("\n")[0] for c in re.findall(r"<pre.*?</pre>", p.read_text(), re.S))] == []


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
        bad += [f"{p.relative_to(docs)}: {line}" for line in re.findall(r"<p><em>[^\n]*\*</p>", html)]        # a star of a formula ended the italics of a docstring
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
        m.querySelectorAll('pre, code, script, style, annotation').forEach(e => e.remove()); return m.textContent }""")
    assert not re.search(r"\\(frac|sum|text|mathbb|begin)\b|\$\$|\{#(eq|fig|tbl)-|@(eq|fig|tbl)-|Unable to display output", text)
    assert crowded(page) == []
    page.set_viewport_size(dict(width=390, height=800))
    page.wait_for_timeout(300)
    page.wait_for_function(SETTLED)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert crowded(page) == [], "at 390 px"
    assert wrong == []


def test_reference_names_everything_public(docs):
    "Every public function and class, with its signature and a link to the very place."
    html = (docs / "reference.html").read_text()
    listed = {(unescape(href).removeprefix("./"), name): unescape(re.sub("<[^>]*>", "", code))
              for href, name, code in re.findall(r'<li>(?:<p>)?<a href="([^"]+)"[^>]*><code>([^<]*)</code></a> <code>(.*?)</code>', html, re.S)}
    public = {}
    for p in sorted((ROOT / "moe_lab").rglob("*.py")):
        if (page := re.search(r"File to edit: .*?nbs/(\S+)\.ipynb", p.read_text())):
            page = (Path(page[1]).parent / re.sub(r"^\d+[a-z]?_", "", Path(page[1]).name)).as_posix()
            public |= {(f"{page}.html#{n.name.lower()}", n.name): n for n in ast.parse(p.read_text()).body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")}
    assert len(public) > 300 and sorted(public.keys() - listed.keys()) == []
    for key, n in public.items(): assert all(a.arg in listed[key] for a in n.args.args), key


def test_next_leads_through_the_whole_book(docs):
    at, read = docs / "index.html", []
    while True:
        read.append(at.relative_to(docs).as_posix())
        html = at.read_text()
        before, after = (re.search(rf'nav-page-{way}">\s*<a href="([^"]+)"', html) for way in ("previous", "next"))
        if len(read) > 1: assert before and (at.parent / unquote(before[1])).resolve() == (docs / read[-2]).resolve(), f"previous of {read[-1]}"
        if not after: break
        at = (at.parent / unquote(after[1])).resolve()
        assert len(read) < len(PAGES), "a circle"
    assert sorted(read) == sorted(PAGES)


def test_figures_say_what_they_show(docs):
    for p in docs.rglob("*.html"):
        ids = re.findall(r'<[^>]*?\sid="([^"]+)"', re.sub(r"<script\b.*?</script>|<link\b[^>]*>", "", p.read_text(), flags=re.S))    # Quarto's style sheets share theirs
        assert len(ids) == len(set(ids)), f"{p}: {[i for i in set(ids) if ids.count(i) > 1]} twice: the second figure or heading of a name stays empty"
        figures = re.findall(r'<div role="figure" aria-label="([^"]*)">', html := p.read_text())
        assert len(figures) == html.count('class="plotly-graph-div"') and all(figures), p


TEN = "sentence capacity topology two-dh switch pipeline placement tiles hybrid cluster".split()


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ten_live_pictures_on_a_page_without_kernel_and_network(browser, site, width, scheme):
    context = browser.new_context(viewport=dict(width=width, height=900), color_scheme=scheme, has_touch=width < 500)
    page = context.new_page()
    wrong = watch(page)
    page.goto(f"{site}/live.html")
    page.wait_for_function(f"{DRAWN} && {SETTLED}")
    context.set_offline(True)
    for name in TEN: assert move_slider(page, page.locator(f"#live-{name}")), f"the slider of {name} changes nothing"
    assert page.locator(".plotly-graph-div:has(.slider-container)").count() == len(TEN)
    assert crowded(page) == [] and wrong == []
    context.close()


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_follows_the_readers_scheme(browser, site, scheme):
    "Text of the page and words of its figures stand out from what lies behind them."
    context = browser.new_context(viewport=dict(width=1300, height=900), color_scheme=scheme)
    page = context.new_page()
    page.goto(f"{site}/viz/render.html")
    page.wait_for_function(DRAWN)
    light = lambda css: sum(w * (c / 12.92 if c <= .04 else ((c + .055) / 1.055) ** 2.4) for w, c in zip((.2126, .7152, .0722), (int(v) / 255 for v in re.findall(r"\d+", css)[:3])))
    behind, text, words = (light(page.evaluate(f"getComputedStyle({e}).{what}")) for e, what in (
        ("document.body", "backgroundColor"), ("document.querySelector('main p')", "color"), ("document.querySelector('.gtitle')", "fill")))
    contrast = lambda a, b: (max(a, b) + .05) / (min(a, b) + .05)
    assert behind < .1 if scheme == "dark" else behind > .9
    assert contrast(text, behind) > 7 and contrast(words, behind) > 3
    context.close()


@needs_browser
def test_search_finds_a_page_by_its_words(page, site):
    page.goto(f"{site}/index.html")
    page.locator("input[type=search]").first.fill("Okabe and Ito")         # only the page on figures names them
    result = page.locator("[class*=search-results] a:visible, .aa-Panel a:visible").first
    result.wait_for()
    assert "viz/render.html" in result.get_attribute("href")
    result.click()
    page.wait_for_url("**/viz/render.html*")

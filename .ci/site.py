"""Builds the site in _docs/ (`make docs`): with Quarto where it is installed, elsewhere with smalldocs.

Both read the notebooks as nbdev processes them (_proc/) and the same _quarto.yml. What neither does is done to the
finished pages: nothing is fetched from elsewhere, links between our pages are relative, reading time is shown.
"""
import ast, json, os, re, shutil, subprocess, sys, tempfile
from html import unescape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import yaml
from nbdev import showdoc
from nbdev.config import get_config
from nbdev.doclinks import NbdevLookup
from nbdev.processors import FilterDefaults, add_fold, add_links, exec_show_docs, mv_exports
from nbdev.process import Processor
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve_drv import exec_nb

NBS, PROC, DOCS = ROOT / "nbs", ROOT / "_proc", ROOT / "_docs"

# The rooms in reading order. Inside a room notebooks follow their numbers; a folder that is not listed comes last.
ROOMS = dict(core="What flows", cluster="Clusters and ranks", routing="Routing", experts="Experts on one device",
             comm="Between devices", models="Models and training", sim="The simulator", placement="Where experts live",
             hybrid_ep="Across data centres", inference="Serving", bench="Benchmarks", viz="Pictures")
FIRST = ("start", "tour", "live", "glossary")    # top-level notebooks that are read before the rooms; the others come after


def sidebar():
    "The contents of the sidebar: home, what is read first, the rooms, then the tools (the other top-level notebooks) and the reference."
    books = sorted(p.relative_to(NBS) for p in NBS.rglob("*.ipynb") if not any(x.startswith(("_", ".")) for x in p.relative_to(NBS).parts))
    top = [p.name for p in books if len(p.parts) == 1 and p.name != "index.ipynb"]
    named = {re.sub(r"^\d+[a-z]?_", "", n).removesuffix(".ipynb"): n for n in top}
    first = [named[n] for n in FIRST if n in named]
    late = [n for n in top if n not in first]
    rooms = {}
    for p in books:
        if len(p.parts) > 1: rooms.setdefault(p.parts[0], []).append(p.as_posix())
    order = [r for r in ROOMS if r in rooms] + [r for r in rooms if r not in ROOMS]
    sections = [dict(section=ROOMS.get(r, r.replace("_", " ").capitalize()), contents=rooms[r]) for r in order]
    return ["index.ipynb", *first, *sections, dict(section="Tools", contents=[*late, "reference.ipynb"])]


def signature(node, module):
    "A function's or class's parameters as one line of code: those of `__init__`, its own or of a class of the same module, or the fields of a dataclass."
    if isinstance(node, ast.FunctionDef): return f"({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")
    for s in node.body:
        if isinstance(s, ast.FunctionDef) and s.name == "__init__": return f"({ast.unparse(s.args).removeprefix('self').removeprefix(', ')})"
    fields = [ast.unparse(s) for s in node.body if isinstance(s, ast.AnnAssign)]
    bases = [n for b in node.bases for n in module.body if isinstance(n, ast.ClassDef) and n.name == ast.unparse(b)]
    return f"({', '.join(fields)})" if fields else next((s for b in bases if (s := signature(b, module))), "")


def module_of(book):
    "The module that a notebook makes, None for a page alone."
    m = re.search(r"#\| ?default_exp (\S+?)[\\\"\s]", book.read_text())
    return m and m[1]


def reference():
    "A notebook of all public functions and classes: signature, first line of what they say, link to the page that makes them."
    text = ["---\ntitle: reference\ndescription: Every public function and class, with its signature, on the way to the page that makes it\noutput-file: reference.html\n---"]
    modules = {m: p.relative_to(NBS) for p in sorted(NBS.rglob("*.ipynb")) if (m := module_of(p))}
    rooms, last = [*ROOMS], None
    def place(m): return (rooms.index(r) if (r := m[0].partition(".")[0]) in rooms else len(rooms) + ("." not in m[0]), m[1].as_posix())
    for name, book in sorted(modules.items(), key=place):
        tree = ast.parse((ROOT / "moe_lab" / (name.replace(".", "/") + ".py")).read_text())
        public = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_")]
        if not public: continue
        room = name.partition(".")[0] if "." in name else "tools"
        if room != last: text.append(f"## {ROOMS.get(room, room.capitalize())}")
        last, lines = room, [f"**[{name}]({book.as_posix()})**: {plain(ast.get_docstring(tree) or '')}", ""]
        for n in public:
            says = plain((ast.get_docstring(n) or "").partition("\n")[0])
            lines.append(f"- [`{n.name}`]({book.as_posix()}#{n.name.lower()}) `{signature(n, tree)}`" + (f": {says}" if says else ""))
        text.append("\n".join(lines).replace(" ``", ""))
    cells = [dict(cell_type="raw" if i == 0 else "markdown", metadata={}, source=t.splitlines(True), id=f"reference-{i}") for i, t in enumerate(text)]
    return dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5)


def plain(text):
    "A docstring as words of Markdown: outside of code, no sign means anything."
    return "".join(part if i % 2 else re.sub(r"([\\\[\]*_<>$#|])", r"\\\1", part) for i, part in enumerate(re.split(r"(`+[^`]*`+)", text)))


class Docs(showdoc.BasicMarkdownRenderer):
    "nbdev's, with a docstring as words: `weight * x` outside of code is a product, not the end of the emphasis around it."
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.docs = plain(self.docs or "")


class show_source(Processor):
    "The code of functions and classes is what a reader comes for: `export` shows it as nbdev's `exports` does."
    def begin(self):
        for c in self.nb.cells:
            if "export" in c.directives_ and any(isinstance(s, (ast.FunctionDef, ast.ClassDef)) for s in c.parsed_() or ()):
                c.directives_["exports"] = c.directives_.pop("export")


class show_docs(exec_show_docs):
    """nbdev's, with the names of the finished module: at a build no cell runs but imports.
    nbdev runs every cell that holds an import anywhere, without the cells before it."""
    def begin(self):
        super().begin()
        showdoc.BasicMarkdownRenderer = Docs
        for c in self.nb.cells:
            if "default_exp" in c.directives_: self.k.run_cell(f"from moe_lab.{c.directives_['default_exp'][0]} import *")

    def __call__(self, cell):
        tree = cell.parsed_() if cell.cell_type == "code" and "eval:" not in cell.directives_ else None
        if tree and (re.search(r"^show_doc\(", cell.source, re.M) or all(isinstance(s, (ast.Import, ast.ImportFrom)) for s in tree)): self.k.cell(cell)
        if self.k.exc: raise RuntimeError(f"in the cell\n{cell.source}") from self.k.exc


class source_last(Processor):
    "What a cell exports, in its order, and then the cell; nbdev gives the reverse order, with the cell after the first."
    def begin(self):
        cells = self.nb.cells
        for i in reversed(range(len(cells))):
            if "exports" not in cells[i].directives_: continue
            end = i + 1
            while end < len(cells) and getattr(cells[end], "has_sd", False): end += 1
            cells[i:end] = [*reversed(cells[i + 1:end]), cells[i]]


class links(Processor):
    "nbdev's links of names to their pages, but what this page makes is meant before others, a parameter is none of them, and code has no links."
    def begin(self):
        self.find = NbdevLookup()
        own = f"moe_lab.{module_of(Path(self.nb.path_))}."
        self.pages = self.find.syms | {name.removeprefix(own): page for name, page in self.find.syms.items() if name.startswith(own)}

    def linked(self, text, without=()):
        self.find.syms = {name: page for name, page in self.pages.items() if name not in without}
        return self.find.linkify(text)

    def cell(self, cell):
        if cell.cell_type == "markdown": cell.source = self.linked(cell.source)
        for o in cell.get("outputs", []):
            if "text/markdown" not in (data := o.get("data", {})): continue
            text = "".join(data["text/markdown"])
            code = re.search(r"^```.*?^```", text, re.M | re.S)
            data["text/markdown"] = self.linked(text, set(re.findall(r"[(,\n]\s*\**(\w+)", re.sub(r"#.*", "", code[0]))) if code else ())


class fold(Processor):
    "Source stands open where a page teaches by it, and behind a click where readers come for figures and tables."
    def begin(self):
        room = Path(self.nb.path_).relative_to(NBS).parent.name
        self.how = "true" if room in ("", "bench", "ledger", "viz") else "show"

    def cell(self, cell):
        if cell.cell_type == "code" and "exports" in cell.directives_: cell.source = f'#| code-fold: {self.how}\n#| code-summary: "Exported source"\n{cell.source}'


class Filter(FilterDefaults):
    "nbdev's processing of a notebook for readers."
    def base_procs(self):
        ours = {exec_show_docs: show_docs, add_fold: fold, add_links: links, mv_exports: source_last}
        return [show_source, *(ours.get(p, p) for p in super().base_procs())]


def process():
    "The notebooks as readers see them, and all that lies beside them, in _proc/."
    refresh_quarto_yml()
    (NBS / "sidebar.yml").write_text(yaml.safe_dump(dict(website=dict(sidebar=dict(contents=sidebar()))), sort_keys=False))
    shutil.rmtree(PROC, ignore_errors=True)
    for p in sorted(NBS.rglob("*")):
        part = p.relative_to(NBS)
        hidden = any(x.startswith((".", "_")) for x in part.parts) and part.name != "_quarto.yml"
        if p.is_dir() or hidden or p.name.endswith(".pct.py"): continue
        (PROC / part).parent.mkdir(parents=True, exist_ok=True)
        if p.suffix == ".ipynb": exec_nb(p, PROC / part, Filter)
        else: shutil.copy(p, PROC / part)
    (PROC / "reference.ipynb").write_text(json.dumps(reference()))


def output_name(nb):
    "The page's file name that nbdev announces in the front matter: the number is dropped."
    first = nb["cells"][0]
    front = yaml.safe_load("".join(first["source"]).strip().strip("-")) if first["cell_type"] == "raw" else {}
    return (front or {}).get("output-file")


def renamed(value, names):
    "A part of the configuration with every notebook under its page's name."
    if isinstance(value, dict): return {k: renamed(v, names) for k, v in value.items()}
    if isinstance(value, list): return [renamed(v, names) for v in value]
    return names.get(value, value) if isinstance(value, str) else value


def smalldocs(work):
    "Render _proc/ in the folder `work`, where each notebook has the name of its page."
    from smalldocs.config import merge
    from smalldocs.site import build
    files = [p.relative_to(PROC) for p in PROC.rglob("*") if p.is_file() and p.suffix not in (".yml", ".py")]
    books = {p: json.loads((PROC / p).read_text()) for p in files if p.suffix == ".ipynb"}
    names = {p.as_posix(): p.with_name(output_name(nb) or p.name).with_suffix(".ipynb").as_posix() for p, nb in books.items()}
    for p in files:
        to = work / names.get(p.as_posix(), p)
        to.parent.mkdir(parents=True, exist_ok=True)
        if p not in books: shutil.copy(PROC / p, to); continue
        def link(m, folder=p.parent):
            target = os.path.normpath(folder / m[1])
            return f"]({os.path.relpath(names.get(target, target), folder)}"
        for c in books[p]["cells"]:
            if c["cell_type"] == "markdown": c["source"] = re.sub(r"\]\(([^()#\s:]+\.ipynb)", link, "".join(c["source"]))
        to.write_text(json.dumps(books[p]))
    config = {}
    for f in (ROOT / "_quarto.yml", NBS / "nbdev.yml", NBS / "sidebar.yml"): config = merge(config, yaml.safe_load(f.read_text()))
    config["project"] = dict(type="website", render=["**/*.ipynb"]) | {"output-dir": "_docs"}
    del config["execute"]                                                   # smalldocs runs no code, and follows the reader's scheme
    for key in ("html-math-method", "respect-user-color-scheme", "grid"): del config["format"]["html"][key]     # `mathml` below; styles.css
    (work / "_quarto.yml").write_text(yaml.safe_dump(renamed(config, names)))
    site = build(work, quiet=True)
    for w in site.warnings:
        if "output-file" not in w: print(f"warning: {w}")
    shutil.rmtree(DOCS, ignore_errors=True)
    shutil.move(work / "_docs", DOCS)


def mathml(m):
    "The MathML of TeX that smalldocs left for a script."
    from latex2mathml.converter import convert
    tex = unescape(m[2]).strip()[2:-2].replace("{aligned}", "{split}")
    return convert(tex, display="block" if m[1] == "display" else "inline")


def reading_time(html):
    "Minutes to read a page: 200 words of prose a minute, 15 lines of code."
    body = html[html.find("<main"):html.find("</main")]
    body = re.sub(r"<(script|style|svg)\b.*?</\1>", " ", body, flags=re.S)
    code = "\n".join(re.findall(r"<pre\b.*?</pre>", body, flags=re.S))
    words = len(re.sub(r"<[^>]*>", " ", re.sub(r"<pre\b.*?</pre>", " ", body, flags=re.S)).split())
    return max(1, round(words / 200 + code.count("\n") / 15))


def finish():
    "What both renderers leave to do, on every page."
    from plotly.offline import get_plotlyjs
    cfg = get_config()
    home = f"{cfg.doc_host}{cfg.doc_baseurl}".rstrip("/") + "/"
    libs = DOCS / "site_libs"
    (libs / "plotly.min.js").write_text(get_plotlyjs())
    shutil.copy(NBS / "figures.js", libs)
    for css in libs.rglob("*.css"): css.write_text(re.sub(r"""@import\s*(url\([^)]*\)|"[^"]*"|'[^']*')[^;]*;""", "", css.read_text()))
    for page in DOCS.rglob("*.html"):
        html, up = page.read_text(), "../" * (len(page.relative_to(DOCS).parts) - 1)
        # smalldocs asks for KaTeX, Quarto for require.js and jQuery (beside every output in HTML): no page of ours uses them
        html = re.sub(r'<(?:script|link)[^>]*(?:cdn\.jsdelivr\.net|cdnjs\.cloudflare\.com)/[^>]*>(?:</script>)?', "", html)
        html = re.sub(r"<script[^>]*>define\('jquery'.*?</script>", "", html)
        html = re.sub(r'<span class="math (inline|display)">(.*?)</span>', mathml, html, flags=re.S)
        head, *rest = re.split(r'<script[^>]*src="https://cdn\.plot\.ly/[^>]*></script>', html)
        if rest: html = f'{head}<script src="{up}site_libs/plotly.min.js"></script><script src="{up}site_libs/figures.js"></script>{"".join(rest)}'
        html = re.sub(r"<p>\s*<a[^>]*>source</a>\s*</p>", "", html)      # the source is on the page itself
        html = html.replace(home, up or "./")
        html = re.sub(r'(<h1 class="title">.*?</h1>)', lambda m: f'{m[1]}<p class="reading-time">{reading_time(html)} min</p>', html, count=1, flags=re.S)
        page.write_text(html)
    # A name in backticks may be a method, which has no heading of its own: then the page is as near as a link gets.
    ids = {p: set(re.findall(r'\bid="([^"]+)"', p.read_text())) for p in DOCS.rglob("*.html")}
    for page in ids:
        def near(m): return m[0] if m[2] in ids.get((page.parent / m[1]).resolve(), {m[2]}) else f'href="{m[1]}"'
        page.write_text(re.sub(r'href="([^"#:]+\.html)#([^"]+)"', near, page.read_text()))


if __name__ == "__main__":
    os.chdir(ROOT)
    process()
    if shutil.which("quarto"):
        subprocess.run(["quarto", "render", "--no-cache"], cwd=PROC, check=True)
        shutil.rmtree(DOCS, ignore_errors=True)
        shutil.move(PROC / DOCS.name, DOCS)
    else:
        with tempfile.TemporaryDirectory() as work: smalldocs(Path(work))
    finish()
    print(f"{len(list(DOCS.rglob('*.html')))} pages in {DOCS.relative_to(ROOT)}/")

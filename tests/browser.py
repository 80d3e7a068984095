"""A page in headless Chromium, with everything noted that must not happen there."""
import functools
import shutil
import threading
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync".split()


@contextmanager
def chromium():
    "A browser, closed at the end."
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try: yield browser
        finally: browser.close()


@contextmanager
def serve(folder):
    "The address of a server for the files of `folder`, on this machine only."
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args): pass
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def watch(page):
    "A list that fills with what goes wrong on `page`: script errors, failed requests, requests to anywhere else."
    wrong = []
    page.on("pageerror", lambda e: wrong.append(f"error: {e}"))
    page.on("console", lambda m: wrong.append(f"console: {m.text}") if m.type == "error" else None)
    page.on("requestfailed", lambda r: wrong.append(f"failed: {r.url}"))
    page.on("response", lambda r: wrong.append(f"{r.status}: {r.url}") if r.status >= 400 else None)
    page.on("request", lambda r: wrong.append(f"outside: {r.url}") if not r.url.startswith(("http://127.0.0.1:", "data:", "blob:")) else None)
    return wrong


DRAWN = "[...document.querySelectorAll('.plotly-graph-div')].every(g => g.querySelector('.main-svg'))"


# Laid out for the width that the window has now (nbs/figures.js).
SETTLED = "[...document.querySelectorAll('.plotly-graph-div')].every(g => g.settled === g.clientWidth)"

# Words of a figure that lie on others or stick out of it: in titles, keys, labels of axes and of the slider.
_CROWDED = """g => {
    const frame = g.getBoundingClientRect(), found = [], spin = t => /rotate\\((?!0|-?90,)/.test(t.getAttribute('transform') ?? '')
    const words = [...g.querySelectorAll('.gtitle, [class$=title], .legendtext, .slider-label, .xaxislayer-above text, .yaxislayer-above text, .annotation-text, .cbaxis text')]
        .filter(t => t.tagName === 'text' && t.textContent.trim() && !spin(t)).map(t => [t.textContent, t.getBoundingClientRect()]).filter(([_, b]) => b.width)
    words.forEach(([a, p], i) => {
        if (p.left < frame.left - 2 || p.right > frame.right + 2 || p.top < frame.top - 2 || p.bottom > frame.bottom + 2) found.push(`"${a}" is cut`)
        for (const [b, q] of words.slice(i + 1))
            if (Math.min(p.right, q.right) - Math.max(p.left, q.left) > 3 && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 4) found.push(`"${a}" lies on "${b}"`)
    })
    return found }"""


def crowded(page):
    "What nobody can read in the figures of `page` at its present width."
    return [f"{g.get_attribute('id')}: {what}" for g in page.locator(".plotly-graph-div").all() for what in g.evaluate(_CROWDED)]


def move_slider(page, figure):
    "Drag the slider of a Plotly figure from one end to the other, as a hand would; did the picture change?"
    state = lambda: figure.evaluate("g => JSON.stringify(g.data)")
    rail = figure.locator(".slider-rail-touch-rect").first
    rail.scroll_into_view_if_needed()
    box = rail.bounding_box()
    y, seen = box["y"] + box["height"] / 2, set()
    for x in (0.01, 0.5, 0.99):
        page.mouse.click(box["x"] + x * box["width"], y)
        page.wait_for_timeout(150)
        seen.add(state())
    return len(seen) > 1

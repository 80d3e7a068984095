"""A notebook as a person works with it: a real JupyterLab, a running kernel, a slider that is dragged, a figure that changes."""
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from browser import chromium, needs_browser

ROOT = Path(__file__).resolve().parent.parent
LIVE = sorted(p.relative_to(ROOT / "nbs").as_posix() for p in (ROOT / "nbs/viz").glob("*.ipynb") if re.search(r'"live\(', p.read_text()))
pytestmark = [needs_browser, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    "The address of a JupyterLab on a copy of the notebooks."
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "nbs", home / "nbs", ignore=shutil.ignore_patterns("*.pct.py", ".ipynb_checkpoints"))
    env = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(home), "JUPYTER_CONFIG_DIR": str(home / "config")}
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--port=0", "--ip=127.0.0.1",
               "--IdentityProvider.token=", "--ServerApp.password=", "--LabApp.news_url="]
    log = home / "log"
    with log.open("w") as f: server = subprocess.Popen(command, cwd=home / "nbs", env=env, stderr=f, stdout=f)
    try:
        for _ in range(240):
            if started := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()): break
            time.sleep(0.25)
        yield started[0]
    finally: server.terminate(); server.wait(20)


@pytest.mark.parametrize("name", LIVE)
def test_live_slider_redraws_the_figure(lab, name):                              # B14
    with chromium() as browser:
        page = browser.new_page(viewport=dict(width=1400, height=1000))
        page.goto(f"{lab}/lab/tree/{name}", wait_until="domcontentloaded")
        page.locator(".jp-Notebook").wait_for(timeout=90_000)
        # Untrusted and before anything runs, the stored figures are drawn from their JSON.
        page.locator(".js-plotly-plot .main-svg").first.wait_for(timeout=60_000)
        page.get_by_text("Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        live = page.locator(".jp-OutputArea-output:has(.widget-hslider):has(.js-plotly-plot)").first
        live.wait_for(timeout=120_000)
        live.scroll_into_view_if_needed()
        picture = lambda: live.locator(".js-plotly-plot").first.evaluate("g => JSON.stringify([g.data, g.layout.title, g.layout.annotations])")
        before = picture()
        live.locator(".noUi-handle").first.focus()
        page.keyboard.press("ArrowRight")
        for _ in range(40):
            page.wait_for_timeout(250)
            if live.locator(".js-plotly-plot").count() and picture() != before: break
        else: pytest.fail("the slider moved and the figure stayed the same")


def test_there_are_live_pictures(): assert LIVE

"""A notebook as a person works with it: a real JupyterLab, a running kernel, each control of each live picture moved, figures that change."""
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
LIVE = sorted(p.relative_to(ROOT / "nbs").as_posix() for p in (ROOT / "nbs").rglob("*.ipynb") if re.search(r'"live\(', p.read_text()))
pytestmark = [needs_browser, pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    "The address of a JupyterLab on a copy of the notebooks."
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "nbs", home / "nbs", ignore=shutil.ignore_patterns("*.pct.py", ".ipynb_checkpoints"))
    settings = home / "settings/@jupyterlab/notebook-extension/tracker.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"windowingMode": "none"}')        # or Lab takes cells out of the page that are out of sight
    env = os.environ | {"JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "PYTHONPATH": str(ROOT), "HOME": str(home), "JUPYTER_CONFIG_DIR": str(home / "config")}
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


def turn(page, control):
    "Move one control as a hand would: a slider by a step, a list to its next choice, a text to another one."
    if control.locator(".noUi-handle").count(): control.locator(".noUi-handle").first.focus(); page.keyboard.press("ArrowRight"); return "slider"
    if (select := control.locator("select")).count():
        select.select_option(index=select.evaluate("s => (s.selectedIndex + 1) % s.options.length"))
        return "list"
    control.locator("input").fill("x = y[0]"); page.keyboard.press("Enter")
    return "text"


@pytest.mark.parametrize("name", LIVE)
def test_every_live_picture_answers(lab, name):                                  # B14
    with chromium() as browser:
        page = browser.new_page(viewport=dict(width=1400, height=1000))
        page.goto(f"{lab}/lab/tree/{name}?reset", wait_until="domcontentloaded")
        page.locator(".jp-Notebook").wait_for(timeout=90_000)
        # Untrusted and before anything runs, the stored figures are drawn from their JSON.
        page.locator(".js-plotly-plot .main-svg").first.wait_for(timeout=60_000)
        page.get_by_text("Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        boxes = page.locator(".widget-vbox:has(.js-plotly-plot)")
        boxes.nth(len(re.findall(r'"live\(', (ROOT / "nbs" / name).read_text())) - 1).wait_for(timeout=200_000)      # the last one
        for i, box in enumerate(boxes.all()):
            box.scroll_into_view_if_needed()
            controls = box.locator("> .widget-inline-hbox").all()
            plot, changed = box.locator(".js-plotly-plot"), []
            picture = lambda: plot.first.evaluate("g => JSON.stringify([g.data, g.layout.title])") if plot.count() else box.locator(".jp-OutputArea").inner_text()
            for control in controls:
                before, kind = picture(), turn(page, control)
                for _ in range(20):
                    page.wait_for_timeout(200)
                    if picture() != before: changed.append(kind); break
            print(f"{name}, picture {i + 1}: {len(changed)} of {len(controls)} controls changed it: {changed}")
            assert "slider" in changed or ("text" in changed and len(controls) == 1), f"{name}, picture {i + 1}: a slider moved and the figure stayed the same"


def test_there_are_live_pictures(): assert "live.ipynb" in LIVE

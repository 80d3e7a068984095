"""Quarto's pre-render hook, so that `quarto render` at the top of the repository builds the whole site (`.ci/site.py`).

Rendering the processed notebooks runs the hook again, in a folder without settings.ini: there it does nothing.
"""
import os, subprocess, sys
from pathlib import Path

if __name__ == "__main__":
    top = Path(os.environ.get("QUARTO_PROJECT_DIR", "."))
    if (top / "settings.ini").exists(): subprocess.run([sys.executable, top / ".ci" / "site.py"], check=True)

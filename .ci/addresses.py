"""Writes the addresses of the repository and its site into settings.ini, from the git remote `origin`.

    python .ci/addresses.py     # then `nbdev_export`, and commit

settings.ini is the only place that holds them; without a remote it keeps a placeholder and nothing happens.
"""
import re, subprocess
from pathlib import Path

SETTINGS = Path(__file__).resolve().parent.parent / "settings.ini"


def addresses(remote):
    "The settings that follow from a remote's address: https, ssh or git@host:."
    m = re.match(r"(?:\w+://(?:[^@/]*@)?|[^@/]*@)([^:/]+)(?::\d+)?[:/](.+?)/([^/]+?)(?:\.git)?/?$", remote)
    if not m: raise ValueError(f"remote must be an address such as https://host/user/repository, got {remote!r}")
    host, user, repo = m.groups()
    new = dict(user=user, repo=repo, doc_baseurl=f"/{repo}")
    if host == "github.com": return new | dict(git_url="https://github.com/%(user)s/%(repo)s", doc_host="https://%(user)s.github.io")
    return new | dict(git_url=f"https://{host}/%(user)s/%(repo)s")


if __name__ == "__main__":
    found = subprocess.run(["git", "remote", "get-url", "origin"], cwd=SETTINGS.parent, capture_output=True, text=True)
    text = SETTINGS.read_text()
    for key, value in addresses(found.stdout.strip()).items() if found.returncode == 0 else ():
        text = re.sub(rf"^{key} = .*$", lambda _: f"{key} = {value}", text, flags=re.M)
    SETTINGS.write_text(text)

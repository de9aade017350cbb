"""Gather the pages of the documentation and build them as a site: python docs/site.py [FOLDER].

The site is FOLDER/site, by default build/site. Two builds at once need two folders.

What readers of the repository find at its root, in docs/, in examples/ and in benchmarks/results/
stands side by side in the site, so links between them are turned accordingly; files that they name
go along.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOVED = {
    "docs/start.md": "index.md",
    "benchmarks/results/README.md": "measurements.md",
    "benchmarks/results/claims.md": "claims.md",
    "README.md": "about.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples/index.md",
}
"""Pages that have another name in the site; those of docs/ are at its top, all else stays."""

LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?\)")


def place(path: Path) -> Path:
    """Where a file of the repository is in the site."""
    name = path.relative_to(ROOT).as_posix()
    return Path(MOVED.get(name, name.removeprefix("docs/")))


def turned(page: Path) -> tuple[str, set[Path]]:
    """The text of a page with links as the site has them, and the files that it names."""
    named = set()

    def link(match: re.Match[str]) -> str:
        begin, target, anchor = match.groups()
        if "://" in target:
            return match[0]
        file = (page.parent / target).resolve()
        named.add(file)
        here = place(page).parent
        there = Path(*[".."] * len(here.parts), place(file)) if here.parts else place(file)
        return f"{begin}{there.as_posix()}{anchor or ''})"

    return LINK.sub(link, page.read_text("utf-8")), named


OPTIONS = re.compile(r"^::: (outpace\.api\.\w+)\.(\w*Options)$", re.MULTILINE)
"""Dataclass in whose place a page lists its options."""


def listed_options(match: re.Match[str]) -> str:
    """The options that a dataclass declares, as Markdown."""
    module, kind = match.groups()
    code = f"import {module} as m; from outpace.api.options import option_texts; "
    code += f"[print(f'- `{{name}}`: {{text}}') for name, text in option_texts(m.{kind}).items()]"
    return f"`{kind}`:\n\n{printed(code)}"


def printed(code: str) -> str:
    run = [sys.executable, "-c", code]
    return subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def measured_figures() -> str:
    """All measured figures of the papers as Markdown, from `benchmarks/results`."""
    code = "from outpace.lab.reproduce.page import page; import pathlib; "
    code += "print(page(pathlib.Path('benchmarks/results')))"
    _, _, sections = printed(code).partition("\n\n")
    return "\n" + sections


def gather_pages(folder: Path) -> None:
    """Write all pages, and the files that they name, into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = {*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in MOVED)}
    files = {ROOT / "docs" / "extra.css"}
    for page in sorted(pages):
        text, named = turned(page)
        text = OPTIONS.sub(listed_options, text)
        text += measured_figures() if page.name == "reproduced.md" else ""
        files |= {file for file in named - pages if file.is_file()}
        (folder / place(page)).parent.mkdir(parents=True, exist_ok=True)
        (folder / place(page)).write_text(text, "utf-8")
    for file in files:
        (folder / place(file)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / place(file))


def build_site(folder: Path) -> int:
    """Build the site in a folder, strictly; returns the exit status of the build."""
    gather_pages(folder / "pages")
    shutil.rmtree(folder / "site", ignore_errors=True)
    shutil.copy(ROOT / "zensical.toml", folder)
    build = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run([*build, "-f", folder / "zensical.toml"]).returncode


if __name__ == "__main__":
    sys.exit(build_site(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build").resolve()))

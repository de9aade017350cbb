"""The documentation as a site: it builds strictly, its links hold, and it fetches nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from shown import ROOT

pytestmark = pytest.mark.nightly


class Page(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := given.get(key))}
        if tag == "a" and (href := given.get("href")):
            self.links.append(href)
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loads.append(given.get("href") or "")
        elif source := given.get("src"):
            self.loads.append(source)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built in a folder that no other process builds in."""
    folder = tmp_path_factory.mktemp("build")
    built = subprocess.run(
        [sys.executable, ROOT / "docs" / "site.py", folder],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def site(folder: Path) -> dict[Path, Page]:
    """Its pages."""
    return {path: Page(path) for path in folder.rglob("*.html")}


def test_every_page_is_there(site: dict[Path, Page]) -> None:
    names = {path.stem for path in site}
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"start"}
    assert pages | {"index", "about", "contributing", "changelog"} <= names
    start = next(page for path, page in site.items() if path.stem == "index")
    linked = {Path(urlsplit(link).path).stem for link in start.links}
    assert pages <= linked


def test_links_hold(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        for link in (*page.links, *page.loads):
            parts = urlsplit(link)
            if parts.scheme or path.stem == "404" or link.startswith("#__"):
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            assert file.is_file(), (path.name, link)
            if parts.fragment and file in site:
                assert unquote(parts.fragment) in site[file].anchors, (path.name, link)


def test_nothing_is_fetched(folder: Path, site: dict[Path, Page]) -> None:
    for page in site.values():
        assert not [load for load in page.loads if urlsplit(load).netloc]
    for path in site:
        assert not re.findall(r"https?://[^\s\"']+\.m?js\b|unpkg\.com", path.read_text("utf-8"))
    for path in folder.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", path.read_text("utf-8"))


def test_the_reference_has_the_docstrings(site: dict[Path, Page]) -> None:
    reference = next(page for path, page in site.items() if path.stem == "api")
    for name in ("LLM.generate", "AsyncLLM.stream", "methods.APD", "decoding.Forward"):
        assert f"outpace.{name}" in reference.anchors

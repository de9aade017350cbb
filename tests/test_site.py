"""The site of the documentation: it builds strictly, its links hold, and it fetches nothing.

In a browser, nothing is cut and all is legible, narrow and wide, light and dark.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import pytest

from shown import ROOT, contrast

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as BrowserPage

pytestmark = pytest.mark.nightly

CUT = """() => [...document.querySelectorAll("html, article img, article .md-typeset__table")]
    .filter(each => each.tagName === "HTML"
        ? each.scrollWidth > innerWidth
        : each.getBoundingClientRect().right > innerWidth)
    .map(each => each.outerHTML.slice(0, 80))"""
"""What reaches beyond the window."""

TEXTS = "article :is(h1, h2, p, li, td, th, a:not(.headerlink), code, code span)"
COLOURS = """texts => [...document.querySelectorAll(texts)]
    .filter(each => each.innerText?.trim() && each.getClientRects().length)
    .map(each => {
        const grounds = [];
        for (let at = each; at; at = at.parentElement)
            grounds.push(getComputedStyle(at).backgroundColor);
        return [getComputedStyle(each).color, ...grounds, "rgb(255, 255, 255)"];
    })"""
"""Colours of texts, each with the grounds that lie under one another."""


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


@pytest.fixture(params=["index", "about", "gallery", "chat"])
def name(request: pytest.FixtureRequest) -> str:
    """Pages that somebody new sees."""
    return request.param


@pytest.fixture(params=[(375, "light"), (375, "dark"), (1440, "light"), (1440, "dark")])
def page(
    browser: Browser, folder: Path, name: str, request: pytest.FixtureRequest
) -> Iterator[BrowserPage]:
    """One of them, on a telephone or a wide screen, by day or by night."""
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto((folder / f"{name}.html").as_uri())
    yield page
    page.close()


def test_nothing_is_cut(page: BrowserPage, name: str) -> None:
    cut = page.evaluate(CUT)
    assert not cut or (name == "about" and all("md-typeset__table" in each for each in cut))


def test_all_is_legible(page: BrowserPage) -> None:
    colours = {tuple(each) for each in page.evaluate(COLOURS, TEXTS)}
    assert len(colours) > 3
    assert not [each for each in colours if contrast(*seen(each)) < 4.5]


def seen(colours: tuple[str, ...]) -> tuple[list[float], list[float]]:
    """A text's colour and its ground, each mixed with what shines through."""
    ground = [0.0, 0.0, 0.0]
    for colour in reversed(colours[1:]):
        ground = mixed(colour, ground)
    return mixed(colours[0], ground), ground


def mixed(colour: str, ground: list[float]) -> list[float]:
    assert colour.startswith("rgb"), colour
    *parts, share = [*map(float, re.findall(r"[\d.]+", colour)), 1.0][:4]
    return [share * part / 255 + (1 - share) * g for part, g in zip(parts, ground, strict=True)]

"""The site in a browser: nothing is cut and all is legible, narrow and wide, light and dark."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from shown import ROOT, contrast

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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its pages, built in a folder that no other process builds in."""
    folder = tmp_path_factory.mktemp("build")
    subprocess.run([sys.executable, ROOT / "docs" / "site.py", folder], check=True, timeout=300)
    return folder / "site"


@pytest.fixture(params=["index", "about", "gallery", "chat"])
def name(request: pytest.FixtureRequest) -> str:
    """Pages that somebody new sees."""
    return request.param


@pytest.fixture(params=[(375, "light"), (375, "dark"), (1440, "light"), (1440, "dark")])
def page(browser: Browser, site: Path, name: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    """One of them, on a telephone or a wide screen, by day or by night."""
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto((site / f"{name}.html").as_uri())
    yield page
    page.close()


def test_nothing_is_cut(page: Page, name: str) -> None:
    cut = page.evaluate(CUT)
    assert not cut or (name == "about" and all("md-typeset__table" in each for each in cut))


def test_all_is_legible(page: Page) -> None:
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
    """A colour as a browser names it, on a ground."""
    assert colour.startswith("rgb"), colour
    *parts, share = [*map(float, re.findall(r"[\d.]+", colour)), 1.0][:4]
    return [share * part / 255 + (1 - share) * g for part, g in zip(parts, ground, strict=True)]

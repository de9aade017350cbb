"""What all tests share: one thread, kernels on the CPU, the same examples in every run.

A test that needs an optional package is skipped where the package is not installed.
"""

import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from optional import skip_if_absent

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything loads a kernel
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of programs that tests start
CACHE_FOLDER = tempfile.TemporaryDirectory()
os.environ["XDG_CACHE_HOME"] = CACHE_FOLDER.name
Path(CACHE_FOLDER.name, "outpace").touch()  # a file instead of a folder: nothing is kept

settings.register_profile("outpace", deadline=None, derandomize=True, database=None)
settings.load_profile("outpace")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the folder of published models, which are not in the repository."""
    parser.addoption("--published", metavar="FOLDER", help="test published GGUF files of a folder")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip files that cannot be imported without an optional package."""
    report = yield
    skip_if_absent(report, report.call, collector.path)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip tests that cannot run without an optional package."""
    report = yield
    skip_if_absent(report, call, item.path)
    return report


FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        pytest.fail("no browser: install chromium (apt-get install chromium)", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        yield browser
        browser.close()

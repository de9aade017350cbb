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
from selection import current_commit, select_short

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything loads a kernel
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of programs that tests start
CACHE_FOLDER = tempfile.TemporaryDirectory()
os.environ["XDG_CACHE_HOME"] = CACHE_FOLDER.name
Path(CACHE_FOLDER.name, "outpace").touch()  # a file instead of a folder: nothing is kept

for name, examples in {"short": 15, "nightly": 100}.items():
    settings.register_profile(
        name, deadline=None, derandomize=True, database=None, max_examples=examples
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the choice of tests, and the folder of published models."""
    parser.addoption("--nightly", action="store_true", help="run the long tests too")
    parser.addoption("--seed", help="select sampled cases by this text, not by the commit's hash")
    parser.addoption("--published", metavar="FOLDER", help="test published GGUF files of a folder")


def pytest_configure(config: pytest.Config) -> None:
    """Set the number of examples, and the seed, which all processes share."""
    settings.load_profile("nightly" if config.option.nightly else "short")
    config.option.seed = config.option.seed or current_commit()


def pytest_report_header(config: pytest.Config) -> str:
    """Print the seed with which a run can be repeated."""
    return f"sampled cases: --seed {config.option.seed}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only the nightly run has."""
    if not config.option.nightly:
        chosen = select_short(items, config.option.seed)
        left_out = set(items).difference(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = chosen


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
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no browser: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        yield browser
        browser.close()

"""What all tests share: one thread, kernels on the CPU, properties that are the same every run."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything loads a kernel
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of programs that tests start

settings.register_profile("outpace", deadline=None, derandomize=True, database=None)
settings.load_profile("outpace")

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

"""Comparisons with the authors' code, with our own side in place of a clone of theirs."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoints import TINY_AR, TINY_AUX, dream, load, wedlm
from outpace.methods import APD, D2F, DFlash, WeDLM


class ApdTwin:
    """`apd_official.Official`."""

    def __init__(self, module: Any, target: Path, verifier: Path) -> None:
        self.module, self.verifier = module, str(verifier)
        self.llm = load(target, APD(verifier=self.verifier))

    def run(
        self, ids: list[int], tokens: int, temperature: float, kv_window: Any, max_lookahead: Any
    ) -> Any:
        """A decode with the ratio of the comparison."""
        program = import_module("apd_official")
        limits = {"window": kv_window, "lookahead": max_lookahead}
        method = APD(verifier=self.verifier, ratio=program.RATIO, **limits)
        return program.ours(self.llm, method, ids, tokens, temperature)


class D2fTwin:
    """`d2f_official.Official`."""

    def __init__(self, module: Any, folder: Path, method: D2F, tokens: int) -> None:
        self.llm, self.method, self.tokens = load(folder), method, tokens

    def run(self, prompts: list[list[int]]) -> Any:
        """A decode that fills everything, as theirs does."""
        method = D2F(block=self.method.block, canvas=True)
        return import_module("d2f_official").ours(self.llm, method, prompts, self.tokens)


class DflashTwin:
    """`dflash_official.Official`."""

    def __init__(self, module: Any, target: Path, draft: Path) -> None:
        self.draft = str(draft)
        self.llm = load(target, DFlash(draft=self.draft))

    def run(self, prompts: list[list[int]], tokens: int, block: int, eos: list[int]) -> Any:
        """A decode with whole blocks."""
        method = DFlash(draft=self.draft, block=block, tokens=block - 1)
        return import_module("dflash_official").ours(self.llm, method, prompts, tokens)


class WedlmTwin:
    """`wedlm_official.Official`."""

    def __init__(self, module: Any, folder: Path) -> None:
        self.llm = load(folder)

    def run(self, ids: list[int], tokens: int, threshold: float) -> tuple[list[int], int]:
        """A decode in blocks."""
        program = import_module("wedlm_official")
        sure = threshold or 1.0
        method = WeDLM(window=program.WINDOW, confidence=sure, block=True, clip=True)
        return program.counted(self.llm, method, ids, tokens)


TWINS = {
    "apd_official": (ApdTwin, {"SMALL_DREAM": dream(TINY_AR), "SMALL_AUX": TINY_AUX}),
    "d2f_official": (D2fTwin, {"SMALL_DREAM": dream(TINY_AR)}),
    "dflash_official": (DflashTwin, {}),
    "wedlm_official": (WedlmTwin, {"SMALL_WEDLM": wedlm(TINY_AR)}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TWINS)
def test_comparison_with_ourselves(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both sides give the same tokens in as many passes, which each program asserts."""
    program, (twin, sizes) = import_module(name), TWINS[name]
    module = SimpleNamespace(apd_accept_criterion=None)
    monkeypatch.setattr(program, "imported", lambda *_: module)
    monkeypatch.setattr(program, "Official", twin)
    for constant, config in sizes.items():
        monkeypatch.setattr(program, constant, config)
    words = ["--official", "clone", "--rounds", "1", "--tokens", "32"]
    problems = ["--problems", "1"] if name in ("d2f_official", "dflash_official") else []
    out = tmp_path / "a.json"
    monkeypatch.setattr(sys, "argv", [name, *words, *problems, "--json", str(out)])
    program.main()
    tables = json.loads(out.read_text())
    assert tables.pop("bars") and tables.pop("provenance")
    assert all(row["side"] for rows in tables.values() for row in rows)

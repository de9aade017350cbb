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
from official import Decode, compare, ours
from outpace.api.options import Options
from outpace.methods import APD, D2F, DFlash, WeDLM


class ApdTwin:
    """`apd_official.Official`."""

    def __init__(self, module: Any, target: Path, verifier: Path) -> None:
        self.module, self.verifier = module, str(verifier)
        self.llm = load(target, APD(verifier=self.verifier))

    def run(self, tokens: int, temperature: float, kv_window: Any, max_lookahead: Any) -> Decode:
        """A decode with the ratio of the comparison."""
        program = import_module("apd_official")
        limits = {"window": kv_window, "lookahead": max_lookahead}
        method = APD(verifier=self.verifier, ratio=program.RATIO, **limits)
        return ours(self.llm, method, tokens, options=program.filters(temperature))


class D2fTwin:
    """`d2f_official.Official`."""

    def __init__(self, module: Any, folder: Path, method: D2F, tokens: int) -> None:
        canvas = D2F(block=method.block, canvas=True)
        self.run = ours(load(folder), canvas, tokens, options=Options(temperature=0.0, top_p=1.0))
        """A decode that fills everything, as theirs does."""


class DflashTwin:
    """`dflash_official.Official`."""

    def __init__(self, module: Any, target: Path, draft: Path) -> None:
        self.draft = str(draft)
        self.llm = load(target, DFlash(draft=self.draft))

    def run(self, tokens: int, block: int, eos: list[int]) -> Decode:
        """A decode with whole blocks."""
        method = DFlash(draft=self.draft, block=block, tokens=block - 1)
        return ours(self.llm, method, tokens, import_module("dflash_official").pairs)


class WedlmTwin:
    """`wedlm_official.Official`."""

    def __init__(self, module: Any, folder: Path) -> None:
        self.llm = load(folder)

    def run(self, tokens: int, threshold: float) -> Decode:
        """A decode in blocks."""
        window, sure = import_module("wedlm_official").WINDOW, threshold or 1.0
        method = WeDLM(window=window, confidence=sure, block=True, clip=True)
        return ours(self.llm, method, tokens)


TWINS = {
    "apd_official": (ApdTwin, {"SMALL_DREAM": dream(TINY_AR), "SMALL_AUX": TINY_AUX}),
    "d2f_official": (D2fTwin, {"SMALL_DREAM": dream(TINY_AR)}),
    "dflash_official": (DflashTwin, {}),
    "wedlm_official": (WedlmTwin, {"SMALL_WEDLM": wedlm(TINY_AR)}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", TWINS)
def test_comparison_with_ourselves(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_what_sides_share_is_checked_before_they_are_timed() -> None:
    called: list[str] = []

    def side(name: str, passes: int) -> Decode:
        return lambda ids: (called.append(name) or ids * passes, passes)

    decodes = {"official": side("official", 6), "ours": side("ours", 3)}
    given: Any = ({"block": 4}, decodes, [[1], [2]], 2, "step")
    rows = compare(*given, columns=lambda result, timings: {"tokens": len(result[0][0])})
    assert [list(row)[:4] for row in rows] == [["block", "side", "tokens", "steps"]] * 2
    assert [(row["side"], row["tokens"], row["steps"]) for row in rows] == [
        ("official", 6, 12),
        ("ours", 3, 6),
    ]
    called.clear()
    with pytest.raises(AssertionError, match="ours"):
        compare(*given, same=["ours"])
    assert called == ["official", "official", "ours", "ours"]
    assert len(compare(*given, same=["ours"], shared=lambda result: len(result[0]))) == 2

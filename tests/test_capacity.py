"""The page on capacity says what the committed results say."""

import json
import re
from math import ceil
from typing import Any

import pytest

from shown import ROOT

PAGE = (ROOT / "docs" / "capacity.md").read_text()
USED, LOAD = 0.7, 100


def results(name: str) -> Any:
    """What a program in benchmarks/ wrote."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def line(words: str, after: str) -> list[float]:
    """Numbers of the row of a table that begins with words, behind a heading."""
    found = re.search(rf"^\| {re.escape(words)} \| (.*) \|$", PAGE.split(after)[1], re.MULTILINE)
    assert found is not None, words
    return [float(each) for each in found[1].split(" | ")]


SERVED = {
    "`tiny-ar`, token by token": "tiny-ar, token by token",
    "`tiny-dream`, left to right": "tiny-dream, left to right",
    "`tiny-dream`, three methods": "tiny-dream, three methods",
}


@pytest.mark.parametrize("words", SERVED)
def test_what_is_served(words: str) -> None:
    (rate,) = (
        each["tokens per second"]
        for each in results("serve")["overhead"]
        if each["case"] == SERVED[words] and each["way"] == "streamed"
    )
    requests = rate / 63
    replicas = ceil(LOAD / (USED * requests))
    shown = line(words, "## What was measured")
    assert shown == [round(rate), round(requests, 1), replicas, round(1e6 / 3600 / rate, 2)]


ALONE = {
    "`tiny-ar`, autoregressive": ("tiny-ar", "autoregressive", ""),
    "`tiny-ar`, DFlash": ("tiny-ar", "DFlash", "tiny-dflash"),
    "`tiny-wedlm`, WeDLM (entropy 0.4)": ("tiny-wedlm", "WeDLM", "entropy 0.4"),
    "`tiny-dream`, left to right": ("tiny-dream", "left to right", "K = 1"),
    "`tiny-dream`, APD (ratio 0.3)": ("tiny-dream", "APD", "R = 0.3"),
}


@pytest.mark.parametrize("words", ALONE)
def test_what_a_method_saves(words: str) -> None:
    (rate,) = (
        each["tokens_per_second"]
        for each in results("methods")["results"]
        if each["task"] == "story"
        and (each["model"], each["kind"], each["setting"]) == ALONE[words]
    )
    assert line(words, "What a method saves") == [round(rate), round(1e6 / 3600 / rate, 2)]

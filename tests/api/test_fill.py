"""Infill templates: filled from both sides as each method alone does, or refused if invalid."""

import asyncio
import re
import threading
from typing import Any

import pytest

from outpace import LLM, AsyncLLM, Hole, OptionError
from outpace.api.options import Options
from outpace.constraint.cloze import InfillParts
from outpace.methods import (
    APD,
    D2F,
    Autoregressive,
    BlockDiffusion,
    Diffusion,
    FastDLLM,
    LeftToRight,
    Method,
    WeDLM,
)
from refusal import refuses
from workload import ON_ZOO, further

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does Tom have?"
CLOZE: InfillParts = [
    "Tom has 3+4=<<3+4=",
    Hole(1, regex=r"[0-9]"),
    ">>",
    Hole(up_to=3, regex=r"[0-9]{1,2}"),
    Hole(4),
    " are his.\n#### ",
    Hole(up_to=6),
]
DIFFUSION: list[Method] = [
    LeftToRight(),
    LeftToRight(tokens=3, window=8, lookahead=8),
    APD(verifier="tiny-aux"),
    APD(verifier="tiny-aux", ratio=0.0, coupling="argmax", window=None, lookahead=None),
    Diffusion(),
    Diffusion(block=4, order="random"),
    Diffusion(ends="last"),
    Diffusion(canvas=True),
    FastDLLM(block=4),
    FastDLLM(cache="prefix", factor=1.0),
    FastDLLM(block=4, cache=None, budget=0.5),
    D2F(),
    D2F(block=4),
]
CASES = [
    *(("tiny-dream", method) for method in DIFFUSION),
    *(("tiny-llada", method) for method in DIFFUSION if not isinstance(method, APD)),
    ("tiny-llada", Diffusion(guidance=0.5)),
    ("tiny-d2f", D2F()),
    ("tiny-block", BlockDiffusion()),
    ("tiny-block", BlockDiffusion(budget=1.0, part=3, canvas=True)),
    ("tiny-block", BlockDiffusion(threshold=0.6)),
    ("tiny-block", D2F()),
    ("tiny-wedlm", WeDLM()),
    ("tiny-wedlm", WeDLM(window=4)),
    ("tiny-wedlm", WeDLM(window=64, eager=False, clip=True)),
]
CASES += [case for case in further(CASES) if case[1].sees_ahead]
_loaded: dict[str, LLM] = {}


def llm(name: str) -> LLM:
    """An embedded model, loaded once."""
    if name not in _loaded:
        _loaded[name] = LLM(name)
    return _loaded[name]


@pytest.mark.sampled
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("name", "method"), CASES, ids=str)
def test_holes_are_filled_and_the_rest_stays(name: str, method: Method, temperature: float) -> None:
    common: Options = {"method": method, "temperature": temperature}
    free: Options = {**common, "max_tokens": 24}
    requests: list[tuple[Any, Options]] = [
        (QUESTION, {**common, "cloze": CLOZE, "seed": 1, "logprobs": True}),
        (QUESTION, free),
        (None, {**common, "cloze": ["Tom has", Hole(3), Hole(2), ". Ann has", Hole(5)]}),
        (QUESTION, {**common, "cloze": [Hole(4)], "seed": 3}),
        (QUESTION, {**free, "regex": r"[0-9]+", "seed": 4}),
    ]
    together = dict(llm(name).serve(requests))
    output = together[0]
    digit, number, some, end = output.holes or ()
    assert output.text == f"Tom has 3+4=<<3+4={digit}>>{number}{some} are his.\n#### {end}"
    assert re.fullmatch(r"[0-9]", digit) and re.fullmatch(r"[0-9]{1,2}", number)
    given = [len(llm(name).text.encode_plain(part)) for part in CLOZE if isinstance(part, str)]
    assert output.finish_reason == "stop" and output.given == sum(given)
    assert llm(name).text.decode(output.ids) == output.text
    assert output.logprobs is not None and len(output.logprobs) == len(output.ids)
    assert max(output.logprobs) <= 0 and output.steps
    assert len(llm(name).text.encode_plain(together[3].text)) <= 4 == len(together[3].ids)
    for number_, (prompt, options) in enumerate(requests[:3]):
        ((_, alone),) = llm(name).serve([(prompt, options)])
        assert alone.ids == together[number_].ids and alone.text == together[number_].text


def test_what_stands_right_of_a_hole_is_seen() -> None:
    for name, method in (("tiny-dream", Diffusion()), ("tiny-wedlm", WeDLM(window=32))):
        found = [
            llm(name).fill(
                ["Tom has <<", Hole(1, regex=r"[0-9]"), f"+4={result}>>{result} apples."],
                method=method,
            )
            for result in (6, 7, 8, 9)
        ]
        assert len({output.holes for output in found}) > 1


def test_special_tokens_in_a_text_stay_text() -> None:
    marks = "<|endoftext|> <|mask|>"
    output = llm("tiny-dream").fill([marks, Hole(2), marks])
    assert output.text == f"{marks}{(output.holes or ())[0]}{marks}"
    assert not {1020, 1021} & set(output.ids)


REFUSED = [(name, method) for name, method in ON_ZOO if not method.sees_ahead]
REFUSED.append(("tiny-wedlm", Autoregressive()))


@pytest.mark.parametrize(("name", "method"), REFUSED, ids=str)
def test_methods_that_see_nothing_behind_a_hole_are_refused(name: str, method: Method) -> None:
    with refuses("method"):
        llm(name).fill(["a", Hole(2), "b"], method=method)


@pytest.mark.parametrize(
    ("param", "cloze"),
    [
        ("cloze", []),
        ("cloze", ["Tom has"]),
        ("cloze", "Tom has {{3}}"),
        ("cloze[1]", [Hole(2), 3]),
        ("cloze[1]", [Hole(2), b"x"]),
        ("prompt", None),
        ("cloze", [Hole(2), "apples"]),
        ("cloze", ["\ud800", Hole(2)]),
        ("prompt", ["a", Hole(600)]),
        ("holes[0]", ["a", Hole(10**9)]),
        ("holes[0]", ["a", Hole(2, regex="[")]),
        ("holes[1]", ["a", Hole(2), Hole(3, regex=r"(a)\1")]),
        ("holes[1]", ["a", Hole(2), Hole(3, regex="x{12}\u2603*")]),
        ("holes[0]", ["a", Hole(up_to=3, regex="x{12}\u2603*")]),
        ("holes[0]", ["a", Hole(4, regex="[0-9]")]),
        ("holes[0]", ["a", Hole(2, regex="")]),
    ],
    ids=lambda value: str(value)[:50],
)
def test_invalid_template_is_named(param: str, cloze: Any) -> None:
    model = llm("tiny-dream")
    with pytest.raises(OptionError) as caught:
        model.fill(cloze)
    assert caught.value.param == param
    assert model.driver.stats.is_idle


@pytest.mark.parametrize(
    "options",
    [
        *({"tokens": value} for value in (0, 1.5, True, "3", float("nan"))),
        *({"up_to": value} for value in (-1, 1.5)),
        {},
        {"tokens": 3, "up_to": 4},
        {"tokens": 3, "regex": 5},
    ],
    ids=str,
)
def test_invalid_hole_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        Hole(**options)
    assert caught.value.param.startswith("hole.")


def test_whole_canvases_end_where_the_text_ends() -> None:
    for parts in (["a", Hole(5)], ["a", Hole(2), " b", Hole(7), " c d"], ["a", Hole(8)]):
        output = llm("tiny-d2f").fill(parts, method=D2F(block=4, canvas=True))
        assert output.finish_reason == "stop" and len(output.ids) == output.given + output.chosen
    (free,) = llm("tiny-d2f").generate("Go", method=D2F(block=4, canvas=True), max_tokens=5)
    assert len(free.ids) <= 4
    output = llm("tiny-dream").fill(["a", Hole(5)], method=Diffusion(block=4, canvas=True))
    assert output.chosen == 5


def test_two_at_once_are_each_as_alone() -> None:
    model = llm("tiny-dream")
    clozes: list[InfillParts] = [
        ["Tom has", Hole(n), " apples", Hole(up_to=n), "."] for n in range(1, 6)
    ]
    alone = [model.fill(cloze, prompt=QUESTION).ids for cloze in clozes]
    found: dict[int, list[int]] = {}

    def fill(number: int) -> None:
        found[number] = model.fill(clozes[number], prompt=QUESTION).ids

    threads = [threading.Thread(target=fill, args=[number]) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(5)] == alone


def test_streams_have_the_text_from_the_first_hole_on() -> None:
    stream = llm("tiny-dream").stream(QUESTION, cloze=CLOZE)
    pieces = list(stream)
    assert stream.output is not None and stream.output.holes is not None
    assert "Tom has 3+4=<<3+4=" + "".join(pieces) == stream.output.text and len(pieces) > 1

    async def ask() -> str:
        model = AsyncLLM(llm("tiny-dream"))
        try:
            return (await model.generate(QUESTION, cloze=CLOZE)).text
        finally:
            model.close()

    assert asyncio.run(ask()) == stream.output.text

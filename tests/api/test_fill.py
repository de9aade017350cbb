"""Infill templates: filled from both sides as each method alone does, or refused if invalid."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import Any

import pytest

from outpace import LLM, AsyncLLM, Hole
from outpace.api.infill import parse_template
from outpace.api.options import Options
from outpace.constraint.cloze import InfillParts
from outpace.decoding import Decoding, Request
from outpace.engine.job import DecodingError
from outpace.methods import (
    APD,
    D2F,
    METHODS,
    Autoregressive,
    BlockDiffusion,
    Diffusion,
    FastDLLM,
    LeftToRight,
    Method,
    WeDLM,
)
from workload import ON_ZOO, further, missing

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
    ("tiny-block", BlockDiffusion(rule="klass", threshold=0.6)),
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


def test_text_in_front_of_the_first_hole_is_no_hole() -> None:
    text = llm("tiny-dream").text
    alone = llm("tiny-dream").fill(["Tom has", Hole(2), "."])
    assert alone.prompt_tokens == 0 and alone.ids[:2] == text.encode_plain("Tom has")
    answer = llm("tiny-dream").fill(["Tom has", Hole(2), "."], prompt=QUESTION)
    assert answer.prompt_tokens == len(text.encode(QUESTION))
    assert answer.text.startswith("Tom has") and answer.text.endswith(".")
    front = llm("tiny-dream").fill([Hole(2), " apples", Hole(1)], prompt=[1, 2, 3])
    assert front.prompt_tokens == 3 and front.text == f"{front.holes[0]} apples{front.holes[1]}"


def test_special_tokens_in_a_text_stay_text() -> None:
    marks = "<|endoftext|> <|mask|>"
    output = llm("tiny-dream").fill([marks, Hole(2), marks])
    assert output.text == f"{marks}{(output.holes or ())[0]}{marks}"
    assert not {1020, 1021} & set(output.ids)


def test_holes_have_whole_characters() -> None:
    for seed in range(8):
        output = llm("tiny-dream").fill(
            ["\u2603", Hole(3), "\u2603", Hole(up_to=4)], temperature=50.0, seed=seed
        )
        assert "\ufffd" not in output.text and len(output.holes or ()) == 2


def test_what_a_hole_leaves_over_is_no_part_of_the_text() -> None:
    output = llm("tiny-dream").fill(["3+4=", Hole(up_to=20, regex=r"[0-9]?"), ".", Hole(3)])
    assert len(output.ids) <= 4 + 1 + 1 + 3 and re.fullmatch(r"3\+4=[0-9]?\..*", output.text, re.S)
    assert llm("tiny-dream").fill(["a", Hole(up_to=5, regex="")]).holes == ("",)


REFUSED = [(name, method) for name, method in ON_ZOO if not method.sees_ahead]
REFUSED.append(("tiny-wedlm", Autoregressive()))


@pytest.mark.parametrize(("name", "method"), REFUSED, ids=str)
def test_methods_that_see_nothing_behind_a_hole_are_refused(name: str, method: Method) -> None:
    able = "APD, BlockDiffusion, D2F, Diff"
    message = rf"^method: {type(method).__name__}\(.*\) cannot condition on .* unverified: {able}"
    with pytest.raises(ValueError, match=message):
        llm(name).fill(["a", Hole(2), "b"], method=method)


def test_all_methods_are_of_one_sort_or_the_other() -> None:
    able, refused = ({type(method) for _, method in some} for some in (CASES, REFUSED))
    assert not missing(), missing()
    assert able | refused == set(METHODS.values())


BAD: list[tuple[Any, str]] = [
    ([], "cloze must contain a hole"),
    (["Tom has"], "cloze must contain a hole"),
    ("Tom has {{3}}", "cloze must be a list of text and holes, got 'Tom has"),
    ([Hole(2), 3], "must be text or a hole, got 3"),
    ([Hole(2), b"x"], "must be text or a hole, got b'x'"),
    (None, "prompt must be text"),
    ([Hole(2), "apples"], "no text before the first hole"),
    (["a", Hole(600)], "a prompt of 1 tokens and max_tokens=600 need 601 slots, but tiny-dream"),
    (["a", Hole(10**9)], "holes[0]: it is too large for 1000000000 tokens"),
    (["a", Hole(2, regex="[")], "holes[0]: it is malformed"),
    (["a", Hole(2), Hole(3, regex=r"(a)\1")], "holes[1]: a back-reference is not supported"),
    (
        ["a", Hole(2), Hole(3, regex="x{12}\u2603*")],
        "holes[1]: it has 3 tokens, but the shortest text of its regex takes 12",
    ),
    (
        ["a", Hole(up_to=3, regex="x{12}\u2603*")],
        "holes[0]: it has 3 tokens, but the shortest text of its regex takes 12",
    ),
    (
        ["a", Hole(4, regex="[0-9]")],
        "holes[0]: it has 4 tokens, but its regex has texts of 1 tokens and none of 4",
    ),
    (["a", Hole(2, regex="")], "its regex has texts of 0 tokens and none of 2"),
    (["\ud800", Hole(2)], "is not UTF-8"),
]


@pytest.mark.parametrize(("cloze", "message"), BAD, ids=lambda value: str(value)[:50])
def test_bad_clozes_are_refused_in_time(cloze: Any, message: str) -> None:
    model = llm("tiny-dream")
    began = time.process_time()
    with pytest.raises(ValueError, match=re.escape(message)):
        model.fill(cloze)
    assert time.process_time() - began < 6
    assert model.driver.stats.is_idle


@pytest.mark.parametrize(
    "options",
    [
        *({"tokens": value} for value in (0, -1, 1.5, True, "3", float("nan"))),
        *({"up_to": value} for value in (0, -1, 1.5, True, "3", float("nan"))),
        {},
        {"tokens": 3, "up_to": 4},
        {"tokens": 3, "regex": 5},
    ],
    ids=str,
)
def test_bad_holes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="hole"):
        Hole(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 5},
        {"stop": "x"},
        {"stop_ids": [5]},
        {"ignore_eos": True},
        {"min_tokens": 2},
        {"regex": "a"},
        {"schema": {}},
    ],
    ids=str,
)
def test_options_that_a_cloze_has_no_room_for_are_refused(options: Any) -> None:
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"^{name} cannot be combined with cloze"):
        llm("tiny-dream").fill(["a", Hole(2)], **options)


class Lazy(LeftToRight):
    """A method that ends before the last slot."""

    def decode(self, request: Request) -> Decoding:
        """Yield no forward."""
        request.max_tokens -= 1
        yield from super().decode(request)
        request.max_tokens += 1


def test_a_method_that_leaves_holes_is_an_error() -> None:
    with pytest.raises(DecodingError, match=r"left holes unfilled from slot [0-9]+ on \(stop\)"):
        llm("tiny-dream").fill(["a", Hole(5)], method=Lazy())


def test_whole_canvases_end_where_the_text_ends() -> None:
    for parts in (["a", Hole(5)], ["a", Hole(2), " b", Hole(7), " c d"], ["a", Hole(8)]):
        output = llm("tiny-d2f").fill(parts, method=D2F(block=4, canvas=True))
        assert output.finish_reason == "stop" and len(output.ids) == output.given + output.chosen
    (free,) = llm("tiny-d2f").generate("Go", method=D2F(block=4, canvas=True), max_tokens=5)
    assert len(free.ids) <= 4
    output = llm("tiny-dream").fill(["a", Hole(5)], method=Diffusion(block=4, canvas=True))
    assert output.chosen == 5


def test_figures_count_what_was_chosen() -> None:
    output = llm("tiny-dream").fill(["3+4=", Hole(up_to=9, regex="[0-9]"), ". Ann has", Hole(2)])
    assert output.chosen == 3 and output.figures.startswith(f"3 tokens in {output.forwards} ")
    assert output.tokens_per_forward == 3 / output.forwards


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


def test_a_weight_that_is_no_number_ends_a_cloze() -> None:
    model = llm("tiny-dream")
    before = model.fill(CLOZE, prompt=QUESTION).ids
    weight = model.target.model.norm.weight
    kept = weight.clone()
    try:
        weight[0] = float("nan")
        with pytest.raises(DecodingError, match="not finite numbers"):
            model.fill(CLOZE, prompt=QUESTION)
    finally:
        weight.copy_(kept)
    assert model.fill(CLOZE, prompt=QUESTION).ids == before


def test_a_text_with_braces_is_a_cloze() -> None:
    assert parse_template("a {{8}} b{{..12}}") == ["a ", Hole(8), " b", Hole(up_to=12)]
    assert parse_template(r"{{3:[0-9]{2}[{}a]?}}{{..2:}}") == [
        Hole(3, regex=r"[0-9]{2}[{}a]?"),
        Hole(up_to=2, regex=""),
    ]
    for text in ("a {{x}} {{3}}", "{{3", "{{-1}}{{3}}", "{{1.5}}", "{{3:{}"):
        with pytest.raises(ValueError, match=r"is not a hole: write \{\{8\}\}"):
            parse_template(text)
    for text in ("", "abc", "{3}"):
        with pytest.raises(ValueError, match="cloze must contain a hole"):
            parse_template(text)
    with pytest.raises(ValueError, match="must be a positive integer, got 0"):
        parse_template("{{0}}")

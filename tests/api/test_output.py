"""Display of an answer: pieces by forward, and HTML for notebooks."""

import copy
import pickle
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from outpace import LLM
from outpace.api.output import Output, render_html
from outpace.decoding import Step
from outpace.methods import (
    APD,
    D2F,
    BlockDiffusion,
    DFlash,
    Eagle,
    Lookup,
    Method,
    Speculative,
    WeDLM,
)

STORY = (
    "Omar counts 60 people on the boat. Then 39 of them get off and 43 others get on. "
    "How many people are there now?"
)


class Reader(HTMLParser):
    """Collects the elements of a page other than plain layout, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert all(name in ("style", "title") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    ("model", "method"),
    [("tiny-ar", None), ("tiny-d2f", D2F()), ("tiny-wedlm", WeDLM(eager=False))],
)
def test_pieces_are_what_a_stream_brings(model: str, method: Method | None) -> None:
    llm = LLM(model, method)
    stream = llm.stream(STORY, max_tokens=96, temperature=0.0)
    streamed = list(stream)
    assert stream.output is not None
    pieces = stream.output.pieces()
    assert len(pieces) == len(stream.output.steps)
    assert [piece for piece in pieces if piece] == streamed
    assert "".join(pieces) == stream.output.text
    assert method is None or stream.output.draft_figures == {}


@pytest.mark.parametrize("stop", ["peo", "#", " 64"])
def test_pieces_end_where_a_stop_string_cuts(stop: str) -> None:
    (output,) = LLM("tiny-wedlm").generate(STORY, max_tokens=96, temperature=0.0, stop=stop)
    assert output.finish_reason == "stop" and stop not in output.text
    assert "".join(output.pieces()) == output.text


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "</span></div><img src=x onerror=alert(1)>",
        "\" onmouseover=\"alert(1)' x='",
        "&lt;b&gt; &amp;",
        "a\n  b\t<!-- c -->",
    ],
)
def test_html_in_an_answer_stays_text(text: str) -> None:
    shown = Reader(render_html([text, "", text], text))
    assert shown.text == text * 3
    assert shown.tags == ["div", "div", "span", "span", "div"]


def test_copies_leave_the_tokenizer_behind() -> None:
    (output,) = LLM("tiny-aux").generate(STORY, max_tokens=4)
    for copied in (copy.copy(output), copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
        assert copied == output and copied.codec is None
        assert copied.pieces() == [output.text]
    assert output.codec is not None and "speech" not in repr(output)


DRAFTING = [
    ("tiny-ar", Lookup(tokens=4)),
    ("tiny-ar", Speculative(draft="tiny-aux", tokens=4, lookup=True)),
    ("tiny-ar", DFlash(draft="tiny-dflash", tokens=3)),
    ("tiny-ar", Eagle(draft="tiny-eagle", width=1, depth=2)),
    ("tiny-ar", Eagle(draft="tiny-eagle", width=3, depth=2, nodes=8)),
    ("tiny-wedlm", WeDLM(verify=True)),
    ("tiny-block", BlockDiffusion(verify=True)),
    ("tiny-dream", APD(verifier="tiny-aux")),
]


@pytest.mark.parametrize(("model", "method"), DRAFTING, ids=str)
def test_other_tokens_are_one_per_forward(model: str, method: Method) -> None:
    llm = LLM(model, method)
    for options in ({"max_tokens": 20}, {"max_tokens": 80}, {"max_tokens": 80, "stop": "\n"}):
        (output,) = llm.generate(STORY, temperature=0.0, **options)
        others = len(output.ids) - output.accepted_tokens
        # The forward that ends the answer early may have no other token in it.
        assert output.forwards - (output.finish_reason == "stop") <= others <= output.forwards
        assert 0 < output.accepted_tokens <= output.draft_tokens


def test_drafts_of_equal_models_are_accepted() -> None:
    llm = LLM("tiny-aux", Speculative(draft="tiny-aux", tokens=4))
    (output,) = llm.generate(STORY, max_tokens=20, temperature=0.0)
    # One token of the prefill, then rounds of four drafts and the target's own, until 4 are left.
    assert output.verifications == [(4, 4), (4, 4), (4, 4), (3, 3)]
    assert [*output.draft_figures.values()] == [15, 15, 15]


def output_of(tokens: int, *steps: tuple[str, int, int, int, int | None]) -> Output:
    """Return an answer of steps: role, committed, drafted, accepted tokens, and draft length."""
    trace = [
        Step(role, 0, 1, 1, kept, 0.0, drafted=drafted, accepted=accepted, draft_length=length)
        for role, kept, drafted, accepted, length in steps
    ]
    fields = {"text": "", "finish_reason": "stop", "prompt_tokens": 1, "seconds": 1.0}
    return Output(ids=[0] * tokens, steps=trace, **fields)


PLAIN, DRAFTED = ("target", 1, 0, 0, 1), ("target", 4, 5, 3, 6)
END = ("target", 0, 0, 0, 1)


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (output_of(3, PLAIN, PLAIN, PLAIN, END), "3 tokens in 3 forwards after the prompt's: 1.00"),
        (output_of(9, PLAIN, DRAFTED, DRAFTED), "9 tokens in 2 forwards after the prompt's: 4.00"),
        (output_of(7, PLAIN, DRAFTED, DRAFTED), "7 tokens in 2 forwards after the prompt's: 3.00"),
        (output_of(1, PLAIN), "1 tokens in 1 forwards: 1.00"),
        (
            replace(output_of(3, *[PLAIN] * 3), finish_reason="length"),
            "2 forwards after the prompt's: 1.00",
        ),
    ],
)
def test_the_forward_of_the_prompt_is_counted_apart(output: Output, shown: str) -> None:
    assert f"{shown} tokens per forward" in output.figures


def test_figures_of_a_canvas_have_all_forwards() -> None:
    output = output_of(8, DRAFTED, DRAFTED)
    output.steps[0] = replace(output.steps[0], holes=(1, 2, 3))
    assert "8 tokens in 2 forwards: 4.00 tokens per forward" in output.figures


@pytest.mark.parametrize(
    ("output", "verifications", "off"),
    [
        (output_of(9, PLAIN, DRAFTED, DRAFTED), [(5, 3), (5, 3)], None),
        (output_of(7, PLAIN, DRAFTED, DRAFTED), [(5, 3), (5, 2)], None),  # cut by a stop string
        (output_of(3, ("verifier", 5, 6, 4, None)), [(6, 2)], None),  # after a token of the target
        (output_of(2, PLAIN, PLAIN), [], "pace"),
        (output_of(1, PLAIN), [], None),
    ],
)
def test_drafts_are_counted_from_steps(
    output: Output, verifications: list[tuple[int, int]], off: str | None
) -> None:
    assert output.verifications == verifications
    assert output.drafting_off == off == output.draft_figures.get("drafting_off")

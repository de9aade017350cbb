"""Display of an answer: pieces by forward, and HTML for notebooks."""

import copy
import pickle
from html.parser import HTMLParser

import pytest

from outpace import LLM
from outpace.api.output import render_html
from outpace.methods import D2F, Method, WeDLM

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
    ("model", "method"), [("tiny-ar", None), ("tiny-d2f", D2F()), ("tiny-wedlm", WeDLM())]
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

"""What does not fit is refused before weights are read, and where possible any tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outpace import LLM
from outpace.api import llm
from outpace.cli import flags, measure
from outpace.cli.main import main
from outpace.methods import Speculative, WeDLM
from outpace.server import models
from outpace.server.settings import Entry
from refusal import refuses


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was read, of which nothing is loaded."""
    found: list[str] = []

    def noting(kind: str) -> Callable[..., None]:
        def note(*args: Any, **options: Any) -> None:
            found.append(kind)
            raise RuntimeError(f"{kind} were read")

        return note

    monkeypatch.setattr(llm, "load_model", noting("weights"))
    for name in ("load_model", "load_draft"):
        monkeypatch.setattr(llm, name, noting("weights"))
    return found


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "quantize": ({"quantize": "q4"}, "quantize must be one of .*, got 'q4'"),
    "dtype": ({"dtype": "float8"}, "dtype must be one of .*, got 'float8'"),
    "attention": ({"attention": "nope"}, "attention must be one of .*, got 'nope'"),
    "method": ({"method": "wedlm"}, "WeDLM decodes causal models that fill masks, but tiny-ar is"),
    "role": (
        {"method": ("speculative", {"draft": "tiny-dflash"})},
        "takes a causal model.* as its draft, but tiny-dflash is a draft",
    ),
    "target": (
        {"model": "tiny-aux", "method": ("eagle", {"draft": "tiny-eagle"})},
        "tiny-eagle cannot draft for tiny-aux: the draft was trained for another target",
    ),
    "absent": ({"method": ("speculative", {"draft": "nope"})}, "no model 'nope': give a folder"),
    "option": ({"method": ("speculative", {"draft": "tiny-ar", "tokens": 0})}, "tokens must be at"),
    "draft": ({"model": "tiny-dflash"}, "'tiny-dflash' is a draft that reads the features of a"),
    "max_length": ({"max_length": 0}, "max_length must be a whole number from 1"),
    "mask_id": ({"mask_id": 10**6}, "mask_id 1000000 is outside the vocabulary"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_model_is_not_read_where_something_does_not_fit(
    name: str, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        pytest.fail("a tokenizer was read")

    monkeypatch.setattr(llm, "load_tokenizer", fail)
    given, message = MISFITS[name]
    with pytest.raises(ValueError, match=message):
        LLM(**{"model": "tiny-ar", **given})
    assert not reads


def test_no_model_of_several_is_read_where_one_does_not_fit(reads: list[str]) -> None:
    pairs = [("tiny-ar", Speculative(draft="tiny-ar")), ("tiny-ar", WeDLM())]
    with refuses("method"):
        flags.LOAD_FLAGS.open_models(pairs)
    with refuses("method"):
        measure.open_racers(["tiny-ar autoregressive", "tiny-ar wedlm"], flags.LOAD_FLAGS)
    entries = {"a": Entry(path="tiny-ar"), "b": Entry(path="tiny-ar", method="wedlm")}
    with pytest.raises(ValueError, match="model b: method: must be one of .*, got wedlm"):
        models.load_all_models(entries)
    with refuses("model"):
        models.load_all_models({**entries, "b": Entry(path="nope")})
    assert not reads


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "tiny-ar", "hi", "--temperature", "-1"],
        ["trace", "tiny-ar", "hi", "--top-p", "7"],
        ["evaluate", "tiny-ar", "--top-k", "-3"],
        ["race", "hi", "--temperature", "nan"],
        ["chat", "tiny-ar", "--max-tokens", "0"],
        ["serve", "tiny-ar", "--method", "wedlm"],
        ["benchmark", "methods", "tiny-ar autoregressive", "tiny-ar wedlm", "--limit", "4"],
    ],
    ids=lambda words: words[0],
)
def test_commands_refuse_first(
    words: list[str], reads: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and not reads
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("outpace: ")

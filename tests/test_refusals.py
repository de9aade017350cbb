"""What does not fit is refused before weights are read, and where possible any tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from outpace import LLM, OptionError
from outpace.api import llm
from outpace.checkpoints.checkpoint import Checkpoint
from outpace.cli import flags
from outpace.cli.main import main
from outpace.lab.commands import evaluate
from outpace.methods import Speculative, WeDLM
from outpace.server import models
from outpace.server.settings import Entry
from refusal import refuses


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was read, of which nothing is loaded."""
    found: list[str] = []

    def note(*args: Any, **options: Any) -> None:
        found.append("weights")
        raise RuntimeError("weights were read")

    for name in ("build_model", "build_draft"):
        monkeypatch.setattr(llm, name, note)
    return found


MISFITS: list[tuple[str, dict[str, Any]]] = [
    ("quantize", {"quantize": "q4"}),
    ("dtype", {"dtype": "float8"}),
    ("attention", {"attention": "nope"}),
    ("method", {"method": "wedlm"}),
    ("draft", {"method": ("speculative", {"draft": "tiny-dflash"})}),
    ("draft", {"model": "tiny-aux", "method": ("eagle", {"draft": "tiny-eagle"})}),
    ("draft", {"method": ("speculative", {"draft": "nope"})}),
    ("tokens", {"method": ("speculative", {"draft": "tiny-ar", "tokens": 0})}),
    ("model", {"model": "tiny-dflash"}),
    ("max_length", {"max_length": 0}),
    ("mask_id", {"mask_id": 10**6}),
    ("prefix_dir", {"prefix_dir": "/dev/null/x"}),
    ("prefix_dir", {"prefix_dir": 3}),
    ("prefix_dir", {"prefix_dir": "/dev/null/x", "tensor_parallel": 2}),
    ("prefix_dir", {"prefix_dir": "/dev/null/x", "prefix_cache": False}),
    ("prefix_gib", {"prefix_gib": 0}),
]


@pytest.mark.parametrize(("param", "options"), MISFITS)
def test_a_model_is_not_read_where_something_does_not_fit(
    param: str, options: dict[str, Any], reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        pytest.fail("a tokenizer was read")

    monkeypatch.setattr(Checkpoint, "load_tokenizer", fail)
    with pytest.raises(OptionError) as caught:
        LLM(**{"model": "tiny-ar", **options})
    assert caught.value.param == param
    assert not reads


def test_no_model_of_several_is_read_where_one_does_not_fit(reads: list[str]) -> None:
    pairs = [("tiny-ar", Speculative(draft="tiny-ar")), ("tiny-ar", WeDLM())]
    with refuses("method"):
        flags.LOAD_FLAGS.open_models(pairs)
    with refuses("method"):
        evaluate.race("x", ["tiny-ar autoregressive", "tiny-ar wedlm"])
    entries = {"a": Entry(path="tiny-ar"), "b": Entry(path="tiny-ar", method="wedlm")}
    with pytest.raises(ValueError, match="model b: method"):
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

"""The engine loop, driven by a script of commands without threads or event loops."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers import pages_in_use
from looped import PROMPT, Script, submit, until_over
from outpace import LLM
from outpace.api import engine_loop
from outpace.api.engine_client import (
    CancelCommand,
    ConnectionEndedError,
    EngineCommand,
    InspectCommand,
)
from outpace.api.engine_loop import EngineLoop
from outpace.api.output import Event
from outpace.api.pending_answer import PendingAnswer
from outpace.constraint.dfa import Dfa
from outpace.engine.job import DecodingError
from outpace.errors import OptionError


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-ar", "autoregressive")


def played(
    llm: LLM, play: Callable[[Script, EngineLoop], Iterator[list[EngineCommand]]]
) -> tuple[Script, EngineLoop]:
    """Run a script to its end, and check that no page is in use."""
    script = Script(iter(()))
    loop = EngineLoop(script)
    loop.add_model("x", llm)
    script.rounds = play(script, loop)
    with pytest.raises(ConnectionEndedError):
        loop.run()
    loop.close()
    assert pages_in_use(llm.engine) == 0
    return script, loop


def test_events_of_a_request_are_whole(llm: LLM) -> None:
    def play(script: Script, loop: EngineLoop) -> Iterator[list[EngineCommand]]:
        yield [submit(1, streams=True, logprobs=True), submit(2)]
        yield from until_over(script, 1, 2)

    script, _ = played(llm, play)
    (alone,) = llm.generate([PROMPT], max_tokens=24, logprobs=True)
    for number in (1, 2):
        first, *rest = script.of(number)
        assert first == Event(number=number)
        output = rest[-1].output
        assert output is not None and output.ids == alone.ids and output.steps == []
        steps = [step for event in rest for step in event.steps]
        assert [step.committed for step in steps] == [step.committed for step in alone.steps]
    streamed = script.of(1)
    assert [token for event in streamed for token in event.ids] == alone.ids
    assert "".join(event.text for event in streamed) == alone.text
    assert len(script.of(2)) == 2  # what is not streamed has one event


def test_a_cancelled_request_ends_with_an_event(llm: LLM) -> None:
    def play(script: Script, loop: EngineLoop) -> Iterator[list[EngineCommand]]:
        yield [submit(1, ignore_eos=True, max_tokens=400), submit(2)]
        yield []
        yield [
            InspectCommand(),
            CancelCommand(1, "x"),
            CancelCommand(7, "x"),
            CancelCommand(7, "absent"),
        ]
        yield from until_over(script, 1, 2)
        yield [InspectCommand(), CancelCommand(1, "x")]

    script, _ = played(llm, play)
    output = script.of(1)[-1].output
    assert output is not None and output.finish_reason == "cancelled"
    before, after = [each["x"] for each in script.messages if isinstance(each, dict)]
    assert before.running == 2 and sum(usage.held_pages for usage in before.models) > 0
    assert after.running == 0 and sum(usage.held_pages for usage in after.models) == 0


def test_a_request_cancelled_while_its_constraint_compiles_is_not_admitted(llm: LLM) -> None:
    def play(script: Script, loop: EngineLoop) -> Iterator[list[EngineCommand]]:
        yield [submit(1, regex="[ab]{9}c"), CancelCommand(1, "x")]
        assert not loop.compiling
        yield []

    script, _ = played(llm, play)
    assert script.messages == []


def test_bad_input_is_the_only_word_of_a_request(llm: LLM) -> None:
    def play(script: Script, loop: EngineLoop) -> Iterator[list[EngineCommand]]:
        yield [submit(1, adapter="none"), submit(2)._replace(model="unknown")]

    script, _ = played(llm, play)
    (refusal,) = script.messages
    assert isinstance(refusal, Event) and refusal.is_last
    assert isinstance(refusal.error, OptionError) and refusal.error.param == "adapter"


def test_a_request_that_fails_ends_with_its_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(answer: Any) -> Any:
        raise UnicodeError("no text")

    def play(script: Script, loop: EngineLoop) -> Iterator[list[EngineCommand]]:
        yield [submit(1, streams=True)]
        monkeypatch.setattr(PendingAnswer, PendingAnswer.take_text.__name__, broken)
        yield from until_over(script, 1)
        assert not loop.models["x"].requests
        yield []

    script, _ = played(llm, play)
    assert isinstance(script.of(1)[-1].error, UnicodeError | DecodingError)


@pytest.mark.parametrize("busy", [False, True])
def test_a_compilation_pauses_beside_requests(monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    naps: list[float] = []
    monkeypatch.setattr(engine_loop, "WORK_SECONDS", 0.0)
    monkeypatch.setattr("outpace.api.engine_loop.time.sleep", naps.append)
    dfa = engine_loop.BackgroundWork(lambda: busy).run(lambda: Dfa.from_pattern("(a|b)*abb"))
    assert dfa.walk(b"abb") >= 0 and bool(naps) == busy
    naps.clear()
    Dfa.from_pattern("(a|b)*abb")  # outside, nothing pauses
    assert not naps

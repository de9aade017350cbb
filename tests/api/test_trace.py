"""States of the slots of an answer by forward, from a trace."""

from outpace.api.output import Output, block_edges, is_scattered, slot_states
from outpace.decoding import FULL, Step
from outpace.decoding.forward import Pattern

CELLS = " ░█▒·"
"""A character for each state."""


def step(
    start: int,
    rows: int,
    kept: int,
    *,
    pattern: Pattern = FULL,
    holes: str = "",
    model: str = "target",
) -> Step:
    runs = [tuple(map(int, run.split("-"))) for run in holes.split()]
    return Step(
        model=model,
        start=start,
        rows=rows,
        visible=start + rows,
        committed=kept,
        seconds=0.0,
        pattern=pattern,
        holes=tuple(range(begin, end) for begin, end in runs),
    )


def output(*steps: Step) -> Output:
    """Return an answer after a prompt of three tokens."""
    kept = sum(each.committed for each in steps)
    return Output(
        text="",
        ids=[5] * kept,
        finish_reason="length",
        steps=list(steps),
        prompt_tokens=3,
        seconds=1.0,
    )


def picture(given: Output) -> list[str]:
    return ["".join(CELLS[state] for state in row) for row in slot_states(given)]


def test_a_pipeline_of_blocks() -> None:
    given = output(
        step(0, 6, 0, pattern=(3, 3), holes="3-6"),
        step(2, 7, 1, pattern=(1, 3, 3), holes="3-5 6-9"),
        step(3, 3, 5, pattern=(3,), holes="4-5"),
        step(6, 6, 3, pattern=(3, 3), holes="9-12"),
    )
    assert picture(given) == ["░░█      ", "█░▒███   ", "▒█▒▒▒▒   ", "···▒▒▒███"]
    assert block_edges(given) == [3, 6, 9] and is_scattered(given)


def test_one_token_a_forward() -> None:
    given = output(step(0, 3, 1), step(3, 1, 1), step(4, 1, 1))
    assert picture(given) == ["█  ", "▒█ ", "·▒█"]
    assert block_edges(given) == [] and not is_scattered(given)


def test_tokens_that_another_model_checked_belong_to_the_forward_of_the_target() -> None:
    given = output(
        step(0, 6, 0, holes="3-6"), step(0, 5, 2, model="verifier"), step(2, 6, 3, holes="5-8")
    )
    assert picture(given) == ["██░  ", "▒▒███"]

"""Tests of the assignment of examples to steps, processes and micro-batches."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from numpy.random import default_rng

from outpace.training.data import Example
from outpace.training.loop import Loop
from outpace.training.micro_batches import MicroBatches, balance_tokens, split_evenly
from runs import losses, metrics, trainer

LENGTHS = default_rng(0).integers(1, 200, 500).tolist()


def example(number: int) -> Example:
    return Example([], [0] * LENGTHS[number], [])


def portions(processes: int, **options: Any) -> MicroBatches:
    return MicroBatches(Loop(**options), processes, example)


def numbers(made: MicroBatches, step: int) -> list[list[int]]:
    ranks = [made.micro_batches(step, rank) for rank in range(made.processes)]
    return [[number for number, _ in portion] for rank in ranks for portion in rank]


def spread(made: MicroBatches, step: int) -> float:
    """Tokens of the largest part over those of the smallest."""
    sizes = [sum(LENGTHS[n] for n in part) for part in numbers(made, step)]
    return max(sizes) / min(sizes)


def test_examples_go_to_processes_in_turn() -> None:
    made = portions(2, batch=8, accumulation=2)
    assert numbers(made, 0) == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert numbers(made, 3)[0] == [24, 26]


def test_balance_evens_what_is_fed_together() -> None:
    turns, balanced = (portions(3, batch=50, accumulation=2, balance=b) for b in (False, True))
    for step in range(5):
        assert sorted(sum(numbers(balanced, step), [])) == [*range(50 * step, 50 * step + 50)]
        assert spread(balanced, step) < 1.1 < spread(turns, step)


def test_a_step_of_tokens_has_as_many() -> None:
    for processes, balance in ((1, False), (2, True), (4, False)):
        made, at = portions(processes, tokens=2000, balance=balance), 0
        for step in range(8):
            found = sorted(sum(numbers(made, step), []))
            assert found == [*range(at, at + len(found))]
            at += len(found)
            assert made.first_example(step + 1) == at
            tokens = [LENGTHS[n] for n in found]
            assert sum(tokens[:-1]) < 2000 <= sum(tokens)


def test_parts_are_filled_longest_first() -> None:
    assert split_evenly([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    items = [(n, Example([], [0] * size, [])) for n, size in enumerate((1, 9, 2, 8, 3, 7))]
    assert [[n for n, _ in part] for part in balance_tokens(items, 3)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tokens": 0}, "tokens"),
        ({"tokens": 500, "epochs": 2.0}, "epochs"),
        ({"tokens": 1199}, "tokens to 1200"),
        ({"batch": 11, "balance": True}, "batch"),
        ({"batch": 13}, "batch"),
    ],
)
def test_indivisible_steps_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Loop(accumulation=3, **options).micro_batch_size(4, longest=100)
    assert Loop(accumulation=3, tokens=2500).micro_batch_size(4, longest=100) == 2
    assert Loop(accumulation=3, batch=14, balance=True).micro_batch_size(4) == 1


def test_balance_and_portions_train_alike(tmp_path: Path) -> None:
    runs = {"one": {}, "four": {"accumulation": 4}, "even": {"accumulation": 4, "balance": True}}
    for name, options in runs.items():
        trainer(tmp_path / name, tokens=700, steps=2, log_every=1, **options).fit()
    one, four, balanced = (losses(tmp_path / name) for name in runs)
    assert four == pytest.approx(one, rel=1e-4) and balanced == pytest.approx(one, rel=1e-4)


def test_a_run_by_tokens_goes_on_where_it_was(tmp_path: Path) -> None:
    for name in ("whole", "halves"):
        trainer(tmp_path / name, tokens=300, balance=True, accumulation=1, steps=8).fit()
    folder = tmp_path / "halves" / "checkpoints"
    shutil.rmtree(folder / "step-00000008")
    state = json.loads((folder / "step-00000004" / "state.json").read_text())
    assert state["examples"] > 4
    again = trainer(tmp_path / "halves", tokens=300, balance=True, accumulation=1, steps=8)
    again.fit()
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "halves")
    with pytest.raises(ValueError, match=r"train\.tokens"):
        trainer(tmp_path / "halves", tokens=400, balance=True, steps=8)

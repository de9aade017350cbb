"""Times of passes that a later process starts from."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from outpace import LLM
from outpace.decoding import Pace
from outpace.engine.pass_times import PassTimes, entry_name, read_points
from outpace.measurements import MeasurementFile, machine_name
from outpace.methods import Autoregressive, Lookup, Speculative

QUESTION = "Tom has 3 apples and buys 4 more. " * 3


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeasurementFile:
    """Return the file of a user without measurements."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return MeasurementFile.of_user()


def new_llm() -> LLM:
    """Return a small model."""
    return LLM("tiny-ar", Lookup(), cache_gib=0.01)


def only_controller(llm: LLM) -> Pace:
    """Return the only controller of a model."""
    (controller,) = llm.engine.controllers.values()
    return controller


def test_a_later_model_starts_from_stored_times(file: MeasurementFile) -> None:
    first = new_llm()
    (plain,) = first.generate(QUESTION, method=Autoregressive(), max_tokens=60)
    (cold,) = first.generate(QUESTION, max_tokens=60)
    assert not [name for name in file.read_entries() if "passes" in name]
    del first
    gc.collect()
    (entry,) = [value for name, value in file.read_entries().items() if "passes" in name]
    assert entry["0"]
    later = new_llm()
    (warm,) = later.generate(QUESTION, max_tokens=60)
    load = only_controller(later).loads[0]  # type: ignore[attr-defined]
    assert load.costs["target"].prior == read_points(entry)[0] and 1 in load.tried
    assert plain.ids == cold.ids == warm.ids


def test_roles_share_the_times_of_a_model(file: MeasurementFile) -> None:
    llm = new_llm()
    llm.generate(QUESTION, max_tokens=60)
    llm.engine.controllers.store_times()
    later = new_llm()
    pairing = later.pair(Speculative(draft="tiny-aux"))
    assert PassTimes(file).read_costs(pairing.runners)[0].keys() == {"target"}
    assert len({entry_name(runner) for runner in pairing.runners.values()}) == 2


def test_times_depend_on_the_shape_and_not_on_the_weights(file: MeasurementFile) -> None:
    llm = new_llm()
    again, packed = new_llm(), LLM("tiny-ar", "lookup", quantize="int8", cache_gib=0.01)
    names = [entry_name(each.target) for each in (llm, again, packed)]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {"0": 3, "x": {"2": [2.0, 1.0]}, "-1": {"2": [2.0, 1.0]}, "1000": {}},
        {"0": {"2": [2.0], "x": [2.0, 1.0], "3": [2.0, "1"], "²": [1.0, 1.0]}},
        {"0": {"2": [2.0, float("nan")], "4": [float("inf"), 1.0], "6": [8.0, -1.0]}},
        {"0": {"2": [2.0, float("inf")], "4": [1000.0, 1.0], "6": [8.0, 0.0]}},
    ],
    ids=str,
)
def test_invalid_times_are_left_out(entry: object, file: MeasurementFile) -> None:
    assert read_points(entry) == {}
    llm = new_llm()
    file.write_entries({entry_name(llm.target): entry})
    (output,) = llm.generate(QUESTION, max_tokens=30)
    (plain,) = llm.generate(QUESTION, method=Autoregressive(), max_tokens=30)
    assert output.ids == plain.ids


def test_valid_times_beside_invalid_ones_are_used() -> None:
    entry = {"0": {"0": [1, 0.5], "6": [8.2, 0.75], "9": None}, "4": {"8": [16.0, 2.0]}}
    assert read_points(json.loads(json.dumps(entry))) == {
        0: {0: (1, 0.5), 6: (8.2, 0.75)},
        4: {8: (16.0, 2.0)},
    }


@pytest.mark.nightly
def test_times_are_stored_at_exit(file: MeasurementFile) -> None:
    code = f"""
from outpace import LLM
llm = LLM("tiny-ar", "lookup", cache_gib=0.01)
llm.generate({QUESTION!r}, max_tokens=40)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    names = [name.removeprefix(machine_name()) for name in file.read_entries()]
    assert sum(name.startswith("passes ") for name in names) == 1

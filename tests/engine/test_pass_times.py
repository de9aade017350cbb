"""Times of passes that a later process starts from."""

import gc
from pathlib import Path

import pytest

from outpace import LLM
from outpace.decoding import Pace
from outpace.engine.controllers import PassTimes, entry_name, read_points
from outpace.measurements import MeasurementFile
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

"""Memory of the models of figures."""

import json
import math
from pathlib import Path

import pytest

from outpace.checkpoints.checkpoint import translate_config
from outpace.decoding.target import DRAFT_KINDS
from outpace.lab.reproduce.figure import PAPERS, figures, find
from outpace.lab.reproduce.memory import billions_of, fit_entries, gib_of
from refusal import refuses

CONFIGS = json.loads((Path(__file__).parents[2] / "golden" / "configs.json").read_text())
FULL = [e for name in PAPERS for f in figures(name) for p in f.scales["full"] for e in p.every]


@pytest.mark.parametrize("name", sorted({name for e in FULL for name in e.model_names}))
def test_sizes_are_those_of_the_published_configurations(name: str) -> None:
    size, fields = billions_of(name), CONFIGS.get(name.rpartition("/")[2])
    assert size is not None
    if fields is not None and (config := translate_config(fields)).kind not in DRAFT_KINDS:
        assert size == pytest.approx(config.num_parameters / 1e9, abs=0.006)


def test_models_are_loaded_together_if_they_fit() -> None:
    entries = find("apd:table1")[0].scales["full"][0].every
    assert 45 < gib_of(entries) < 50 and gib_of(entries, 1.0, 1.0) < 25
    for free, parts in ((80.0, [3]), (40.0, [2, 1]), (24.0, [1, 1, 1]), (math.inf, [3])):
        found = fit_entries(entries, free, 2.0, 2.0)
        assert [len({entry.model for entry in part}) for part in found] == parts
        assert sorted(e.name for part in found for e in part) == sorted(e.name for e in entries)
    with refuses("device"):
        fit_entries(entries, 16.0, 2.0, 2.0)

"""Cases of Fast-dLLM's authors, forward by forward, through the engine and its paged cache."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers import Recorded, engine_of, enter, finish, runner, tokens
from outpace.checkpoints.load import load_model
from outpace.engine.engine import Engine, Job
from outpace.methods import FastDLLM, Method

FOLDER = Path(__file__).parent
CASES: list[dict[str, Any]] = json.loads((FOLDER / "fast_dllm" / "cases.json").read_text())
MODELS = sorted({case["model"] for case in CASES})
MASK = 310


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of(*((name, load_model(FOLDER / name)) for name in MODELS), slots=4000)


def official(params: dict[str, Any]) -> FastDLLM:
    rule = {name: params[name] for name in ("threshold", "factor") if name in params}
    return FastDLLM(cache=params["cache"], block=params["block_length"], canvas=True, **rule)


def submit(engine: Engine, case: dict[str, Any], method: Method) -> Job:
    """Queue a case; the authors' code does not stop at an end-of-sequence."""
    return enter(
        engine,
        method,
        case["prompt"],
        runners={"target": runner(engine, case["model"])},
        max_tokens=case["params"]["gen_length"],
        eos=frozenset(),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case_equals_the_official_run(engine: Engine, case: dict[str, Any]) -> None:
    method = Recorded(method=official(case["params"]))
    job = submit(engine, case, method)
    finish(engine)
    assert case["prompt"] + tokens(job) == case["output_ids"]
    canvas = case["prompt"] + [MASK] * case["params"]["gen_length"]
    assert len(method.forwards) == len(case["forwards"])
    for forward, (start, rows, filled) in zip(method.forwards, case["forwards"], strict=True):
        assert (forward.start, len(forward.ids)) == (start, rows)
        assert forward.ids == canvas[start : start + rows]
        for slot, token in filled:
            canvas[slot] = token


def test_all_cases_in_one_batch(engine: Engine) -> None:
    jobs = [submit(engine, case, official(case["params"])) for case in CASES]
    finish(engine)
    for job, case in zip(jobs, CASES, strict=True):
        assert case["prompt"] + tokens(job) == case["output_ids"], case["id"]


def test_cases_are_of_all_kinds() -> None:
    kinds = {(case["model"], case["params"]["cache"]) for case in CASES}
    caches = (None, "prefix", "dual")
    assert kinds >= {("llada/model", cache) for cache in caches}
    assert kinds >= {(name, cache) for name in ("dream/model", "apd/model") for cache in caches[1:]}
    assert any("factor" in case["params"] for case in CASES)
    counts = [len(filled) for case in CASES for *_, filled in case["forwards"]]
    assert len(CASES) == 72 and max(counts) > 4

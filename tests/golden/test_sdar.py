"""Every case of SDAR's authors, block by block, through the engine and its paged cache.

The authors feed a full block once more by itself, so that its keys are kept; here the first forward
of the next block does that beside its own work. What is counted are the forwards that fill.
"""

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers import as_it_stands, close, engine_of, enter, finish, run, runner, tokens
from outpace.checkpoints.load import load_config, load_model
from outpace.decoding import Decoding, Forward, Kind, Prediction, Request, Sample, Sampling
from outpace.engine.engine import Engine
from outpace.engine.job import Job
from outpace.methods import BlockDiffusion, Method

FOLDER = Path(__file__).parent / "sdar"
FILE: dict[str, Any] = json.loads((FOLDER / "cases.json").read_text())
CASES: list[dict[str, Any]] = FILE["generate"]
GREEDY = [
    case
    for case in CASES
    if case["kind"] == "topk1" or (case["kind"] == "argmax" and case["params"]["temperature"] == 1)
]
EXPECTED = load_file(FOLDER / "expected.safetensors")
SAID = torch.arange(320) != FILE["mask_token_id"]


def names(cases: list[dict[str, Any]]) -> list[str]:
    return [case["id"] for case in cases]


def official(params: dict[str, Any], **options: Any) -> BlockDiffusion:
    strategy = params["remasking_strategy"]
    return BlockDiffusion(
        block=params["block_length"],
        steps=params["denoising_steps"],
        order="left_to_right" if strategy == "sequential" else "confidence",
        threshold=params["confidence_threshold"] if strategy.endswith("dynamic") else None,
        **{"canvas": True, **options},
    )


def room(case: dict[str, Any]) -> int:
    """Tokens of an answer in whole blocks, as the official code rounds up."""
    return len(case["output_ids"]) - case["prompt_length"]


def stops(case: dict[str, Any]) -> frozenset[int]:
    return frozenset(case["params"]["stopping_criteria_idx"] or ())


def text(case: dict[str, Any]) -> list[int]:
    """The official answer up to the token that ends it."""
    output = case["output_ids"][case["prompt_length"] :]
    return output[: next((i for i, token in enumerate(output) if token in stops(case)), room(case))]


@dataclass(frozen=True, kw_only=True)
class Replayed(Method):
    """Runs the forwards of a method, whose choices are the recorded ones."""

    target_kinds = (Kind.BLOCK,)

    method: BlockDiffusion
    case: dict[str, Any]
    asked: list[Forward] = field(default_factory=list)
    got: list[Prediction] = field(default_factory=list)

    def decode(self, seq: Request) -> Decoding:
        decoding = self.method.decode(seq)
        forward = next(decoding)
        for step in self.case["trace"]:
            self.asked.append(as_it_stands(forward))
            self.got.append((yield replace(forward, read=Sample(keep=True))))
            confidence = np.array(step["confidence"], dtype=np.float32)
            drawn = Prediction(tokens=step["argmax_or_sampled"], scores={"confidence": confidence})
            try:
                forward = decoding.send(drawn)
            except StopIteration:
                return


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of(("sdar", load_model(FOLDER / "model")), slots=2000)


def submit(engine: Engine, method: Method, case: dict[str, Any], **sampling: Any) -> Job:
    return enter(
        engine,
        method,
        case["input_ids"],
        runners={"target": runner(engine, "sdar")},
        max_tokens=room(case),
        sampling=Sampling(**sampling),
        eos=stops(case),
    )


def test_every_case_is_here() -> None:
    assert Counter(names(CASES)).most_common(1)[0][1] == 1
    assert Counter(case["kind"] for case in CASES) == {"argmax": 14, "topk1": 5, "sampled": 2}
    assert len(GREEDY) == 17 and len(EXPECTED) == len(FILE["logits"]) + 2
    config = load_config(FOLDER / "model")
    assert (config.family, config.kind, config.shift) == ("sdar", Kind.BLOCK, 0)
    assert (config.block, config.mask_id, config.eos) == (4, FILE["mask_token_id"], (300, 302))


@pytest.mark.parametrize("case", FILE["logits"], ids=names(FILE["logits"]))
def test_logits_of_one_forward(engine: Engine, case: dict[str, Any]) -> None:
    ids, block = case["input_ids"], case["block_length"]
    target = runner(engine, "sdar")
    forward = Forward(
        ids=ids,
        start=0,
        pattern=tuple(min(block, len(ids) - at) for at in range(0, len(ids), block)),
        predict=range(len(ids)),
        read=Sample(keep=True),
    )
    table = target.reserve(len(ids))
    assert table is not None
    (out,) = run(target, [forward], [table])
    target.release(table)
    assert out.logits is not None
    close(out.logits[:, SAID], EXPECTED[case["id"]][:, SAID])


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_case_equals_the_official_run(engine: Engine, case: dict[str, Any]) -> None:
    replayed = Replayed(method=official(case["params"]), case=case)
    job = submit(engine, replayed, case)
    finish(engine)
    assert tokens(job) == text(case)
    assert len(replayed.asked) == len(case["trace"]) == len(job.trace)
    block, mask = case["params"]["block_length"], FILE["mask_token_id"]
    logits, fed = EXPECTED.get(f"step_logits_{case['id']}"), 0
    for number, (step, forward) in enumerate(zip(case["trace"], replayed.asked, strict=True)):
        begin = step["block_start"]
        assert (forward.start, forward.end) == (fed, begin + block)
        assert forward.pattern == (block,) * (len(forward.ids) // block)
        assert forward.ids[begin - fed :] == step["input"]
        assert forward.ids[: begin - fed] == case["output_ids"][fed:begin]
        holes = [place for place, token in enumerate(step["input"]) if token == mask]
        assert list(forward.predict or ()) == [begin + place for place in holes]
        ours = replayed.got[number].logits
        assert ours is not None
        if logits is not None:
            close(ours[:, SAID], logits[number][holes][:, SAID])
        fed = begin
    assert list(job.canvas) == case["output_ids"][: len(job.canvas)]


@pytest.mark.parametrize("canvas", [True, False])
def test_greedy_cases_all_in_one_batch(engine: Engine, canvas: bool) -> None:
    """As a user runs them: token by token, forward by forward.

    Without `canvas` an answer ends with its last token, not with the block.
    """
    for together in (True, False):
        jobs = []
        for case in GREEDY:
            top_k = case["params"]["top_k"] or None
            method = official(case["params"], canvas=canvas)
            jobs.append(submit(engine, method, case, top_k=top_k))
            if not together:
                finish(engine)
        finish(engine)
        for job, case in zip(jobs, GREEDY, strict=True):
            assert tokens(job) == text(case), case["id"]
            forwards = len(job.trace)
            if canvas or not stops(case):
                assert forwards == len(case["trace"])
            assert forwards <= len(case["trace"])


def test_a_quota_beyond_the_masks_overwrites_nothing(engine: Engine) -> None:
    for case in FILE["quirks"]:
        job = submit(engine, official(case["params"]), case)
        finish(engine)
        assert len(tokens(job)) == room(case)
        assert job.ids[: case["prompt_length"]] == case["input_ids"]

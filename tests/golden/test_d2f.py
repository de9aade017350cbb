"""Every public case of D2F's authors, block by block, through the engine and its paged cache.

What is fed differs in two ways from the official code, and each is checked where it shows: the
row before the first hole is fed again where the official code kept its logits, and full blocks
behind the last hole are not fed.
"""

import json
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers import Recorded, engine_of, enter, finish, runner, tokens
from outpace.checkpoints.load import load_model
from outpace.decoding import Forward, Sampling
from outpace.engine.engine import Engine, Job
from outpace.methods import D2F, Method

FOLDER = Path(__file__).parent / "d2f"
CASES: list[dict[str, Any]] = json.loads((FOLDER / "decode_cases.json").read_text())
NAMES = [case["id"] for case in CASES]
ORDERS = {"default": "confidence", "margin_confidence": "margin", "neg_entropy": "entropy"}


def keep_logits(forward: Forward) -> Forward:
    return replace(forward, read=replace(forward.read, keep=True))


def accepted(recorded: Recorded) -> list[list[list[int]]]:
    """Slot and token of what each forward filled: what the next one no longer predicts."""
    holes = [list(forward.predict) for forward in recorded.forwards] + [[]]
    return [
        [[slot, token] for slot, token in zip(now, out.tokens, strict=True) if slot not in then]
        for now, then, (_, out) in zip(holes, holes[1:], recorded.turns, strict=False)
    ]


def method_of(case: dict[str, Any], *, canvas: bool = True) -> D2F:
    params = case["params"]
    return D2F(
        block=params["block_size"],
        add=params["block_add_threshold"],
        activate=params["decoded_token_threshold"],
        confidence=params["skip_threshold"],
        order=ORDERS[params["sampling_strategy"]],
        canvas=canvas,
    )


def model_of(case: dict[str, Any]) -> str:
    return case["adapter"] or case["model"]


@pytest.fixture(scope="module")
def engine() -> Engine:
    pairs = {model_of(case): (case["model"], case["adapter"]) for case in CASES}
    models = [
        (name, load_model(FOLDER / model, adapter=FOLDER / adapter if adapter else None))
        for name, (model, adapter) in pairs.items()
    ]
    return engine_of(*models, slots=3000)


def submit(engine: Engine, method: Method, case: dict[str, Any]) -> Job:
    params = case["params"]
    return enter(
        engine,
        method,
        case["prompt_ids"],
        runners={"target": runner(engine, model_of(case))},
        max_tokens=params["max_new_tokens"],
        sampling=Sampling(top_p=params["top_p"] or 1.0, top_k=params["top_k"]),
        eos=frozenset([case["eos_token_id"]]),
    )


def text(case: dict[str, Any]) -> list[int]:
    """The official output up to its end-of-sequence."""
    output, eos = case["output_ids"], case["eos_token_id"]
    return output[: output.index(eos)] if eos in output else output


def states(case: dict[str, Any], recorded: Recorded) -> list[list[list[Any]]]:
    """State of every block before every forward, from what the method fed and asked for.

    A block stands in the cache when a forward has fed it full behind full ones; then no later
    forward feeds it, but for the row that may predict the first hole.
    """
    params, prompt = case["params"], len(case["prompt_ids"])
    block, rows = params["block_size"], []
    count, cached = 0, 0
    for forward in recorded.forwards:
        holes = Counter((slot - prompt) // block + 1 for slot in forward.predict)
        count = max(count, *holes)
        left = [holes[index] for index in range(count + 1)]
        shares = [1.0, *((block - masks) / block for masks in left[1:])]
        whole = next(index for index in range(count + 1) if left[index])
        rows.append(
            [
                [
                    index,
                    "in_cache" if index < cached else "to_cache" if index < whole else "active",
                    index == 0 or shares[index - 1] >= params["decoded_token_threshold"],
                    left[index],
                ]
                for index in range(count + 1)
            ]
        )
        cached = whole
    return rows


def test_every_case_is_here() -> None:
    assert Counter(case["family"] for case in CASES) == {"dream": 22, "llada": 22}
    assert len(set(NAMES)) == 44
    assert sum(case["n_forward"] for case in CASES) == sum(len(case["steps"]) for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_case_equals_the_official_run(engine: Engine, case: dict[str, Any]) -> None:
    recorded = Recorded(method=method_of(case), change=keep_logits)
    job = submit(engine, recorded, case)
    finish(engine)
    assert tokens(job) == text(case)
    steps, asked = case["steps"], recorded.forwards
    assert len(asked) == len(job.trace) == len(steps) == case["n_forward"]
    assert accepted(recorded) == [step["accepted"] for step in steps]
    assert states(case, recorded) == [step["states"] for step in steps]
    prompt, block = len(case["prompt_ids"]), case["params"]["block_size"]
    filled = dict(zip(range(prompt), case["prompt_ids"], strict=True))
    for step, forward in zip(steps, asked, strict=True):
        begin, end = step["input_start"], step["input_start"] + step["input_len"]
        lead = begin - forward.start
        assert lead == (forward.predict[0] == begin)  # the row whose logits were carried
        ends = [*range(prompt, end + 1, block)]
        skipped = ends[bisect_right(ends, forward.predict[-1]) + 1 :]
        assert forward.end == end - len(skipped) * block
        # Lengths of blocks: that row, what is committed, the blocks in flight.
        edges = [forward.start, begin][1 - lead :] + [e for e in ends if begin < e <= forward.end]
        assert forward.pattern == tuple(b - a for a, b in zip(edges, edges[1:], strict=False))
        assert list(forward.ids) == [
            filled.get(slot, case["mask_token_id"]) for slot in range(forward.start, forward.end)
        ]
        filled |= dict(step["accepted"])
    for step, then in zip(steps, steps[1:], strict=False):
        # What is committed is what no later forward feeds.
        assert then["cache_len"] == step["cache_len"] + step["commit"] == then["input_start"]
    assert [filled[prompt + index] for index in range(len(filled) - prompt)] == case["output_ids"]


@pytest.mark.parametrize("case", [c for c in CASES if c["id"].endswith(("/default_b8", "/lora"))])
def test_logits_of_the_first_forward(engine: Engine, case: dict[str, Any]) -> None:
    """Of the masks of the first block, whose rows see the prompt and themselves.

    Float32 alone moves logits of these weights by some 1e-4 (up to 6e-4) from those of float64,
    the official ones as well as ours.
    """
    recorded = Recorded(method=method_of(case), change=keep_logits)
    submit(engine, recorded, case)
    finish(engine)
    family, name = case["id"].split("/")
    expected = load_file(FOLDER / f"{family}_decode_logits.safetensors")[f"{name}.step0"][0]
    shift = runner(engine, model_of(case)).config.shift
    expected = expected[[slot - shift for slot in recorded.forwards[0].predict]]
    said = torch.arange(expected.shape[-1]) != case["mask_token_id"]  # which is never said here
    logits = recorded.turns[0][1].logits
    torch.testing.assert_close(logits[:, said], expected[:, said], atol=1e-3, rtol=0)


@pytest.mark.parametrize("canvas", [True, False])
def test_cases_all_in_one_batch(engine: Engine, canvas: bool) -> None:
    """44 requests of both families at a time, as a user runs them.

    Without `canvas` the text is the same, and may be longer where no whole block has room.
    """
    jobs = [submit(engine, method_of(case, canvas=canvas), case) for case in CASES]
    finish(engine)
    for job, case in zip(jobs, CASES, strict=True):
        output, expected = tokens(job), text(case)
        if canvas or job.finish_reason == "stop":
            assert output == expected, case["id"]
        else:
            assert len(output) == case["params"]["max_new_tokens"]
            assert output[: len(expected)] == expected
        forwards = len(job.trace)
        if canvas or len(output) == len(expected):
            assert forwards <= case["n_forward"] and (not canvas or forwards == case["n_forward"])

"""Every decode of WeDLM's authors, forward by forward, through the engine and its paged cache.

Streaming decodes are those of their engine, which emits a token one forward after it is filled
(`eager=False`); block decodes those of their compatibility model, which has no cache and keeps no
key (`confidence`, `block`, `clip`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import Recorded, engine_of, enter, finish, runner, tokens
from outpace import LLM
from outpace.checkpoints.load import load_model
from outpace.decoding import Canvas, Forward, Prediction, Read, Sampling
from outpace.decoding.sampling import GroupReader, LogitTruncation, Readout, token_scores
from outpace.engine.engine import Engine, Job
from outpace.methods import Autoregressive, Method, WeDLM

FOLDER = Path(__file__).parent / "wedlm"
STREAMS = json.loads((FOLDER / "stream_cases.json").read_text())
BLOCKS = json.loads((FOLDER / "block_cases.json").read_text())["cases"]
TOKENS = json.loads((FOLDER / "ar_cases.json").read_text())["cases"]
SAMPLER = json.loads((FOLDER / "sampler.json").read_text())
MASK, EOS = STREAMS["mask_token_id"], STREAMS["eos_token_id"]
Case = dict[str, Any]


def with_variant(group: Case) -> list[Case]:
    return [{**case, "variant": group["variant"]} for case in group["sequences"]]


CASES = {
    **{case["name"]: case for case in STREAMS["single"] if "stop" not in case["params"]},
    **{f"batch-{i}": case for i, case in enumerate(with_variant(STREAMS["batch"]))},
    **{f"prefix-{i}": case for i, case in enumerate(with_variant(STREAMS["prefix_cache"]))},
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of(*((name, load_model(FOLDER / name)) for name in ("qwen3", "qwen25")))


@dataclass(frozen=True, kw_only=True)
class Sharpened(Read):
    """The most probable token, and its probability at a temperature."""

    temperature: float

    @classmethod
    def make_reader(cls, reads: list[Self], slots: Any, device: torch.device) -> GroupReader:
        (own,) = reads

        def read(logits: Tensor, rows: slice) -> Readout:
            best = (logits / own.temperature).softmax(-1).max(-1)
            return Readout(best.indices, {"confidence": best.values})

        return read


def submit(engine: Engine, case: Case, method: Method, **options: Any) -> Job:
    stops = frozenset([EOS, *case.get("params", {}).get("stop_token_ids", [])])
    return enter(
        engine,
        method,
        case["prompt_ids"],
        runners={"target": runner(engine, case["variant"])},
        **{"max_tokens": len(case["output_ids"]), "eos": stops, **options},
    )


def streaming(case: Case, **options: Any) -> WeDLM:
    params = case["params"]
    return WeDLM(
        window=case["window"],
        entropy=params["wedlm_entropy_threshold"],
        penalty=params["wedlm_pos_penalty_factor"],
        **options,
    )


def visible(case: Case) -> list[int]:
    """Output of a case without the stop token, which the authors keep."""
    ids = case["output_ids"]
    stops = {EOS, *case["params"].get("stop_token_ids", [])}
    return ids[:-1] if ids[-1] in stops else ids


def steps(turns: list[tuple[Forward, Prediction]], prompt: int) -> Iterator[Case]:
    """Turns as the authors' traces have them, without the prompt that the first one feeds."""
    following = [forward for forward, _ in turns[1:]]
    for (forward, answer), after in zip(turns, [*following, None], strict=True):
        skipped = prompt if forward.start == 0 else 0
        holes = list(forward.predicted_slots())
        step = {
            "input_ids": list(forward.ids)[skipped:],
            "position_ids": list(forward.positions or ())[skipped:],
            "n_filled": len(forward.ids) - skipped - len(holes),
            "base_len": forward.start + skipped,
        }
        if after is None:
            yield {**step, "finished": True}
            return
        left = set(after.predicted_slots())
        filled = [i for i, hole in enumerate(holes) if hole not in left]
        yield {
            **step,
            "mask_positions": holes,
            "entropy": answer.scores["entropy"],
            "greedy": answer.tokens,
            "filled_positions": [holes[i] for i in filled],
            "filled_ids": [answer.tokens[i] for i in filled],
        }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_streaming_decode_step_by_step(engine: Engine, case: Case) -> None:
    method = Recorded(method=streaming(case, eager=False))
    job = submit(engine, case, method, max_tokens=case["params"]["max_tokens"])
    finish(engine)
    assert tokens(job) == visible(case)
    prompt = len(case["prompt_ids"])
    ours = list(steps(method.turns, prompt))
    for mine, theirs in zip(ours, case["steps"], strict=True):
        for name, value in mine.items():
            if name == "entropy":
                np.testing.assert_allclose(value, theirs[name], atol=1e-3)
            else:
                assert value == theirs[name], name
    assert len(ours) == case["n_forwards"]
    assert sum(len(step["input_ids"]) for step in ours) == case["n_forward_tokens"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_eager_decode_has_the_same_tokens_and_fewer_forwards(engine: Engine, case: Case) -> None:
    job = submit(engine, case, streaming(case), max_tokens=case["params"]["max_tokens"])
    finish(engine)
    assert tokens(job) == visible(case)
    assert len(job.trace) < case["n_forwards"]


def test_batch_equals_each_alone(engine: Engine) -> None:
    engine.max_sequences = STREAMS["batch"]["max_num_seqs"]
    cases = with_variant(STREAMS["batch"])
    jobs = [
        submit(engine, case, streaming(case), max_tokens=case["params"]["max_tokens"])
        for case in cases
    ]
    finish(engine)
    assert [tokens(job) for job in jobs] == [visible(case) for case in cases]
    assert len({case["params"]["max_tokens"] for case in cases}) > 1


@pytest.mark.parametrize(
    "case", [c for c in STREAMS["single"] if "stop" in c["params"]], ids=lambda c: c["name"]
)
def test_stop_string_ends_the_answer(case: Case) -> None:
    llm = LLM(FOLDER / case["variant"], streaming(case))
    (stop,) = case["params"]["stop"]
    options = {"max_tokens": case["params"]["max_tokens"], "stop": stop}
    (output,) = llm.generate([case["prompt_ids"]], **options)
    assert output.ids == case["output_ids"]
    assert f"{output.text.rstrip()} {stop}" == case["text"]


def blockwise(case: Case) -> WeDLM:
    """The method with the settings of a case; their threshold of 0 takes one token a forward."""
    threshold = case["confidence_threshold"] or 1.0
    return WeDLM(window=case["block_size"], confidence=threshold, block=True, clip=True)


@pytest.mark.parametrize("case", [c for c in BLOCKS if "steps" in c], ids=lambda case: case["name"])
def test_block_decode_step_by_step(engine: Engine, case: Case) -> None:
    read = Sharpened(temperature=case["temperature"], scores=("confidence",))
    method = Recorded(method=blockwise(case), change=lambda forward: replace(forward, read=read))
    job = submit(engine, case, method, eos=frozenset())
    finish(engine)
    assert tokens(job) == case["output_ids"]
    masked = [list(forward.predicted_slots()) for forward in method.forwards]
    assert masked == [step["masked"] for step in case["steps"]]
    assert [forward.end for forward in method.forwards] == [s["seq_len"] for s in case["steps"]]


@pytest.mark.parametrize(
    "case", [c for c in BLOCKS if "sequences" in c], ids=lambda case: case["name"]
)
def test_block_decode_of_a_batch(engine: Engine, case: Case) -> None:
    pad = case["pad_token_id"]
    steps = 0
    for ids, sequence in zip(case["input_ids"], case["sequences"], strict=True):
        prompt = ids[: ids.index(pad)] if pad in ids else ids
        end = len(prompt) + case["max_new_tokens"]
        alone = {**case, "prompt_ids": prompt, "output_ids": sequence[len(prompt) : end]}
        job = submit(engine, alone, blockwise(case), eos=frozenset())
        finish(engine)
        assert tokens(job) == alone["output_ids"]
        steps += len(job.trace)
    assert steps == case["total_steps"]


@pytest.mark.parametrize("case", TOKENS, ids=lambda case: case["variant"])
@pytest.mark.parametrize("method", [Autoregressive(), WeDLM(verify=True)], ids=["plain", "verify"])
def test_token_by_token(engine: Engine, case: Case, method: Method) -> None:
    job = submit(engine, case, method, eos=frozenset())
    finish(engine)
    assert tokens(job) == case["output_ids"]


LOGITS = torch.tensor(SAMPLER["entropy"]["logits"])


def test_entropy_is_that_of_raw_logits_in_nats() -> None:
    ours = token_scores(LOGITS, LOGITS.argmax(-1), {"entropy"})["entropy"]
    torch.testing.assert_close(ours, torch.tensor(SAMPLER["entropy"]["entropy"]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", SAMPLER["select"], ids=lambda case: str(case["threshold"]))
def test_choice_of_holes(case: Case) -> None:
    holes = case["mask_indices"]
    method = WeDLM(entropy=case["threshold"], penalty=case["penalty"])
    canvas = Canvas([], MASK)
    canvas.append_slots(holes[-1] + 1)
    entropy = np.array(case["entropy"], dtype=np.float32)
    method.fill_confident(
        canvas, holes, Prediction(tokens=[7] * len(holes), scores={"entropy": entropy})
    )
    assert [i for i, hole in enumerate(holes) if canvas.ids[hole] == 7] == case["selected"]


@pytest.mark.parametrize("case", SAMPLER["filters"], ids=str)
def test_law_of_a_sample(case: Case) -> None:
    """The same where order does not matter; theirs cuts by top-k, by top-p, and divides by T then.

    Here the logits are divided by the temperature before both cuts, as everywhere else.
    """
    top_k = case["top_k"] or None
    sampling = Sampling(temperature=case["temperature"], top_p=case["top_p"], top_k=top_k)
    law = LogitTruncation.from_requests([sampling], [range(len(LOGITS))], torch.device("cpu"))
    ours, theirs = law(LOGITS, slice(None)).softmax(-1), torch.tensor(case["probs"])
    same = case["top_p"] == 1 or (case["temperature"] == 1 and top_k is None)
    assert torch.allclose(ours, theirs, atol=1e-4) is same


def test_no_case_is_left_out() -> None:
    assert len(CASES) == 20 + 5 + 2
    assert (len(BLOCKS), len(TOKENS), len(SAMPLER["select"]), len(SAMPLER["filters"])) == (
        12,
        2,
        8,
        8,
    )

"""Every public case of APD's authors, forward by forward, through the engine and its paged cache.

Four quirks of the official code are not in ours on purpose; each is handled where it shows:
a window of 0, the search for end-of-sequence in the prompt, tokens kept behind an
end-of-sequence, and a last group that counts holes which do not exist.
"""

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers import close, engine_of, enter, finish, runner, tokens, whole
from outpace.checkpoints.load import load_model
from outpace.decoding import Decoding, Forward, Kind, Prediction, Read, Request, agreement
from outpace.decoding.forward import IntArray
from outpace.decoding.sampling import GroupReader, Readout
from outpace.engine.engine import Engine, Job
from outpace.methods import APD, LeftToRight, Method

FOLDER = Path(__file__).parent / "apd"
DATA = json.loads((FOLDER / "cases.json").read_text())
EXPECTED = load_file(FOLDER / "expected.safetensors")
UNIFORMS = (EXPECTED["noise_u16"].double() + 0.5) / 65536
CASES: list[dict[str, Any]] = DATA["cases"]
MASK, EOS = DATA["mask_token_id"], DATA["eos_token_id"]

GROUPS = {
    "apd_without_R": 1,
    "eos_disabled": 1,
    "eos_stop": 4,
    "greedy_M": 5,
    "greedy_R": 10,
    "greedy_RWM": 7,
    "greedy_W": 6,
    "leftright": 11,
    "prompt_contains_eos": 1,
    "sampled_T0.2": 7,
    "sampled_T0.7": 1,
    "sampled_T1": 8,
    "vocab_mismatch": 2,
    "W_matters": 7,
}


@dataclass(frozen=True, kw_only=True)
class AuthorsSampler(Read):
    """The authors' proposals: temperature and filters, then the temperature once more.

    Logits are divided by the temperature and filtered, and then sampled as the arg-max of
    `exp(l) / (-ln U) ** T`, so that the law is the one of T squared.
    """

    uniforms: Tensor
    temperature: float
    top_p: float
    top_k: int | None

    @classmethod
    def make_reader(cls, reads: list[Self], slots: Any, device: torch.device) -> GroupReader:
        (own,) = reads

        def read(logits: Tensor, rows: slice) -> Readout:
            return Readout(own.sample(logits, own.uniforms[rows]), {})

        return read

    def sample(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        lowest = torch.finfo(logits.dtype).min
        logits = logits / self.temperature
        if self.top_p < 1:
            ranked, order = logits.sort(descending=True)
            above = ranked.softmax(-1).cumsum(-1) > self.top_p
            above = above.roll(1, -1)
            above[:, 0] = False
            logits = logits.masked_fill(torch.zeros_like(above).scatter(-1, order, above), lowest)
        if self.top_k is not None:
            edge = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < edge, lowest)
        return (logits.double().exp() / (-uniforms.log()) ** self.temperature).argmax(-1)


class FirstRowPredictsItself(Forward):
    """A forward of the official shift: the first row, having none before it, predicts its slot."""

    def predicted_rows(self, shift: int) -> IntArray:
        assert self.predict is not None
        return np.maximum(np.asarray(self.predict) - self.start - shift, 0)


@dataclass(slots=True, kw_only=True)
class Iteration:
    """One turn of the official loop: a forward of the target and, maybe, one of the verifier."""

    left: int
    right: int
    proposals: list[int]
    logits: Tensor
    targets: list[int] = field(default_factory=list)

    @property
    def agreed(self) -> int:
        """Tokens accepted: the first, and those on which proposals and targets agree."""
        return 1 + agreement(self.proposals[1:], self.targets)


@dataclass(frozen=True, kw_only=True)
class Replay(Method):
    """Runs a method as the official code was run, and writes down what it asks and gets.

    The target is read at every mask, although `LeftToRight` wants no more than k of them. Where
    the case injects noise, the target is read with the authors' sampler.
    """

    target_kinds = (Kind.DIFFUSION,)

    method: Method
    case: dict[str, Any]
    iterations: list[Iteration] = field(default_factory=list)

    def decode(self, seq: Request) -> Decoding:
        decoding = self.method.decode(seq)
        forward = next(decoding)
        while True:
            if forward.model == "target":
                answer = yield self.official(forward, len(seq))
                self.iterations.append(
                    Iteration(
                        left=forward.start,
                        right=forward.end,
                        proposals=answer.tokens,
                        logits=answer.logits,
                    )
                )
                wanted = len(forward.predicted_slots())
                answer = Prediction(tokens=answer.tokens[:wanted], logits=answer.logits[:wanted])
            else:
                answer = yield forward
                self.iterations[-1].targets = answer.tokens
            try:
                forward = decoding.send(answer)
            except StopIteration:
                return

    def official(self, forward: Forward, first: int) -> Forward:
        """A forward of the target, read at every mask from slot `first` on."""
        params = self.case["params"]
        read: Read = replace(forward.read, keep=True)
        if self.case["injected_noise"]:
            noise = UNIFORMS[len(self.iterations) % len(UNIFORMS)]
            read = AuthorsSampler(
                keep=True,
                uniforms=noise[: forward.end - first],
                temperature=params["temperature"],
                top_p=params.get("top_p", 1.0),
                top_k=self.case["effective_top_k"],
            )
        kind = FirstRowPredictsItself if params.get("kv_window") == 0 else Forward
        return kind(
            ids=forward.ids,
            start=forward.start,
            pattern=forward.pattern,
            predict=range(first, forward.end),
            read=read,
        )


def official_method(params: dict[str, Any], *, windowed: bool = True) -> Method:
    """The method that the official parameters name, with the coupling of the released code."""
    window = params.get("kv_window") if windowed else None
    lookahead = params.get("max_lookahead")
    if (ratio := params.get("apd_mixture_weight")) is None:
        method: Method = LeftToRight(
            tokens=params["tokens_per_step"], window=window or None, lookahead=lookahead
        )
    else:
        method = APD(
            verifier="verifier",
            ratio=ratio,
            window=window or None,
            lookahead=lookahead,
            coupling="argmax",
        )
    if window == 0:
        # Ours refuses a window below 1, since the first new token would keep the keys of a mask.
        object.__setattr__(method, "window", 0)
    return method


def expected_tokens(case: dict[str, Any], canvas: str = "output_ids") -> list[int]:
    """The official output without what is left of the masks, cut at end-of-sequence."""
    output = [token for token in case[canvas][len(case["prompt"]) :] if token != MASK]
    eos = case["params"].get("eos_token_id", EOS)
    return output[: output.index(eos)] if eos in output else output


def accepted(case: dict[str, Any]) -> list[int]:
    """Tokens accepted in each iteration, without the holes that the last group overcounts."""
    counts, room = [], case["params"]["max_new_tokens"]
    for count in case["acceptance_counts"]:
        counts.append(min(count, room))
        room -= counts[-1]
    return counts


@pytest.fixture(scope="module")
def engine() -> Engine:
    names = ("model", "verifier", "verifier_v304")
    return engine_of(*((name, load_model(FOLDER / name)) for name in names), slots=6000)


def submit(engine: Engine, method: Method, case: dict[str, Any]) -> Job:
    runners = {"target": runner(engine, "model")}
    if case["verifier"]:
        runners["verifier"] = runner(engine, case["verifier"])
    params = case["params"]
    return enter(
        engine,
        method,
        case["prompt"],
        runners=runners,
        max_tokens=params["max_new_tokens"],
        eos=frozenset([params.get("eos_token_id", EOS)]),
    )


def replay(engine: Engine, case: dict[str, Any], *, windowed: bool = True) -> tuple[Job, Replay]:
    method = official_method(case["params"], windowed=windowed)
    recorded = Replay(method=method, case=case)
    job = submit(engine, recorded, case)
    finish(engine)
    tokens(job)
    return job, recorded


def kept_by_iteration(job: Job) -> list[int]:
    """Tokens committed in each iteration, as the engine's trace has it."""
    kept: list[int] = []
    for step in job.trace:
        if step.model == "target":
            kept.append(0)
        kept[-1] += step.committed
    return kept


def test_every_case_is_here() -> None:
    assert Counter(case["group"] for case in CASES) == GROUPS
    assert len(CASES) == sum(GROUPS.values()) == 71
    assert sum("masked_logits" in case for case in CASES) == 3


@pytest.mark.parametrize("case", CASES, ids=[f"{case['id']}-{case['group']}" for case in CASES])
def test_case_equals_the_official_run(engine: Engine, case: dict[str, Any]) -> None:
    job, recorded = replay(engine, case)
    official, ours = case["trace"], recorded.iterations
    if case["group"] == "prompt_contains_eos":
        # The official loop looks for end-of-sequence in the whole canvas, finds it in the prompt
        # and stops after one iteration. A prompt does not end an answer of ours: it goes on.
        assert len(ours) > case["num_forward_evals"] == 1
        assert job.tokens[0] == expected_tokens(case)[0]
        ours = ours[:1]
    else:
        assert job.tokens == expected_tokens(case)
        assert sum(step.model == "target" for step in job.trace) == case["num_forward_evals"]
    assert [turn.left for turn in ours] == official["left"]
    assert [turn.right for turn in ours] == official["right"]
    assert [turn.proposals for turn in ours] == official["x0"]
    if case["verifier"]:
        # The first entry of each list is irrelevant, since the first token is always taken.
        assert [turn.targets for turn in ours] == [target[1:] for target in official["target"]]
        assert [turn.agreed for turn in ours] == case["acceptance_counts"]
    if case["group"] != "prompt_contains_eos":
        # What stands behind an end-of-sequence is in the official counts, but not in ours.
        *kept, last = accepted(case)
        ended = len(expected_tokens(case)) - sum(kept)
        assert kept_by_iteration(job) == [*kept, ended]
        assert ended == last or job.finish_reason == "stop"
    if "masked_logits" in case:
        for index, turn in enumerate(recorded.iterations):
            expected = EXPECTED[f"{case['id']}_iter{index}_masked_logits"].clone()
            second = min(1, len(turn.logits) - 1)
            expected[:, MASK] = turn.logits[0, MASK]
            close(turn.logits[[0, second, -1]], expected)


WITHOUT_WINDOW = [case for case in CASES if "output_ids_without_W" in case]
GREEDY = [
    case
    for case in CASES
    if not case["injected_noise"]
    and case["params"].get("kv_window") != 0
    and case["group"] != "prompt_contains_eos"
]


@pytest.mark.parametrize("case", WITHOUT_WINDOW, ids=[case["id"] for case in WITHOUT_WINDOW])
def test_window_matters(engine: Engine, case: dict[str, Any]) -> None:
    job, _ = replay(engine, case, windowed=False)
    assert len(WITHOUT_WINDOW) == 7
    assert job.tokens == expected_tokens(case, "output_ids_without_W")
    assert job.tokens != expected_tokens(case)


def test_greedy_cases_as_a_user_runs_them_all_in_one_batch(engine: Engine) -> None:
    assert len(GREEDY) == 46
    jobs = [submit(engine, official_method(case["params"]), case) for case in GREEDY]
    finish(engine)
    for job, case in zip(jobs, GREEDY, strict=True):
        assert tokens(job) == expected_tokens(case), case["id"]
        windows = [
            (step.start, step.start + step.rows) for step in job.trace if step.model == "target"
        ]
        assert windows == list(zip(case["trace"]["left"], case["trace"]["right"], strict=True))


@pytest.mark.parametrize("index", range(3))
def test_logits_of_target_and_verifier(engine: Engine, index: int) -> None:
    case = DATA["logits"][index]
    target, verifier = runner(engine, "model").model, runner(engine, "verifier").model
    ids, logits = case["dream_input_ids"], EXPECTED[f"dream_logits_{index}"]
    close(whole(target, ids, causal=False), logits)
    ids, logits = case["verifier_input_ids"], EXPECTED[f"verifier_logits_{index}"]
    close(whole(verifier, ids, causal=True), logits)

"""Every public generation of Dream's and LLaDA's authors, canvas by canvas, through the engine."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers import Recorded, engine_of, enter, finish, runner, tokens
from outpace.checkpoints.load import load_model
from outpace.decoding import Forward, Sampling
from outpace.decoding.order import timestep_counts
from outpace.decoding.sampling import GroupReader, Read, Readout, token_scores
from outpace.engine.engine import Engine, Job
from outpace.methods import Diffusion, LeftToRight, Method, diffusion

FOLDER = Path(__file__).parent
DREAM, LLADA = (json.loads((FOLDER / n / "cases.json").read_text()) for n in ("dream", "llada"))
EXPECTED = {n: load_file(FOLDER / n / "expected.safetensors") for n in ("dream", "llada")}
MASK, EOT = DREAM["mask_token_id"], LLADA["eot_token_id"]
GREEDY, NEVER = Sampling(), frozenset[int]()
ORDERS = {"maskgit_plus": "confidence", "topk_margin": "margin", "low_confidence": "confidence"}


@dataclass(frozen=True, kw_only=True)
class AuthorsNoise(Read):
    """LLaDA's proposals: the arg-max of `exp(l) / (-ln U) ** T` in float64."""

    uniforms: Tensor
    temperature: float

    @classmethod
    def make_reader(cls, reads: Sequence[Self], slots: Any, device: torch.device) -> GroupReader:
        (own,) = reads

        def read(logits: Tensor, rows: slice) -> Readout:
            noised = logits.double().exp() / (-own.uniforms[rows].log()) ** own.temperature
            chosen = noised.argmax(-1)
            return Readout(chosen, token_scores(logits, chosen, set(own.scores)))

        return read


def with_noise(uniforms: Tensor) -> Callable[[Forward], Forward]:
    """Return a function that lets each forward read with the next numbers of a case."""
    numbers = cycle(uniforms)

    def change(forward: Forward) -> Forward:
        assert forward.predict is not None
        read = AuthorsNoise(
            scores=forward.read.scores,
            temperature=forward.read.sampling.temperature,
            uniforms=next(numbers)[list(forward.predict)],
        )
        return replace(forward, read=read)

    return change


def canvases(method: Recorded, job: Job) -> list[list[int]]:
    """Return the inputs of all forwards with the prompt, and the final text."""
    prompt, inputs = job.prompt, [list(forward.ids) for forward in method.forwards]
    return [ids for ids in inputs if ids[: len(prompt)] == prompt] + [job.ids]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """All models, one of them once more with a head that says end-of-sequence."""
    names = {"dream": "dream/model", "model": "llada/model", "model_gqa": "llada/model_gqa"}
    models = {name: load_model(FOLDER / path) for name, path in names.items()}
    edited = models["edited"] = load_model(FOLDER / names["model"])
    head = edited.unembedding.weight.data
    head[[300, 119]] = head[[119, 300]]
    return engine_of(*models.items(), slots=4000)


def submit(
    engine: Engine,
    model: str,
    method: Method,
    prompt: list[int],
    max_tokens: int,
    sampling: Sampling = GREEDY,
    eos: frozenset[int] = NEVER,
) -> Job:
    """Queue a case; without an end-of-sequence unless given, since the authors do not stop."""
    return enter(
        engine,
        method,
        prompt,
        runners={"target": runner(engine, model)},
        max_tokens=max_tokens,
        sampling=sampling,
        eos=eos,
    )


def changes(canvases: Sequence[Sequence[int]]) -> list[list[int]]:
    """Without those equal to the one before: a step that fills nothing takes no forward."""
    kept: list[list[int]] = []
    for canvas in canvases:
        if not kept or list(canvas) != kept[-1]:
            kept.append(list(canvas))
    return kept


DREAM_ONE = [case for case in DREAM["generate"] if "prompt" in case]
DREAM_MANY = [case for case in DREAM["generate"] if "prompts" in case]


def dream(params: dict[str, Any]) -> Diffusion:
    """The method that Dream's parameters name; the order and eps are native where not given."""
    order = ORDERS.get(params["alg"], params["alg"])
    return Diffusion(
        order=None if order == "entropy" else order,
        steps=params["steps"],
        eps=params.get("eps"),
        canvas=True,
    )


def dream_sampling(case: dict[str, Any]) -> Sampling:
    """Filters apply to the scores even at temperature 0."""
    return Sampling(top_p=case["params"].get("top_p", 1.0), top_k=case["effective_top_k"])


@pytest.mark.parametrize("case", DREAM_ONE, ids=lambda case: case["id"])
def test_dream(engine: Engine, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    params, name = case["params"], case["id"]
    if case["has_injected_uniform"]:
        numbers = EXPECTED["dream"][f"{name}_uniform"].numpy()
        luck = lambda seed, step, slots: numbers[step, : len(slots)]  # noqa: E731
        monkeypatch.setattr(diffusion, "slot_uniforms", luck)
    else:
        counts = timestep_counts(params["max_new_tokens"], params["steps"], params.get("eps", 1e-3))
        assert counts == case["transfer_counts"]
    method = Recorded(method=dream(params))
    job = submit(
        engine, "dream", method, case["prompt"], params["max_new_tokens"], dream_sampling(case)
    )
    finish(engine)
    assert job.prompt + tokens(job) == case["output_ids"]
    start = case["prompt"] + [MASK] * params["max_new_tokens"]
    history = EXPECTED["dream"][f"{name}_history"].tolist()
    assert changes(canvases(method, job)) == changes([start, *history])


@pytest.mark.parametrize("case", DREAM_MANY, ids=lambda case: case["id"])
def test_dream_padded_batch(engine: Engine, case: dict[str, Any]) -> None:
    method, length = dream(case["params"]), case["params"]["max_new_tokens"]
    jobs = [
        submit(engine, "dream", method, prompt, length, dream_sampling(case))
        for prompt in case["prompts"]
    ]
    finish(engine)
    assert [tokens(job) for job in jobs] == [row[-length:] for row in case["output_ids"]]


@pytest.mark.parametrize("case", DREAM["schedule"], ids=lambda c: f"{c['masks']}-{c['steps']}")
def test_dream_schedule(case: dict[str, Any]) -> None:
    assert timestep_counts(case["masks"], case["steps"], case["eps"]) == case["counts"]


LLADA_ONE = [case for case in LLADA["generate"] if "prompt" in case]
LLADA_MANY = [case for case in LLADA["generate"] if "prompt" not in case]
ENDS = {"logits_eos_inf": "never", "confidence_eos_eot_inf": "last"}


def llada(params: dict[str, Any]) -> Method:
    """The method that LLaDA's parameters name."""
    length, guidance = params["gen_length"], params["cfg_scale"]
    if (count := params.get("tokens_per_step")) and not guidance:
        return LeftToRight(tokens=count)
    order = params.get("remasking", "left_to_right")
    return Diffusion(
        order=None if order == "low_confidence" else order,
        steps=length // count if count else params.get("steps", params.get("num_steps")),
        block=params["block_length"],
        guidance=guidance,
        ends=next((ENDS[switch] for switch in ENDS if params.get(switch)), "free"),
        canvas=True,
    )


@pytest.mark.parametrize("case", LLADA_ONE, ids=lambda case: case["id"])
def test_llada(engine: Engine, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    params, prompt = case["params"], case["prompt"]
    noise = None
    if "injected_uniform" in case:
        noise = (EXPECTED["llada"][f"{case['id']}_noise_u16"].double() + 0.5) / 65536
    if params.get("remasking") == "random":
        luck = lambda seed, step, slots: noise[step, slots, 0].numpy()  # noqa: E731
        monkeypatch.setattr(diffusion, "slot_uniforms", luck)
    eos = {"logits_eos_inf": [300], "confidence_eos_eot_inf": [300, EOT], "head_edit": [300]}
    ends = frozenset(id for name, ids in eos.items() if name in {*params, *case} for id in ids)
    method = Recorded(method=llada(params))
    if params["temperature"]:
        method = replace(method, change=with_noise(noise))
    job = submit(
        engine,
        "edited" if "head_edit" in case else case["model"],
        method,
        prompt,
        params["gen_length"],
        Sampling(temperature=params["temperature"]),
        ends,
    )
    finish(engine)
    history = EXPECTED["llada"][f"{case['id']}_history"].tolist()
    assert canvases(method, job)[: case["num_forwards"]] == history[:-1]
    expected = case["output_ids"][len(prompt) :]
    cut = next((index for index, token in enumerate(expected) if token in ends), len(expected))
    left = expected.index(MASK) if MASK in expected else len(expected)
    assert tokens(job)[:left] == expected[: min(cut, left)]
    passes = 2 if params["cfg_scale"] else 1
    assert MASK in expected or len(job.trace) == passes * case["num_forwards"]


@pytest.mark.parametrize("case", LLADA_MANY, ids=lambda case: case["id"])
def test_llada_padded_batch(engine: Engine, case: dict[str, Any]) -> None:
    rows = zip(case["input_ids"], case["attention_mask"], strict=True)
    prompts = [ids[mask.index(1) :] for ids, mask in rows]
    method, length = llada(case["params"]), case["params"]["gen_length"]
    jobs = [submit(engine, case["model"], method, prompt, length) for prompt in prompts]
    finish(engine)
    assert [tokens(job) for job in jobs] == [row[-length:] for row in case["output_ids"]]


def test_all_public_cases_are_here() -> None:
    assert (len(DREAM_ONE), len(DREAM_MANY), len(DREAM["schedule"])) == (22, 2, 33)
    assert (len(LLADA_ONE), len(LLADA_MANY)) == (22, 1)

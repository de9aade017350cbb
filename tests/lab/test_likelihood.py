"""Log-likelihoods compared with sums over logits."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

import pytest
import torch

from helpers import whole
from outpace import LLM
from outpace.api.options import Options
from outpace.checkpoints.load import load_model
from outpace.lab.likelihood import (
    CausalLikelihood,
    LeftToRightLikelihood,
    MonteCarloLikelihood,
    score_answers,
)
from outpace.methods import Autoregressive, LeftToRight, Method
from refusal import refuses

TEXT = "Tom has 5 bags. He gives 2 bags to Ann."


def read(llm: LLM, method: Any, ids: list[int]) -> float:
    (output,) = llm.generate([ids], method=method, max_tokens=1, temperature=0)
    assert output.finish_reason in ("stop", "length")
    return float(method.found.logprob)


@pytest.mark.parametrize("name", ["tiny-ar", "tiny-wedlm"])
def test_causal_model(name: str) -> None:
    llm = LLM(name)
    ids = llm.text.encode(TEXT, raw=True)
    logits = whole(load_model(name), ids, causal=True)[:-1, : llm.text.vocab_size].clone()
    if llm.config.mask_id is not None:
        logits[:, llm.config.mask_id] = -1e30
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    for known in (1, 5, len(ids) - 1):
        expected = float(logprobs[known - 1 :].sum())
        for _ in range(2):
            assert read(llm, CausalLikelihood(known=known), ids) == pytest.approx(
                expected, abs=1e-3
            )
    methods = [CausalLikelihood(known=known) for known in range(1, len(ids))]
    requests = [(ids, {"method": method, "max_tokens": 1}) for method in methods]
    for number, _ in llm.serve(requests):  # type: ignore[arg-type]
        expected = float(logprobs[number:].sum())
        assert methods[number].found.logprob == pytest.approx(expected, abs=1e-3)


def test_answers_are_scored_after_their_prompts() -> None:
    llm, answer = LLM("tiny-ar"), "He has 3 bags."
    prompt = llm.text.encode(TEXT)
    assert llm.text.codec is not None
    ids = llm.text.codec.encode_plain(answer)
    expected = read(llm, CausalLikelihood(known=len(prompt)), [*prompt, *ids])
    sums, counts = score_answers(llm, [(prompt, answer), (prompt, ""), (prompt[:2], answer)])
    assert counts == [len(ids), 0, len(ids)]
    assert sums[0] == pytest.approx(expected, abs=1e-3) and sums[1] == 0 > sums[2]


@pytest.mark.parametrize(
    ("name", "method", "kind"),
    [
        ("tiny-ar", Autoregressive(), CausalLikelihood),
        ("tiny-dream", LeftToRight(), LeftToRightLikelihood),
    ],
)
def test_greedy_continuation_is_detected(name: str, method: Method, kind: Any) -> None:
    llm = LLM(name)
    prompt = llm.text.encode(f"{TEXT} How many bags does he have?")
    (output,) = llm.generate([prompt], method=method, max_tokens=8, temperature=0)
    for text, greedy in ((output.ids, True), ([*output.ids[:-1], output.ids[-1] ^ 1], False)):
        likelihood = kind(known=len(prompt))
        read(llm, likelihood, [*prompt, *text])
        assert likelihood.found.greedy is greedy


def test_empty_continuation_has_probability_one() -> None:
    for name, kind in (
        ("tiny-ar", CausalLikelihood),
        ("tiny-dream", MonteCarloLikelihood),
        ("tiny-dream", LeftToRightLikelihood),
    ):
        llm = LLM(name)
        ids = llm.text.encode(TEXT, raw=True)
        method = kind(known=len(ids))
        assert read(llm, method, ids) == 0 and method.found.greedy


def masked_logprobs(llm: LLM, ids: list[int], masked: Sequence[int]) -> list[float]:
    mask = llm.config.mask_id
    fed = [mask if slot in masked else token for slot, token in enumerate(ids)]
    logits = whole(load_model(llm.name), fed, causal=False)[:, : llm.text.vocab_size].clone()
    logits[:, mask] = -1e30
    logprobs = logits.log_softmax(-1)
    return [float(logprobs[slot - llm.config.shift, ids[slot]]) for slot in masked]


diffusion = pytest.mark.parametrize("name", ["tiny-dream", "tiny-llada"])


@diffusion
def test_diffusion_model(name: str) -> None:
    llm = LLM(name)
    ids = llm.text.encode(TEXT, raw=True)[:14]
    method = MonteCarloLikelihood(known=len(ids) - 3, draws=6)
    masks = list(method.draw_masks(3))
    assert {len(slots) for slots in masks} == {1, 2, 3}
    expected = mean(3 / len(slots) * sum(masked_logprobs(llm, ids, slots)) for slots in masks)
    assert read(llm, method, ids) == pytest.approx(expected, abs=1e-3)


@diffusion
def test_left_to_right_likelihoods_equal_a_loop(name: str) -> None:
    llm = LLM(name)
    ids = llm.text.encode(TEXT, raw=True)
    end = len(ids)
    first = [masked_logprobs(llm, ids, range(slot, end))[0] for slot in range(end - 4, end)]
    methods = [LeftToRightLikelihood(known=known) for known in range(end - 4, end)]
    for number, _ in llm.serve(((ids, Options(method=m, max_tokens=1)) for m in methods), batch=4):
        found = methods[number].found
        assert found.logprob == pytest.approx(sum(first[number:]), abs=1e-3)


def test_numbers_of_masks_are_spread_evenly() -> None:
    masks = list(MonteCarloLikelihood(known=7, draws=20).draw_masks(5))
    counts = sorted(len(slots) for slots in masks)
    assert counts == [n for n in range(1, 6) for _ in range(4)]
    assert all(slots == sorted(set(slots)) for slots in masks)
    assert {slot for slots in masks for slot in slots} == set(range(7, 12))
    first = [len(next(MonteCarloLikelihood(known=7, seed=n).draw_masks(5))) for n in range(200)]
    assert all(25 < first.count(count) < 55 for count in range(1, 6))


def test_invalid_options_are_rejected() -> None:
    for known in (0, "x"):
        with refuses("known"):
            CausalLikelihood(known=known)  # type: ignore[arg-type]
    with refuses("draws"):
        MonteCarloLikelihood(known=1, draws=0)
    with refuses("method"):
        LLM("tiny-dream").generate([[1, 2, 3]], method=CausalLikelihood(known=1), max_tokens=1)

"""The public API given what it cannot take: a `ValueError` that says so, or an answer."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import causal_model, feature_draft, is_idle, save_tokenizer
from outpace import LLM
from outpace.checkpoints.load import save_model

ROWS = 264

ODD = [
    *(None, True, False, 0, 1, -1, 2, 10**30, 10**400, 1.5, 0.0, float("nan"), float("inf")),
    *("", "x", "\ud800", "a" * 5000, b"", b"x", [], [1], ["x"], [None], [[]], [[1]], [1.5]),
    *((), {}, {"role": "user"}, {"a": 1}, set(), {1, 2}, object(), object, len, 2j, Path("x")),
    *(np.array(1), np.array([1, 2]), np.array([[1]]), np.float32(0.5), np.int64(3)),
    *(torch.tensor(1), torch.tensor([1, 2]), torch.float64, iter([1]), range(3)),
]
"""What may come where something else is meant."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("models") / "causal"
    model = causal_model(seed=1, vocab_size=ROWS)
    save_model(model, root, dtype=torch.float32)
    save_tokenizer(root)
    draft = feature_draft(
        model, vocab_size=ROWS, dflash_config={"mask_token_id": 9, "target_layer_ids": [0, 1]}
    )
    save_model(draft, root.parent / "draft", dtype=torch.float32)
    return str(root)


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    return LLM(folder, cache_gib=0.01)


def only_value_errors(call: Callable[[Any], object]) -> int:
    """How many odd values are refused; anything but a `ValueError` is a failure."""
    refused = 0
    for value in ODD:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call(value)
        except ValueError as error:
            assert str(error)
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{value!r} gives {error!r}") from error
    return refused


OPTIONS = ["method", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "raw"]
OPTIONS += ["logprobs", "min_p", "stop_ids", "ignore_eos", "min_tokens", "presence_penalty"]
OPTIONS += ["frequency_penalty", "repetition_penalty", "logit_bias", "template"]
OPTIONS += ["schema", "regex", "choices", "grammar", "cloze"]
OPTIONS += ["tools", "tool_choice", "parallel_tool_calls"]
OPTIONS += ["prompt_logprobs", "suffix"]
OPTIONS += ["adapter", "reasoning_effort", "max_reasoning_tokens", "top_logprobs"]


@pytest.mark.sampled
@pytest.mark.parametrize("entry", ["generate", "stream", "submit", "serve"])
@pytest.mark.parametrize("option", OPTIONS)
def test_odd_options_are_refused_or_answered(llm: LLM, option: str, entry: str) -> None:
    def call(value: Any) -> None:
        options: dict[str, Any] = {"max_tokens": 2, option: value}
        if entry == "serve":
            list(llm.serve([([1, 2], options)]))
        elif entry == "stream":
            list(llm.stream([1, 2], **options))
        elif entry == "submit":
            llm.driver.cancel(llm.submit([1, 2], **options))
        else:
            llm.generate([1, 2], **options)

    refused = only_value_errors(call)
    assert refused > 10 or option in ("raw", "logprobs", "ignore_eos", "parallel_tool_calls")
    assert is_idle(llm.engine)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: [value, [1, 2]]])
def test_odd_prompts_are_refused_or_answered(
    llm: LLM, wrap: Callable[[Any], Any], raw: bool
) -> None:
    assert only_value_errors(lambda value: llm.generate(wrap(value), max_tokens=2, raw=raw)) > 10
    assert is_idle(llm.engine)


def test_odd_messages_are_refused_or_answered(llm: LLM) -> None:
    for key, other in (("role", "content"), ("content", "role")):
        message = {other: "user"}
        refused = only_value_errors(
            lambda value, key=key, message=message: llm.generate(
                [{**message, key: value}], max_tokens=2
            )
        )
        assert refused > 10


def test_odd_batches_are_refused_or_served(llm: LLM) -> None:
    assert only_value_errors(lambda value: list(llm.serve([([1], {})], batch=value))) > 10


LOADING = ["model", "method", "adapter", "device", "dtype", "quantize", "max_length", "mask_id"]
LOADING += [
    "cache_gib",
    "cache_dtype",
    "max_rows",
    "max_sequences",
    "prefix_cache",
    "tensor_parallel",
]
LOADING += ["attention", "graphs", "compile", "pace", "adapters"]


@pytest.mark.parametrize("argument", LOADING)
def test_odd_arguments_are_refused_or_loaded(folder: str, argument: str) -> None:
    def call(value: Any) -> None:
        given: dict[str, Any] = {"model": folder, "cache_gib": 0.001, argument: value}
        llm = LLM(**given)
        llm.generate([1, 2], max_tokens=2)

    assert only_value_errors(call) > 10 or argument in ("prefix_cache",)

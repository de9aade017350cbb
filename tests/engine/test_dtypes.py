"""Half precision in the engine: the same tokens batched and alone, read in float32."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import engine_of, feeds, pages_in_use, runner
from outpace import LLM
from outpace.attention import compiled
from outpace.decoding import Forward, Sample, Sampling
from outpace.engine.cache import PAGE_SIZE
from outpace.engine.engine import Engine
from outpace.engine.runner import Runner
from outpace.kernels import tiles
from outpace.methods import Method
from outpace.models.transformer import Stack
from workload import KINDS, MODELS, Request, new_models, serve

HALVES = [torch.bfloat16, torch.float16]
each_half = pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])


@cache
def halved(dtype: torch.dtype) -> dict[str, Stack]:
    return {name: model.to(dtype) for name, model in new_models().items()}


def engine_in(dtype: torch.dtype, **limits: int) -> Engine:
    return engine_of(*halved(dtype).items(), slots=64 * PAGE_SIZE, **limits)


def asked(method: Method) -> list[Request]:
    """Return requests of different lengths and settings, some of them late."""
    return [
        Request(
            method=method,
            prompt=tuple(range(1, 22))[n : 5 + 3 * n],
            sampling=Sampling(temperature=0.8 * (n % 2), top_p=0.9, seed=n),
            arrives=n // 3,
        )
        for n in range(6)
    ]


@pytest.mark.sampled
@each_half
@pytest.mark.parametrize("method", KINDS, ids=lambda method: type(method).__name__)
def test_requests_together_equal_each_alone_in_half_precision(
    method: Method, dtype: torch.dtype
) -> None:
    engine, batch = engine_in(dtype), asked(method)
    found = [ids for ids, *_ in serve(engine, batch)]
    expected = [serve(engine_in(dtype), [replace(each, arrives=0)])[0][0] for each in batch]
    # Sums of 16-bit numbers may be rounded otherwise in a batch, which can change one text.
    assert sum(map(list.__eq__, found, expected)) >= len(batch) - 1
    assert list(map(bool, found)) == list(map(bool, expected))
    assert pages_in_use(engine) == 0
    memory = runner(engine, "causal").cache.memories[0]
    assert memory.dtype == dtype and memory.isfinite().all()


def narrow_engine(cache_dtype: torch.dtype, prefix_cache: bool = True, **limits: int) -> Engine:
    engine = Engine(**limits)
    for name, model in MODELS.items():
        options: dict[str, Any] = {"cache_dtype": cache_dtype, "prefix_cache": prefix_cache}
        engine.add_runner(Runner(name, model, slots=64 * PAGE_SIZE, **options))
    return engine


@pytest.mark.sampled
@pytest.mark.parametrize("cache_dtype", [*HALVES, torch.int8], ids=str)
@pytest.mark.parametrize("method", KINDS, ids=lambda method: type(method).__name__)
def test_narrower_caches_give_the_same_tokens_together_alone_and_in_pieces(
    method: Method, cache_dtype: torch.dtype
) -> None:
    engine, batch = narrow_engine(cache_dtype), asked(method)
    alone = [narrow_engine(cache_dtype, prefix_cache=False, max_rows=7) for _ in batch]
    expected = [
        serve(each, [replace(request, arrives=0)])[0][0]
        for each, request in zip(alone, batch, strict=True)
    ]
    for _ in range(2):  # the second time, prefixes are found
        assert [ids for ids, *_ in serve(engine, batch)] == expected
    assert runner(engine, "causal").cache.memories[0].dtype == cache_dtype


@each_half
def test_logits_are_read_in_float32(dtype: torch.dtype) -> None:
    each = Runner("tiny", halved(dtype)["diffusion"], slots=8 * PAGE_SIZE)
    seen: list[Tensor] = []

    def look(logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        seen.append(logits.clone())

    reads = [
        Sample(keep=True),
        Sample(keep=True, scores=("confidence", "entropy", "margin", "logprob")),
        Sample(keep=True, sampling=Sampling(temperature=0.7, top_p=0.9, top_k=9, seed=1)),
    ]
    asks = [Forward(ids=[1, 2, 3], start=0, predict=[2, 3], read=read) for read in reads]
    tables = [each.reserve(8) for _ in asks]
    fed = feeds(each, asks, [table for table in tables if table is not None])
    for feed in fed:
        feed.processors = (look,)
    outs = each.run_pass(fed)
    assert {logits.dtype for logits in seen} == {torch.float32}
    for out, logits in zip(outs, seen, strict=True):
        assert out.logits is not None and out.logits.dtype == torch.float32
        assert torch.equal(out.logits, logits)
    law = seen[1].double().log_softmax(-1)
    picked = law[torch.arange(2), outs[1].tokens]
    assert outs[1].logprobs == pytest.approx(picked.tolist(), abs=1e-6)
    assert outs[1].scores["entropy"] == pytest.approx(-(law.exp() * law).sum(-1), abs=1e-5)


@pytest.mark.skipif(
    not tiles.has_tile_loop(torch.float32)
    or compiled.compiled_missing_reason(torch.device("cpu")) is not None,
    reason="this machine has no compiled loops",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_are_batch_invariant(dtype: str) -> None:
    llm = LLM("tiny-aux", dtype=dtype, prefix_cache=False)
    prompts = [list(range(3, 3 + count)) for count in (2, 5, 17, 60, 3, 9)]
    chosen: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "logprobs": True}
    together = llm.generate(prompts, ignore_eos=True, **chosen)
    alone = [llm.generate([prompt], ignore_eos=True, **chosen)[0] for prompt in prompts]
    assert [each.ids for each in together] == [each.ids for each in alone]
    assert [each.logprobs for each in together] == [each.logprobs for each in alone]

"""Rows of one pass with different adapters: each as merged, and as in any other company."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from adapting import write_adapter
from helpers import (
    block_model,
    causal_model,
    diffusion_model,
    extending_draft,
    feature_draft,
    is_idle,
    masked_model,
)
from outpace import LLM
from outpace.api.output import Output
from outpace.checkpoints.load import save_model
from outpace.engine.adapters import AdaptedMLP
from outpace.kernels import tiles
from outpace.methods import (
    Autoregressive,
    BlockDiffusion,
    DFlash,
    Diffusion,
    Eagle,
    FastDLLM,
    LeftToRight,
    Lookup,
    Method,
    Speculative,
    WeDLM,
)
from outpace.models.transformer import Transformer

pytestmark = pytest.mark.skipif(
    not tiles.has_tile_loop(torch.float32), reason="rows have equal bits in compiled loops only"
)

SIZES = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 32, "head_dim": 16}
"""Sizes of the tiny models that the compiled loops support."""

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3], [2]]
MODELS: dict[str, Callable[..., Transformer]] = {
    "causal": causal_model,
    "masked": masked_model,
    "diffusion": diffusion_model,
    "block": block_model,
}
METHODS: dict[str, Sequence[Method]] = {
    "causal": (Autoregressive(), Lookup(tokens=4)),
    "masked": (WeDLM(window=6, entropy=2.0),),
    "diffusion": (LeftToRight(), Diffusion(steps=6), FastDLLM(block=8, threshold=0.3)),
    "block": (BlockDiffusion(threshold=0.4),),
}
PARTS = [("attention",), ("mlp",), ("attention", "mlp", "unembedding"), ("unembedding",)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each kind, each with 8 adapters of different ranks and layers."""
    root = tmp_path_factory.mktemp("adapted")
    for kind, build in MODELS.items():
        model = build(**SIZES)
        save_model(model, root / kind, dtype=torch.float32)
        for number in range(8):
            options = {"seed": number, "rank": 1 + 3 * number, "parts": PARTS[number % 4]}
            write_adapter(root / f"{kind}-a{number}", model.config, **options)
    return root


def adapters_of(folders: Path, kind: str) -> dict[str, str]:
    return {f"a{number}": str(folders / f"{kind}-a{number}") for number in range(8)}


def adapted(folders: Path, kind: str = "causal", **options: Any) -> LLM:
    return LLM(folders / kind, adapters=adapters_of(folders, kind), cache_gib=0.01, **options)


def answer(llm: LLM, requests: Sequence[tuple[list[int], str | None]], **options: Any) -> list[Any]:
    """Tokens and their exact log-probabilities, of requests that run together."""
    common = {"max_tokens": 12, "logprobs": True, "ignore_eos": True, **options}
    found: Mapping[int, Output] = dict(
        llm.serve([(prompt, {**common, "adapter": name}) for prompt, name in requests])
    )
    assert is_idle(llm.engine)
    return [(found[number].ids, found[number].logprobs) for number in range(len(requests))]


@pytest.mark.parametrize("kind", MODELS)
def test_eight_adapters_in_a_batch_are_each_as_merged(folders: Path, kind: str) -> None:
    llm, paths = adapted(folders, kind), {None: None, **adapters_of(folders, kind)}
    requests = [(PROMPTS[number % 4], name) for number, name in enumerate(paths)]
    merged = {
        name: LLM(folders / kind, adapter=path, cache_gib=0.01) for name, path in paths.items()
    }
    for number, method in enumerate(METHODS[kind]):
        options = {"method": method, "temperature": number % 2, "seed": 5}
        together = answer(llm, requests, **options)
        for (prompt, name), (ids, scores) in zip(requests, together, strict=True):
            ((same, expected),) = answer(merged[name], [(prompt, None)], **options)
            assert ids == same, (method, name)
            assert scores == pytest.approx(expected, abs=1e-3)
            assert name is not None or scores == expected
    assert len({tuple(ids) for ids, _ in together}) > 4


@pytest.mark.parametrize("kind", MODELS)
def test_answers_do_not_depend_on_their_company(folders: Path, kind: str) -> None:
    names = [None, *adapters_of(folders, kind)]
    requests = list(zip(cycle(PROMPTS), names, strict=False))
    for method in METHODS[kind]:
        options = {"method": method, "temperature": 0.7, "top_p": 0.9, "seed": 1}
        together = answer(adapted(folders, kind, prefix_cache=False), requests, **options)
        llm = adapted(folders, kind, prefix_cache=False, max_rows=16)
        for number in (0, 4, 7):
            assert answer(llm, requests[number : number + 1], **options) == [together[number]]
        assert answer(llm, requests[::-1], **options) == together[::-1]


def test_rows_of_a_pass_with_two_types_of_read(folders: Path) -> None:
    llm, names, wanted = adapted(folders), ("a2", "a6", None, "a7"), (1, None, 1, None)
    requests: list[tuple[list[int], dict[str, Any]]] = [
        (prompt, {"adapter": name, "prompt_logprobs": count, "max_tokens": 4})
        for prompt, name, count in zip(PROMPTS, names, wanted, strict=True)
    ]
    together = dict(llm.serve(requests))
    for number, (prompt, options) in enumerate(requests):
        (alone,) = llm.generate(prompt, **options)
        assert together[number].ids == alone.ids
        assert together[number].prompt_logprobs == alone.prompt_logprobs


def test_prompts_longer_than_a_chunk_of_an_mlp(tmp_path: Path) -> None:
    model = causal_model(max_position_embeddings=1024, **SIZES)
    save_model(model, tmp_path / "model", dtype=torch.float32)
    paths = {
        name: str(write_adapter(tmp_path / name, model.config, seed=seed, size=0.1))
        for seed, name in enumerate("ab")
    }
    llm = LLM(tmp_path / "model", adapters=paths, cache_gib=0.01)
    assert sum(isinstance(each, AdaptedMLP) for each in llm.model.modules()) == 2
    torch.manual_seed(0)
    prompts = torch.randint(22, (3, 230)).tolist()
    requests = list(zip(prompts, (None, "a", "b"), strict=True))
    together = answer(llm, [*requests, (PROMPTS[0], "a")])
    for request, found in zip(requests, together, strict=False):
        path = None if request[1] is None else paths[request[1]]
        merged = LLM(tmp_path / "model", adapter=path, cache_gib=0.01)
        ((ids, scores),) = answer(merged, [(request[0], None)])
        assert found[0] == ids and found[1] == pytest.approx(scores, abs=1e-3)


def test_prefix_cache_separates_adapters(folders: Path) -> None:
    prompt = list(range(1, 21)) * 3
    requests: list[tuple[list[int], str | None]] = [
        (prompt, name) for name in ("a2", None, "a6", "a2", None, "a6")
    ]
    plain = adapted(folders, prefix_cache=False)
    expected = [answer(plain, [request]) for request in requests]
    llm, hits = adapted(folders), []
    for request, alone in zip(requests, expected, strict=True):
        assert answer(llm, [request]) == alone
        hits.append(llm.engine.prefix_stats.hits)
    assert hits == [0, 0, 0, 1, 2, 3]
    assert expected[0] != expected[1] != expected[2]


@pytest.fixture(scope="module")
def drafts(folders: Path) -> Mapping[str, Method]:
    target = causal_model(**SIZES)
    made = {
        "near": causal_model(seed=2, **SIZES),
        "features": feature_draft(target, **SIZES),
        "states": extending_draft(target, **{**SIZES, "draft_vocab_size": 32}),
    }
    for name, model in made.items():
        save_model(model, folders / name, dtype=torch.float32)
    return {
        "near": Speculative(draft=str(folders / "near"), tokens=3),
        "base": Speculative(draft=str(folders / "causal"), tokens=3),
        "features": DFlash(draft=str(folders / "features"), tokens=3),
        "states": Eagle(draft=str(folders / "states"), width=2, depth=2, nodes=6),
    }


@pytest.mark.parametrize("draft", ["near", "base", "features", "states"])
def test_methods_with_drafts_are_lossless_to_the_adapted_model(
    folders: Path, drafts: Mapping[str, Method], draft: str
) -> None:
    llm, prompt = adapted(folders), list(range(1, 21)) * 2
    requests = [(prompt, name) for name in (None, "a2", "a6", None, "a1", "a2")]
    for temperature in (0.0, 0.8):
        options = {"temperature": temperature, "seed": 3}
        expected = answer(llm, requests, method=Autoregressive(), **options)
        for _ in range(2):  # the second time with the pages of the first
            found = answer(llm, requests, method=drafts[draft], **options)
            assert [ids for ids, _ in found] == [ids for ids, _ in expected]


def test_lookup_shares_answers_of_one_adapter_only(folders: Path) -> None:
    llm, method = adapted(folders), Lookup(shared=True, tokens=4, match=1)
    answer(llm, [(PROMPTS[0], "a2")], method=method)
    stores = {name: llm.pair(method, name).answers for name in (None, "a2", "a6")}
    ids = answer(llm, [(PROMPTS[0], "a2")])[0][0]
    found = {name: store.find_copy([*PROMPTS[0], *ids[:5]], 3) for name, store in stores.items()}
    assert found == {None: [], "a2": ids[5:8], "a6": []}


def test_controllers_of_draft_lengths_are_those_of_an_adapter(folders: Path) -> None:
    llm = adapted(folders, pace="auto")
    paces = {
        name: llm.prepare(PROMPTS[0], method=Lookup(), adapter=name).pace
        for name in (None, "a1", "a2")
    }
    assert len({id(pace) for pace in paces.values()}) == 3 and None not in paces.values()

"""Pairings: built once, then looked up, and independent of each other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from helpers import (
    END,
    SPECIALS,
    causal_model,
    diffusion_model,
    feature_draft,
    is_idle,
    loaded_models,
    masked_model,
    save_tokenizer,
)
from outpace import LLM
from outpace.checkpoints.drafts import LocalDraft
from outpace.checkpoints.load import load_config, save_model
from outpace.decoding import Decoding, Request
from outpace.engine import pairing
from outpace.engine.cache import PAGE_SIZE
from outpace.engine.pairing import ASSUMED_CONCURRENCY, DEFAULT_CANVAS_TOKENS, MethodSelector
from outpace.methods import (
    APD,
    D2F,
    Autoregressive,
    DFlash,
    LeftToRight,
    Lookup,
    Method,
    Speculative,
)
from refusal import refuses

ROWS, SMALL = 264, 200
"""Rows of the targets' embeddings, and of those of smaller ones."""

PROMPTS = [[1, 2, 3], [9, 8], [7] * 20, [255, 4], [199, 200]]
"""Some contain tokens that a smaller model does not have."""

COMMON = [prompt for prompt in PROMPTS if max(prompt) < SMALL]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Targets with and without a tokenizer, and further models that fit or do not."""
    root = tmp_path_factory.mktemp("models")
    causal = causal_model(seed=1, vocab_size=ROWS, eos_token_id=None)
    models = {
        "causal": causal,
        "diffusion": diffusion_model(seed=1, vocab_size=ROWS, mask_token_id=END + 1),
        "small": causal_model(seed=2, vocab_size=SMALL),
        "large": causal_model(seed=2, vocab_size=ROWS + 1000),
        "same": causal_model(seed=2, vocab_size=ROWS),
        "draft": feature_draft(
            causal,
            vocab_size=ROWS,
            dflash_config={"mask_token_id": END + 1, "target_layer_ids": [0, 1]},
        ),
        "wide": causal_model(seed=2, vocab_size=ROWS, hidden_size=64),
    }
    for name, model in models.items():
        save_model(model, root / name, dtype=torch.float32)
    for name in ("causal", "same"):
        save_model(models[name], root / f"texted-{name}", dtype=torch.float32)
    save_tokenizer(root / "texted-causal")
    save_tokenizer(root / "texted-same", specials=SPECIALS[:3])
    save_model(models["same"], root / "texted-other", dtype=torch.float32)
    save_tokenizer(root / "texted-other", first="z")
    return {path.name: str(path) for path in root.iterdir()}


def generate(llm: LLM, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Return the tokens of greedy answers and of hot ones, which contain all allowed tokens."""
    given = {"max_tokens": 16, **options}
    greedy = llm.generate(prompts, **given)
    hot = llm.generate(prompts, temperature=30.0, seed=1, **given)
    return [output.ids for output in greedy + hot]


def smaller(folders: dict[str, str], case: str) -> tuple[str, Method, Method]:
    """Return a target, a method of it, and one with a model of fewer tokens."""
    if case == "draft":
        return folders["causal"], Autoregressive(), Speculative(draft=folders["small"], tokens=3)
    return folders["diffusion"], LeftToRight(), APD(verifier=folders["small"], ratio=0.5)


@pytest.mark.parametrize("case", ["draft", "verifier"])
def test_a_smaller_embedding_bounds_its_own_requests_alone(
    folders: dict[str, str], case: str
) -> None:
    target, plain, method = smaller(folders, case)
    expected = generate(LLM(target, plain, cache_gib=0.01), PROMPTS)
    assert max(token for answer in expected for token in answer) >= SMALL
    llm = LLM(target, plain, cache_gib=0.01)
    assert generate(llm, PROMPTS) == expected
    own = generate(llm, COMMON, method=method)
    assert all(token < SMALL for answer in own for token in answer)
    assert generate(llm, PROMPTS) == expected
    options = {"temperature": 30.0, "max_tokens": 16, "seed": 1}
    mixed = [
        (prompt, {**options, "method": chosen}) for prompt in COMMON for chosen in (plain, method)
    ]
    found = dict(llm.serve(mixed))
    hot = [expected[len(PROMPTS) + PROMPTS.index(prompt)] for prompt in COMMON]
    assert [found[2 * n].ids for n in range(len(COMMON))] == hot
    assert [found[2 * n + 1].ids for n in range(len(COMMON))] == own[len(COMMON) :]
    assert llm.target.vocab == ROWS
    for _ in range(2):  # a prompt that the smaller one cannot read
        with refuses("prompt"):
            llm.generate(PROMPTS, method=method, max_tokens=5)
        assert generate(llm, PROMPTS) == expected
    assert is_idle(llm.engine)


@pytest.mark.parametrize(
    ("target", "param", "method"),
    [
        ("texted-causal", "method", lambda n: Speculative(draft=n["texted-other"])),
        ("causal", "method", lambda n: Speculative(draft=n["large"])),
        ("causal", "draft", lambda n: Speculative(draft=n["draft"])),
        ("causal", "draft", lambda n: Speculative(draft="./nowhere")),
        ("causal", "draft", lambda n: DFlash(draft=n["same"])),
        ("wide", "draft", lambda n: DFlash(draft=n["draft"])),
        ("causal", "method", lambda n: APD(verifier=n["same"])),
        ("diffusion", "verifier", lambda n: APD(verifier=n["diffusion"])),
        ("diffusion", "method", lambda n: Speculative(draft=n["same"])),
        ("diffusion", "method", lambda n: APD(verifier=n["large"])),
    ],
)
def test_what_is_refused_leaves_nothing_loaded(
    folders: dict[str, str], target: str, param: str, method: Any
) -> None:
    llm = LLM(folders[target], cache_gib=0.01)
    models, pairings = loaded_models(llm), dict(llm.pairings)
    expected = generate(llm, PROMPTS, max_tokens=5)
    for _ in range(2):
        with refuses(param):
            llm.generate([1, 2], method=method(folders))
        assert (loaded_models(llm), llm.pairings) == (models, pairings)
    assert generate(llm, PROMPTS, max_tokens=5) == expected


# The default of max_tokens.


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("long")
    changes: dict[str, Any] = {"vocab_size": SMALL, "max_position_embeddings": 1024}
    models = {
        "causal": causal_model(seed=1, eos_token_id=None, **changes),
        "short": causal_model(seed=2, **{**changes, "max_position_embeddings": 700}),
        "masked": masked_model(seed=1, mask_token_id=SMALL - 1, **changes),
        "diffusion": diffusion_model(seed=1, mask_token_id=SMALL - 1, **changes),
    }
    for name, model in models.items():
        save_model(model, root / name, dtype=torch.float32)
    return {path.name: str(path) for path in root.iterdir()}


def of_slots(model: str, slots: int, method: Method | None = None, **options: Any) -> LLM:
    config = load_config(model)
    slot = 2 * config.layers * config.kv_heads * config.head_dim * torch.float32.itemsize
    llm = LLM(model, method, cache_gib=(slots + 0.5) * slot / 2**30, **options)
    assert llm.driver.stats.models[-1].total_pages * PAGE_SIZE == slots
    return llm


def default(llm: LLM, prompt: int = 24, **options: Any) -> int:
    """Return the `max_tokens` of a request that sets none."""
    return llm.prepare([1] * prompt, **options).max_tokens


def test_default_answers_share_the_cache(long: dict[str, str]) -> None:
    llm = of_slots(long["causal"], 4096)
    assert default(llm) == 1024 - 24  # the context: pages are taken as the text grows
    assert default(llm, method=Reserving()) == max(
        4096 // ASSUMED_CONCURRENCY - 24, DEFAULT_CANVAS_TOKENS
    )
    assert default(llm, requests=4) == 1000
    assert default(llm, requests=7) == 36 * 16 - 24  # 36 of 256 pages
    assert default(llm, requests=8) == 512 - 24
    llm.generate([[1] * 24] * 8, method=Watching(llm=llm))
    assert Watching.most == 8


@dataclass(frozen=True, kw_only=True)
class Reserving(Autoregressive):
    """Reserves memory for its longest answer."""

    is_resumable = False


@dataclass(frozen=True, kw_only=True)
class Watching(Autoregressive):
    """Records the number of requests that run at the same time."""

    llm: Any
    most: ClassVar[int] = 0

    def decode(self, request: Request) -> Decoding:
        Watching.most = max(Watching.most, self.llm.driver.stats.running)
        request.finish_reason = "cancelled"
        yield from ()


def test_default_leaves_room_for_all_that_an_operator_allows(long: dict[str, str]) -> None:
    assert default(of_slots(long["causal"], 2048, Reserving(), max_sequences=2)) == 1000
    assert default(of_slots(long["causal"], 2048, Reserving(), max_sequences=4)) == 512 - 24


@pytest.mark.parametrize("method", [LeftToRight(), D2F(block=8)], ids=repr)
def test_default_canvas_of_a_diffusion_model_is_fixed(long: dict[str, str], method: Method) -> None:
    llm = of_slots(long["diffusion"], 8192, method)
    assert {default(llm, requests=n) for n in (1, 7, 64)} == {DEFAULT_CANVAS_TOKENS}
    assert default(llm, 1000) == 24


@pytest.mark.parametrize("sharded", [False, True])
def test_a_sharded_model_has_no_default_draft_that_reads_rows_of_its_head(
    folders: dict[str, str], sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "drafts/qwen2.5-coder-0.5b-dflash"
    found = LocalDraft("dflash", name, str(Path(__file__).parents[2] / name))
    monkeypatch.setattr(pairing, "best_local_draft", lambda target: found)
    selector = MethodSelector.open(folders["causal"], sharded=sharded)
    assert selector.draft == (None if sharded else found)
    assert isinstance(selector.native, Lookup if sharded else DFlash)

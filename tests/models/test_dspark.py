"""DSpark drafts: their published format and code, and what their heads choose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers import (
    MASK,
    VOCAB,
    causal_model,
    close,
    dense,
    feeds,
    published,
    run,
    same_weights,
)
from naive_draft import naive_hidden, random_layers
from outpace import LLM
from outpace.checkpoints.load import load_draft, load_model, save_model, translate_config
from outpace.decoding import FULL, Forward, Prediction, Sample, Sampling
from outpace.engine.cache import PageTable
from outpace.engine.runner import Runner
from outpace.methods import Autoregressive, DFlash
from outpace.models.draft import DFlashDraft
from outpace.models.dspark import DSparkDraft
from outpace.models.split import ModelShard
from refusal import refuses

RANK, BLOCK, EPS = 6, 5, 1e-6
FULL_HEADS = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
FULL_HEADS |= {"confidence_head_with_markov": True}


def fields(**changes: Any) -> dict[str, Any]:
    """Return a tiny `config.json` as DeepSpec writes it from that of a Qwen3 target."""
    return {
        **published("Qwen3DSparkModel"),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "head_dim": 8,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": ["full_attention", "full_attention"],
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_target_layers": 2,
        "rms_norm_eps": EPS,
        "rope_scaling": None,
        "sliding_window": None,
        "use_cache": True,
        "use_sliding_window": False,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "num_anchors": 512,
        "target_layer_ids": [0, 1],
        **FULL_HEADS,
        **changes,
    }


def tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """Return random tensors under the published names."""
    generator = torch.Generator().manual_seed(7)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.4

    dim = 32
    found = {
        "embed_tokens.weight": matrix(VOCAB, dim),
        "lm_head.weight": matrix(VOCAB, dim),
        "norm.weight": 1 + matrix(dim),
        "fc.weight": matrix(dim, 2 * dim),
        "hidden_norm.weight": 1 + matrix(dim),
    }
    found |= random_layers(matrix)
    if rank := config["markov_rank"]:
        found["markov_head.markov_w1.weight"] = matrix(VOCAB, rank)
        found["markov_head.markov_w2.weight"] = matrix(VOCAB, rank) * 3
    if config["enable_confidence_head"]:
        size = dim + rank * config["confidence_head_with_markov"]
        found["confidence_head.proj.weight"] = matrix(1, size)
        found["confidence_head.proj.bias"] = matrix(1)
    return found


def write(folder: Path, **changes: Any) -> Path:
    """Write a draft in the published format."""
    folder.mkdir()
    config = fields(**changes)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(config), folder / "model.safetensors")
    return folder


def block_hidden(weights: dict[str, Tensor], features: Tensor, last: int) -> Tensor:
    """Return hidden states of a block after a last token."""
    return naive_hidden(
        weights, features, weights["embed_tokens.weight"][[last] + [MASK] * (BLOCK - 1)]
    )


def naive_block(
    weights: dict[str, Tensor], features: Tensor, last: int, count: int
) -> tuple[list[int], Tensor, list[float]]:
    """Return the greedy tokens of a block, their logits, and how sure the draft is of each."""
    hidden = block_hidden(weights, features, last)
    tokens: list[int] = []
    logits, sure = [], []
    for state in hidden[:count]:
        row, inputs = state @ weights["lm_head.weight"].T, state
        if "markov_head.markov_w1.weight" in weights:
            before = weights["markov_head.markov_w1.weight"][last]
            row = row + before @ weights["markov_head.markov_w2.weight"].T
            inputs = torch.cat((state, before))
        if "confidence_head.proj.weight" in weights:
            inputs = inputs[: weights["confidence_head.proj.weight"].shape[1]]
            score = inputs @ weights["confidence_head.proj.weight"][0]
            sure.append(float(torch.sigmoid(score + weights["confidence_head.proj.bias"][0])))
        row[MASK] = -1e30  # the mask is never drafted
        last = int(row.argmax())
        tokens.append(last)
        logits.append(row)
    return tokens, torch.stack(logits), sure


def block_forward(config: Any, features: Tensor, last: int, count: int, **read: Any) -> Forward:
    """Return the forward of a method for the slots after `features` and a last token."""
    start = len(features)
    scores = ("acceptance",) if config.chain and config.chain.predicts_acceptance else ()
    return Forward(
        ids=[last] + [MASK] * (BLOCK - 1),
        start=start,
        pattern=FULL,
        context=features,
        predict=range(start + 1, start + 1 + count),
        read=Sample(keep=True, scores=scores, **read),
        model="draft",
    )


def draft_blocks(
    draft: DFlashDraft, blocks: list[tuple[Tensor, int, int]], read_rows: int = 256, **read: Any
) -> list[Prediction]:
    """Draft blocks of several sequences in one pass."""
    runner = Runner("draft", draft, slots=512, read_rows=read_rows)
    forwards = [block_forward(draft.config, *block, **read) for block in blocks]
    memory = [runner.reserve(64) for _ in blocks]
    return run(runner, forwards, [table for table in memory if table is not None])


def random_blocks() -> list[tuple[Tensor, int, int]]:
    """Return features, last tokens and numbers of drafts of four sequences."""
    generator = torch.Generator().manual_seed(3)
    sizes = ((3, 5, BLOCK), (7, 2, 3), (1, 9, BLOCK), (4, 11, 1))
    return [(torch.randn(n, 64, generator=generator), last, c) for n, last, c in sizes]


VARIANTS = [
    {},
    {"markov_rank": 0, "enable_confidence_head": False},
    {"enable_confidence_head": False},
    {"confidence_head_with_markov": False},
    {"markov_rank": 0, "confidence_head_with_markov": False},
]
"""All combinations of heads; the second is a DFlash draft of the same authors."""


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("read_rows", [256, 6])
def test_block_equals_the_published_code(
    tmp_path: Path, changes: dict[str, Any], read_rows: int
) -> None:
    draft = load_draft(write(tmp_path / "draft", **changes), causal_model())
    assert isinstance(draft, DSparkDraft) == (draft.config.chain is not None)
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    found = draft_blocks(draft, random_blocks(), read_rows)
    for (features, last, count), ours in zip(random_blocks(), found, strict=True):
        tokens, logits, sure = naive_block(weights, features, last, count)
        assert ours.tokens == tokens
        assert ours.logits is not None
        close(ours.logits, logits)
        assert ("acceptance" in ours.scores) == bool(sure)
        if sure:
            close(torch.tensor(ours.scores["acceptance"]), torch.tensor(sure))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of a target and its draft."""
    folder = tmp_path_factory.mktemp("pair")
    save_model(causal_model(), folder / "target", dtype=torch.float32)
    return folder / "target", write(folder / "draft")


PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9], [2]]


def answers(pair: tuple[Path, Path], method: Any, **options: Any) -> list[list[int]]:
    """Return the tokens of all prompts, decoded together; alone must not differ."""
    llm = LLM(pair[0], method)
    options = {"max_tokens": 20, **options}
    together = [output.ids for output in llm.generate(PROMPTS, **options)]
    assert [llm.generate(prompt, **options)[0].ids for prompt in PROMPTS] == together
    return together


WARM = {"temperature": 0.8, "seed": 5}
PENALTIES = {"frequency_penalty": 0.7, "repetition_penalty": 1.2}


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"tokens": 3}, WARM),
        ({"confidence_threshold": 0.5}, WARM),
        ({"confidence_threshold": 0.5}, PENALTIES),
        ({"block": 3}, PENALTIES),
        ({"verify": "rejection", "tokens": 4, "confidence_threshold": 0.4}, {}),
        ({"block": 1}, {"max_tokens": 3}),
    ],
)
def test_decoding_equals_plain_decoding(
    pair: tuple[Path, Path], changes: dict[str, Any], options: dict[str, Any]
) -> None:
    method = DFlash(draft=str(pair[1]), **changes)
    assert answers(pair, method, **options) == answers(pair, Autoregressive(), **options)


@torch.inference_mode()
def naive_decode(
    pair: tuple[Path, Path], prompt: list[int], threshold: float, total: int
) -> tuple[list[int], list[int]]:
    """Return the text and the numbers of drafts of DeepSpec's loop at temperature 0."""
    target, weights = load_model(pair[0]), load_file(pair[1] / "model.safetensors")
    ids, counts = [*prompt, int(target_states(target, prompt)[0][-1].argmax())], []
    while len(ids) < len(prompt) + total:
        room = len(prompt) + total - len(ids)
        features = target_states(target, ids)[1][: len(ids) - 1]
        hidden = min(BLOCK, room - 1)
        if not hidden:
            drafted: list[int] = []
        else:
            drafted, _, sure = naive_block(weights, features, ids[-1], hidden)
            for place, each in enumerate(sure):
                if each < threshold:
                    drafted = drafted[:place]
                    break
            counts.append(len(drafted))
        best = target_states(target, ids + drafted)[0][len(ids) - 1 :].argmax(-1).tolist()
        accepted = next(
            (n for n, pair in enumerate(zip(drafted, best, strict=False)) if pair[0] != pair[1]),
            len(drafted),
        )
        ids += best[: accepted + 1]
    return ids[len(prompt) :], counts


def target_states(target: Any, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return logits and features of a text, computed from its beginning."""
    rows = torch.arange(len(ids))
    hidden, captured = target.capture_layers(torch.tensor(ids), rows, dense(causal=True), (0, 1))
    return target.compute_logits(hidden), torch.cat([captured[0], captured[1]], -1)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6, 1.0])
def test_length_of_drafts_equals_a_naive_loop(pair: tuple[Path, Path], threshold: float) -> None:
    method = DFlash(draft=str(pair[1]), tokens=BLOCK, confidence_threshold=threshold)
    output = LLM(pair[0], method).generate(PROMPTS[0], max_tokens=16)[0]
    steps = [(step.model, step.rows) for step in output.steps]
    lengths = [
        rows - 1
        for (model, _), (_, rows) in zip(steps, steps[1:], strict=False)
        if model == "draft"
    ]
    assert (output.ids, lengths) == naive_decode(pair, PROMPTS[0], threshold, 16)


def test_rejection_draws_from_the_corrected_logits(pair: tuple[Path, Path]) -> None:
    draft = load_draft(pair[1], causal_model())
    weights = load_file(pair[1] / "model.safetensors")
    warm = Sampling(temperature=1.0, seed=11)
    found = draft_blocks(draft, random_blocks(), sampling=warm, step=1)
    for (features, last, count), ours in zip(random_blocks(), found, strict=True):
        hidden = block_hidden(weights, features, last)[:count]
        before = weights["markov_head.markov_w1.weight"][[last, *ours.tokens[:-1]]]
        logits = hidden @ weights["lm_head.weight"].T
        logits += before @ weights["markov_head.markov_w2.weight"].T
        logits[:, MASK] = -1e30
        assert ours.logits is not None
        close(ours.logits, logits)
    greedy = draft_blocks(draft, random_blocks())
    assert [each.tokens for each in found] != [each.tokens for each in greedy]


def test_constraint_holds_token_by_token(pair: tuple[Path, Path]) -> None:
    draft = load_draft(pair[1], causal_model())
    seen: list[tuple[list[int], list[int]]] = []

    def ban_repeats(logits: Tensor, slots: Any, text: Any) -> None:
        seen.append((list(slots), list(text)))
        logits[:, [token for token in text[: slots[0]] if token != MASK]] = -1e30

    runner = Runner("draft", draft, slots=512)
    features, last, count = random_blocks()[1]
    forward = block_forward(draft.config, features, last, count)
    (fed,) = feeds(runner, [forward], [some(runner.reserve(64))])
    fed.processors, fed.text = (ban_repeats,), forward.merge_text([1] * 7 + [last])
    (found,) = runner.run_pass([fed])
    assert len({last, 1, *found.tokens}) == count + 2
    whole = [1] * 7 + [last] + [MASK] * (BLOCK - 1)
    texts = [[*whole[:8], *found.tokens[:n], *whole[8 + n :]] for n in range(count)]
    assert seen == [([8 + n], text) for n, text in enumerate(texts)]


def some(table: PageTable | None) -> PageTable:
    """Return memory that must not be short."""
    assert table is not None
    return table


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_head_type": "rnn"}, "markov_head_type must be 'vanilla', got 'rnn'"),
        ({"markov_head_type": "gated"}, "markov_head_type must be 'vanilla', got 'gated'"),
        ({"markov_rank": -1}, "markov_rank must be a whole number.*got -1"),
        ({"markov_rank": True}, "markov_rank must be a whole number.*got True"),
        ({"markov_rank": 0.5}, "markov_rank must be a whole number.*got 0.5"),
        ({"markov_rank": None}, "field 'markov_rank' is missing"),
        ({"markov_rank": 0}, "reads the previous token needs a Markov head"),
        ({"enable_confidence_head": 1}, "enable_confidence_head must be true or false, got 1"),
        ({"confidence_head_with_markov": None}, "'confidence_head_with_markov' is missing"),
        ({"block_size": 0}, "block_size must be a whole number.*got 0"),
        ({"block_size": None}, "field 'block_size' is missing"),
        ({"mask_token_id": VOCAB}, "mask_id 24 is outside the vocabulary of 24"),
        ({"target_layer_ids": [-1, 0]}, "target_layer_ids must be.*got .-1, 0."),
        ({"target_layer_ids": None}, "field 'target_layer_ids' is missing"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False, got True"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types has 'sliding_attention'"),
        ({"log_snr_conditioning": True}, "log_snr_conditioning is True, which is not supported"),
    ],
)
def test_other_fields_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        translate_config(fields(**changes))


def test_unfit_weights_and_targets_are_refused(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    config, found = fields(), tensors(fields())
    bias = found.pop("confidence_head.proj.bias")
    gate = {"confidence_head.proj.bias": bias, "markov_head.gate_proj.weight": torch.ones(6, 38)}
    for name, change in (("gone", {}), ("more", gate)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(found | change, folder / "model.safetensors")
    with pytest.raises(ValueError, match="'confidence_head.proj.bias'"):
        load_draft(tmp_path / "gone", causal_model())
    with pytest.raises(ValueError, match="'markov_head.gate_proj.weight'"):
        load_draft(tmp_path / "more", causal_model())
    with pytest.raises(ValueError, match="its vocabulary is 24, the target's is 25"):
        load_draft(pair[1], causal_model(vocab_size=25))
    with pytest.raises(ValueError, match="tensor_parallel: Qwen3DSparkModel.*cannot be sharded"):
        ModelShard(0, 2).shard_config(translate_config(config))


def test_draft_is_saved_in_its_format(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    save_model(load_draft(pair[1], causal_model()), tmp_path / "again", dtype=torch.float32)
    same_weights(tmp_path / "again", pair[1])
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config == {**fields(), "torch_dtype": "float32"}


def test_confidence_needs_a_head(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    draft = write(tmp_path / "draft", enable_confidence_head=False)
    llm = LLM(pair[0], DFlash(draft=str(draft), confidence_threshold=0.5))
    with refuses("confidence_threshold"):
        llm.generate(PROMPTS[0], max_tokens=4)

"""DFlash 2 drafts: their published format and code, and the path that their selector takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers import MASK, VOCAB, causal_model, close, published, run, same_weights
from naive_draft import EPS, Finish, Weights, naive_hidden, random_layers
from outpace import LLM
from outpace.checkpoints.load import load_draft, save_model, translate_config
from outpace.decoding import FULL, Forward, Prediction, Sample, Sampling
from outpace.engine.runner import Runner
from outpace.methods import Autoregressive, DFlash
from outpace.models.dflash2 import DFlash2Draft
from outpace.models.draft import DFlashDraft
from outpace.models.draft_parts import BlockConvolution, ChainHeads
from outpace.models.split import ModelShard
from outpace.training.objectives.dflash import DFlash as Objective
from refusal import refuses

DIM, BLOCK = 32, 5
SIZES = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}


def fields(**changes: Any) -> dict[str, Any]:
    """Return a tiny `config.json` like that of Qwen3.8-27B-DFlash2; changes of sizes are nested."""
    own = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [0, 1], **SIZES}
    nested = {name: value for name, value in changes.items() if name in own or "_scale" in name}
    nested |= {
        n: changes[n] for n in ("output_multiplier", "final_logit_softcapping") if n in changes
    }
    return {
        **published("DFlash2DraftModel"),
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": 8,
        "hidden_act": "silu",
        "is_causal": False,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_target_layers": 2,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "sliding_window": 64,
        "use_sliding_window": True,
        "dflash_config": own | nested,
        **{name: value for name, value in changes.items() if name not in nested},
    }


def tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """Return random tensors under the published names."""
    generator = torch.Generator().manual_seed(7)
    own = config["dflash_config"]

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.4

    found = {
        "norm.weight": 1 + matrix(DIM),
        "fc.weight": matrix(DIM, 2 * DIM),
        "hidden_norm.weight": 1 + matrix(DIM),
        "candidate_selector.hidden_projection.weight": matrix(own["selector_rank"], DIM),
        "candidate_selector.predecessor_codebook": 2 * matrix(VOCAB, own["selector_rank"]),
        "candidate_selector.successor_codebook": 2 * matrix(VOCAB, own["selector_rank"]),
    }
    taps = own["conv_kernel_size"]
    deltas = 2 * taps * DIM // own["conv_group_size"]
    found |= random_layers(matrix)
    for layer in range(2):
        for name in ("attention", "mlp"):
            prefix = f"layers.{layer}.{name}_conv"
            found[f"{prefix}.base_kernel"] = matrix(2, taps, DIM)
            found[f"{prefix}.kernel_projection.weight"] = matrix(deltas, DIM) / 4
    return found


def write(folder: Path, **changes: Any) -> Path:
    """Write a draft in the published format."""
    folder.mkdir()
    config = fields(**changes)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(config), folder / "model.safetensors")
    return folder


def convolve(part: Weights, name: str, y: Tensor) -> tuple[Tensor, Finish]:
    """Return the rows mixed before attention or MLP, and how its output is mixed, row by row."""
    base = part[f"{name}_conv.base_kernel"]
    deltas = y @ part[f"{name}_conv.kernel_projection.weight"].T
    deltas = deltas.view(len(y), 2, base.shape[1], -1)
    size = DIM // deltas.shape[-1]

    def mix(x: Tensor, side: int) -> Tensor:
        mixed = torch.zeros_like(x)
        for i in range(len(x)):
            for tap in range(min(base.shape[1], i + 1)):
                kernel = base[side, tap] + deltas[i, side, tap].repeat_interleave(size)
                mixed[i] += kernel * x[i - tap]
        return mixed

    return mix(y, 0), lambda out: mix(out, 1)


def naive_scores(
    target: Any, weights: Weights, features: Tensor, last: int, chosen: list[int] | None, count: int
) -> tuple[list[int], list[dict[int, float]]]:
    """Return the path through the candidates and the scores of each step's candidates.

    The path is that of the highest scores, or `chosen`.
    """
    weights = {name: tensor.double() for name, tensor in weights.items()}
    x = target.embedding.weight.double()[[last] + [MASK] * (BLOCK - 1)]
    hidden = naive_hidden(weights, features.double(), x, convolve)
    head = target.unembedding.weight.double()
    first, second = (
        weights[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor")
    )
    path, steps = [], []
    for step in range(1, count + 1):
        logits = head @ hidden[step]
        logits[MASK] = -1e30  # the mask is never drafted
        gate = weights["candidate_selector.hidden_projection.weight"] @ hidden[step]
        scores = {
            int(token): float(logits[token] + (first[last] * gate) @ second[token])
            for token in logits.topk(min(SIZES["selector_top_k"], VOCAB)).indices
        }
        last = max(scores, key=lambda token: scores[token]) if chosen is None else chosen[step - 1]
        path.append(last)
        steps.append(scores)
    return path, steps


def block_forward(features: Tensor, last: int, count: int, **read: Any) -> Forward:
    """Return the forward of a method for the slots after `features` and a last token."""
    start = len(features)
    return Forward(
        ids=[last] + [MASK] * (BLOCK - 1),
        start=start,
        pattern=FULL,
        context=features,
        predict=range(start + 1, start + 1 + count),
        read=Sample(keep=True, **read),
        model="draft",
    )


def draft_blocks(
    draft: DFlashDraft, blocks: list[tuple[Tensor, int, int]], read_rows: int = 256, **read: Any
) -> list[Prediction]:
    """Draft blocks of several sequences in one pass."""
    runner = Runner("draft", draft, slots=512, read_rows=read_rows)
    forwards = [block_forward(*block, **read) for block in blocks]
    memory = [runner.reserve(64) for _ in blocks]
    return run(runner, forwards, [table for table in memory if table is not None])


def random_blocks() -> list[tuple[Tensor, int, int]]:
    """Return features, last tokens and numbers of drafts; the last tokens of two are masks."""
    generator = torch.Generator().manual_seed(3)
    sizes = ((3, 5, BLOCK - 1), (8, MASK, 3), (1, MASK, BLOCK - 1), (4, 11, 1))
    return [(torch.randn(n, 64, generator=generator), last, c) for n, last, c in sizes]


@pytest.mark.parametrize(
    "changes",
    [{}, {"conv_kernel_size": 1}, {"conv_kernel_size": 3}, {"conv_group_size": 32}],
)
@pytest.mark.parametrize("read_rows", [256, 6])
def test_block_equals_the_published_code(
    tmp_path: Path, changes: dict[str, Any], read_rows: int
) -> None:
    target = causal_model()
    draft = load_draft(write(tmp_path / "draft", **changes), target)
    assert isinstance(draft, DFlash2Draft)
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    found = draft_blocks(draft, random_blocks(), read_rows)
    for (features, last, count), ours in zip(random_blocks(), found, strict=True):
        path, steps = naive_scores(target, weights, features, last, None, count)
        assert ours.tokens == path
        check_scores(ours, steps)


def check_scores(found: Prediction, steps: list[dict[int, float]]) -> None:
    """Compare logits with the scores of candidates; other tokens cannot be drawn."""
    assert found.logits is not None
    for row, scores in zip(torch.as_tensor(found.logits), steps, strict=True):
        close(row[[*scores]], torch.tensor([*scores.values()]))
        others = [token for token in range(VOCAB) if token not in scores]
        assert not row.softmax(-1)[others].any()


def test_rejection_draws_a_path(tmp_path: Path) -> None:
    target = causal_model()
    draft = load_draft(write(tmp_path / "draft"), target)
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    warm = Sampling(temperature=1.0, seed=11)
    found = draft_blocks(draft, random_blocks(), sampling=warm, step=1)
    for (features, last, count), ours in zip(random_blocks(), found, strict=True):
        check_scores(ours, naive_scores(target, weights, features, last, ours.tokens, count)[1])
    greedy = draft_blocks(draft, random_blocks())
    assert [each.tokens for each in found] != [each.tokens for each in greedy]


def test_more_candidates_than_tokens(tmp_path: Path) -> None:
    draft = load_draft(write(tmp_path / "draft", selector_top_k=VOCAB + 5), causal_model())
    (found,) = draft_blocks(draft, random_blocks()[:1])
    assert found.logits is not None
    assert (torch.as_tensor(found.logits) > -1e20).sum(1).tolist() == [VOCAB - 1] * (BLOCK - 1)


def test_neighbour_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    draft = load_draft(write(tmp_path / "draft"), causal_model())
    first, second = random_blocks()[:2]
    with pytest.raises(ArithmeticError):
        draft_blocks(draft, [(first[0] * torch.inf, *first[1:])])
    hidden = []
    for features in (first[0], first[0] * torch.inf):
        x = draft.embed_tokens(torch.tensor([1, MASK, 2, MASK]))
        x[:2] *= 1 if features is first[0] else torch.inf
        mixer = draft.blocks[0].attention_convolution
        kernels = torch.ones(4, 2, DIM)
        hidden.append(mixer.mix_rows(kernels, x, torch.tensor([0, 1, 0, 1]))[2:])
    assert torch.equal(*hidden)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of a target and its draft."""
    folder = tmp_path_factory.mktemp("pair")
    save_model(causal_model(), folder / "target", dtype=torch.float32)
    return folder / "target", write(folder / "draft")


PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9], [2]]


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"tokens": 3}, {"temperature": 0.8, "seed": 5}),
        ({"block": 3}, {"frequency_penalty": 0.7, "repetition_penalty": 1.2}),
        ({"block": 1}, {"max_tokens": 3}),
        ({"verify": "rejection", "tokens": 4}, {}),
    ],
)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_decoding_equals_plain_decoding(
    pair: tuple[Path, Path], changes: dict[str, Any], options: dict[str, Any], quantize: Any
) -> None:
    options = {"max_tokens": 20, **options}
    found = []
    for method in (DFlash(draft=str(pair[1]), **changes), Autoregressive()):
        llm = LLM(pair[0], method, quantize=quantize)
        together = [output.ids for output in llm.generate(PROMPTS, **options)]
        assert [llm.generate(prompt, **options)[0].ids for prompt in PROMPTS] == together
        found.append(together)
    assert found[0] == found[1]


def test_saved_draft_is_the_same(tmp_path: Path) -> None:
    source = write(tmp_path / "draft")
    save_model(load_draft(source, causal_model()), tmp_path / "saved", dtype=torch.float32)
    same_weights(tmp_path / "saved", source)


def test_published_configuration() -> None:
    config = translate_config(
        {
            "architectures": ["DFlash2DraftModel"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 5,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": False,
            "is_causal": False,
            "layer_types": ["sliding_attention"] * 5,
            "use_sliding_window": True,
            "max_window_layers": 5,
            "sliding_window": 2048,
            "vocab_size": 248320,
            "num_target_layers": 64,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
            "dflash_config": {
                "block_size": 8,
                "conv_group_size": 16,
                "conv_kernel_size": 2,
                "mask_token_id": 248070,
                "selector_rank": 256,
                "selector_top_k": 16,
                "target_layer_ids": [5, 19, 33, 47, 61],
            },
        }
    )
    assert config.chain == ChainHeads(rank=256, candidates=16)
    assert config.convolution == BlockConvolution(taps=2, group=16)
    assert (config.block, config.shift, config.mask_id) == (8, 0, 248070)
    assert {(each.window, each.causal) for each in config.sights} == {(2048, False)}
    assert config.feature_layers == (5, 19, 33, 47, 61)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_kernel_size": 0}, "conv_kernel_size must be a whole number.*got 0"),
        ({"conv_kernel_size": True}, "conv_kernel_size must be a whole number.*got True"),
        ({"conv_group_size": 5}, "conv_group_size 5 must divide hidden_size 32"),
        ({"conv_group_size": 2.5}, "conv_group_size must be a whole number.*got 2.5"),
        ({"selector_rank": -1}, "selector_rank must be a whole number.*got -1"),
        ({"selector_top_k": "all"}, "selector_top_k must be a whole number.*got 'all'"),
        ({"output_multiplier": 2.0}, "output_multiplier must be 1.0, got 2.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping must be None, got 30.0"),
        ({"input_embedding_scale": 0.5}, "input_embedding_scale must be 1.0, got 0.5"),
        ({"mask_token_id": VOCAB}, "mask_id 24 is outside the vocabulary of 24"),
    ],
)
def test_other_fields_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        translate_config(fields(**changes))


@pytest.mark.parametrize("name", SIZES)
def test_missing_sizes_are_refused(name: str) -> None:
    config = fields()
    del config["dflash_config"][name]
    with pytest.raises(ValueError, match=f"field 'dflash_config.{name}' is missing"):
        translate_config(config)


def test_unfit_weights_processes_and_training_are_refused(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    config, found = fields(), tensors(fields())
    del found["layers.1.mlp_conv.base_kernel"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'layers\.1\.mlp_conv\.base_kernel'"):
        load_draft(tmp_path, causal_model())
    with pytest.raises(ValueError, match="DFlash2DraftModel, a draft.*cannot be sharded"):
        ModelShard(0, 2).shard_config(translate_config(config))
    with pytest.raises(ValueError, match="trains no draft with convolutions"):
        Objective().bind(translate_config(config))
    method = DFlash(draft=str(pair[1]), confidence_threshold=0.5)
    with refuses("confidence_threshold"):
        LLM(pair[0], method).generate(PROMPTS[0], max_tokens=3)

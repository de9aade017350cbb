"""Test the configuration and tables of the EAGLE draft, and what does not load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers import GOLDEN, VOCAB, causal_model, extended_pair, extending_draft, published_eagle
from outpace.checkpoints.load import load_draft, load_model, save_model, translate_config
from outpace.decoding import Kind
from outpace.models.extending import EagleDraft, default_feature_layers

PAIR = GOLDEN / "eagle" / "llama"
LISTED = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"eagle_config": {LISTED: [0, 1], "use_aux_hidden_state": True}},
        {"eagle_config": None, LISTED: [1, 2]},
        {"tie_word_embeddings": True, "mlp_bias": False, "target_hidden_size": 32},
        {"attention_bias": False, "eos_token_id": [1, 2], "norm_before_residual": False},
    ],
)
def test_spellings_of_one_configuration(changes: dict[str, Any]) -> None:
    ours, theirs = translate_config(published_eagle(**changes)), translate_config(published_eagle())
    assert ours.feature_layers == theirs.feature_layers == (0, 1)
    assert ours.family == "eagle" and ours.kind is Kind.EAGLE and ours.shift == 2
    assert ours.feature_widths == (64, 32) and ours.rope.theta == 10_000


def test_published_fields() -> None:
    published = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "draft_vocab_size": 32000,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.53.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    config = translate_config(published)
    assert (config.draft_vocab, config.feature_layers, config.head_dim) == (32000, (), 128)
    assert default_feature_layers(36) == (1, 17, 32) and default_feature_layers(94) == (1, 46, 90)
    assert default_feature_layers(7) == (1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1, got 2"),
        ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size 25 exceeds the vocabulary of 24"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"norm_before_residual": 1}, "norm_before_residual must be true or false, got 1"),
        ({"norm_before_fc": "yes"}, "norm_before_fc must be true or false, got 'yes'"),
        ({"fc_norm": True}, "fc_norm is True, which is not supported"),
        ({"norm_output": True}, "norm_output is True, which is not supported"),
        ({LISTED: [1, 3]}, f"eagle_config.{LISTED} and {LISTED} have different values"),
        ({"target_hidden_size": 64}, "target_hidden_size must be 32, got 64"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state must be True"),
        ({"eagle_config": {"layers": 3}}, "eagle_config.layers is 3, which is not supported"),
        ({"eagle_config": {LISTED: [1, 1]}}, "several distinct layers"),
        ({"eagle_config": {LISTED: [1]}}, "several distinct layers"),
        ({"eagle_config": {LISTED: ["1"]}}, "must be a whole number"),
        ({"eagle_config": 3}, "eagle_config must be an object, got 3"),
        ({"sliding_window": 8}, "sliding_window is 8"),
        ({"architectures": ["Eagle3Speculator"]}, "eagle_config is .*, which is not supported"),
        ({"architectures": ["Eagle3Speculators"]}, "architectures .* is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act must be .silu., got"),
    ],
)
def test_other_kinds_of_drafts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        translate_config(published_eagle(**changes))


def test_a_model_without_a_draft_vocabulary_is_llama() -> None:
    fields = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}
    assert translate_config(published_eagle(**fields, eagle_config=None)).family == "llama"


@pytest.mark.parametrize(
    ("changes", "target", "message"),
    [
        (
            {"hidden_size": 48, "num_attention_heads": 6},
            {},
            "hidden size is 48, the target's is 32",
        ),
        ({"vocab_size": 30}, {}, "vocabulary is 30, the target's is 24"),
        ({"eagle_config": {LISTED: [0, 2]}}, {}, "reads layer 2 of its target, which has 2"),
        ({"eagle_config": None, LISTED: [0, 1]}, {}, "reads layer -1"),
        ({"eagle_config": None}, {"num_hidden_layers": 6}, "must list .* target of 6 layers"),
    ],
)
def test_draft_of_another_target_is_refused(
    changes: dict[str, Any], target: dict[str, int], message: str
) -> None:
    config = translate_config(published_eagle(**changes))
    with pytest.raises(ValueError, match=message):
        EagleDraft(config, causal_model(**target))


def swapped(tensors: dict[str, Tensor]) -> None:
    """Make the first two tokens of `d2t` equal."""
    tensors["d2t"][1] = tensors["d2t"][0] - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("d2t"), "no tensor 'd2t'"),
        (lambda t: t.pop("t2d"), "no tensor 't2d'"),
        (lambda t: t["d2t"].add_(400), "d2t contains tokens outside the vocabulary of 320"),
        (lambda t: t["d2t"].sub_(400), "d2t contains tokens outside the vocabulary of 320"),
        (swapped, r"d2t must list 160 tokens \(draft_vocab_size\), got 159"),
        (lambda t: t["t2d"].logical_not_(), "t2d must list the same tokens as d2t"),
        (lambda t: t.update(t2d=t["t2d"].long()), "'t2d' holds I64"),
        (lambda t: t.update(d2t=t["d2t"].float()), "'d2t' holds F32"),
        (lambda t: t.update(d2t=t["d2t"][:9].clone()), r"'d2t' has shape \(9,\)"),
        (
            lambda t: t.update({"embed_tokens.weight": torch.zeros(320, 64)}),
            "'embed_tokens.weight'",
        ),
        (lambda t: t.update({"midlayer.self_attn.q_proj.bias": torch.zeros(64)}), "q_proj.bias'"),
        (lambda t: t["fc.weight"].fill_(torch.nan), "'fc.weight' has NaN"),
    ],
)
def test_invalid_weights_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    tensors = load_file(PAIR / "draft" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(PAIR / "draft" / "config.json", tmp_path)
    with pytest.raises(ValueError, match=message):
        load_draft(tmp_path, extended_pair()[0])


def test_a_draft_of_all_tokens_has_no_tables(tmp_path: Path) -> None:
    target = causal_model()
    draft = extending_draft(target)
    assert draft.head_tokens is None and draft.compute_logits(torch.ones(1, 32)).shape == (1, VOCAB)
    save_model(draft, tmp_path, dtype=torch.float32)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "model.safetensors").keys()
    assert load_draft(tmp_path, target).config == draft.config


def test_draft_and_model_are_not_interchangeable() -> None:
    with pytest.raises(ValueError, match="is a draft that reads the features of a target"):
        load_model(PAIR / "draft")

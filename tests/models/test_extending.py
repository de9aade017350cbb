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
from outpace.checkpoints.load import load_draft, save_model, translate_config
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


def test_fields_without_effect_are_accepted() -> None:
    plain = {
        "bos_token_id": 151643,
        "initializer_range": 0.02,
        "max_window_layers": 36,
        "rope_scaling": None,
        "sliding_window": None,
        "transformers_version": "4.53.1",
        "use_cache": True,
        "use_sliding_window": False,
    }
    config = translate_config(published_eagle(**plain, draft_vocab_size=12, eagle_config=None))
    assert (config.draft_vocab, config.feature_layers) == (12, ())
    assert default_feature_layers(36) == (1, 17, 32) and default_feature_layers(94) == (1, 46, 90)
    assert default_feature_layers(7) == (1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size"),
        ({"attention_bias": True}, "attention_bias"),
        ({"norm_before_residual": 1}, "norm_before_residual"),
        ({"norm_before_fc": "yes"}, "norm_before_fc"),
        ({"fc_norm": True}, "fc_norm"),
        ({"norm_output": True}, "norm_output"),
        ({LISTED: [1, 3]}, LISTED),
        ({"target_hidden_size": 64}, "target_hidden_size"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_config": {"layers": 3}}, "eagle_config.layers"),
        ({"eagle_config": {LISTED: [1, 1]}}, LISTED),
        ({"eagle_config": {LISTED: [1]}}, LISTED),
        ({"eagle_config": {LISTED: ["1"]}}, LISTED),
        ({"eagle_config": 3}, "eagle_config"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"architectures": ["Eagle3Speculator"]}, "eagle_config"),
        ({"architectures": ["Eagle3Speculators"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_other_kinds_of_drafts_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        translate_config(published_eagle(**changes))


def test_a_model_without_a_draft_vocabulary_is_llama() -> None:
    fields = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}
    assert translate_config(published_eagle(**fields, eagle_config=None)).family == "llama"


@pytest.mark.parametrize(
    ("changes", "target", "value"),
    [
        ({"hidden_size": 48, "num_attention_heads": 6}, {}, "48"),
        ({"vocab_size": 30}, {}, "30"),
        ({"eagle_config": {LISTED: [0, 2]}}, {}, "layer 2"),
        ({"eagle_config": None, LISTED: [0, 1]}, {}, "layer -1"),
        ({"eagle_config": None}, {"num_hidden_layers": 6}, LISTED),
    ],
)
def test_draft_of_another_target_is_refused(
    changes: dict[str, Any], target: dict[str, int], value: str
) -> None:
    config = translate_config(published_eagle(**changes))
    with pytest.raises(ValueError, match=value):
        EagleDraft(config, causal_model(**target))


def swapped(tensors: dict[str, Tensor]) -> None:
    """Make the first two tokens of `d2t` equal."""
    tensors["d2t"][1] = tensors["d2t"][0] - 1


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda t: t.pop("d2t"), "d2t"),
        (lambda t: t.pop("t2d"), "t2d"),
        (lambda t: t["d2t"].add_(400), "d2t"),
        (lambda t: t["d2t"].sub_(400), "d2t"),
        (swapped, "d2t"),
        (lambda t: t["t2d"].logical_not_(), "t2d"),
        (lambda t: t.update(t2d=t["t2d"].long()), "t2d"),
        (lambda t: t.update(d2t=t["d2t"].float()), "d2t"),
        (lambda t: t.update(d2t=t["d2t"][:9].clone()), "d2t"),
        (lambda t: t.update({"embed_tokens.weight": torch.zeros(320, 64)}), "embed_tokens.weight"),
        (lambda t: t.update({"midlayer.self_attn.q_proj.bias": torch.zeros(64)}), "q_proj.bias"),
        (lambda t: t["fc.weight"].fill_(torch.nan), "fc.weight"),
    ],
)
def test_invalid_weights_are_refused(change: Any, name: str, tmp_path: Path) -> None:
    tensors = load_file(PAIR / "draft" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(PAIR / "draft" / "config.json", tmp_path)
    with pytest.raises(ValueError, match=name):
        load_draft(tmp_path, extended_pair()[0])


def test_a_draft_of_all_tokens_has_no_tables(tmp_path: Path) -> None:
    target = causal_model()
    draft = extending_draft(target)
    assert draft.head_tokens is None and draft.compute_logits(torch.ones(1, 32)).shape == (1, VOCAB)
    save_model(draft, tmp_path, dtype=torch.float32)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "model.safetensors").keys()
    assert load_draft(tmp_path, target).config == draft.config

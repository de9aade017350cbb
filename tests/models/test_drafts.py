"""Compare the DFlash draft with its authors' code, and test which DFlash and EAGLE drafts load."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from helpers import (
    GOLDEN,
    VOCAB,
    adding_draft,
    causal_model,
    extended_pair,
    published,
    published_eagle,
)
from outpace.checkpoints.checkpoint import translate_config
from outpace.checkpoints.load import load_draft, load_model, save_model
from outpace.decoding import Kind
from outpace.models.attention import Attend
from outpace.models.config import EMBEDDINGS, AttentionWindow
from outpace.models.draft import DFlashDraft
from outpace.models.extending import build_draft_model, default_feature_layers

EAGLE = GOLDEN / "eagle" / "llama"
PAIRS = ["pair_a", "pair_b"]


def close(ours: Tensor, official: Tensor) -> None:
    """Assert equality within the tolerance of the golden vectors."""
    torch.testing.assert_close(ours, official, atol=1e-4, rtol=0)


def seeing(mask: Tensor | None) -> Attend:
    """Return attention with a mask `bool[T, C + T]`, or without one."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Path:
    return GOLDEN / "dflash" / request.param


@pytest.fixture(scope="module")
def draft(pair: Path) -> DFlashDraft:
    return load_draft(pair / "draft", load_model(pair / "target"))


def case(pair: Path, name: str) -> dict[str, Any]:
    """Return a recorded decode of the authors' loop."""
    cases = json.loads((pair / "cases.json").read_text())["cases"]
    return next(case for case in cases if case["name"] == name)


@torch.inference_mode()
def test_features_of_the_target(pair: Path, draft: DFlashDraft) -> None:
    trace, prompt = load_file(pair / "trace.safetensors"), case(pair, "len12")["prompt"]
    (target,) = draft.lender
    causal = torch.ones(len(prompt), len(prompt), dtype=torch.bool).tril()
    layers = draft.config.feature_layers
    ids, places = torch.tensor(prompt), torch.arange(len(prompt))
    hidden, captured = target.capture_layers(ids, places, seeing(causal), layers)
    features = torch.cat([captured[layer] for layer in layers], -1)
    close(features, trace["block0.features"])
    close(draft.fusion_norm(draft.fusion(features)), trace["block0.fused"])
    last = target.config.layers - 1
    hidden, captured = target.capture_layers(ids, places, seeing(causal), [last])
    assert captured[last] is hidden and torch.equal(hidden, target(ids, places, seeing(causal)))


@torch.inference_mode()
def test_logits_of_a_block(pair: Path, draft: DFlashDraft) -> None:
    trace, decode = load_file(pair / "trace.safetensors"), case(pair, "len12")
    features = trace["block0.features"]
    positions = trace["block0.position_ids"].flatten()
    block = [decode["blocks"][0]["verify_ids"][0]]
    block += [draft.config.mask_id] * (draft.config.block - 1)
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept[layer] = k[: len(features)], v[: len(features)]
        return seeing(None)(layer, q, k, v)

    places = positions[len(features) :], positions[: len(features)]
    hidden = draft(torch.tensor(block), places[0], attend, context=(features, places[1]))
    close(hidden, trace["block0.draft_hidden"])
    close(draft.compute_logits(hidden[1:]), trace["block0.draft_logits"])
    for layer, (keys, values) in kept.items():
        close(keys.transpose(0, 1), trace[f"ctx_k.layer{layer}"])
        close(values.transpose(0, 1), trace[f"ctx_v.layer{layer}"])


@torch.inference_mode()
def test_logits_of_training_rows(pair: Path, draft: DFlashDraft) -> None:
    golden = load_file(pair / "training.safetensors")
    width, row = golden["features"].shape[1], 0
    positions = golden["position_ids"][row]
    hidden = draft(
        golden["noise_ids"][row],
        positions[width:],
        seeing(golden["attn_mask"][row, 0].bool()),
        context=(golden["features"][row], positions[:width]),
    )
    expected = golden["logits_row0"]
    close(draft.compute_logits(hidden[: len(expected)]), expected)


def test_saved_draft_loads_unchanged(pair: Path, draft: DFlashDraft, tmp_path: Path) -> None:
    save_model(draft, tmp_path, dtype=torch.float32)
    theirs, ours = (load_file(f / "model.safetensors") for f in (pair / "draft", tmp_path))
    assert theirs.keys() == ours.keys() and len(ours) == 11 * draft.config.layers + 3
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert load_draft(tmp_path, *draft.lender).config == draft.config


LISTED = "eagle_aux_hidden_state_layer_ids"
NESTED = {"mask_token_id": 23, "target_layer_ids": [1, 5]}


def dflash_fields(**changes: Any) -> dict[str, Any]:
    """Return a small published draft configuration."""
    fields = {
        **published("DFlashDraftModel"),
        "head_dim": 8,
        "block_size": 4,
        "num_target_layers": 8,
        "dflash_config": NESTED,
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not None}


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": None, "dflash_config": {**NESTED, "block_size": 4}},
        {"dflash_config": None, **NESTED},
        {"dflash_config": {"mask_token_id": 23}},
        {"dflash_config": {"mask_token_id": 23}, LISTED: [2, 6]},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"dflash_config": {**NESTED, "causal": False}},
        {"is_causal": False, "layer_types": ["full_attention"] * 2, "sliding_window": None},
        {"draft_vocab_size": 24, "target_hidden_size": 32, "is_neox_style": True},
        {"dflash_config": {**NESTED, "projector_type": None, "use_swa": False}},
        {"dflash_config": {**NESTED, "input_fusion": False}},
        {"dflash_config": {**NESTED, "input_fusion": None}},
    ],
)
def test_spellings_of_one_dflash_configuration(changes: dict[str, Any]) -> None:
    assert translate_config(dflash_fields(**changes)) == translate_config(dflash_fields())


@pytest.mark.parametrize(
    ("depth", "layers", "expected"),
    [(36, 5, (1, 9, 17, 25, 33)), (48, 8, (1, 7, 14, 20, 26, 32, 39, 45)), (8, 1, (4,))],
)
def test_default_layers_are_spread(depth: int, layers: int, expected: tuple[int, ...]) -> None:
    fields = {"num_target_layers": depth, "num_hidden_layers": layers}
    found = translate_config(dflash_fields(**fields, dflash_config={"mask_token_id": 23}))
    assert found.feature_layers == expected
    empty = dflash_fields(**fields, dflash_config={**NESTED, "target_layer_ids": []})
    assert translate_config(empty).feature_layers == (EMBEDDINGS,)


@pytest.mark.parametrize(
    ("changes", "is_causal"),
    [
        ({}, (True, False)),
        ({"is_causal": False}, (False, False)),
        ({"is_causal": True}, (True, True)),
        ({"dflash_config": {**NESTED, "causal": False}}, (False, False)),
    ],
)
def test_sliding_layers_are_causal_by_default(
    changes: dict[str, Any], is_causal: tuple[bool, bool]
) -> None:
    kinds = ["sliding_attention", "full_attention"]
    found = translate_config(dflash_fields(layer_types=kinds, sliding_window=6, **changes))
    sliding, full = is_causal
    assert found.windows == (
        AttentionWindow(window=6, causal=sliding),
        AttentionWindow(causal=full),
    )


@pytest.mark.parametrize(
    ("make", "changes", "field"),
    [
        (
            dflash_fields,
            {"dflash_config": {**NESTED, "projector_type": "dspark"}},
            "projector_type",
        ),
        (dflash_fields, {"dflash_config": {**NESTED, "selector_rank": 256}}, "selector_rank"),
        (dflash_fields, {"dflash_config": {**NESTED, "use_swa": True}}, "use_swa"),
        (dflash_fields, {"dflash_config": {**NESTED, "conv_kernel_size": 2}}, "conv_kernel_size"),
        (dflash_fields, {"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorrDraftModel"),
        *(
            (
                dflash_fields,
                {"dflash_config": {**NESTED, "input_fusion": wrong}},
                "dflash_config.input_fusion",
            )
            for wrong in (1, "true", {})
        ),
        (dflash_fields, {"input_fusion": True}, "input_fusion"),
        (dflash_fields, {"draft_vocab_size": 12}, "draft_vocab_size"),
        (dflash_fields, {"is_neox_style": False}, "is_neox_style"),
        (dflash_fields, {"output_multiplier": 0.5}, "output_multiplier"),
        (dflash_fields, {"layer_types": ["full_attention", "linear"]}, "layer_types"),
        (dflash_fields, {"dflash_config": {"target_layer_ids": [1, 5]}}, "mask_token_id"),
        (dflash_fields, {"dflash_config": {"mask_token_id": 24}}, "mask_id"),
        (
            dflash_fields,
            {"num_target_layers": None, "dflash_config": {"mask_token_id": 2}},
            "num_target_layers",
        ),
        (published_eagle, {"num_hidden_layers": 2}, "num_hidden_layers"),
        (published_eagle, {"draft_vocab_size": VOCAB + 1}, "draft_vocab_size"),
        (published_eagle, {"attention_bias": True}, "attention_bias"),
        (published_eagle, {"norm_before_residual": 1}, "norm_before_residual"),
        (published_eagle, {"norm_before_fc": "yes"}, "norm_before_fc"),
        (published_eagle, {"fc_norm": True}, "fc_norm"),
        (published_eagle, {"norm_output": True}, "norm_output"),
        (published_eagle, {LISTED: [1, 3]}, LISTED),
        (published_eagle, {"target_hidden_size": 64}, "target_hidden_size"),
        (
            published_eagle,
            {"eagle_config": {"use_aux_hidden_state": False}},
            "use_aux_hidden_state",
        ),
        (published_eagle, {"eagle_config": {"layers": 3}}, "eagle_config.layers"),
        (published_eagle, {"eagle_config": {LISTED: [1, 1]}}, LISTED),
        (published_eagle, {"eagle_config": {LISTED: [1]}}, LISTED),
        (published_eagle, {"eagle_config": {LISTED: ["1"]}}, LISTED),
        (published_eagle, {"eagle_config": 3}, "eagle_config"),
        (published_eagle, {"sliding_window": 8}, "sliding_window"),
        (published_eagle, {"architectures": ["Eagle3Speculator"]}, "eagle_config"),
        (published_eagle, {"architectures": ["Eagle3Speculators"]}, "architectures"),
        (published_eagle, {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_other_kinds_of_drafts_are_refused(
    make: Callable[..., dict[str, Any]], changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        translate_config(make(**changes))


@pytest.mark.parametrize(
    ("fields", "target", "value"),
    [
        (dflash_fields(), {"hidden_size": 48}, "48"),
        (dflash_fields(), {"vocab_size": 30}, "30"),
        (dflash_fields(), {"num_hidden_layers": 5}, "5"),
        (dflash_fields(num_target_layers=None), {"num_hidden_layers": 4}, "layer 5"),
        (published_eagle(hidden_size=48, num_attention_heads=6), {}, "48"),
        (published_eagle(vocab_size=30), {}, "30"),
        (published_eagle(eagle_config={LISTED: [0, 2]}), {}, "layer 2"),
        (published_eagle(eagle_config=None), {"num_hidden_layers": 6}, LISTED),
    ],
)
def test_draft_of_another_target_is_refused(
    fields: dict[str, Any], target: dict[str, int], value: str
) -> None:
    config = translate_config(fields)
    depth = {"num_hidden_layers": 8} if config.kind is Kind.DFLASH else {}
    with pytest.raises(ValueError, match=value):
        build_draft_model(config, causal_model(**depth | target))


def test_a_fused_draft_is_recognised(draft: DFlashDraft) -> None:
    found = translate_config(dflash_fields(dflash_config={**NESTED, "input_fusion": True}))
    plain = translate_config(dflash_fields())
    assert (plain.kind, plain.feature_widths) == (Kind.DFLASH, ())
    assert (found.kind, found.feature_widths) == (Kind.DFLASH_FUSED, (64,))
    assert replace(found, kind=Kind.DFLASH) == plain
    assert adding_draft(draft).config == replace(draft.config, kind=Kind.DFLASH_FUSED)


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
    tensors = load_file(EAGLE / "draft" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(EAGLE / "draft" / "config.json", tmp_path)
    with pytest.raises(ValueError, match=name):
        load_draft(tmp_path, extended_pair()[0])

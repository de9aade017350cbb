"""Compare the DFlash draft with its authors' code, and test what does not load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from helpers import adding_draft, causal_model, published
from outpace.checkpoints.load import load_draft, load_model, save_model, translate_config
from outpace.decoding import Kind
from outpace.models.attention import Attend
from outpace.models.config import AttentionWindow
from outpace.models.draft import DFlashDraft, DFlashFusedDraft

GOLDEN = Path(__file__).parent.parent / "golden" / "dflash"
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
    """Return the folder of a target and its draft."""
    return GOLDEN / request.param


@pytest.fixture(scope="module")
def draft(pair: Path) -> DFlashDraft:
    """Return the draft with its target."""
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


TARGET = {"hidden_size": 32, "vocab_size": 24, "num_hidden_layers": 8}
NESTED = {"mask_token_id": 23, "target_layer_ids": [1, 5]}


def config(**changes: Any) -> dict[str, Any]:
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
        {"dflash_config": {"mask_token_id": 23}, "eagle_aux_hidden_state_layer_ids": [2, 6]},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"dflash_config": {**NESTED, "causal": False}},
        {"is_causal": False, "layer_types": ["full_attention"] * 2, "sliding_window": None},
        {"draft_vocab_size": 24, "target_hidden_size": 32, "is_neox_style": True},
        {"dflash_config": {**NESTED, "projector_type": None, "use_swa": False}},
        {"dflash_config": {**NESTED, "input_fusion": False}},
        {"dflash_config": {**NESTED, "input_fusion": None}},
    ],
)
def test_spellings_of_one_configuration(changes: dict[str, Any]) -> None:
    assert translate_config(config(**changes)) == translate_config(config())


@pytest.mark.parametrize(
    ("depth", "layers", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (48, 8, (1, 7, 14, 20, 26, 32, 39, 45)),
        (8, 1, (4,)),
    ],
)
def test_default_layers_are_spread(depth: int, layers: int, expected: tuple[int, ...]) -> None:
    fields = {"num_target_layers": depth, "num_hidden_layers": layers}
    found = translate_config(config(**fields, dflash_config={"mask_token_id": 23}))
    assert found.feature_layers == expected


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
    found = translate_config(config(layer_types=kinds, sliding_window=6, **changes))
    sliding, full = is_causal
    assert found.sights == (
        AttentionWindow(window=6, causal=sliding),
        AttentionWindow(causal=full),
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dflash_config": {**NESTED, "projector_type": "dspark"}}, "projector_type"),
        ({"dflash_config": {**NESTED, "selector_rank": 256}}, "selector_rank"),
        ({"dflash_config": {**NESTED, "use_swa": True}}, "use_swa"),
        ({"dflash_config": {**NESTED, "conv_kernel_size": 2}}, "conv_kernel_size"),
        ({"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorrDraftModel"),
        ({"architectures": ["XPressDraftModel"]}, "XPressDraftModel"),
        ({"architectures": ["Qwen3XPressModel"]}, "Qwen3XPressModel"),
        *(
            ({"dflash_config": {**NESTED, "input_fusion": wrong}}, "dflash_config.input_fusion")
            for wrong in (1, "true", {})
        ),
        ({"input_fusion": True}, "input_fusion"),
        ({"draft_vocab_size": 12}, "draft_vocab_size"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"output_multiplier": 0.5}, "output_multiplier"),
        ({"layer_types": ["full_attention", "linear"]}, "layer_types"),
        ({"dflash_config": {"target_layer_ids": [1, 5]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 24}}, "mask_id"),
        ({"num_target_layers": None, "dflash_config": {"mask_token_id": 2}}, "num_target_layers"),
    ],
)
def test_other_kinds_of_drafts_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        translate_config(config(**changes))


@pytest.mark.parametrize(
    ("changes", "target", "value"),
    [
        ({}, {"hidden_size": 48}, "48"),
        ({}, {"vocab_size": 30}, "30"),
        ({}, {"num_hidden_layers": 5}, "5"),
        ({"num_target_layers": None}, {"num_hidden_layers": 4}, "layer 5"),
        ({"feature_layers": (-1, 5)}, {}, "layer -1"),
    ],
)
def test_draft_of_another_target_is_refused(
    changes: dict[str, Any], target: dict[str, int], value: str
) -> None:
    layers = {name: changes[name] for name in changes if name == "feature_layers"}
    other = {name: changes[name] for name in changes if name not in layers}
    found = replace(translate_config(config(**other)), **layers)
    with pytest.raises(ValueError, match=value):
        DFlashDraft(found, causal_model(**TARGET | target))
    DFlashDraft(translate_config(config(**other)), causal_model(**TARGET))


def test_draft_and_model_are_not_interchangeable(pair: Path, draft: DFlashDraft) -> None:
    for folder in (pair / "draft", GOLDEN.parent / "eagle" / "llama" / "draft"):
        with pytest.raises(ValueError, match="draft"):
            load_model(folder)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM"):
        load_draft(pair / "target", *draft.lender)


def test_a_fused_draft_is_recognised(draft: DFlashDraft) -> None:
    found = translate_config(config(dflash_config={**NESTED, "input_fusion": True}))
    plain = translate_config(config())
    assert (plain.kind, plain.feature_widths) == (Kind.DFLASH, ())
    assert (found.kind, found.feature_widths) == (Kind.DFLASH_FUSED, (64,))
    assert replace(found, kind=Kind.DFLASH) == plain
    assert adding_draft(draft).config == replace(draft.config, kind=Kind.DFLASH_FUSED)


@torch.inference_mode()
def test_features_of_zeros_add_nothing(draft: DFlashDraft) -> None:
    adding = adding_draft(draft)
    adding.feature_norm.weight.add_(3)
    ids = torch.tensor([3, 1, 4])
    features = torch.randn(2, adding.config.feature_size)
    blank = torch.zeros(1, adding.config.feature_size)
    rows = adding.input_rows(ids, [features, blank])
    assert torch.equal(rows[2:], adding.embed_tokens(ids[2:]))
    assert torch.equal(rows[:2], adding.embed_tokens(ids[:2]) + adding.fuse_features(features))
    assert (rows[:2] - adding.embed_tokens(ids[:2])).abs().min() > 0


def test_saved_fused_draft_loads_unchanged(draft: DFlashDraft, tmp_path: Path) -> None:
    adding = adding_draft(draft)
    save_model(adding, tmp_path, dtype=torch.float32)
    published_ = json.loads((tmp_path / "config.json").read_text())
    assert published_["dflash_config"]["input_fusion"] is True
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "feature_norm.weight" in names and "hidden_norm.weight" not in names
    loaded = load_draft(tmp_path, *draft.lender)
    assert isinstance(loaded, DFlashFusedDraft) and loaded.config == adding.config
    for name, parameter in adding.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


@pytest.mark.parametrize("adds", [True, False])
def test_weights_of_another_draft_are_refused(
    draft: DFlashDraft, tmp_path: Path, *, adds: bool
) -> None:
    save_model(adding_draft(draft) if adds else draft, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["dflash_config"]["input_fusion"] = not adds
    (tmp_path / "config.json").write_text(json.dumps(content))
    own, other = ("feature_norm", "hidden_norm") if adds else ("hidden_norm", "feature_norm")
    with pytest.raises(ValueError, match=f"'{own}.weight'"):
        load_draft(tmp_path, *draft.lender)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{own}.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"'{other}.weight'"):
        load_draft(tmp_path, *draft.lender)

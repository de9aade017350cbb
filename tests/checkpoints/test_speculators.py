"""Drafts written by the library speculators: the same numbers as in the plain formats."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from helpers import VOCAB, causal_model, dense, extending_draft, feature_draft, needs_packed_loops
from outpace import LLM
from outpace.checkpoints.checkpoint import translate_config
from outpace.checkpoints.compress import compress_checkpoint
from outpace.checkpoints.load import load_draft, load_model, save_model
from outpace.decoding.processor import BANNED_LOGIT
from outpace.methods import DFlash, Eagle, Method
from outpace.models.draft import DFlashDraft, Draft
from outpace.models.extending import EagleDraft, build_draft_model
from outpace.models.int8 import is_quantized
from outpace.models.split import ModelShard
from outpace.models.transformer import Transformer
from speculator_configs import LAYER, LISTED, SOME, WEIGHTS, dflash, dspark, eagle, tables, written

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def translated(target: Transformer, plain: Path) -> dict[str, Tensor]:
    """Return the tensors of a plain draft with the library's names, and a copy of the embedding."""
    found = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in load_file(plain / WEIGHTS).items()
    }
    return {**found, "embed_tokens.weight": target.embedding.weight.clone()}


@pytest.fixture
def target(tmp_path: Path) -> Transformer:
    model = causal_model()
    save_model(model, tmp_path / "target", dtype=torch.float32)
    return model


def same_weights(ours: Draft, theirs: Draft) -> None:
    found, wanted = (dict(draft.named_parameters()) for draft in (ours, theirs))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def texts(folder: Path, method: Method) -> list[Any]:
    llm = LLM(folder, method, cache_gib=0.01)
    return llm.generate([IDS, IDS[:3]], max_tokens=16, ignore_eos=True)


def test_eagle_equals_the_plain_draft(target: Transformer, tmp_path: Path) -> None:
    plain = extending_draft(target, vocab_size=VOCAB, draft_vocab_size=len(SOME))
    for name, table in tables(SOME).items():
        plain.register_buffer(name, table)
    save_model(plain, tmp_path / "plain", dtype=torch.float32)
    tensors = translated(target, tmp_path / "plain")
    folder = written(tmp_path / "draft", eagle(draft_vocab_size=len(SOME)), tensors)
    ours = load_draft(folder, target)
    assert isinstance(ours, EagleDraft)
    same_weights(ours, plain)
    assert ours.head_tokens is not None and ours.head_tokens.tolist() == SOME
    assert ours.config.feature_layers == plain.config.feature_layers == (0, 1)
    drafts = (str(tmp_path / "plain"), str(folder))
    one, other = (texts(tmp_path / "target", Eagle(draft=name)) for name in drafts)
    for mine, theirs in zip(one, other, strict=True):
        assert (mine.ids, mine.forwards) == (theirs.ids, theirs.forwards)
    save_model(ours, tmp_path / "again", dtype=torch.float32)
    del tensors["embed_tokens.weight"]
    assert load_file(tmp_path / "again" / WEIGHTS).keys() == tensors.keys()
    same_weights(load_draft(tmp_path / "again", target), plain)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotated(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[1])[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin


def official(config: dict[str, Any], part: dict[str, Tensor], features: Tensor) -> Tensor:
    """Compute a draft's logits `[T, D]` for tokens `IDS` by the definition of its layer."""
    if config.get("norm_before_fc"):
        features = normed(features, part["input_norm.weight"])
    layer = {name[9:]: own for name, own in part.items() if name.startswith("layers.0.")}
    hidden = residual = features @ part["fc.weight"].T
    hidden = normed(hidden, layer["hidden_norm.weight"])
    if config["norm_before_residual"]:
        residual = hidden
    tokens = normed(part["embed_tokens.weight"][IDS], layer["input_layernorm.weight"])
    x = torch.cat((tokens, hidden), -1)
    q, k, v = (
        (x @ layer[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 8)).transpose(0, 1)
        for name in "qkv"
    )
    if config[LAYER]["model_type"] == "qwen3":
        q, k = (normed(y, layer[f"self_attn.{n}_norm.weight"]) for n, y in (("q", q), ("k", k)))
    k, v = (y.repeat_interleave(2, 0) for y in (rotated(k), v))
    seen = F.scaled_dot_product_attention(rotated(q)[None], k[None], v[None], is_causal=True)[0]
    hidden = residual + seen.transpose(0, 1).flatten(1) @ layer["self_attn.o_proj.weight"].T
    x = normed(hidden, layer["post_attention_layernorm.weight"])
    gate, up = (x @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    hidden = hidden + (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    return normed(hidden, part["norm.weight"]) @ part["lm_head.weight"].T


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_eagle_follows_its_fields(
    kind: str, own: bool, residual: bool, before: bool, target: Transformer, tmp_path: Path
) -> None:
    choices = {"norm_before_residual": residual, "norm_before_fc": before}
    config = {
        **eagle({"model_type": kind}, draft_vocab_size=len(SOME)),
        **choices,
        "embed_requires_grad": own,
    }
    made = EagleDraft(translate_config(config), target)
    torch.manual_seed(1)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() == 2 else 1.0, std=0.5)
    for name, table in tables(SOME).items():
        made.register_buffer(name, table)
    save_model(made, tmp_path / "draft", dtype=torch.float32)
    tensors = load_file(tmp_path / "draft" / WEIGHTS)
    assert ("embed_tokens.weight" in tensors) == own
    assert ("input_norm.weight" in tensors) == before
    tensors.setdefault("embed_tokens.weight", target.embedding.weight)
    ours = load_draft(written(tmp_path / "full", config, tensors), target)
    features = torch.randn(len(IDS), 64)
    positions = torch.arange(len(IDS))
    hidden, _ = ours.capture_layers(
        torch.tensor(IDS), positions, dense(causal=True), features=[features]
    )
    logits = ours.compute_logits(hidden)
    expected = official(config, tensors, features)
    torch.testing.assert_close(logits[:, SOME], expected, atol=2e-4, rtol=2e-4)
    others = [token for token in range(VOCAB) if token not in SOME]
    assert bool((logits[:, others] == BANNED_LOGIT).all())


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [SOME, [*range(VOCAB)]], ids=["some", "all"])
@pytest.mark.parametrize("windows", ["full", "causal", "both ways"])
@pytest.mark.parametrize("borrows", [False, True])
def test_dflash_equals_the_plain_draft(
    tokens: list[int], windows: str, borrows: bool, target: Transformer, tmp_path: Path
) -> None:
    layer: dict[str, Any] = {}
    if windows != "full":
        kinds = ["sliding_attention", "full_attention"]
        layer = {"layer_types": kinds, "sliding_window": 3, "use_sliding_window": True}
    wide = {"is_causal": False} if windows == "both ways" else {}
    nested = {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 1]}
    plain = feature_draft(target, dflash_config=nested, block_size=4, **layer, **wide)
    save_model(plain, tmp_path / "plain", dtype=torch.float32)
    assert target.unembedding is not None
    tensors = translated(target, tmp_path / "plain")
    if not borrows:
        tensors["lm_head.weight"] = target.unembedding.weight[tokens].clone()
    reduced = len(tokens) < VOCAB
    config = dflash(layer, draft_vocab_size=len(tokens), target_head=borrows)
    config["sliding_window_non_causal"] = windows == "both ways"
    tensors |= tables(tokens) if reduced else {}
    folder = written(tmp_path / "draft", config, tensors)
    ours = load_draft(folder, target)
    assert isinstance(ours, DFlashDraft) and ours.config.windows == plain.config.windows
    rows = torch.randn(5, 32)
    found, wanted = ours.compute_logits(rows), plain.compute_logits(rows)
    torch.testing.assert_close(found[:, tokens], wanted[:, tokens])
    others = [token for token in range(VOCAB) if token not in tokens]
    assert bool((found[:, others] == BANNED_LOGIT).all())
    for name, parameter in plain.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name
    drafts = (str(tmp_path / "plain"), str(folder))
    one, other = (texts(tmp_path / "target", DFlash(draft=name)) for name in drafts)
    for mine, theirs in zip(one, other, strict=True):
        assert mine.ids == theirs.ids
        assert reduced or mine.forwards == theirs.forwards
    save_model(ours, tmp_path / "again", dtype=torch.float32)
    assert load_draft(tmp_path / "again", target).config == ours.config
    assert load_file(tmp_path / "again" / WEIGHTS).keys() | {"embed_tokens.weight"} == {*tensors}


@needs_packed_loops
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_a_quantized_head_have_its_bits(tied: bool, quantize: str, tmp_path: Path) -> None:
    model = causal_model(tie_word_embeddings=tied, intermediate_size=64)
    save_model(model, tmp_path / "target", dtype=torch.float32)
    fields = dflash(draft_vocab_size=len(SOME), target_head=True, target_fingerprint="f8da")
    config = translate_config(fields)
    draft = build_draft_model(config, model)
    draft.set_head_tokens(torch.tensor(SOME))
    save_model(draft, tmp_path / "plain", dtype=torch.float32)
    compress_checkpoint(tmp_path / "plain", tmp_path / "draft", target=tmp_path / "target")
    target = load_model(tmp_path / "target", quantize=quantize)
    for folder in ("plain", "draft"):
        loaded, rows = load_draft(tmp_path / folder, target), torch.randn(5, 32)
        assert is_quantized(loaded.unembedding)
        assert torch.equal(loaded.head_logits(rows), target.compute_logits(rows)[:, SOME])
        assert "lm_head.weight" not in load_file(tmp_path / folder / WEIGHTS)
    with pytest.raises(ValueError, match=f"f8da: its vocabulary is {VOCAB}, .* {VOCAB + 1}"):
        load_draft(tmp_path / "draft", causal_model(vocab_size=VOCAB + 1))
    with pytest.raises(ValueError, match="tensor_parallel: DFlash.* has rows"):
        ModelShard(0, 2).shard_config(config)


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("model_type", eagle({"model_type": "gemma"})),
        ("model_type", eagle({"model_type": None})),
        ("num_hidden_layers", eagle({"num_hidden_layers": 2})),
        ("draft_vocab_size", eagle({"vocab_size": 8})),
        ("target_head", dflash(target_head=1)),
        ("target_fingerprint", dflash(target_fingerprint=7)),
        ("hidden_act", eagle({"hidden_act": "gelu"})),
        ("layer_types", eagle({"layer_types": ["sliding_attention"]})),
        ("hidden_size", eagle(hidden_size=48)),
        ("fc_norm", eagle(fc_norm=True)),
        ("norm_output", eagle(norm_output=True)),
        ("embed_requires_grad", eagle(embed_requires_grad="no")),
        ("target_hidden_size", eagle(target_hidden_size=64)),
        ("model_type", eagle(speculators_model_type="eagle")),
        ("algorithm", eagle(speculators_config={"algorithm": "mtp"})),
        ("speculators_config", eagle(speculators_config=3)),
        (LAYER, eagle(**{LAYER: [1]})),
        ("num_hidden_layers", eagle(**{LAYER: None})),
        ("sample_from_anchor", dflash(sample_from_anchor=1)),
        (LISTED, dflash(**{LISTED: None})),
        (LISTED, dflash(**{LISTED: []})),
        ("mask_token_id", dflash(mask_token_id=None)),
        ("hc_mult", dflash(hc_mult=4)),
        ("sliding_window_non_causal", dflash(sliding_window_non_causal=1)),
        ("layer_types", dflash({"layer_types": []})),
        ("model_type", dflash(speculators_model_type="dspark")),
        ("auto_map", dflash(architectures=["DFlash2DraftModel"])),
        ("auto_map", dflash(architectures=["DSparkDraftModel"])),
        ("markov_rank", dflash(markov_rank=6)),
        ("markov_head_type", dspark(markov_head_type="gated")),
        ("markov_head_type", dspark(markov_head_type="rnn")),
        ("markov_rank", dspark(markov_rank=None)),
        ("markov_rank", dspark(markov_rank=-1)),
        ("Markov", dspark(markov_rank=0)),
        ("enable_confidence_head", dspark(enable_confidence_head=None)),
        ("draft_vocab_size", dspark(draft_vocab_size=VOCAB + 1)),
        ("model_type", dspark(speculators_model_type="dflash")),
        ("algorithm", dspark(speculators_config={"algorithm": "dflash"})),
    ],
)
def test_unsupported_fields_are_refused(field: str, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^config\.json: .*{field}"):
        translate_config(config)

"""Compare causal models that fill blocks with transformers under their mask.

SDLM is Qwen2.5 and Nemotron-Labs-Diffusion is Ministral 3, with one block in which all rows see one
another, after causal rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Ministral3Config,
    Ministral3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import naive
from disguised import (
    IDS,
    MASK,
    SIZES,
    Disguise,
    build_random,
    change_fields,
    reference,
    rename_prefixes,
    use_official,
)
from helpers import close, published, whole
from outpace import LLM
from outpace.checkpoints.load import load_config, load_model, save_model
from outpace.decoding import Kind, Request, Target
from outpace.methods import Autoregressive, BlockDiffusion, Lookup, Speculative

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 0.25,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
SDLM = {
    "architectures": ["SDLMQwen2ForCausalLM"],
    "block_size": 4,
    "casual_attn": False,
    "text_mask_token": "<text_mask>",
    "text_mask_token_id": MASK,
}
NEMOTRON = {
    "architectures": ["NemotronLabsDiffusionModel"],
    "ar_loss_weight": 1.0,
    "block_size": 8,
    "dlm_loss_weight": None,
    "dlm_paradigm": "bidirectional",
    "dp_varying_mask_ratio": False,
    "mask_token_id": MASK,
    "model_type": "nemotron_labs_diffusion",
}
MODELS: dict[str, Disguise] = {
    "sdlm": (Qwen2ForCausalLM, Qwen2Config(**SIZES), SDLM),
    "nemotron_diffusion": (
        Ministral3ForCausalLM,
        Ministral3Config(**SIZES, head_dim=16, sliding_window=None, rope_parameters=YARN),
        NEMOTRON,
    ),
}


def written(name: str, folder: Path) -> PreTrainedModel:
    """Save a transformers model with random weights under the names of the family."""
    kind, config, own = MODELS[name]
    model = build_random(kind, config)
    model.lm_head.weight *= 4  # so that some predictions are sure
    model.save_pretrained(folder)
    if name == "nemotron_diffusion":
        rename_prefixes(folder / "model.safetensors")
    change_fields(folder, own)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = written(name, tmp_path)
    ours, config = load_model(tmp_path), load_config(tmp_path)
    assert (config.family, config.kind, config.shift) == (name, Kind.CAUSAL_BLOCK, 1)
    assert (config.mask_shift, config.block) == {"sdlm": (1, 4)}.get(name, (0, 8))
    with torch.inference_mode():
        close(whole(ours, IDS, causal=True), theirs(torch.tensor([IDS])).logits[0])
    n = len(IDS)
    ends = [*range(1, n - 6), n]
    expected = reference(theirs, IDS, ends)
    close(naive.by_block(ours, IDS, ends).roll(-1, 0)[:, :MASK], expected[:, :MASK])
    save_model(ours, tmp_path / "again", dtype=torch.float32)
    again = load_model(tmp_path / "again")
    close(naive.by_block(again, IDS, ends), naive.by_block(ours, IDS, ends), 0.0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("threshold", [0.3, None])
def test_greedy_text_equals_that_of_transformers(
    name: str, threshold: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = written(name, tmp_path)
    llm = LLM(tmp_path, cache_gib=0.01)
    assert type(llm.method) is BlockDiffusion
    prompts = [IDS[:37], IDS[:5], IDS[:16]]
    method = BlockDiffusion(threshold=threshold)
    outputs = llm.generate(prompts, method=method, max_tokens=21, ignore_eos=True)
    use_official(theirs, monkeypatch)
    decode = naive.prefix_filled if name == "sdlm" else naive.block_diffusion
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = decode(llm.target.model, prompt, 21, threshold=threshold)
        assert list(output.ids) == expected
        if name == "nemotron_diffusion":
            lookahead = BlockDiffusion(threshold=threshold, lookahead=3)
            (output,) = llm.generate([prompt], method=lookahead, max_tokens=21, ignore_eos=True)
            assert list(output.ids) == decode(
                llm.target.model, prompt, 21, threshold=threshold, lookahead=3
            )
    assert threshold is None or min(output.forwards for output in outputs) < 18


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_lossless_methods_give_autoregressive_text(name: str, tmp_path: Path) -> None:
    written(name, tmp_path)
    llm = LLM(tmp_path, cache_gib=0.02)
    prompts = [IDS[:37], IDS[:5], IDS[:16]]
    for temperature in (0.0, 0.7):
        settings = {"max_tokens": 21, "temperature": temperature, "seed": 3}
        expected = [
            output.ids for output in llm.generate(prompts, method=Autoregressive(), **settings)
        ]
        for method in (
            BlockDiffusion(verify=True, threshold=None),
            BlockDiffusion(verify=True, threshold=0.2),
            Lookup(),
            Speculative(draft=str(tmp_path)),
        ):
            outputs = llm.generate(prompts, method=method, **settings)
            assert [output.ids for output in outputs] == expected


def test_verified_drafts_are_the_models_own(tmp_path: Path) -> None:
    written("nemotron_diffusion", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    tensors["diffusion_head.weight"].zero_()
    tensors["diffusion_head.weight"][7] = 1.0
    tensors["encoder.embed_tokens.weight"].abs_()
    save_file(tensors, path, metadata={"format": "pt"})
    llm = LLM(tmp_path, cache_gib=0.01)
    (output,) = llm.generate(
        [IDS[:5]], method=BlockDiffusion(verify=True, threshold=None), max_tokens=33
    )
    assert list(output.ids) == [7] * 33
    # One token, seven drafted after it, and then eight in each forward.
    assert output.forwards == 5


@pytest.mark.parametrize("name", MODELS)
def test_options_without_effect_are_refused(name: str, tmp_path: Path) -> None:
    written(name, tmp_path)
    llm = LLM(tmp_path, cache_gib=0.01)
    with pytest.raises(ValueError, match="edit cannot be used with a causal model"):
        llm.generate([IDS], method=BlockDiffusion(edit=0.5), max_tokens=4)
    for method in ("wedlm", "d2f", "left_to_right", "diffusion"):
        with pytest.raises(ValueError, match="is a causal model that fills blocks"):
            llm.generate([IDS], method=method, max_tokens=4)
    unused = {
        "budget": 1.0,
        "steps": 2,
        "order": "entropy",
        "part": 2,
        "canvas": True,
        "lookahead": 2,
    }
    for option, value in unused.items():
        method = BlockDiffusion(**{option: value})
        if name == "sdlm":
            with pytest.raises(ValueError, match=f"^{option} cannot be used with a model whose"):
                llm.generate([IDS], method=method, max_tokens=4)
        else:
            assert llm.generate([IDS], method=method, max_tokens=4)


@pytest.mark.parametrize("mask_shift", [0, 1])
def test_templates_need_masks_that_predict_their_own_slot(mask_shift: int) -> None:
    target = Target(mask_id=MASK, block=4, mask_shift=mask_shift)
    request = Request(prompt=[1, 2], max_tokens=4, target=target, is_infill=True)
    if not mask_shift:
        BlockDiffusion().check_request(request)
        return
    with pytest.raises(ValueError, match="^method: the model predicts from left to right"):
        BlockDiffusion().check_request(request)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"casual_attn": True}, "casual_attn must be False, got True"),
        ({"causal_attn": True}, "causal_attn must be False, got True"),
        ({"text_mask_token_id": None}, "field 'text_mask_token_id' is missing"),
        ({"block_size": None}, "field 'block_size' is missing"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"a_later_field": 1}, "a_later_field is 1"),
    ],
)
def test_unsupported_fields_of_sdlm_are_refused(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**published(), **SIZES, **SDLM}))
    assert load_config(tmp_path).kind is Kind.CAUSAL_BLOCK
    change_fields(tmp_path, fields)
    with pytest.raises(ValueError, match=words):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dlm_paradigm": "autoregressive"}, "dlm_paradigm must be 'bidirectional'"),
        ({"mask_token_id": None}, "field 'mask_token_id' is missing"),
        ({"block_size": 2.5}, "block_size must be a whole number"),
        ({"rope_parameters": {**YARN, "mscale": 2.0}}, "mscale and mscale_all_dim must be equal"),
        ({"rope_parameters": {**YARN, "other": 2}}, "other is 2, which is not supported"),
        (
            {"rope_parameters": {**YARN, "original_max_position_embeddings": "long"}},
            "original_max_position_embeddings must be a whole number",
        ),
        ({"max_position_embeddings": "long"}, "max_position_embeddings must be a whole number"),
        ({"a_later_field": 1}, "a_later_field is 1"),
    ],
)
def test_unsupported_fields_of_nemotron_are_refused(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = {**Ministral3Config(**SIZES, head_dim=16, rope_parameters=YARN).to_dict(), **NEMOTRON}
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": None}))
    assert load_config(tmp_path).max_length == 128 < config["max_position_embeddings"]
    change_fields(tmp_path, fields)
    with pytest.raises(ValueError, match=words):
        load_config(tmp_path)

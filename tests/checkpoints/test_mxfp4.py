"""MXFP4 weights: each number matches the format's definition, and models match transformers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from helpers import whole
from outpace.checkpoints.load import load_model, save_model
from outpace.checkpoints.quantised.mxfp4 import dequantize_blocks

IDS = [3, 61, 27, 52, 14, 9, 40, 8, 61, 0, 33, 12] * 2
CONFIG = GptOssConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=5,
    max_position_embeddings=128,
    rope_parameters={"rope_type": "default", "rope_theta": 150_000.0},
)
EXPERTS = "model.layers.{}.mlp.experts.{}_proj"


def by_hand(byte: int, scale: int) -> tuple[float, float]:
    """Return the two numbers of a byte: sign, two exponent bits, one fraction bit."""
    numbers = []
    for nibble in (byte & 15, byte >> 4):
        sign, exponent, fraction = nibble >> 3, nibble >> 1 & 3, nibble & 1
        size = fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
        numbers.append((-1) ** sign * size * 2.0 ** (scale - 127))
    return numbers[0], numbers[1]


def packed(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    return blocks, torch.randint(121, 127, shape, dtype=torch.uint8)


@pytest.mark.parametrize("scale", [0, 1, 126, 127, 130, 251])
def test_every_byte_matches_the_definition(scale: int) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    found = dequantize_blocks(blocks, torch.full((16, 1), scale, dtype=torch.uint8))
    expected = torch.tensor([by_hand(byte, scale) for byte in range(256)]).view(16, 32)
    assert torch.equal(found, expected)
    assert torch.equal(found.bfloat16().float(), expected)


def written(folder: Path) -> GptOssForCausalLM:
    torch.manual_seed(0)
    model = GptOssForCausalLM(CONFIG).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() >= 2 else 0.5, std=0.2)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        experts = model.model.layers[layer].mlp.experts
        for name, rows, columns in (("gate_up", 64, 64), ("down", 64, 32)):
            stack = EXPERTS.format(layer, name)
            blocks, scales = packed(4, rows, columns // 32)
            del tensors[stack]
            tensors |= {f"{stack}_blocks": blocks, f"{stack}_scales": scales}
            whole = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            getattr(experts, f"{name}_proj").data = whole
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def test_a_checkpoint_equals_the_model(tmp_path: Path) -> None:
    theirs = written(tmp_path / "packed")
    ours = load_model(tmp_path / "packed")
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(whole(ours, IDS, causal=True), expected, atol=2e-4, rtol=2e-4)
    save_model(ours, tmp_path / "full", dtype=torch.float32)
    assert "quantization_config" not in json.loads((tmp_path / "full" / "config.json").read_text())
    full = load_model(tmp_path / "full").state_dict()
    assert all(torch.equal(full[name], tensor) for name, tensor in ours.state_dict().items())
    loaded = GptOssForCausalLM.from_pretrained(tmp_path / "full").eval()
    with torch.inference_mode():
        assert torch.equal(loaded(torch.tensor([IDS]), use_cache=False).logits[0], expected)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("_scales", lambda x: x.clone().fill_(255)),
        ("_scales", lambda x: x[:, :-1]),
        ("_scales", lambda x: x.to(torch.int8)),
        ("_blocks", lambda x: x[:-1]),
        ("_blocks", lambda x: x[..., :8]),
        ("_scales", None),
        ("_blocks", None),
    ],
)
def test_invalid_tensors_are_refused(
    part: str, change: Callable[[torch.Tensor], torch.Tensor] | None, tmp_path: Path
) -> None:
    written(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensor = tensors.pop(EXPERTS.format(1, "gate_up") + part)
    if change is not None:
        tensors[EXPERTS.format(1, "gate_up") + part] = change(tensor).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=EXPERTS.format(1, "gate_up")):
        load_model(tmp_path)

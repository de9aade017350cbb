"""Published formats of quantized weights: each matrix equals its definition, to the bit.

Packing and values are computed here element by element, as the formats define them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grouped import (
    AWQ_CONFIG,
    FILE,
    Format,
    Packed,
    awq,
    check_invalid_parts,
    compressed,
    gptq,
    gptq_config,
    grid,
    packs,
    table,
    write_quantized,
)
from helpers import published
from outpace.checkpoints.checkpoint import translate_config
from outpace.checkpoints.hub import CONFIG_FILE
from outpace.checkpoints.load import load_model, save_model
from outpace.checkpoints.quantised import QUANTIZATION_FIELD

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}


def fp8(out: int, inputs: int, *, block: tuple[int, int] | None = (20, 24)) -> Packed:
    numbers = (torch.randn(out, inputs) * 20).to(torch.float8_e4m3fn)
    if block is None:
        scale = torch.rand(()) + 0.1
        plain = [[float(x) * float(scale) for x in row] for row in numbers.float()]
        return {"weight": numbers, "weight_scale": scale}, torch.tensor(plain)
    high, wide = block
    scale = grid(-(-out // high), -(-inputs // wide), torch.float32)
    plain = [
        [
            float(numbers[row, column].float()) * float(scale[row // high, column // wide])
            for column in range(inputs)
        ]
        for row in range(out)
    ]
    return {"weight": numbers, "weight_scale_inv": scale}, torch.tensor(plain)


def whole(out: int, inputs: int, *, strategy: str = "channel", symmetric: bool = True) -> Packed:
    """Return unpacked 8-bit integers with a scale per output, group or matrix."""
    size = {"channel": inputs, "group": 16, "tensor": inputs}[strategy]
    count, rows = -(-inputs // size), 1 if strategy == "tensor" else out
    codes, scale = table(out, inputs, -128, 127), grid(rows, count, torch.bfloat16)
    zeros = table(rows, count, -8, 8) if not symmetric else [[0] * count] * rows
    plain = [
        [
            (codes[row][column] - zeros[row % rows][column // size])
            * float(scale[row % rows, column // size])
            for column in range(inputs)
        ]
        for row in range(out)
    ]
    stored = {"weight": torch.tensor(codes, dtype=torch.int8)}
    stored["weight_scale"] = scale.flatten() if strategy == "tensor" else scale
    if not symmetric:
        stored["weight_zero_point"] = torch.tensor(zeros, dtype=torch.int8)
    return stored, torch.tensor(plain)


def blocked(out: int, inputs: int) -> Packed:
    stored, plain = fp8(out, inputs)
    return {"weight": stored["weight"], "weight_scale": stored["weight_scale_inv"]}, plain


def rows8(out: int, inputs: int) -> Packed:
    stored, plain = fp8(out, inputs, block=(1, inputs))
    return {"weight": stored["weight"], "weight_scale": stored["weight_scale_inv"]}, plain


FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [20, 24],
}
PLAIN_FP8 = {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}
GROUP = {"strategy": "group", "group_size": 16}
GROUP4 = {"num_bits": 4, **GROUP}
BLOCK = {"type": "float", "strategy": "block", "block_structure": [20, 24]}
UNEVEN = {"symmetric": False}

FORMATS: dict[str, Format] = {
    "fp8": (FP8, fp8, {}),
    "fp8 whole": (PLAIN_FP8, fp8, {"block": None}),
    "gptq 4": (gptq_config(), gptq, {}),
    "gptq 8": (gptq_config(bits=8), gptq, {"bits": 8}),
    "gptq column": (gptq_config(group_size=-1), gptq, {"size": -1}),
    "gptq mixed": (gptq_config(desc_act=True, sym=False), gptq, {"mixed": True}),
    "gptq v2": (gptq_config(checkpoint_format="gptq_v2"), gptq, {"step": 0}),
    "awq": (AWQ_CONFIG, awq, {}),
    "int8 channel": (compressed("int-quantized"), whole, {}),
    "int8 tensor": (compressed("int-quantized", strategy="tensor"), whole, {"strategy": "tensor"}),
    "int8 group": (compressed("naive-quantized", **GROUP), whole, {"strategy": "group"}),
    "int8 asymmetric": (compressed("int-quantized", **UNEVEN), whole, UNEVEN),
    "int4 packed": (compressed("pack-quantized", **GROUP4), packs, {}),
    "int8 packed": (compressed("pack-quantized", **GROUP), packs, {"bits": 8}),
    "int4 asymmetric": (compressed("pack-quantized", **UNEVEN, **GROUP4), packs, UNEVEN),
    "int4 mixed": (
        *(compressed("pack-quantized", actorder="group", **GROUP4), packs),
        {"mixed": True},
    ),
    "float8 channel": (compressed("float-quantized", type="float"), rows8, {}),
    "float8 block": (compressed("float-quantized", **BLOCK), blocked, {}),
}


def write(folder: Path, name: str, **config: Any) -> Path:
    return write_quantized(folder, name, FORMATS[name], **SIZES, **config)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_read_as_it_is_defined(name: str, tmp_path: Path) -> None:
    model, plain = load_model(write(tmp_path, name)), load_model(tmp_path / "plain")
    for ours, theirs in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(ours[1], theirs[1]), ours[0]
    save_model(model, tmp_path / "again", dtype=torch.float32)
    assert QUANTIZATION_FIELD not in json.loads((tmp_path / "again" / CONFIG_FILE).read_text())
    assert load_model(tmp_path / "again").config == plain.config


SCALES = {"fp8": "weight_scale_inv", "gptq 4": "scales", "gptq mixed": "scales", "awq": "scales"}
NAMES = ("int8 channel", "int8 asymmetric", "int4 packed", "int4 mixed", "float8 block")
SCALES |= dict.fromkeys(NAMES, "weight_scale")


@pytest.mark.parametrize("name", SCALES)
def test_invalid_parts_are_refused(name: str, tmp_path: Path) -> None:
    check_invalid_parts(write(tmp_path, name), FORMATS[name], SCALES[name])


def test_excluded_modules_are_not_quantized(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, "int4 packed"))
    head = load_file(tmp_path / "plain" / FILE)["lm_head.weight"]
    assert torch.equal(model.get_parameter("unembedding.weight"), head)


INT = compressed("int-quantized")
REFUSED: list[tuple[str, Any]] = [
    ("bitsandbytes", {"quant_method": "bitsandbytes"}),
    ("quant_method", {"load_in_4bit": True}),
    (QUANTIZATION_FIELD, 5),
    ("bits", gptq_config(bits=3)),
    ("bits", gptq_config(bits=True)),
    ("group_size", gptq_config(group_size=0)),
    ("checkpoint_format", gptq_config(checkpoint_format="marlin")),
    ("dynamic", gptq_config(dynamic={"a": 1})),
    ("is_marlin_format", gptq_config(is_marlin_format=True)),
    ("version", {**AWQ_CONFIG, "version": "gemv"}),
    ("bits", {**AWQ_CONFIG, "bits": 8}),
    ("zero_point", {**AWQ_CONFIG, "zero_point": False}),
    ("fmt", {**FP8, "fmt": "e5m2"}),
    ("weight_block_size", {**FP8, "weight_block_size": [128]}),
    ("weight_block_size", {**FP8, "weight_block_size": [0, 1]}),
    ("kv_cache_scheme", {**FP8, "kv_cache_scheme": {"a": 1}}),
    ("format", compressed("marlin-24")),
    ("num_bits", compressed("int-quantized", num_bits=2)),
    ("type", compressed("int-quantized", type="float")),
    ("8 bits", compressed("float-quantized", type="float", num_bits=4)),
    ("strategy", compressed("int-quantized", strategy="tensor_group")),
    ("group_size", compressed("int-quantized", strategy="group")),
    ("block_structure", compressed("int-quantized", strategy="block")),
    ("actorder", compressed("int-quantized", actorder="x")),
    ("later", compressed("int-quantized", later=1)),
    ("config_groups", {**INT, "config_groups": {}}),
    ("config_groups.a", {**INT, "config_groups": {"a": 1}}),
    ("ignore", {**INT, "ignore": ["re:("]}),
    ("ignore", {**INT, "ignore": "x"}),
    ("kv_cache_scheme", {**INT, "kv_cache_scheme": {"a": 1}}),
    ("quantization_status", {**INT, "quantization_status": "frozen"}),
    ("sparsity_config", {**INT, "sparsity_config": {"format": "2:4"}}),
    ("transform_config", {**INT, "transform_config": {"a": 1}}),
]


@pytest.mark.parametrize(("field", "scheme"), REFUSED)
def test_unsupported_schemes_are_refused(field: str, scheme: Any) -> None:
    with pytest.raises(ValueError, match=field):
        translate_config({**published(), QUANTIZATION_FIELD: scheme})

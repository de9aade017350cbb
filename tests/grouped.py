"""Checkpoints with quantized matrices, packed element by element as the formats define them."""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers import published, random_model
from outpace.checkpoints.hub import CONFIG_FILE
from outpace.checkpoints.load import load_model, save_model
from outpace.checkpoints.quantised import QUANTIZATION_FIELD

FILE = "model.safetensors"
DOWN = "model.layers.0.mlp.down_proj.weight"

Packed = tuple[dict[str, Tensor], Tensor]
"""Stored tensors of a matrix, by the ends of their names, and the matrix itself."""


def words(codes: list[list[int]], bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Pack rows of codes into words; `order` has the code at each place of a word."""
    count = 32 // bits
    order = order or tuple(range(count))
    rows = []
    for row in codes:
        padded = row + [0] * (-len(row) % count)
        rows.append(
            [
                sum(padded[first + order[place]] << bits * place for place in range(count))
                for first in range(0, len(padded), count)
            ]
        )
    values = [[word - 2**32 if word >= 2**31 else word for word in row] for row in rows]
    return torch.tensor(values, dtype=torch.int32)


def turned(table: list[list[int]]) -> list[list[int]]:
    return [list(row) for row in zip(*table, strict=True)]


def table(rows: int, columns: int, low: int, high: int) -> list[list[int]]:
    return [[random.randint(low, high) for _ in range(columns)] for _ in range(rows)]


def grid(rows: int, columns: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(rows, columns) * 0.01 + 1e-3).to(dtype)


def gptq(
    out: int, inputs: int, *, bits: int = 4, size: int = 16, step: int = 1, mixed: bool = False
) -> Packed:
    """Pack codes along the inputs; zero points are stored minus a step."""
    size = inputs if size == -1 else size
    count, most = -(-inputs // size), 2**bits - 1
    codes, zeros = table(out, inputs, 0, most), table(count, out, 0, most)
    scale = grid(count, out)
    group = [column // size for column in range(inputs)]
    if mixed:
        random.Random(inputs).shuffle(group)  # as GPTQ, which orders them by their activations
    plain = [
        [
            (codes[row][column] - zeros[group[column]][row]) * float(scale[group[column], row])
            for column in range(inputs)
        ]
        for row in range(out)
    ]
    stored = {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words([[(zero - step) % (most + 1) for zero in row] for row in zeros], bits),
        "scales": scale,
    }
    if mixed:
        stored["g_idx"] = torch.tensor(group, dtype=torch.int32)
    return stored, torch.tensor(plain)


def awq(out: int, inputs: int, *, size: int = 16) -> Packed:
    """Pack codes along the outputs, the even ones of eight before the odd ones."""
    count, order = inputs // size, (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros, scale = table(inputs, out, 0, 15), table(count, out, 0, 15), grid(count, out)
    plain = [
        [
            (codes[column][row] - zeros[column // size][row]) * float(scale[column // size, row])
            for column in range(inputs)
        ]
        for row in range(out)
    ]
    stored = {"qweight": words(codes, 4, order), "qzeros": words(zeros, 4, order), "scales": scale}
    return stored, torch.tensor(plain)


def packs(
    out: int,
    inputs: int,
    *,
    bits: int = 4,
    symmetric: bool = True,
    mixed: bool = False,
    size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> Packed:
    """Return codes packed with an offset along the inputs, and zero points along the outputs."""
    size, half = inputs if size == -1 else size, 2 ** (bits - 1)
    count, scale = -(-inputs // size), grid(out, -(-inputs // size), dtype)
    codes = table(out, inputs, -half, half - 1)
    zeros = table(out, count, -half, half - 1) if not symmetric else [[0] * count] * out
    group = [column // size for column in range(inputs)]
    if mixed:
        random.Random(inputs).shuffle(group)  # as GPTQ, which orders them by their activations
    plain = [
        [
            (codes[row][column] - zeros[row][group[column]]) * float(scale[row, group[column]])
            for column in range(inputs)
        ]
        for row in range(out)
    ]

    def above(values: list[list[int]]) -> list[list[int]]:
        return [[value + half for value in row] for row in values]

    stored = {
        "weight_packed": words(above(codes), bits),
        "weight_shape": torch.tensor([out, inputs]),
        "weight_scale": scale,
    }
    if not symmetric:
        stored["weight_zero_point"] = words(turned(above(zeros)), bits).t().contiguous()
    if mixed:
        stored["weight_g_idx"] = torch.tensor(group, dtype=torch.int32)
    return stored, torch.tensor(plain)


def compressed(form: str, *, activations: Any = None, **weights: Any) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors, as published."""
    usual = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "channel",
        "symmetric": True,
        "type": "int",
    }
    group = {
        "input_activations": activations,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**usual, **weights},
    }
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {"format": "dense", "targets": []},
        "version": "0.9.0",
    }


def gptq_config(**changes: Any) -> dict[str, Any]:
    return {
        "bits": 4,
        "damp_percent": 0.01,
        "desc_act": False,
        "group_size": 16,
        "model_file_base_name": "model",
        "model_name_or_path": None,
        "quant_method": "gptq",
        "static_groups": False,
        "sym": True,
        "true_sequential": True,
        **changes,
    }


AWQ_CONFIG = {
    "bits": 4,
    "group_size": 16,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / FILE)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)


Format = tuple[dict[str, Any], Callable[..., Packed], dict[str, Any]]
"""A `quantization_config`, the function that packs a matrix, and its options."""


def write_quantized(folder: Path, seed: str, form: Format, **config: Any) -> Path:
    """Write a checkpoint to `folder / "stored"`, and dequantized to `folder / "plain"`."""
    random.seed(seed)
    torch.manual_seed(0)
    scheme, pack, options = form
    save_model(random_model(published(**config)), folder / "plain", dtype=torch.float32)
    tensors = load_file(folder / "plain" / FILE)
    stored = dict(tensors)
    for matrix in [name for name in tensors if "_proj.weight" in name]:
        parts, plain = pack(*tensors[matrix].shape, **options)
        tensors[matrix] = plain.float()
        del stored[matrix]
        stored |= {f"{matrix.removesuffix('weight')}{end}": part for end, part in parts.items()}
    save_file(tensors, folder / "plain" / FILE)
    (folder / "stored").mkdir()
    save_file(stored, folder / "stored" / FILE)
    content = json.loads((folder / "plain" / CONFIG_FILE).read_text())
    (folder / "stored" / CONFIG_FILE).write_text(
        json.dumps({**content, QUANTIZATION_FIELD: scheme})
    )
    return folder / "stored"


def list_edits(parts: Iterable[str]) -> Iterator[Callable[[dict[str, Tensor]], Any]]:
    """Yield invalid changes of the parts of a matrix."""
    for part in parts:
        name = DOWN.replace("weight", part)
        changes: list[Callable[[Tensor], Tensor]] = [
            lambda x: x[..., :-1].clone(),
            lambda x: x.float() > 0,
        ]
        if part not in ("weight_shape", "weight_g_idx", "g_idx"):  # of which some are sound
            changes += [lambda x: x.flatten()[:3], lambda x: x.double().long()]
        yield lambda tensors, name=name: tensors.pop(name)
        for edit in changes:
            yield lambda tensors, name=name, edit=edit: tensors.update({name: edit(tensors[name])})


def check_invalid_parts(folder: Path, form: Format, scales: str, **options: Any) -> None:
    """Check that a checkpoint with a missing or changed part, or an invalid scale, is refused."""
    scale = DOWN.replace("weight", scales)
    edits = list(list_edits(form[1](32, 32, **form[2])[0]))
    for value in (float("nan"), float("inf"), -0.5):
        edits.append(lambda tensors, value=value: tensors[scale].view(-1)[-1:].fill_(value))
    sound = (folder / FILE).read_bytes()
    for number, edit in enumerate(edits):
        (folder / FILE).write_bytes(sound)
        change(folder, edit)
        with pytest.raises(ValueError) as error:
            load_model(folder, **options)
        assert str(folder) in str(error.value) and "\n" not in str(error.value), number

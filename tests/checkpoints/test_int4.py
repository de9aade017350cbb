"""Matrices of 4 bits on a CPU: published groups are kept exactly, other ones are rounded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from adapting import write_adapter
from grouped import (
    AWQ_CONFIG,
    DOWN,
    FILE,
    Format,
    awq,
    change,
    check_invalid_parts,
    compressed,
    gptq,
    gptq_config,
    packs,
    write_quantized,
)
from helpers import needs_packed_loops, published, random_model, whole
from outpace import LLM
from outpace.checkpoints.load import load_config, load_model, save_model
from outpace.kernels.packed import BLOCK_FORMATS
from outpace.models.low_bits import layer_projections
from outpace.models.packed import PackedEmbedding, PackedLinear
from outpace.models.transformer import Embedding

pytestmark = needs_packed_loops
SIZES = {"hidden_size": 64, "intermediate_size": 96}
IDS = [5, 3, 1, 4]
GROUP = {"num_bits": 4, "strategy": "group", "group_size": 32}
WHOLE = {"num_bits": 4, "strategy": "channel"}
F16 = torch.float16

SIZE, MIXED = {"size": 32}, {"size": 32, "mixed": True}
ORDERED = {"actorder": "group", **GROUP}
KEPT: dict[str, Format] = {
    "gptq": (gptq_config(group_size=32), gptq, SIZE),
    "gptq, groups of 64": (gptq_config(group_size=64), gptq, {"size": 64}),
    "gptq, whole rows": (gptq_config(group_size=-1), gptq, {"size": -1}),
    "gptq, ordered": (gptq_config(group_size=32, desc_act=True, sym=False), gptq, MIXED),
    "awq": ({**AWQ_CONFIG, "group_size": 32}, awq, SIZE),
    "packed": (compressed("pack-quantized", **GROUP), packs, SIZE),
    "packed, asymmetric": (
        *(compressed("pack-quantized", symmetric=False, **GROUP), packs),
        {**SIZE, "symmetric": False, "dtype": F16},
    ),
    "packed, whole rows": (compressed("pack-quantized", **WHOLE), packs, {"size": -1}),
    "packed, ordered": (compressed("pack-quantized", **ORDERED), packs, MIXED),
}


def write(folder: Path, name: str, form: Format | None = None, **config: Any) -> Path:
    return write_quantized(folder, name, form or KEPT[name], **{**SIZES, **config})


def kinds(model: nn.Module) -> dict[str, set[int]]:
    return {
        name: {kind for kind, *_ in module.matrix.parts}
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear | PackedEmbedding)
    }


@pytest.mark.sampled
@pytest.mark.parametrize("name", KEPT)
def test_published_groups_are_kept_exactly(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "outpace"):
        ours, plain = (
            load_model(write(tmp_path, name), quantize="native"),
            load_model(tmp_path / "stored"),
        )
    assert [line for line in caplog.messages if "8 of 10 matrices are in blocks of" in line]
    assert kinds(ours) == dict.fromkeys(layer_projections(ours).values(), {BLOCK_FORMATS["INT4"]})
    found, wanted = ours.state_dict(), plain.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[each], wanted[each]) for each in found)
    save_model(ours, tmp_path / "again", dtype=torch.float32)
    again = load_model(tmp_path / "again").state_dict()
    assert all(torch.equal(again[each], wanted[each]) for each in wanted)
    logits, exact = (whole(model, IDS, causal=True) for model in (ours, plain))
    assert 0 < (logits - exact).norm() < 0.05 * exact.norm()  # rows are rounded to 8 bits


@pytest.mark.parametrize("name", ["awq", "gptq, ordered"])
def test_batched_requests_equal_single_ones(name: str, tmp_path: Path) -> None:
    llm = LLM(write(tmp_path, name))
    prompts = [[5, 3, 1 + n, 4, *range(2 * n)] for n in range(9)]
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "logprobs": True}
    together, threads = llm.generate(prompts, **options), torch.get_num_threads()
    try:
        for number, (prompt, output) in enumerate(zip(prompts, together, strict=True)):
            torch.set_num_threads(1 + number % 3)
            (alone,) = llm.generate([prompt], **options)
            assert (alone.ids, alone.logprobs) == (output.ids, output.logprobs)
    finally:
        torch.set_num_threads(threads)


def in_float32(tensors: dict[str, Tensor]) -> None:
    """Store scales in float32, of which one is not exact in float16."""
    for name in [name for name in tensors if name.endswith("scales")]:
        tensors[name] = tensors[name].float()
    tensors[DOWN.replace("weight", "scales")].view(-1)[-1:] = 0.1


def other_order(tensors: dict[str, Tensor]) -> None:
    name = next(name for name in sorted(tensors) if name.endswith("up_proj.g_idx"))
    tensors[name] = tensors[name].flip(0)


FALLBACKS: dict[str, tuple[str, dict[str, Any], Any, str, int]] = {
    "scales": ("gptq", {}, in_float32, "scales are not exact in float16", 1),
    "order": ("gptq, ordered", {}, other_order, "order their inputs differently", 1),
    "inputs": ("gptq", {"intermediate_size": 80}, None, "80 inputs are not a multiple of 32", 2),
    "groups": ("", {}, None, "a group does not end after a multiple of 32 inputs", 8),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_other_groups_are_dequantized(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, config, edit, reason, count = FALLBACKS[name]
    sixteen = ({**AWQ_CONFIG, "group_size": 16}, awq, {"size": 16})
    folder = write(tmp_path, source or "sixteen", None if source else sixteen, **config)
    if edit is not None:
        change(folder, edit)
    with caplog.at_level("WARNING", "outpace"):
        ours = load_model(folder, quantize="native")
    (line,) = caplog.messages
    assert f"{count} matrices" in line and line.endswith(reason) and "_proj.weight'" in line
    assert len(kinds(ours)) == 8 - count
    wanted = load_model(folder).state_dict()
    assert all(torch.equal(found, wanted[each]) for each, found in ours.state_dict().items())


def test_an_adapter_dequantizes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path, "awq")
    write_adapter(tmp_path / "adapter", load_config(folder), parts=("attention",))
    with caplog.at_level("WARNING", "outpace"):
        assert len(kinds(load_model(folder, quantize="native", adapter=tmp_path / "adapter"))) == 4
    assert "4 matrices" in caplog.text and "quantize int8" in caplog.text


@pytest.mark.parametrize("name", ["gptq, ordered", "awq", "packed, asymmetric"])
def test_invalid_parts_are_refused(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, name, num_hidden_layers=1)
    scales = "weight_scale" if name.startswith("packed") else "scales"
    check_invalid_parts(folder, KEPT[name], scales, quantize="native")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_rounded_when_it_is_loaded(
    tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    plain = random_model(published(**SIZES, tie_word_embeddings=tied))
    save_model(plain, tmp_path / "plain", dtype=torch.float32)
    small = load_model(tmp_path / "plain", quantize="int4", dtype=dtype)
    types = {type(module) for module in small.modules()}
    assert nn.Linear not in types and Embedding not in types
    projections = {*layer_projections(small).values()}
    for name, found in kinds(small).items():
        assert found == {BLOCK_FORMATS["INT4" if name in projections else "Q8_0"]}
    logits, expected = (whole(model, IDS, causal=True) for model in (small, plain))
    assert 1e-3 < (logits - expected).norm() / expected.norm() < 0.5
    save_model(small, tmp_path / "small", dtype=torch.float32)
    before, after = (load_file(tmp_path / name / FILE) for name in ("plain", "small"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if tensor.dim() == 2:
            blocks, steps = tensor.view(-1, 32), 15 if "_proj" in name else 254
            span = blocks.amax(-1).clamp(min=0) - blocks.amin(-1).clamp(max=0)
            worst = (after[name].view(-1, 32) - blocks).abs().amax(-1) / span
            assert 0 < worst.max() <= (0.27 if steps == 15 else 1.1 / steps), name
    again = load_model(tmp_path / "small", quantize="int4", dtype=dtype)
    for name, tensor in again.state_dict().items():
        own = small.state_dict()[name]
        assert (tensor - own).norm() < 0.02 * own.norm(), name

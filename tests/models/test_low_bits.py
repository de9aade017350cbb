"""Test which quantization each device supports, and how torchao applies it to a model.

No GPU is needed: the decisions run as if there were one, and weights stay on the CPU.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import (
    causal_model,
    extending_draft,
    feature_draft,
    loaded_models,
    published,
    random_model,
    whole,
)
from outpace.api import llm
from outpace.api.llm import LLM
from outpace.checkpoints import fill, load
from outpace.checkpoints.load import load_model, save_model
from outpace.checkpoints.weights import CheckpointWeights
from outpace.engine import runner
from outpace.lab.run import questions_of
from outpace.methods import APD, Autoregressive, DFlash, Eagle, Method
from outpace.models import low_bits
from outpace.models.experts import Experts
from outpace.models.low_bits import (
    INT4_GROUP_SIZE,
    build_quantizer,
    check_quantize,
    layer_projections,
)
from outpace.models.transformer import Stack
from refusal import refuses

GPU = torch.device("cuda")
BF16 = torch.bfloat16
MISSING = "no torchao: pip install '.[quantize]'"
PROJECTIONS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
MIXTURE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "head_dim": 8,
}


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is a GPU of compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.fixture
def gpu(capable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load models as for a GPU, through torchao, but on the CPU."""
    api = pytest.importorskip("torchao.quantization.quant_api", reason=MISSING)
    monkeypatch.setattr(api, "_check_hardware_support", lambda granularity: None)
    filled, here = load.build_model, fill.fill_model
    for module in (llm, load):
        monkeypatch.setattr(
            module,
            "build_model",
            lambda make, checkpoint, config, form, *rest: filled(
                make, checkpoint, config, replace(form, dtype=BF16, device=GPU), *rest
            ),
        )

    def on_cpu(
        model: Stack,
        weights: CheckpointWeights,
        dtype: torch.dtype,
        device: Any,
        *rest: Any,
        **options: Any,
    ) -> None:
        assert (dtype, device) == (BF16, GPU)
        here(model, weights, dtype, "cpu", *rest, **options)

    monkeypatch.setattr(load, "fill_model", on_cpu)
    monkeypatch.setattr(runner, "pack_model", lambda model: None)
    for module in (low_bits, load):
        monkeypatch.setattr(
            module, "check_quantize", lambda way, device, dtype: check_quantize(way, GPU, dtype)
        )


def published_mixture() -> dict[str, Any]:
    """Return a tiny `config.json` of a mixture of experts."""
    return published("Qwen3MoeForCausalLM", **MIXTURE)


def reduced(model: nn.Module) -> set[str]:
    return {
        name
        for name, module in model.named_modules()
        if "weight" in dict(module.named_parameters(recurse=False))
        and type(module.weight) is not nn.Parameter
    }


@pytest.mark.parametrize(
    ("quantize", "device", "dtype", "found"),
    [
        *((value, "cpu", BF16, (9, 0)) for value in ("int3", "INT8", "", 8, ["int8"], "fp8")),
        *((value, "meta", BF16, (9, 0)) for value in ("int4", "int8", "fp8")),
        *((value, GPU, torch.float32, (9, 0)) for value in ("int4", "int8", "fp8")),
        ("int8", GPU, torch.float16, (9, 0)),
        ("fp8", "cuda:1", BF16, (8, 6)),
        ("int4", "cuda:1", BF16, (7, 5)),
    ],
)
def test_other_formats_devices_and_dtypes_are_refused(
    quantize: Any,
    device: Any,
    dtype: torch.dtype,
    found: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def capability(device: torch.device) -> tuple[int, int]:
        assert device in (GPU, torch.device("cuda:1"))
        return found

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    with refuses("quantize"):
        check_quantize(quantize, device, dtype)
    if device == "cpu":
        with refuses("quantize"):  # before it reads the folder
            LLM("nowhere", device=device, quantize=quantize)
    for own in (torch.float32, torch.float16):
        check_quantize("int8", "cpu", own)


@pytest.mark.parametrize("quantize", ["fp8", "int8", "int4"])
def test_rocm_and_a_missing_torchao_are_refused(
    quantize: str, capable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as rocm, refuses("quantize"):
        rocm.setattr(torch.version, "hip", "6.4")
        check_quantize(quantize, GPU, BF16)
    for name in ("torchao", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, name, None)
    check_quantize("int8", "cpu", BF16)
    with refuses("quantize"):
        check_quantize(quantize, GPU, BF16)


def test_projections_of_layers_are_selected() -> None:
    target, names = causal_model(), {f"blocks.{n}.{each}" for n in (0, 1) for each in PROJECTIONS}
    assert set(layer_projections(target).values()) == names
    assert set(layer_projections(feature_draft(target)).values()) == names
    own = {f"blocks.0.{each}" for each in PROJECTIONS}
    assert set(layer_projections(extending_draft(target)).values()) == own
    mixture = random_model(published_mixture())
    assert isinstance(mixture.blocks[0].mlp, Experts)
    assert set(layer_projections(mixture).values()) == {
        f"blocks.{layer}.{part}"
        for layer in (0, 1)
        for part in (
            *PROJECTIONS[:2],
            *(f"mlp.experts.{n}.{each}" for n in range(6) for each in ("gate_up", "down")),
        )
    }
    assert all(isinstance(module, nn.Linear) for module in layer_projections(mixture))


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
@pytest.mark.parametrize("mixture", [False, True])
def test_only_projections_are_quantized(
    quantize: str, mixture: bool, gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = random_model(published_mixture() if mixture else published(), std=0.1)
    save_model(plain, tmp_path)
    models: list[Stack] = []
    chosen, part = low_bits.layer_projections, fill.read_part

    def noted(model: Stack) -> dict[nn.Module, str]:
        models.append(model)
        return chosen(model)

    def watched(*args: Any) -> Tensor:
        weights = [module.weight for module in chosen(models[0])]
        full = [each for each in weights if type(each) is nn.Parameter and not each.is_meta]
        assert len(full) <= 1  # the one whose bias is read next
        return part(*args)

    monkeypatch.setattr(low_bits, "layer_projections", noted)
    monkeypatch.setattr(fill, "read_part", watched)
    small = load_model(tmp_path, quantize=quantize, dtype=BF16)
    assert reduced(small) == set(layer_projections(small).values())
    kind = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[quantize]
    assert {module.weight.qdata.dtype for module in layer_projections(small)} == {kind}
    for name, parameter in small.named_parameters():
        assert parameter.dtype == BF16 and not parameter.requires_grad, name
    assert type(small.unembedding.weight) is type(small.embedding.weight) is nn.Parameter
    logits, expected = (whole(each, [1, 2, 3, 4], causal=True) for each in (small, plain))
    assert 1e-4 < (logits - expected).norm() / expected.norm() < 0.15


def codes(values: Tensor, quantize: str) -> Tensor:
    """Round numbers `[n, m]` with a scale per row and return the dequantized values."""
    if quantize == "int8":
        scale = values.abs().amax(-1, keepdim=True) / 127.5
        return (values / scale).round().clamp(-128, 127) * scale
    scale = (values.to(BF16).abs().amax(-1, keepdim=True) / 448).float()
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_products_are_those_of_rounded_matrices(
    quantize: str, biased: bool, rows: int, gpu: None
) -> None:
    model = causal_model()
    narrow = build_quantizer(model, quantize, GPU)
    assert narrow is not None
    attention = model.to(BF16).blocks[1].attention
    layer = attention.qkv if biased else attention.out
    weight = layer.weight.detach().float()
    narrow(layer)
    x = torch.randn(rows, 32, dtype=BF16) * torch.logspace(-2, 2, rows)[:, None].to(BF16)
    shown = x.float() if quantize == "int8" else codes(x.float(), quantize)
    found, expected = layer(x), shown @ codes(weight, quantize).T
    assert (layer.bias is not None) is biased
    if biased:
        expected += layer.bias.float()
    assert found.dtype == BF16 and found.shape == (rows, layer.out_features)
    if rows:
        error = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < 2**-7
        alone = torch.cat([layer(row[None]) for row in x])
        torch.testing.assert_close(alone, found, rtol=2**-6, atol=2**-6)
    narrow(model.embedding)
    assert type(model.embedding.weight) is nn.Parameter


def test_int4_is_packed(gpu: None) -> None:
    """It runs on the meta device, because packing and products need a GPU.

    torchao pads inputs to 1024.
    """
    with torch.device("meta"):
        model = random_model(published(hidden_size=128, intermediate_size=192)).to(BF16)
    narrow = build_quantizer(model, "int4", GPU)
    assert narrow is not None
    for module in model.modules():
        narrow(module)
    assert reduced(model) == set(layer_projections(model).values())
    for module in layer_projections(model):
        out, width = module.weight.shape
        assert (out, width) == (module.out_features, module.in_features)
        assert module.weight.qdata.shape == (out // 8, 8, 32, 4)
        assert module.weight.qdata.dtype == torch.int32
        assert module.weight.scale_and_zero.shape == (1024 // INT4_GROUP_SIZE, out, 2)


@pytest.mark.parametrize(
    ("quantize", "model", "method"),
    [
        ("int8", "tiny-ar", DFlash(draft="tiny-dflash")),
        *(
            pytest.param(quantize, model, method, marks=pytest.mark.nightly)
            for quantize in ("int8", "fp8")
            for model, method in (
                ("tiny-ar", Autoregressive()),
                ("tiny-ar", Eagle(draft="tiny-eagle")),
                ("tiny-dream", APD(verifier="tiny-aux")),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_quantized_models_of_a_method_answer(
    quantize: str, model: str, method: Method, gpu: None
) -> None:
    own = LLM(model, method, device="cpu", dtype="bfloat16", quantize=quantize, cache_gib=0.1)
    assert len(loaded_models(own)) == (1 if isinstance(method, Autoregressive) else 2)
    for each in own.runners.values():
        assert reduced(each.model) == set(layer_projections(each.model).values())
    questions = questions_of("story", 4)
    outputs = own.generate([each.prompt for each in questions], max_tokens=120, temperature=0.0)
    right = [each.judge_answer(out.text) for each, out in zip(questions, outputs, strict=True)]
    assert sum(map(bool, right)) >= 3

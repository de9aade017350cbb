"""Test int8 matrices: their codes, the result of a row, and where they are unavailable."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helpers import published, random_model, whole
from outpace.checkpoints.load import load_model, save_model
from outpace.kernels import matmul, tiles
from outpace.kernels.matmul import LAYOUTS, MAX_CODE, has_layout, quantize_rows
from outpace.models.int8 import (
    Int8Embedding,
    Int8Linear,
    has_int8_products,
    is_quantized,
    quantize_module,
)
from outpace.models.transformer import Embedding
from refusal import refuses

needs_products = pytest.mark.skipif(
    not has_int8_products(), reason="this machine has no products of 8 bits"
)
FILE = "model.safetensors"


def linear(*, width: int = 96, out: int = 80, bias: bool = False, seed: int = 0) -> nn.Linear:
    """Create a layer with random weights."""
    torch.manual_seed(seed)
    return nn.Linear(width, out, bias=bias).requires_grad_(False)


def quantised(layer: nn.Linear) -> Int8Linear:
    own = quantize_module(layer, torch.float32)
    assert isinstance(own, Int8Linear)
    return own


def literal(x: Tensor, layer: nn.Linear) -> Tensor:
    """Compute the integer product row by row and output by output."""
    outputs = []
    for row in x.float():
        scale = row.abs().max() / MAX_CODE
        codes = torch.floor(row / scale + 0.5).long()
        for weight in layer.weight:
            own = weight.abs().max() / MAX_CODE
            sum_ = int((codes * (weight / own).round().long()).sum())
            outputs.append(sum_ * own * scale)
    return torch.stack(outputs).view(len(x), -1)


@pytest.fixture(params=["tiles", "blocks"])
def each(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use one layout of matrices, if this machine has it."""
    if not has_layout(request.param, torch.int8):
        pytest.skip(f"this machine has no {request.param} of 8 bits")
    monkeypatch.setattr(matmul, "available_layouts", lambda codes: (request.param,))
    name: str = request.param
    return name


@pytest.mark.parametrize("rows", [1, 2, 5, 17, 300])
@pytest.mark.parametrize("shape", [(16, 8), (48, 36), (1152, 896), (64, 4864)])
def test_layouts_give_the_same_bits(each: str, shape: tuple[int, int], rows: int) -> None:
    torch.manual_seed(rows)
    codes = torch.randint(-128, 128, shape, dtype=torch.int8)
    scale, bias = torch.rand(shape[0]), torch.randn(shape[0])
    x = torch.randn(rows, shape[1]) * 10 ** torch.randn(rows, 1)
    own, scales = quantize_rows(x)
    exact = ((own.double() - 128) @ codes.double().T).float() * scale * scales
    before = codes.clone()
    for layout in (each, "rows"):
        matrix = LAYOUTS[layout](codes)
        assert torch.equal(matmul.bind_product(matrix, None, scale)(x), exact)
        assert torch.equal(matmul.bind_product(matrix, bias, scale)(x), exact + bias)
    assert torch.equal(codes, before)


def test_the_longest_sums_do_not_overflow(each: str) -> None:
    longest = tiles.MAX_INT8_INPUTS // 4 * 4
    codes = torch.full((16, longest), -128, dtype=torch.int8)
    codes[1::2] = 127
    x = torch.tensor([[1.0], [-1.0]]).expand(2, longest)
    found = matmul.bind_product(LAYOUTS[each](codes), None, torch.ones(16))(x)
    exact = (x.double() * MAX_CODE) @ codes.double().T
    torch.testing.assert_close(found.double(), exact / MAX_CODE, rtol=1e-6, atol=0)
    assert exact.abs().max() < 2**31 <= exact.abs().max() + 4 * 128 * MAX_CODE
    longer = torch.ones(16, longest + 4, dtype=torch.int8)
    with refuses("quantize"):
        Int8Linear(longer, torch.ones(16))
    with pytest.raises(ValueError, match="^weight"):
        tiles.to_tiles(longer)


@needs_products
@pytest.mark.parametrize("width", [32, 48, 96, 97])
def test_a_product_equals_integer_arithmetic(width: int) -> None:
    layer = linear(width=width, out=37)
    x = torch.randn(5, width) * torch.tensor([1, 1e-6, 1e6, 3, 0.1])[:, None]
    torch.testing.assert_close(quantised(layer)(x), literal(x, layer), rtol=1e-6, atol=0)


@needs_products
@pytest.mark.parametrize("shape", [(32, 48), (192, 1024), (4864, 896)])
def test_a_row_is_batch_invariant(each: str, shape: tuple[int, int]) -> None:
    layer = quantised(linear(width=shape[0], out=shape[1]))
    x = torch.randn(65, shape[0])
    whole = layer(x)
    for rows in (1, 2, 3, 4, 7, 16, 17, 31, 64):
        assert torch.equal(layer(x[:rows]), whole[:rows]), rows
    loud = torch.cat((x[:1], 1e4 * x[1:]))
    assert torch.equal(layer(loud)[:1], whole[:1])


@needs_products
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_stays_in_its_row(each: str, value: float) -> None:
    layer, x = quantised(linear(bias=True)), torch.randn(3, 96)
    alone = layer(x[:1])
    x[1, 5] = value
    found = layer(x)
    assert torch.equal(found[:1], alone)
    assert found[1].isnan().all() and found[2].isfinite().all()


@needs_products
def test_an_embedding_and_its_head_are_one_matrix() -> None:
    table = Embedding(50, 32).requires_grad_(False)
    own = quantize_module(table, torch.bfloat16)
    assert isinstance(own, Int8Embedding)
    ids = torch.tensor([3, 49, 0])
    assert own(ids).dtype == torch.bfloat16
    torch.testing.assert_close(own.dequantize_rows(ids), table(ids), atol=0.02, rtol=0)
    torch.testing.assert_close(
        own.tied_head.dense_weight(), own.dequantize_rows(torch.arange(50)), rtol=0, atol=1e-7
    )
    assert own.compute_logits(torch.ones(2, 32)).shape == (2, 50)


@needs_products
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_model_can_be_saved(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    plain = random_model(published(tie_word_embeddings=tied))
    save_model(plain, tmp_path / "plain", dtype=torch.float32)
    small = load_model(tmp_path / "plain", quantize="int8", dtype=dtype)
    assert is_quantized(small) and not is_quantized(plain)
    kinds = {type(module) for module in small.modules()}
    assert nn.Linear not in kinds and Embedding not in kinds
    logits = whole(small, [1, 2, 3, 4], causal=True)
    expected = whole(plain, [1, 2, 3, 4], causal=True)
    assert 1e-4 < (logits - expected).norm() / expected.norm() < 0.12
    save_model(small, tmp_path / "small", dtype=torch.float32)
    before, after = (load_file(tmp_path / name / FILE) for name in ("plain", "small"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        step = tensor.abs().max() / MAX_CODE
        assert (after[name] - tensor).abs().max() <= step, name
    again = load_model(tmp_path / "small", quantize="int8", dtype=dtype)
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, small.state_dict()[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [float("nan"), 1e300])
def test_non_finite_weights_are_refused(value: float, tmp_path: Path) -> None:
    save_model(random_model(published()), tmp_path)
    tensors = {name: each.double() for name, each in load_file(tmp_path / FILE).items()}
    tensors["model.layers.1.mlp.down_proj.weight"][2, 3] = value
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        load_model(tmp_path, quantize="int8")

"""Layouts of weights change the speed of products and nothing else."""

import copy
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from ctypes import CFUNCTYPE, c_size_t, c_void_p
from dataclasses import replace
from pathlib import Path
from threading import Event, get_ident

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers import published, whole
from outpace.checkpoints.load import save_model
from outpace.decoding import Forward, Kind
from outpace.engine.cache import PAGE_SIZE
from outpace.engine.cpu import (
    FAST_LAYOUTS,
    MLP_CHUNK_ROWS,
    SeparateHead,
    TiledEmbedding,
    pack_model,
    unpack_model,
)
from outpace.engine.pack import ScheduledForward
from outpace.engine.runner import Runner
from outpace.kernels import matmul, tiles
from outpace.kernels.loader import load_library, thread_count
from outpace.kernels.matmul import (
    LAYOUTS,
    MIN_PADDED_ROWS,
    TIMED_ROWS,
    bind_product,
    has_layout,
    is_batch_invariant,
    is_tiled,
)
from outpace.kernels.tiles import RowProduct
from outpace.models.config import ModelConfig
from outpace.models.norm import DirectNorm
from outpace.models.transformer import Transformer

FILE = "model.safetensors"
SIZES = {"hidden_size": 192, "vocab_size": 1024}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["tiled", "untiled"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up a machine with tiles, where this one has them, and one without."""
    if request.param == "untiled":

        def has_blocks(name: str, dtype: torch.dtype) -> bool:
            return name == "blocks" and has_layout(name, dtype)

        monkeypatch.setattr(tiles, "has_tile_loop", lambda dtype: False)
        monkeypatch.setattr(matmul, "has_layout", has_blocks)
        monkeypatch.setattr("outpace.engine.cpu.has_layout", has_blocks)


def model(*, bidirectional: bool, vocab: int = 2048, tied: bool = False) -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(
        family="dream" if bidirectional else "qwen2",
        architecture="DreamModel" if bidirectional else "Qwen2ForCausalLM",
        vocab=vocab,
        dim=192,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        mlp=1024,
        max_length=2 * MLP_CHUNK_ROWS,
        qkv_bias=True,
        tied=tied,
        kind=Kind.DIFFUSION if bidirectional else Kind.CAUSAL,
        mask_id=7 if bidirectional else None,
    )
    return Transformer(config).eval().requires_grad_(False)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    "rows", [1, 2, 33, MIN_PADDED_ROWS + 1, MLP_CHUNK_ROWS + 1, 2 * MLP_CHUNK_ROWS]
)
def test_results_are_unchanged(machine: None, bidirectional: bool, rows: int) -> None:
    plain = model(bidirectional=bidirectional)
    laid_out = copy.deepcopy(plain)
    pack_model(laid_out)
    ids = list(range(rows))
    before, after = (whole(m, ids, causal=not bidirectional) for m in (plain, laid_out))
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


def test_torch_runs_alone_while_its_threads_are_late(machine: None) -> None:
    library, caller, entered = load_library(), get_ident(), Event()
    if library is None:
        pytest.skip("this machine has no compiled loops")

    @CFUNCTYPE(None, c_void_p, c_size_t)
    def arrive_late(_context: object, _number: int) -> None:
        if get_ident() == caller:
            entered.wait(1)  # else this thread would take both numbers
        else:
            entered.set()
            time.sleep(0.02)

    runner = Runner("tiny", model(bidirectional=False), slots=PAGE_SIZE)
    table, counts = runner.reserve(PAGE_SIZE), []
    assert table is not None

    def report(_size: float) -> None:
        if not counts:
            library.run_parallel(2, 2, None, arrive_late)
        counts.append((torch.get_num_threads(), thread_count(2**40)))

    runner.cache.extend(table, 3)
    runner.report = report
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runner.run_pass(
            [ScheduledForward.from_forward(Forward(ids=[1, 2, 3], start=0), table, runner.config)]
        )
        counts.append((torch.get_num_threads(), thread_count(2**40)))
    finally:
        torch.set_num_threads(threads)
    assert {*counts[:-1]} == {(1 if runner.has_compiled_products else 2, 2)}
    assert counts[-1] == (2, 2)
    linear = [each for each in runner.model.modules() if isinstance(each, torch.nn.Linear)]
    assert runner.has_compiled_products == all(is_tiled(each.weight) for each in linear)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Test batch invariance again, before and after."""
    is_batch_invariant.cache_clear()
    yield
    is_batch_invariant.cache_clear()


@pytest.mark.skipif(
    not (has_layout("tiles", torch.float32) and has_layout("blocks", torch.float32)),
    reason="this machine lacks one of the layouts",
)
@pytest.mark.parametrize("shape", [(192, 192), (37, 64)])
@pytest.mark.parametrize("at", [1, 3, 129])
def test_batch_dependent_layout_is_not_used(
    shape: tuple[int, int],
    at: int,
    fresh: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def bind_dependent(weight: Tensor, *rest: Tensor | None) -> RowProduct:
        product = bind_product(weight, *rest)
        wrong = 1 + 2**-20 if weight.is_mkldnn else 1
        return lambda x: product(x) * (wrong if len(x) == at else 1)

    weight = torch.randn(shape)
    times = {
        name: dict.fromkeys(TIMED_ROWS, time) for name, time in [("tiles", 1), ("blocks", 0.1)]
    }
    monkeypatch.setattr(matmul, "time_layouts", lambda *_: times)
    assert matmul.choose_layout(weight) == "blocks"
    is_batch_invariant.cache_clear()
    monkeypatch.setattr(matmul, "bind_product", bind_dependent)
    with caplog.at_level("INFO", "outpace"):
        assert matmul.choose_layout(weight) == ("tiles" if shape[0] % 16 == 0 else "rows")
    assert f"{shape[0]} x {shape[1]} is not batch invariant for {at} rows" in caplog.text
    monkeypatch.setattr(tiles, "has_tile_loop", lambda dtype: False)
    assert matmul.choose_layout(weight) == "rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(192, 192), (1152, 896), (896, 4864), (320, 64)])
@pytest.mark.parametrize("name", ["tiles", "blocks", "chosen"])
def test_rows_are_batch_invariant(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, x = (torch.randn(n, shape[1]).to(dtype) for n in (shape[0], 300))
    threads = torch.get_num_threads()
    name = matmul.choose_layout(weight) if name == "chosen" else name
    if name == "rows" or not has_layout(name, dtype):
        pytest.skip(f"this machine has no {name} of {dtype} for any company")
    if not is_batch_invariant(name, shape, dtype, threads):
        pytest.skip(f"{name} of {dtype} are not used on this machine: rows depend on company")
    laid = LAYOUTS[name](weight)
    product = bind_product(laid)
    whole = product(x)
    for rows in (1, 2, 3, 4, 6, 7, 15, 16, 17, 33, 47, 130, 299):
        assert torch.equal(product(x[:rows]), whole[:rows]), rows
        assert torch.equal(product(x[-rows:]), whole[-rows:]), rows
    if name != "tiles":
        return
    try:
        torch.set_num_threads(3)
        assert torch.equal(product(x[:17]), whole[:17])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.nightly
@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE", "AVX512_CORE_BF16"])
def test_rows_are_batch_invariant_on_lesser_processors(isa: str) -> None:
    test = f"{__file__}::{test_rows_are_batch_invariant.__name__}"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--nightly", "-p", "no:cacheprovider", test],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": isa},  # read once per process
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_tied_head(
    bidirectional: bool, rows: int, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILED_LOOKUP_BYTES", 4 * 192 * 3072)
    for vocab in (1024, 2048, 3072):
        packed = model(bidirectional=bidirectional, vocab=vocab, tied=True)
        before, hidden = packed.embedding.weight.clone(), torch.randn(rows, 192)
        names = dict(packed.named_parameters()).keys()
        pack_model(packed)
        is_separate = isinstance(packed.embedding, SeparateHead | TiledEmbedding)
        assert is_separate == any(matmul.has_layout(name, torch.float32) for name in FAST_LAYOUTS)
        if isinstance(packed.embedding, SeparateHead):
            head = packed.embedding.head
            table = packed.embedding.weight
            shared = not head.is_mkldnn and head.data_ptr() == table.data_ptr()
            assert shared == (vocab == 3072)  # a copy of a large one takes too much memory
        assert dict(packed.named_parameters()).keys() == names
        ids = torch.tensor([5, 0, vocab - 1])
        assert torch.equal(packed.embed_tokens(ids), before[ids])
        assert torch.equal(packed.state_dict()["embedding.weight"], before)
        torch.testing.assert_close(
            packed.compute_logits(hidden), hidden @ before.T, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1024, 2048])
@pytest.mark.parametrize("tied", [True, False])
def test_a_layout_is_undone(
    dtype: torch.dtype, vocab: int, tied: bool, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILED_LOOKUP_BYTES", 2048 * 192 * dtype.itemsize)
    plain = model(bidirectional=False, vocab=vocab, tied=tied).to(dtype)
    laid_out = copy.deepcopy(plain)
    modules, fired = list(laid_out.modules()), list[str]()
    laid_out.blocks[1].mlp.register_forward_hook(lambda *_: fired.append("hook"))
    pack_model(laid_out)
    assert [n for n, _ in laid_out.named_parameters()] == [n for n, _ in plain.named_parameters()]
    whole(laid_out, [1, 2, 3], causal=True)
    assert not fired and not set(modules[1:]) & {*laid_out.blocks.modules()} - {laid_out.blocks}
    unpack_model(laid_out)
    assert list(laid_out.modules()) == modules
    for (name, ours), (_, theirs) in zip(
        laid_out.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride(), name
    for name, module in laid_out.named_modules():
        if not list(module.children()) and name != "embedding":
            module.register_forward_hook(lambda *_, name=name: fired.append(name))
    whole(laid_out, [1, 2, 3], causal=True)
    assert len(fired) == sum(1 for m in plain.modules() if not list(m.children()))
    assert fired.count("hook") == 1


def test_a_model_that_decodes_can_be_saved(machine: None, tmp_path: Path) -> None:
    plain = model(bidirectional=False, vocab=1024, tied=True)
    plain.config = replace(plain.config, source=published(**SIZES))
    laid_out = copy.deepcopy(plain)
    pack_model(laid_out)
    for name, each in (("plain", plain), ("laid-out", laid_out)):
        save_model(each, tmp_path / name, dtype=torch.float32)
    before, after = (load_file(tmp_path / name / FILE) for name in ("plain", "laid-out"))
    assert before.keys() == after.keys() and len(before) == 26
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_direct_norm_equals_the_norm(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    norm = torch.nn.RMSNorm(96, 1e-5).requires_grad_(False)
    torch.nn.init.normal_(norm.weight)
    norm, x = norm.to(dtype), (torch.randn(3, 2, 96) * scale).to(dtype)
    fast = DirectNorm(norm)(x)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    exact = exact * norm.weight.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fast.double(), exact, atol=tolerance, rtol=tolerance)
    assert fast.dtype == dtype

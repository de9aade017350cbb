"""Compiled layers: the same numbers, few variants."""

import shutil
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from again import Again
from helpers import causal_model, finish, tokens
from outpace.attention.ranges import RangesAttention, causal_ranges
from outpace.checkpoints.load import load_model
from outpace.engine import runner
from outpace.engine.cache import PAGE_SIZE
from outpace.engine.cpu import unpack_model
from outpace.engine.engine import Engine
from outpace.engine.fuse import FusedBlock, check_compilation, compile_layers
from outpace.engine.runner import Runner
from outpace.methods import APD, Autoregressive, DFlash, Method
from outpace.models.transformer import Stack, Transformer
from workload import KINDS, MODELS, Request

CPU = torch.device("cpu")
METHODS = [next(m for m in KINDS if isinstance(m, kind)) for kind in (Autoregressive, APD, DFlash)]
SMALL = replace(causal_model().config, layers=4)
FORMS: dict[str, dict[str, Any]] = {
    "Qwen2": {"qkv_bias": True, "tied": True},
    "Qwen3": {"qk_norm": True},
    "OLMo 2": {"qk_norm": True, "wide_qk_norm": True, "norms": "after"},
    "Gemma 3": {"norms": "around", "norm_offset": True, "activation": "gelu_tanh"},
    "gpt-oss without experts": {"sinks": True, "out_bias": True, "mlp_bias": True},
    "some layers without rotation": {"unrotated": (1,)},
}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured and run uncompiled: no compiler is needed."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    counters.clear()


def states(model: Stack, rows: int) -> torch.Tensor:
    """Return hidden states of this many rows of text."""
    ids = torch.arange(rows) % 20
    with torch.inference_mode():
        return model(ids, torch.arange(rows), RangesAttention(causal_ranges(rows)))


@pytest.mark.nightly
@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("form", FORMS)
def test_a_layer_of_any_form_is_captured_whole(form: str) -> None:
    torch.manual_seed(0)
    model = Transformer(replace(SMALL, **FORMS[form])).eval().requires_grad_(False)
    wanted = {rows: states(model, rows) for rows in (7, 1, 16, 33)}
    compile_layers(model)
    for rows, own in wanted.items():
        torch.testing.assert_close(states(model, rows), own)
    kinds = 2 if form == "some layers without rotation" else 1
    assert counters["stats"]["unique_graphs"] == 2 * 2 * kinds


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize(
    "method",
    [METHODS[0], *(pytest.param(method, marks=pytest.mark.nightly) for method in METHODS[1:])],
    ids=lambda method: type(method).__name__,
)
def test_compiled_layers_give_the_same_tokens(
    method: Method, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "pack_model", lambda model: unpack_model(model))
    for model in MODELS.values():
        unpack_model(model)  # a matrix in blocks cannot be copied

    def decode(compile: bool) -> list[int]:
        engine, fused = Engine(), 0
        models = deepcopy(MODELS)
        for role, model in models.items():
            own = Runner(
                role,
                model,
                slots=32 * PAGE_SIZE,
                attention="triton",
                record=Again() if graphs else None,
                compile=compile,
            )
            fused += any(isinstance(module, FusedBlock) for module in own.model.modules())
            engine.add_runner(own)
        assert bool(fused) == compile
        job = Request(method=method, prompt=(3, 1, 4, 1, 5), max_tokens=7).submit(engine)
        finish(engine)
        return tokens(job)

    assert decode(True) == decode(False)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own modules
@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler of C++")
def test_compiled_model_is_the_same() -> None:
    model = load_model("tiny-ar", dtype=torch.float32, device=CPU)
    unpack_model(model)
    wanted = {rows: states(model, rows) for rows in (5, 1, 18)}
    compile_layers(model)
    for rows, own in wanted.items():
        torch.testing.assert_close(states(model, rows), own, rtol=1e-4, atol=1e-4)
    unpack_model(model)
    assert not any(isinstance(module, FusedBlock) for module in model.modules())
    assert torch.equal(states(model, 5), wanted[5])


@pytest.mark.parametrize(
    ("wanted", "device", "processes", "message"),
    [
        (True, CPU, 1, "compile requires a CUDA device, got cpu"),
        (True, torch.device("cuda"), 2, "requires a model in one process"),
        (1, CPU, 1, "compile must be True or False, got 1"),
        ("yes", CPU, 1, "compile must be True or False, got 'yes'"),
    ],
)
def test_unavailable_compilation_is_refused(
    wanted: object, device: torch.device, processes: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_compilation(wanted, device, processes)  # type: ignore[arg-type]

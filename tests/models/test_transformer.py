"""Test parts of models: direct norms, returned rows, delta layers and prediction heads."""

from dataclasses import replace

import pytest
import torch

from helpers import causal_model, dense, hybrid_model, published, whole
from outpace.checkpoints.checkpoint import translate_config
from outpace.kernels.gated_delta import DeltaState, SequenceRows
from outpace.models.extending import mtp_config
from outpace.models.norm import DirectNorm, DirectOffsetNorm, OffsetNorm, build_norm, freeze_model


def freeze(norm: torch.nn.Module) -> torch.nn.Sequential:
    model = torch.nn.Sequential(norm)
    freeze_model(model)
    return model


def test_a_frozen_model_uses_direct_norms() -> None:
    torch.manual_seed(0)
    model = causal_model().requires_grad_(True)
    before = whole(model, list(range(9)), causal=True)
    freeze_model(model)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.RMSNorm)]
    assert len(norms) > 2 and {type(norm) for norm in norms} == {DirectNorm}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    torch.testing.assert_close(whole(model, list(range(9)), causal=True), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_offset_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = translate_config(
        published(
            "Gemma3ForCausalLM",
            rms_norm_eps=1e-5,
            head_dim=8,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=8,
            rope_local_base_freq=1e4,
            sliding_window=4,
        )
    )
    own = build_norm(config).to(dtype)
    assert type(own) is OffsetNorm and not own.weight.any()
    torch.nn.init.normal_(own.weight)
    x = (torch.randn(50, 32) * 3).to(dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    exact = (exact * (1 + own.weight.detach().double())).to(dtype)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(own(x), exact, **tolerance)
    own.weight.requires_grad_(False)
    (frozen,) = freeze(own)
    assert type(frozen) is DirectOffsetNorm
    torch.testing.assert_close(frozen(x), exact, **tolerance)
    assert frozen(x).dtype == dtype


def test_its_formula_is_bit_identical() -> None:
    norm, x = torch.nn.RMSNorm(192, 1e-6), torch.randn(50, 192) * 3
    torch.nn.init.normal_(norm.weight)
    size = torch.linalg.vector_norm(x, 2, -1, True).hypot_(torch.tensor([(1e-6 * 192) ** 0.5]))
    scaled = x * norm.weight.detach()
    expected = torch.addcdiv(torch.tensor([0.0]), scaled, size, value=192**0.5)
    (frozen,) = freeze(norm)
    assert torch.equal(frozen(x), expected)


@pytest.mark.parametrize("wanted", [[], [4], [0, 2, 2]])
@torch.inference_mode()
def test_wanted_rows_are_those_of_the_whole(wanted: list[int]) -> None:
    model, rows, attend = causal_model(), torch.arange(5), dense(causal=True)
    every = model(rows, rows, attend)
    part = model(rows, rows, attend, torch.tensor(wanted, dtype=torch.int64))
    torch.testing.assert_close(part, every[wanted], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_copies_of_delta_states_continue_as_the_text() -> None:
    layer, slots = hybrid_model().blocks[0].attention, [16, 64, 100, 128, 140]
    torch.manual_seed(0)
    parts = layer.project_rows(torch.randn(200, 32))
    mixed, beta, decay = parts[0], parts[2], parts[3]

    def run(state: DeltaState | None, first: int, end: int, copied: list[int]) -> tuple:
        rows = SequenceRows(state, slice(0, end - first), end, copied)
        given = (part[first:end] for part in (mixed, decay, beta))
        out, (states,) = layer.run_sequences(*given, [rows])
        return out, states.copies

    whole, _ = run(None, 0, 200, [])
    _, copies = run(None, 0, 140, slots)
    assert [copy.start for copy in copies] == slots
    for copy in copies:
        torch.testing.assert_close(run(copy, copy.start, 200, [])[0], whole[copy.start :])


@pytest.mark.parametrize("heads", [0, 2])
def test_a_model_without_exactly_one_prediction_head_gives_no_draft(heads: int) -> None:
    target = translate_config(published())
    with pytest.raises(ValueError, match="MTP"):
        mtp_config(replace(target, mtp_heads=heads))

"""Tests of attention windows: training must equal decoding."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import (
    MASK,
    causal_model,
    diffusion_model,
    masked_model,
    published,
    random_model,
    whole,
)
from literal import Memory
from outpace.attention.ranges import dense_mask, narrow_to_window
from outpace.decoding import Forward
from outpace.decoding.forward import FULL, Pattern
from outpace.models.config import AttentionWindow
from outpace.models.transformer import Transformer
from outpace.training.data import Example
from outpace.training.layer_attention import hidden_states
from outpace.training.objective import Models
from outpace.training.objectives import D2F, MDLM, SFT, WeDLM
from outpace.training.rows import Rows, pack_documents
from runs import plain_response

WINDOWS = [
    (AttentionWindow(window=3, causal=True), AttentionWindow()),
    (AttentionWindow(window=1), AttentionWindow(window=4, causal=True)),
    (AttentionWindow(causal=True), AttentionWindow(window=5)),
]
slides = pytest.mark.parametrize("windows", WINDOWS, ids=["first", "both", "apart"])


def seeing(model: Transformer, windows: tuple[AttentionWindow, ...]) -> Transformer:
    model.config = replace(model.config, windows=windows)
    return model


def example(prompt: int, response: int, first: int = 1) -> Example:
    ids = [first + place % 15 for place in range(prompt + response)]
    return Example(ids[:prompt], ids[prompt:], [False] * response)


def decoded(model: Transformer, *forwards: tuple[Rows, slice, int, Pattern]) -> list[Tensor]:
    """Hidden states of some rows, each set of them fed from a slot on, in one sequence."""
    memory, states = Memory(model), []
    for rows, part, start, mask in forwards:
        ids, positions = rows.ids[part].tolist(), rows.positions[part].tolist()
        forward = Forward(ids=ids, start=start, pattern=mask, positions=positions)
        states.append(memory.run(forward)[0])
    return states


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@slides
def test_packed_texts(windows: tuple[AttentionWindow, ...]) -> None:
    model = seeing(causal_model(), windows)
    parts = [SFT().rows(example(2, n, n), np.random.default_rng(0)) for n in (3, 9, 9, 6)]
    ours = hidden_states(model, pack_documents(parts)).split([5, 8, 11, 11])
    for part, states in zip(sorted(parts, key=len), ours, strict=True):
        same(states, *decoded(model, (part, slice(None), 0, "causal")))
    plain = hidden_states(causal_model(), pack_documents(parts))
    assert not torch.allclose(torch.cat(ours), plain, atol=0.1), "and they hide something"


SLIDES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
SLIDES |= {"rms_norm_eps": 1e-6, "head_dim": 8}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 12}
GEMMA |= {"rope_local_base_freq": 1e2}
SINKS = {"num_local_experts": 3, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [("Gemma3ForCausalLM", GEMMA), ("GptOssForCausalLM", SINKS), ("Olmo3ForCausalLM", {})],
)
def test_published_models_see_as_they_decode(architecture: str, fields: dict[str, Any]) -> None:
    model = random_model(published(architecture, **SLIDES, **fields)).requires_grad_(True)
    parts = [SFT().rows(example(2, n, n), np.random.default_rng(0)) for n in (3, 9)]
    hidden = hidden_states(model, pack_documents(parts))
    for part, states in zip(parts, hidden.split([5, 11]), strict=True):
        expected = whole(model, part.ids.tolist(), causal=True)
        torch.testing.assert_close(model.compute_logits(states), expected, atol=2e-4, rtol=2e-4)
    model.compute_logits(hidden).logsumexp(-1).square().sum().backward()
    unused = [name for name, each in model.named_parameters() if each.grad is None]
    assert all(".experts." in name for name in unused)


@slides
def test_a_text_all_of_which_is_seen(windows: tuple[AttentionWindow, ...]) -> None:
    model, objective = seeing(diffusion_model(), windows), MDLM(shift=1, mask_id=MASK)
    rows = objective.rows(example(4, 8), np.random.default_rng(0))
    same(hidden_states(model, rows), *decoded(model, (rows, slice(None), 0, FULL)))


@slides
def test_blocks_that_see_what_is_before_them(windows: tuple[AttentionWindow, ...]) -> None:
    model, objective = seeing(diffusion_model(), windows), D2F(block=3, shift=1, mask_id=MASK)
    answer = plain_response(np.arange(1, 9))
    rows = objective.noisy_rows([5, 6], answer, np.ones(3), np.zeros(8))
    same(hidden_states(model, rows), *decoded(model, (rows, slice(None), 0, (2, 3, 3, 2))))
    loss = replace(objective, hard=0.0).loss(Models(model, {"teacher": model}), rows)
    whole = hidden_states(model, replace(rows, ranges=whole_text(len(rows))))
    scored = rows.labels >= 0
    soft = model.compute_logits(whole[scored]).softmax(-1)
    ours = model.compute_logits(hidden_states(model, rows)[scored]).log_softmax(-1)
    expected = -((soft * ours).sum(-1) * rows.weights[scored]).sum()
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-4)


def whole_text(length: int) -> Tensor:
    return torch.tensor([[[0, length], [0, 0]]] * length, dtype=torch.int32)


@slides
def test_short_suffixes_behind_one_clean_copy(windows: tuple[AttentionWindow, ...]) -> None:
    model = seeing(diffusion_model(), windows)
    objective = MDLM(anchored=1.0, scored=1.0, anchors=3, shift=1, mask_id=MASK)
    rows = objective.rows(example(4, 12), np.random.default_rng(1))
    begins = torch.nonzero(rows.ranges[:, 1, 1] > 0).squeeze(1)
    ours, total = hidden_states(model, rows), 16
    for begin in sorted({int(rows.ranges[row, 1, 0]) for row in begins}):
        part = slice(begin, int(rows.ranges[begin, 1, 1]))
        start = int(rows.positions[begin])
        clean = (rows, slice(0, start), 0, "causal")
        same(ours[part], decoded(model, clean, (rows, part, start, FULL))[1])
        total += part.stop - part.start
    assert total == len(rows) > 20


@slides
def test_masks_behind_what_is_known_of_their_block(windows: tuple[AttentionWindow, ...]) -> None:
    model = seeing(masked_model(), windows)
    objective = WeDLM(block=6, ratios=(0.4, 0.8)).bind(model.config)
    rows = objective.rows(example(4, 14), np.random.default_rng(2))
    ours, streams = hidden_states(model, rows), 0
    for begin in sorted(set(rows.ranges[18:, 1, 0].tolist())):
        part = slice(begin, int(rows.ranges[18:][rows.ranges[18:, 1, 0] == begin][:, 1, 1].max()))
        start = int(rows.ranges[begin, 0, 1])
        clean = (rows, slice(0, start), 0, "causal")
        forwards = [clean, (rows, part, start, "causal")] if start else [(rows, part, 0, "causal")]
        same(ours[part], decoded(model, *forwards)[-1])
        streams += rows.positions[part].tolist() != list(range(start, start + len(ours[part])))
    assert streams, "some tokens were moved"


@pytest.mark.parametrize("window", [1, 2, 3, 7, 100, 2**40])
def test_two_ranges_are_one_line_of_keys(window: int) -> None:
    lines = [[0, 1, 2, 6, 7, 8], [3, 6, 7], [6, 7]]
    ranges = torch.tensor([[[0, 3], [6, 9]], [[3, 4], [6, 8]], [[0, 0], [6, 8]]])
    own = torch.tensor([7, 6, 7])
    for causal in (False, True):
        seen = dense_mask(narrow_to_window(ranges, own, window=window, causal=causal), 9)
        for row, line, key in zip(seen, lines, own.tolist(), strict=True):
            place = line.index(key)
            expected = line[max(place - window + 1, 0) : place + 1 if causal else None]
            assert row.nonzero().flatten().tolist() == expected


def test_a_row_that_does_not_see_itself_is_refused() -> None:
    ranges = torch.tensor([[[0, 1], [0, 0]], [[0, 1], [0, 0]]])
    own = torch.arange(2)
    assert narrow_to_window(ranges, own, window=None, causal=False) is ranges
    with pytest.raises(ValueError, match="row 1"):
        narrow_to_window(ranges, own, window=3, causal=False)

"""Masks, counts, positions, losses and gradients of the WeDLM authors' trainer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from outpace.attention.ranges import RangesAttention, dense_mask
from outpace.checkpoints.checkpoint import load_tokenizer
from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.families.family import part_sizes
from outpace.checkpoints.load import load_model
from outpace.models.transformer import Transformer
from outpace.training.data import Data, Examples
from outpace.training.objective import Models
from outpace.training.objectives import WeDLM
from outpace.training.rows import UNSCORED, Rows, join_rows, next_token_rows

FOLDER = Path(__file__).parent / "wedlm"
CASES = {case["name"]: case for case in json.loads((FOLDER / "train.json").read_text())["cases"]}
LOGITS = load_file(FOLDER / "train.safetensors")
TALKS = json.loads((FOLDER / "sft_data.json").read_text())
Case = dict[str, Any]


def objective(case: Case) -> WeDLM:
    weighting = {"weighted": "normalised", "uniform": "uniform"}[case["weighting"]]
    return WeDLM(
        block=case["block_size"],
        per_block=case["mask_per_block"],
        weighting=weighting,
        ar_weight=case["ar_loss_weight"],
        mask_id=case["mask_token_id"],
        length=2048,
    )


def samples(case: Case) -> list[dict[str, np.ndarray]]:
    """Tokens, blocks, masks and shares of each sample."""
    masks, found = iter(case["mask_per_block_bool"]), []
    spans = zip(case["cum_seqlens"], case["cum_seqlens"][1:], strict=False)
    for (begin, end), ratios in zip(spans, case["ratios_per_block"], strict=True):
        blocks = np.arange(end - begin) // case["block_size"]
        found.append(
            {
                "tokens": np.array(case["input_ids"][begin:end]),
                "token_weights": np.array(case["labels"][begin:end]) != UNSCORED,
                "blocks": blocks,
                "masked": np.concatenate([next(masks) for _ in ratios]).astype(bool),
                "ratios": np.array(ratios)[blocks],
            }
        )
    return found


def rows(case: Case) -> Rows:
    """The rows of a case, sample by sample as the authors pack them."""
    parts, total = [], 0
    for sample in samples(case):
        sample["token_weights"] = sample["token_weights"].astype(float)
        text = next_token_rows(sample["tokens"], sample["token_weights"])
        masked = objective(case).masked_stream(**sample, begin=len(text))
        document = join_rows([text, masked])
        document.ranges += total
        parts.append(document)
        total += len(document)
    return join_rows(parts)


def kept(case: Case) -> list[int]:
    """The authors' rows that ours are: all but those of blocks without a mask."""
    places: list[int] = []
    for begin, sample in zip(case["packed_cum_seqlens"], samples(case), strict=False):
        size, blocks = len(sample["blocks"]), sample["blocks"]
        masked = np.isin(blocks, blocks[sample["masked"]])
        places += range(begin, begin + size)
        places += (begin + size + np.flatnonzero(masked)).tolist()
    return places


def gradients(model: Transformer) -> dict[str, float]:
    """Norm of each gradient under its published name."""
    family, norms = FAMILIES[model.config.family], {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        names = family.tensor_names(name)
        sizes = part_sizes(model.config, name) if len(names) > 1 else (len(parameter),)
        parts = parameter.grad.split(sizes)
        norms |= {n: float(part.norm()) for n, part in zip(names, parts, strict=True)}
    return norms


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows(case: Case) -> None:
    ours, places = rows(case), kept(case)
    dropped = sorted(set(range(len(case["packed_input_ids"]))) - set(places))
    official = np.array([list(map(int, line)) for line in case["attn_mask_rows"]], dtype=bool)
    assert not official[np.ix_(places, dropped)].any()
    assert not np.array(case["masked_indices"])[dropped].any()
    assert ours.ids.tolist() == [case["packed_input_ids"][place] for place in places]
    assert ours.positions.tolist() == [case["logical_positions"][place] for place in places]
    assert np.array_equal(
        dense_mask(ours.ranges, len(ours)).numpy(), official[np.ix_(places, places)]
    )
    scored = (ours.ids == case["mask_token_id"]).tolist()
    assert scored == [bool(case["masked_indices"][place]) for place in places]
    targets = [case["original_ids"][place] for place in places]
    assert ours.labels[scored].tolist() == [t for t, s in zip(targets, scored, strict=True) if s]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_counts(case: Case) -> None:
    for sample in samples(case):
        for block in range(sample["blocks"][-1] + 1):
            inside = sample["blocks"] == block
            count = int(sample["token_weights"][inside].sum())
            ratio = float(sample["ratios"][inside][0])
            assert sample["masked"][inside].sum() == round(count * ratio)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_losses_and_gradients(case: Case) -> None:
    model = load_model(FOLDER / case["variant"]).requires_grad_(True)
    packed, chosen = rows(case), objective(case)
    hidden = model(packed.ids, packed.positions, RangesAttention(packed.ranges))
    logits = model.compute_logits(hidden[packed.ids == case["mask_token_id"]])
    expected = LOGITS[f"{case['name']}.masked_logits"]
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=0)
    weights = packed.weights[packed.ids == case["mask_token_id"]]
    shares = (weights / weights.sum()).tolist()
    assert shares == pytest.approx(case["masked_token_weights"] or [1 / len(shares)] * len(shares))
    loss = chosen.loss(Models(model), packed)
    total = loss.total / packed.normaliser
    assert float(total.detach()) == pytest.approx(case["total_loss"], rel=1e-4)
    means = {name: float(value / over) for name, (value, over) in loss.metrics.items()}
    assert means["masks"] == pytest.approx(case["mlm_loss"], rel=1e-4)
    if case["ar_loss_weight"]:
        assert means["next"] == pytest.approx(case["ar_loss"], rel=1e-4)
    total.backward()
    norms = gradients(model)
    assert norms == pytest.approx(case["grad_norms"], rel=1e-4, abs=1e-5)
    whole = float(np.linalg.norm(list(norms.values())))
    assert whole == pytest.approx(case["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    "packed", TALKS["packed"], ids=lambda packed: packed["num_learnable_im_end"]
)
def test_examples(packed: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(FOLDER / "qwen3")
    ends = max(packed["num_learnable_im_end"] - 1, 0)
    compared = 0
    for messages, official in zip(TALKS["conversations"], packed["samples"], strict=True):
        answered = messages[-1]["role"] == "assistant"
        if not answered or len(official["input_ids"]) == packed["max_seq_length"]:
            continue
        path = tmp_path / "talk.jsonl"
        path.write_text(json.dumps({"messages": messages}))
        example = Examples(Data(path=str(path), end="<|im_end|>"), tokenizer)[0]
        drawn = WeDLM(ends=ends, mask_id=319, length=2048).rows(example, np.random.default_rng(0))
        size, given = len(official["input_ids"]), len(example.prompt)
        assert drawn.ids[:size].tolist() == official["input_ids"]
        assert official["labels"] == [UNSCORED] * given + official["input_ids"][given:]
        assert drawn.labels[given - 1 : size - 1].tolist() == official["labels"][given:]
        compared += 1
    assert compared >= 6

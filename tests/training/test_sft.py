"""Tests of supervised fine-tuning: rows computed by hand."""

import numpy as np
import pytest
import torch

from helpers import published
from outpace.attention.ranges import causal_ranges
from outpace.checkpoints.load import translate_config
from outpace.training.data import Example
from outpace.training.objectives import SFT

EXAMPLE = Example(prompt=[5, 6], response=[7, 8, 9], marks=[False, True, False])


def test_each_row_scores_the_next_token_of_the_response() -> None:
    rows = SFT().rows(EXAMPLE, np.random.default_rng(0))
    assert rows.ids.tolist() == [5, 6, 7, 8, 9]
    assert rows.positions.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(rows.ranges, causal_ranges(5))
    assert rows.labels.tolist() == [-100, 7, 8, 9, -100]
    assert rows.weights.tolist() == [0, 1, 1, 1, 0]
    assert rows.normaliser == 3


def test_prompt_and_marked_tokens_weigh_what_the_options_say() -> None:
    rows = SFT(prompt_weight=0.5, mark_weight=2.0).rows(EXAMPLE, np.random.default_rng(0))
    assert rows.labels.tolist() == [6, 7, 8, 9, -100]
    assert rows.weights.tolist() == [0.5, 1, 2, 1, 0]
    assert rows.normaliser == 4.5


def test_a_model_whose_rows_score_themselves_is_refused() -> None:
    config = translate_config(published(architecture="Qwen2ForCausalLM"))
    object.__setattr__(config, "shift", 0)
    with pytest.raises(ValueError, match="mdlm"):
        SFT().bind(config)

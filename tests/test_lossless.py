"""Accepted tokens follow the distribution of the target alone, whatever drafts.

The target here attends to nothing but the last token. So its distribution is a table, and every
token of every answer is a sample of one of its rows.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers import (
    adding_draft,
    causal_model,
    convolved_draft,
    corrected_draft,
    engine_of,
    enter,
    extending_draft,
    feature_draft,
    finish,
    runner,
    tokens,
    whole,
)
from outpace.decoding import Sampling
from outpace.engine.engine import Engine
from outpace.methods import DFlash, Eagle, Method, Speculative

VOCAB, SAMPLES, FEW, SEQUENCES = 8, 20_480, 5_120, 256
SIZES = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
TARGET = causal_model(seed=4, **SIZES)
TARGET.blocks[0].attention.out.weight.zero_()
TARGET.unembedding.weight.mul_(0.25)
DRAFT = copy.deepcopy(TARGET)
DRAFT.norm.weight.add_(torch.randn(32, generator=torch.Generator().manual_seed(0)))
FEATURES = feature_draft(
    TARGET, **SIZES, dflash_config={"mask_token_id": VOCAB - 1, "target_layer_ids": [0]}
)
ADDED = adding_draft(FEATURES)
CORRECTED = corrected_draft(FEATURES)
CONVOLVED = convolved_draft(FEATURES)
STATES = extending_draft(
    TARGET, seed=3, layers=(0, 0), **SIZES, head_dim=32, draft_vocab_size=VOCAB - 2
)
FILTERED = Sampling(temperature=1.5, top_p=0.9, top_k=6, seed=4)
SETTINGS = [
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.6, seed=2),
    Sampling(temperature=1.0, top_p=0.8, seed=3),
    FILTERED,
]
METHODS: list[Method] = [
    Speculative(draft="draft", tokens=3),
    Speculative(draft="draft", tokens=3, verify="rejection"),
    DFlash(draft="features", tokens=4),
    DFlash(draft="features", tokens=4, verify="rejection"),
    DFlash(draft="features", tokens=4, width=3, nodes=8),
    DFlash(draft="added", tokens=4, verify="rejection"),
    DFlash(draft="corrected", tokens=4, verify="rejection", confidence_threshold=0.4),
    DFlash(draft="convolved", tokens=4, verify="rejection"),
    Eagle(draft="states", width=1, depth=2),
    Eagle(draft="states", width=1, depth=2, verify="rejection"),
    Eagle(draft="states", width=3, depth=2, nodes=8),
]


def law(sampling: Sampling) -> Tensor:
    """Return the probability `[V, V]` of a token after another, by sorting."""
    logits = torch.cat([whole(TARGET, [token], causal=True) for token in range(VOCAB)]).double()
    ranked, order = (logits / sampling.temperature).sort(descending=True)
    if sampling.top_k is not None:
        ranked[:, sampling.top_k :] = -torch.inf
    mass = ranked.softmax(-1)
    mass[mass.cumsum(-1) - mass > sampling.top_p] = 0
    return torch.zeros_like(mass).scatter(-1, order, mass / mass.sum(-1, keepdim=True))


@pytest.fixture(scope="module")
def engine() -> Engine:
    models = {"target": TARGET, "draft": DRAFT, "features": FEATURES, "states": STATES}
    models |= {"added": ADDED, "corrected": CORRECTED, "convolved": CONVOLVED}
    return engine_of(*models.items(), slots=SEQUENCES * 96)


def count_pairs(engine: Engine, method: Method, sampling: Sampling, samples: int) -> Tensor:
    """Return how often a token came after another in many answers, `[V, V]`."""
    roles = {"target": "target", **method.model_names()}
    jobs = [
        enter(
            engine,
            method,
            [index % VOCAB],
            runners={role: runner(engine, name) for role, name in roles.items()},
            max_tokens=samples // SEQUENCES,
            sampling=replace(sampling, seed=sampling.seed * SEQUENCES + index),
        )
        for index in range(SEQUENCES)
    ]
    finish(engine)
    rounds = sum(step.model == "target" for job in jobs for step in job.trace)
    assert 1.05 < samples / rounds < 3.5  # many drafts are kept, and many are not
    counts = torch.zeros(VOCAB, VOCAB)
    for job in jobs:
        ids = torch.tensor([job.prompt[-1], *tokens(job)])
        counts.index_put_((ids[:-1], ids[1:]), torch.ones(len(ids) - 1), accumulate=True)
    return counts.double()


def likelihood(counts: Tensor, table: Tensor) -> float:
    """Return the probability of counts as far from the table; rare cells of a row are merged."""
    if bool(counts[table == 0].any()):
        return 0.0
    distance, freedom = 0.0, 0
    for row, probabilities in zip(counts, table, strict=True):
        expected = probabilities * row.sum()
        rare = expected < 5
        cells = [(row[~rare], expected[~rare])]
        if float(expected[rare].sum()) >= 1:
            cells.append((row[rare].sum()[None], expected[rare].sum()[None]))
        for seen, due in cells:
            distance += float(((seen - due) ** 2 / due).sum())
        freedom += max(sum(len(due) for _, due in cells) - 1, 0)
    half = torch.tensor([freedom / 2, distance / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*half))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_output_follows_the_target(engine: Engine, method: Method) -> None:
    assert likelihood(count_pairs(engine, method, FILTERED, FEW), law(FILTERED)) > 0.01


@pytest.mark.nightly
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_long_output_follows_the_target(engine: Engine, method: Method, sampling: Sampling) -> None:
    assert likelihood(count_pairs(engine, method, sampling, SAMPLES), law(sampling)) > 0.01

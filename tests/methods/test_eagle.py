"""Eagle, forward by forward."""

from math import log

import pytest
import torch
from torch import Tensor

from helpers import one_hot, request_of, script
from outpace.decoding import CAUSAL, Prediction, Request, Sample, Sampling, Target, Tree
from outpace.decoding.accept import Rejection
from outpace.methods import Eagle

WIDE, OWN = 3, 1


def seen(tokens: list[int], rows: int) -> Prediction:
    return Prediction(tokens=tokens, features=torch.arange(float(rows))[:, None].expand(-1, WIDE))


def said(laws: list[dict[int, float]], rows: int = 0, begin: float = 0.0) -> Prediction:
    """Return a prediction of the draft: distributions of its rows, and numbered states."""
    logits = torch.full((len(laws), 16), -1e30)
    for row, law in enumerate(laws):
        for token, share in law.items():
            logits[row, token] = log(share)
    states = begin + torch.arange(float(rows or len(laws)))[:, None]
    return Prediction(tokens=logits.argmax(-1).tolist(), logits=logits, features=states)


def column(features: Tensor | None) -> list[float]:
    assert features is not None
    return features[:, 0].tolist()


def sequence(**options) -> Request:
    return request_of(**{"prompt": [5, 6, 7], "max_tokens": 12} | options)


def test_tree_grows_by_level_and_branch_runs_again() -> None:
    seq = sequence(eos=frozenset([7]))
    answers = [
        seen([8], 3),
        said([{1: 0.6, 2: 0.4}], rows=3),
        said([{3: 0.9, 4: 0.1}, {3: 0.6, 9: 0.4}], begin=10),
        seen(
            [2, 0, 3, 0, 11], 5
        ),  # 8 predicts 2, which predicts 3, which is in the tree and predicts 11
        said([{1: 0.6, 2: 0.4}], rows=3),
        said([{3: 0.9, 4: 0.1}, {3: 0.6, 9: 0.4}], begin=10),
        seen([7, 7, 7, 7, 7], 8),
    ]
    method = Eagle(draft="", width=2, depth=1, nodes=5)
    forwards = script(method, seq, answers)
    prefill, first, level, check, again, _, last = forwards
    assert seq.tokens == [8, 2, 3, 11]
    assert prefill.features_for == "draft" and prefill.pattern == CAUSAL
    assert (first.start, list(first.ids), first.pattern) == (0, [6, 7, 8], CAUSAL)
    assert (first.predict, list(first.predict_from)) == ([4], [2])
    assert first.features.shape == (3, WIDE) and first.model == first.features_for == "draft"
    assert (level.start, level.ids, level.pattern) == (3, [1, 2], Tree(3, (0, 0)))
    assert (level.positions, level.predict, list(level.predict_from)) == ([3, 3], [5, 5], [3, 4])
    assert column(level.features) == [2, 2]  # the state of the last token of the text
    # 1 has 0.6, and 3 after it 0.54; 2 has 0.4, and 3 after it 0.24.
    assert check.ids == [8, 1, 2, 3, 3] and check.start == 3
    assert check.pattern == Tree.from_parents(3, [-1, 0, 0, 1, 2])
    assert check.positions == [3, 4, 4, 5, 5] and check.predict == [4, 5, 5, 6, 6]
    assert (again.start, list(again.ids)) == (3, [2, 3, 11])
    assert column(again.features) == [0, 2, 4] and (last.start, last.ids[:3]) == (4, [2, 3, 11])
    assert last.pattern.root_slot == 6 and last.positions[:3] == [4, 5, 6]


def test_a_beam_keeps_the_likeliest_of_a_whole_level() -> None:
    seq = sequence(max_tokens=9, eos=frozenset([0]))
    answers = [
        seen([8], 3),
        said([{1: 0.6, 2: 0.4}], rows=3),
        said([{3: 0.55, 4: 0.45}, {3: 0.9, 5: 0.1}], begin=10),
        said([{6: 0.9, 7: 0.1}, {6: 0.9, 7: 0.1}], begin=20),
        seen([0] * 6, 6),
    ]
    forwards = script(Eagle(draft="", width=2, depth=2, nodes=6), seq, answers)
    deeper = forwards[3]
    # 2 3 has 0.36 and 1 3 has 0.33.
    assert (deeper.start, deeper.ids) == (5, [3, 3]) and column(deeper.features) == [11, 10]
    assert deeper.pattern == Tree(3, (0b10, 0b01)) and deeper.positions == [4, 4]
    assert (
        forwards[4].ids == [8, 1, 2, 3, 3, 6] and forwards[4].pattern.ancestor_masks[-1] == 0b10101
    )


def test_chain_is_causal() -> None:
    seq = sequence(max_tokens=7)
    answers = [
        seen([8], 3),
        said([{1: 1.0}], rows=3),
        said([{2: 1.0}]),
        said([{3: 1.0}]),
        seen([1, 2, 4, 9], 4),
        said([{1: 1.0}], rows=3),
        said([{2: 1.0}]),
        seen([1, 2, 3], 3),
    ]
    forwards = script(Eagle(draft="", width=1, depth=2), seq, answers)
    assert seq.tokens == [8, 1, 2, 4, 1, 2, 3]
    assert [f.pattern for f in forwards] == [CAUSAL] * 8
    assert [(f.start, list(f.ids)) for f in forwards] == [
        (0, [5, 6, 7]),
        (0, [6, 7, 8]),
        (3, [1]),
        (4, [2]),
        (3, [8, 1, 2, 3]),
        (3, [1, 2, 4]),
        (6, [1]),  # limited by the remaining budget
        (6, [4, 1, 2]),
    ]
    assert [f.predict for f in forwards[1:4]] == [[4], [5], [6]]


@pytest.mark.parametrize("width", [1, 2])
def test_match_reads_the_target_with_its_own_noise(width: int) -> None:
    warm = Sampling(temperature=1.0, seed=7)
    seq = sequence(max_tokens=3, sampling=warm)
    answers = [seen([8], 3), said([{1: 0.6, 2: 0.4}], rows=3), seen([1, 2, 3], 3)]
    first, draft, check = script(Eagle(draft="", width=width), seq, answers)
    assert first.read == check.read == Sample(sampling=warm)
    assert draft.read == (Sample(sampling=warm) if width == 1 else Sample(keep=True))


def test_rejection_takes_the_logits_of_a_chain() -> None:
    warm = Sampling(temperature=1.0, seed=7)
    levels = [
        Prediction(tokens=[n], logits=one_hot([n]), features=torch.zeros(3, OWN)) for n in (1, 2)
    ]
    answers = [seen([8], 3), *levels, seen([1, 2, 3], 3)]
    method = Eagle(draft="", width=1, depth=1, verify="rejection")
    *_, target = script(method, sequence(max_tokens=4, sampling=warm), answers)
    assert isinstance(target.read, Rejection) and target.read.drafted == (1, 2)
    assert torch.equal(target.read.guess, one_hot([1, 2]))


def test_slots_after_the_text() -> None:
    assert Eagle(draft="", width=1).slots_needed(10, 20) == 30
    assert Eagle(draft="").slots_needed(10, 20) == 30 + 70
    assert Eagle(draft="", depth=2).slots_needed(10, 20) == 30 + 60


@pytest.mark.parametrize(
    ("options", "target", "size"),
    [
        ({}, {}, (10, 7)),
        ({}, {"is_recurrent": True}, (1, 7)),
        ({}, {"is_recurrent": True, "has_mtp_draft": True}, (1, 2)),
        ({}, {"has_mtp_draft": True}, (1, 2)),
        ({"verify": "rejection"}, {}, (1, 7)),
        ({"width": 3, "depth": 4}, {"has_mtp_draft": True}, (3, 4)),
    ],
)
def test_default_sizes_follow_the_target(
    options: dict, target: dict, size: tuple[int, int]
) -> None:
    shape = Eagle(**options).shape(Target(**target))
    assert (shape.width, shape.depth) == size
    lengths = Eagle(**options).length_range(Target(**target), auto=True)
    assert lengths is None if options.get("verify") else lengths.values[-1] == size[1] + 2


def test_processors_get_the_branch_of_each_row() -> None:
    answers = [seen([8], 3), said([{1: 0.6, 2: 0.4}], rows=3), seen([1, 2, 3], 3)]
    processors = (lambda logits, slots, text: None,)
    for given, expected in (((), [None] * 3), (processors, [None, [[]], [[], [1], [2]]])):
        seq = sequence(max_tokens=3, processors=given)
        forwards = script(Eagle(draft="", width=2), seq, answers)
        assert [forward.branches for forward in forwards] == expected

"""`Request.commit` is the only way for a token to become output."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outpace.decoding import Request, Sampling

EOS = 9


def sequence(max_tokens: int = 5) -> Request:
    """Return a request with a prompt of three tokens."""
    return Request(prompt=[1, 2, 3], max_tokens=max_tokens, eos=frozenset([EOS]))


def test_new_sequence_is_its_prompt() -> None:
    seq = sequence()
    assert (seq.ids, len(seq), seq.tokens, seq.limit) == ([1, 2, 3], 3, [], 8)
    assert seq.commit([4]) and seq.prompt == [1, 2, 3]


def test_committed_tokens_are_output() -> None:
    seq = sequence()
    assert seq.commit([4, 5])
    assert (seq.ids, seq.tokens, seq.finish_reason) == ([1, 2, 3, 4, 5], [4, 5], None)


def test_end_of_sequence_is_not_output() -> None:
    seq = sequence()
    assert not seq.commit([4, EOS, 5])
    assert (seq.tokens, seq.finish_reason) == ([4], "stop")


def test_limit_truncates() -> None:
    seq = sequence()
    assert not seq.commit([4, 4, 4, 4, 4, 4])
    assert (seq.tokens, seq.finish_reason) == ([4] * 5, "length")


def test_end_of_sequence_after_the_limit_is_ignored() -> None:
    seq = sequence(max_tokens=1)
    assert not seq.commit([4, EOS])
    assert seq.finish_reason == "length"


def test_end_of_sequence_in_the_prompt_does_not_count() -> None:
    seq = Request(prompt=[EOS, EOS], max_tokens=5, eos=frozenset([EOS]))
    assert seq.commit([4])


def test_nothing_is_added_to_an_ended_sequence() -> None:
    seq = sequence()
    seq.finish_reason = "cancelled"
    assert not seq.commit([4])
    assert (seq.tokens, seq.finish_reason) == ([], "cancelled")


def test_empty_commit_changes_nothing() -> None:
    seq = sequence()
    assert seq.commit([]) and seq.tokens == []


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=8), st.integers(1, 12))
def test_commit_sizes_do_not_matter(groups: list[list[int]], max_tokens: int) -> None:
    seq = sequence(max_tokens)
    for group in groups:
        seq.commit(group)
    tokens = [token for group in groups for token in group]
    ended = tokens.index(EOS) if EOS in tokens else len(tokens)
    assert seq.tokens == tokens[: min(ended, max_tokens)]
    reason = "length" if max_tokens <= ended and max_tokens <= len(tokens) else None
    assert seq.finish_reason == (reason or ("stop" if EOS in tokens else None))


def test_read_carries_the_sampling_of_the_request() -> None:
    seq = Request(prompt=[1], max_tokens=2, sampling=Sampling(temperature=0.5, seed=3))
    read = seq.sample(4, keep=True, scores=("entropy",))
    assert (read.sampling, read.step, read.keep) == (seq.sampling, 4, True)
    assert read.scores == ("entropy",)

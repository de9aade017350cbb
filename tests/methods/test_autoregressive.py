"""Autoregressive decoding: one token per forward."""

from __future__ import annotations

from helpers import script
from outpace.decoding import CAUSAL, Request, Sampling
from outpace.methods import Autoregressive


def test_prefill_then_one_row_per_forward() -> None:
    seq = Request(prompt=[1, 2, 3], max_tokens=3)
    forwards = script(Autoregressive(), seq, [[4], [5], [6]])
    assert [(list(f.ids), f.start) for f in forwards] == [([1, 2, 3], 0), ([4], 3), ([5], 4)]
    assert all(f.pattern == CAUSAL and f.visible_end is None for f in forwards)
    assert [list(f.predicted_slots()) for f in forwards] == [[3], [4], [5]]
    assert (seq.tokens, seq.finish_reason) == ([4, 5, 6], "length")


def test_it_stops_at_end_of_sequence() -> None:
    seq = Request(prompt=[1], max_tokens=9, eos=frozenset([7]))
    assert len(script(Autoregressive(), seq, [[4], [7]])) == 2
    assert (seq.tokens, seq.finish_reason) == ([4], "stop")


def test_every_forward_is_read_with_the_sampling_of_the_request() -> None:
    seq = Request(prompt=[1], max_tokens=2, sampling=Sampling(temperature=0.7, seed=5))
    forwards = script(Autoregressive(), seq, [[4], [5]])
    assert [forward.read for forward in forwards] == [seq.sample()] * 2

"""Compare automata over tokens with the bytes of each token."""

from random import Random

import numpy as np
import pytest

from outpace.constraint.automaton import UNREACHABLE, TokenAutomaton
from outpace.constraint.dfa import Dfa
from outpace.constraint.regular import StateSets
from outpace.constraint.schema import schema_dfa
from outpace.constraint.vocabulary import Vocabulary

EOS = 7
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
        "at": {"type": "string", "format": "date"},
    },
    "required": ["name"],
}
DFAS = {
    "schema": schema_dfa(SCHEMA),
    "words": Dfa.from_pattern(r"(\\w+\\s?){1,4}"),
    "choices": Dfa.from_texts(["red", "read", "reader", "\u00e9t\u00e9", ""]),
    "numbers": Dfa.from_pattern("-?[0-9]{1,3}(,[0-9]{3})*"),
    "nothing": Dfa.from_texts([""]),
}


def vocabulary(count: int, seed: int) -> list[bytes | None]:
    """Return single bytes, tokens that the test patterns use, and one end token."""
    rng = Random(seed)
    parts = [b"red", b"re", b"ad", b'"', b'": "', b"name", b"1", b"23", b",", b" ", b"\xc3\xa9"]
    known = {bytes([byte]) for byte in range(256)}
    while len(known) < count:
        known.add(b"".join(rng.choices([*parts, bytes([rng.randrange(256)])], k=rng.randint(1, 5))))
    texts: list[bytes | None] = [*sorted(known)]
    texts[EOS] = None
    return texts


@pytest.mark.parametrize("name", DFAS)
def test_tokens_follow_their_bytes(name: str) -> None:
    dfa, texts = DFAS[name], vocabulary(600, seed=1)
    automaton = TokenAutomaton(dfa, Vocabulary(texts), frozenset({EOS}))
    for token, text in enumerate(texts):
        states = np.arange(len(dfa.table))
        for byte in text or b"":
            states = np.where(states < 0, -1, dfa.table[states, byte])
        if token == EOS:
            states = np.where(dfa.accepts, automaton.end, -1)
        elif text is not None:
            states[automaton.tokens_to_end[states] == UNREACHABLE] = -1
        assert (automaton.table[:-1, automaton.classes[token]] == states).all()
    assert (automaton.table[automaton.end] == automaton.end).all()


@pytest.mark.parametrize("name", DFAS)
def test_the_length_of_the_shortest_answer(name: str) -> None:
    automaton = TokenAutomaton(DFAS[name], Vocabulary(vocabulary(400, seed=3)), frozenset({EOS}))
    sets, within = StateSets(automaton), automaton.accepts
    for left in range(sets.max_distance + 1):
        assert (sets.states_within(left).flags == within).all()
        within = within | automaton.predecessors(within, -1)
    assert (automaton.tokens_to_end[within] < UNREACHABLE).all()

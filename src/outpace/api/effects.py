"""What the options of a request do to its answer: its end, its logits, what it must be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

from numpy import ndarray
from torch import Tensor

from outpace.api.options import REQUEST, RequestOptions
from outpace.constraint.compiler import Compiler
from outpace.decoding import CAUSAL_KINDS, Constraint, Processor
from outpace.decoding.processor import Bias, NotBefore, Penalties
from outpace.decoding.sampling_params import is_whole
from outpace.errors import OptionError
from outpace.methods import METHODS, Method


def ends_of(
    chosen: RequestOptions, eos: frozenset[int], vocab: int, silent: Set[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """End-of-sequence of the answer, and the tokens that end it wherever they come.

    `eos` are those of the model, `silent` tokens that have no text. A constrained answer must
    end: where a model has no `eos`, its stop ids take their place. Raises `OptionError` for an
    invalid token, and for one that would cut a constrained answer.
    """
    given: Any = chosen.stop_ids
    if isinstance(given, ndarray | Tensor):
        given = given.tolist()
    listed = list(given) if isinstance(given, Sequence | Set) else [given]
    check_tokens("stop_ids", listed, vocab)
    stops = frozenset(map(int, listed))
    if chosen.rule is None:
        return frozenset() if chosen.ignore_eos else eos, stops
    if not eos:
        return stops, frozenset()
    if spoken := sorted(stops - eos - silent):
        raise OptionError(
            "stop_ids",
            spoken[0],
            f"stop_ids would break the {chosen.rule[0]} of an answer, which may contain token "
            f"{spoken[0]}: give special tokens only, or one of the two",
        )
    return eos, stops


def processors_of(
    chosen: RequestOptions, method: Method, begin: int, ends: frozenset[int], vocab: int
) -> Iterator[Processor]:
    """What changes logits of an answer that begins at slot `begin`, whose model `ends` it so.

    Raises `OptionError` for what the method cannot do, and for tokens that are none.
    """
    penalties = Penalties(
        begin=begin,
        presence=chosen.presence_penalty,
        frequency=chosen.frequency_penalty,
        repetition=chosen.repetition_penalty,
    )
    if penalties != Penalties(begin=begin):
        check_order(chosen, method)
        yield penalties
    if chosen.logit_bias:
        check_tokens("logit_bias", list(chosen.logit_bias), vocab)
        yield Bias({int(token): float(bias) for token, bias in chosen.logit_bias.items()})
    if chosen.min_tokens and ends:
        yield NotBefore(ends, begin + chosen.min_tokens)


def constraint_of(
    chosen: RequestOptions,
    compiler: Compiler,
    method: Method,
    slots: range,
    ends: frozenset[int],
    vocab: int,
    mask_id: int,
    wait: bool,
) -> Constraint | None:
    """What an answer of some slots that `ends` so must be, if it is constrained.

    Raises as `compiler` does: `OptionError` where there is no such answer, and unless it shall
    `wait`, `Unread`.
    """
    if chosen.rule is None:
        return None
    return compiler.constraint(
        chosen.rule,
        sequential=method.sequential,
        begin=slots.start,
        limit=slots.stop,
        size=vocab,
        ends=ends,
        mask_id=mask_id,
        wait=wait,
    )


def check_sight(method: Method) -> None:
    """Raise `OptionError` for a cloze where a method sees nothing behind a hole."""
    if not method.sees_ahead:
        able = (kind.__name__ for kind in METHODS.values() if kind.decodes != CAUSAL_KINDS)
        raise OptionError(
            "method",
            method,
            f"method: {method!r} sees nothing behind a hole and cannot fill a cloze; "
            f"these do, unverified: {', '.join(able)}",
        )


def check_order(chosen: RequestOptions, method: Method) -> None:
    """Raise `OptionError` for penalties of a method that fills holes in any order."""
    if not method.sequential:
        ordered = (each for each in REQUEST.values() if each.info.sequential)
        name = next(o.name for o in ordered if getattr(chosen, o.name) != o.default)
        raise OptionError(
            name,
            getattr(chosen, name),
            f"{name} needs a method that commits tokens from left to right, "
            f"and {method!r} fills holes in any order",
        )


def check_tokens(name: str, tokens: Sequence[object], vocab: int) -> None:
    """Raise `OptionError` for what is no token of a vocabulary."""
    for token in tokens:
        if not (is_whole(token) and 0 <= int(token) < vocab):  # type: ignore[call-overload]
            message = f"{name} holds {token!r}, which is no token from 0 to {vocab - 1}"
            raise OptionError(name, token, message)

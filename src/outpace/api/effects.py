"""Request options applied to an answer: stop tokens, logits processors and constraints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

from numpy import ndarray
from torch import Tensor

from outpace.api.options import REQUEST_OPTIONS, RequestOptions, option_names
from outpace.api.text import TextCodec
from outpace.constraint.compiler import Compiler
from outpace.constraint.constraint_rule import FREE_RULE
from outpace.constraint.thoughts import ThoughtFormat
from outpace.decoding import CAUSAL_KINDS, Constraint, Kind, Processor
from outpace.decoding.processor import MinTokens, Penalties, TokenBias
from outpace.decoding.sampling_params import is_whole_number
from outpace.errors import OptionError
from outpace.methods import METHODS, Method


def resolve_stop_ids(
    options: RequestOptions, eos: frozenset[int], vocab: int, silent: Set[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the end-of-sequence ids of an answer, and the ids that end it at any position.

    A constrained answer must be able to end. If the model has no `eos`, the stop ids replace it.

    Args:
        options: Options of the request.
        eos: End-of-sequence ids of the model.
        vocab: Size of the vocabulary.
        silent: Token ids without text, such as special tokens.

    Raises:
        OptionError: For an invalid token id, or one that could cut off a constrained answer.
    """
    listed: Any = options.stop_ids
    if isinstance(listed, ndarray | Tensor):
        listed = listed.tolist()
    tokens = list(listed) if isinstance(listed, Sequence | Set) else [listed]
    check_token_ids("stop_ids", tokens, vocab)
    stops = frozenset(map(int, tokens))
    if options.rule is None:
        return frozenset() if options.ignore_eos else eos, stops
    if not eos:
        return stops, frozenset()
    if conflicts := sorted(stops - eos - silent):
        raise OptionError(
            "stop_ids",
            conflicts[0],
            f"stop_ids cannot be combined with {options.rule[0]} here: the answer may hold token "
            f"{conflicts[0]}; use special tokens only, or omit one of the two options",
        )
    return eos, stops


def build_processors(
    options: RequestOptions, method: Method, begin: int, ends: frozenset[int], vocab: int
) -> Iterator[Processor]:
    """Yield the logits processors of an answer.

    Args:
        options: Options of the request.
        method: Decoding method of the request.
        begin: First slot of the answer.
        ends: End-of-sequence ids.
        vocab: Size of the vocabulary.

    Raises:
        OptionError: For options that the method does not support, and for invalid token ids.
    """
    penalties = Penalties(
        begin=begin,
        presence=options.presence_penalty,
        frequency=options.frequency_penalty,
        repetition=options.repetition_penalty,
    )
    if penalties != Penalties(begin=begin):
        check_sequential(options, method)
        yield penalties
    if options.logit_bias:
        check_token_ids("logit_bias", list(options.logit_bias), vocab)
        yield TokenBias({int(token): float(bias) for token, bias in options.logit_bias.items()})
    if options.min_tokens and ends:
        yield MinTokens(ends, begin + options.min_tokens)


def build_constraint(
    options: RequestOptions,
    compiler: Compiler,
    method: Method,
    thoughts: ThoughtFormat | None,
    slots: range,
    ends: frozenset[int],
    vocab: int,
    mask_id: int,
    wait: bool,
) -> Constraint | None:
    """Return the constraint on an answer in `slots`, or None if it is unconstrained.

    Raises:
        OptionError: If no answer satisfies the constraint.
        Exception: That of the compiler for an uncompiled constraint, unless `wait` is set.
    """
    most, rule = options.max_reasoning_tokens, options.rule
    if most is not None and thoughts is not None:
        rule = rule or FREE_RULE
    if rule is None:
        return None
    if rule[0] == "grammar" and most is None and thoughts is not None and thoughts.begin:
        thoughts = None  # a grammar cannot follow thoughts, which the prompt does not require
    return compiler.build_constraint(
        rule,
        sequential=method.is_sequential,
        begin=slots.start,
        limit=slots.stop,
        size=vocab,
        ends=ends,
        mask_id=mask_id,
        wait=wait,
        thoughts=thoughts,
        max_thoughts=most,
    )


def check_reasoning_limit(options: RequestOptions, text: TextCodec) -> None:
    """Raise `OptionError` for a limit of thoughts if the model's answers have none."""
    if options.max_reasoning_tokens is not None and text.thought_format is None:
        message = (
            f"max_reasoning_tokens: the chat template of {text.name} describes no thoughts in a "
            "known format; omit it"
        )
        raise OptionError("max_reasoning_tokens", options.max_reasoning_tokens, message)


def check_prompt_logprobs(options: RequestOptions, name: str, kind: Kind) -> None:
    """Raise `OptionError` for log-probabilities of the prompt if the model is not causal."""
    if options.prompt_logprobs is not None and kind not in CAUSAL_KINDS:
        message = (
            f"prompt_logprobs: needs a causal model, but {name} is a {kind.value}, which does not "
            "predict the tokens of a prompt; omit it"
        )
        raise OptionError("prompt_logprobs", options.prompt_logprobs, message)


def check_can_infill(method: Method) -> None:
    """Raise `OptionError` if a method cannot condition on text after a hole."""
    if not method.sees_ahead:
        able = (kind.__name__ for kind in METHODS.values() if kind.target_kinds != CAUSAL_KINDS)
        raise OptionError(
            "method",
            method,
            f"method: {method!r} cannot condition on text after a hole, so it cannot infill; "
            f"use one of these, unverified: {', '.join(able)}",
        )


def check_suffix(options: RequestOptions, method: Method, text: TextCodec) -> None:
    """Raise `OptionError` for a suffix, or an option beside it, that the model does not support."""
    if text.middle_tokens is not None:
        return
    if not method.sees_ahead:
        message = (
            f"suffix: {text.name} has no tokens to fill in the middle, and {method!r} cannot "
            "condition on text after the answer; omit suffix"
        )
        raise OptionError("suffix", options.suffix, message)
    names = ["stop_ids", "ignore_eos", "min_tokens", *option_names("rule")]
    options.check_absent(names, "suffix")


def check_sequential(options: RequestOptions, method: Method) -> None:
    """Raise `OptionError` for penalties with a method that fills mask positions in any order."""
    if not method.is_sequential:
        ordered = (each for each in REQUEST_OPTIONS.values() if each.info.sequential)
        name = next(o.name for o in ordered if getattr(options, o.name) != o.default)
        raise OptionError(
            name,
            getattr(options, name),
            f"{name} needs a method that commits tokens from left to right, "
            f"but {method!r} fills mask positions in any order",
        )


def check_token_ids(name: str, tokens: Sequence[object], vocab: int) -> None:
    """Raise `OptionError` for an invalid token id."""
    for token in tokens:
        if not (is_whole_number(token) and 0 <= int(token) < vocab):  # type: ignore[call-overload]
            message = f"{name} must hold token ids from 0 to {vocab - 1}, got {token!r}"
            raise OptionError(name, token, message)

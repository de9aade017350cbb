"""`AnswerPlan`: from the options of a request to an answer that the engine accepts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from numpy import ndarray
from torch import Tensor

from outpace.api.detokenizer import Detokenizer
from outpace.api.infill import InfillLayout, check_can_infill, check_suffix
from outpace.api.options import REQUEST_OPTIONS, RequestOptions, option_info
from outpace.api.parts import AnswerFormat
from outpace.api.pending_answer import PendingAnswer
from outpace.api.text import TextCodec, encode_inner
from outpace.constraint.compiler import FREE_RULE, Compiler
from outpace.decoding import CAUSAL_KINDS, Constraint, Kind, Processor
from outpace.decoding.processor import MinTokens, Penalties, TokenBias
from outpace.engine.pairing import Pairing
from outpace.errors import OptionError
from outpace.field_types import is_whole_number
from outpace.methods import Method


@dataclass(frozen=True, kw_only=True)
class AnswerPlan:
    """One answer before it is submitted: its prompt, models and method, and where it ends."""

    options: RequestOptions
    text: TextCodec
    eos: frozenset[int]
    """Ids that end an answer of the model."""
    pairing: Pairing
    method: Method
    prompt: list[int]
    max_tokens: int
    format: AnswerFormat
    layout: InfillLayout | None = None
    """Slots of an infill template, or of an answer before a suffix."""

    def build_answer(
        self, compiler: Compiler, usual: Mapping[str, float], *, streams: bool, wait: bool
    ) -> PendingAnswer:
        """Build the answer; `usual` are the sampling options of the method and the model.

        Raises:
            OptionError: For options that the models do not support.
            NotCompiledError: If a constraint is not compiled yet and `wait` is not set.
        """
        options, layout = self.options, self.layout
        padding = frozenset[int]() if layout is None else layout.ends
        detokenizer = Detokenizer(self.text, options.stop, options.min_tokens, self.format, padding)
        ends, stop_ids = self.resolve_stop_ids()
        processors = build_processors(
            options, self.method, len(self.prompt), ends, self.pairing.vocab
        )
        answer = PendingAnswer(
            method=self.method,
            pairing=self.pairing,
            detokenizer=detokenizer,
            layout=layout,
            streams=streams,
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            sampling=options.build_sampling(usual),
            eos=ends if layout is None else frozenset(),
            stop_ids=stop_ids | detokenizer.stop_tokens.keys() if layout is None else stop_ids,
            min_tokens=int(options.min_tokens),
            logprobs=options.logprobs,
            top_logprobs=int(options.top_logprobs),
            prompt_logprobs=options.prompt_logprobs,
            choices=self.encode_choices(),
            processors=tuple(processors),
            fixed_tokens={} if layout is None else layout.given,
            is_infill=layout is not None,
        )
        if (constraint := self.build_constraint(compiler, answer, wait)) is not None:
            answer.constraint = constraint
            answer.processors += (constraint,)
        return answer

    def resolve_stop_ids(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the end-of-sequence ids of the answer, and the ids that end it at any position.

        A constrained answer must be able to end. If the model has no end-of-sequence, the stop ids
        replace it, and none of them may cut off the answer.
        """
        options, eos = self.options, self.eos
        if options.suffix is not None and self.text.middle_tokens is not None:
            eos |= self.text.middle_tokens.ends
        listed: Any = options.stop_ids
        if isinstance(listed, ndarray | Tensor):
            listed = listed.tolist()
        tokens = list(listed) if isinstance(listed, Sequence | Set) else [listed]
        check_token_ids("stop_ids", tokens, self.pairing.vocab)
        stops = frozenset(map(int, tokens))
        if options.rule is None:
            return frozenset() if options.ignore_eos else eos, stops
        if not eos:
            return stops, frozenset()
        if conflicts := sorted(stops - eos - self.text.silent_ids):
            raise OptionError(
                "stop_ids",
                conflicts[0],
                f"cannot be combined with {options.rule[0]} here: the answer may hold token "
                f"{conflicts[0]}; use special tokens only, or omit one of the two options",
            )
        return eos, stops

    def encode_choices(self) -> dict[str, list[int]]:
        """Return the tokens of each choice whose log-probability is wanted."""
        options, codec, thoughts = self.options, self.text.codec, self.format.thoughts
        if options.choices is None or not options.logprobs or codec is None:
            return {}
        target, problem = self.pairing.runners["target"], None
        if target.config.kind not in CAUSAL_KINDS:
            problem = f"need a causal model, but {target.name} is a {target.config.kind.value}"
        elif thoughts is not None and not thoughts.begin:
            problem = "cannot follow a prompt that begins thoughts; turn them off"
        if problem is not None:
            reason = f"log-probabilities of choices {problem}, or omit logprobs"
            raise OptionError("logprobs", options.logprobs, reason)
        choices = {text: encode_inner(codec, text) for text in options.choices}
        if (longest := max(map(len, choices.values()))) > self.max_tokens:
            reason = f"a choice has {longest} tokens, got {self.max_tokens}; raise it"
            raise OptionError("max_tokens", self.max_tokens, reason)
        return choices

    def build_constraint(
        self, compiler: Compiler, answer: PendingAnswer, wait: bool
    ) -> Constraint | None:
        pairing, sequential = self.pairing, self.method.is_sequential
        if self.layout is not None:
            return self.layout.build_constraint(compiler, sequential, pairing.vocab, wait)
        pairing.check_room(self.method, answer)  # first: a compilation may take seconds
        most, rule = self.options.max_reasoning_tokens, self.options.rule
        thoughts = self.format.thoughts
        if most is not None and thoughts is not None:
            rule = rule or FREE_RULE
        if rule is None:
            return None
        if rule[0] == "grammar" and most is None and thoughts is not None and thoughts.begin:
            thoughts = None  # a grammar cannot follow thoughts, which the prompt does not require
        return compiler.build_constraint(
            rule,
            sequential=sequential,
            begin=len(self.prompt),
            limit=answer.limit,
            size=pairing.vocab,
            ends=answer.eos | answer.stop_ids,
            mask_id=pairing.target.mask_id,
            wait=wait,
            thoughts=thoughts,
            max_thoughts=most,
            calls=self.format.calls,
        )


def check_supported(options: RequestOptions, text: TextCodec, kind: Kind, method: Method) -> None:
    """Raise `OptionError` for options that a model or method has not, before models are loaded."""
    if options.max_reasoning_tokens is not None and text.thought_format is None:
        raise OptionError(
            "max_reasoning_tokens",
            options.max_reasoning_tokens,
            f"needs a chat template with thoughts, unlike that of {text.name}: omit it",
        )
    if options.prompt_logprobs is not None and kind not in CAUSAL_KINDS:
        raise OptionError(
            "prompt_logprobs",
            options.prompt_logprobs,
            f"needs a causal model, and {text.name} is a {kind.value}: omit it",
        )
    if options.suffix is not None:
        check_suffix(options, method, text)
    if options.cloze is not None:
        check_can_infill(method)


def build_processors(
    options: RequestOptions, method: Method, begin: int, ends: frozenset[int], vocab: int
) -> Iterator[Processor]:
    """Yield the logits processors of an answer that begins in slot `begin`."""
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


def check_sequential(options: RequestOptions, method: Method) -> None:
    if not method.is_sequential:
        ordered = (each for each in REQUEST_OPTIONS.values() if option_info(each).sequential)
        name = next(o.name for o in ordered if getattr(options, o.name) != o.default)
        raise OptionError(
            name,
            getattr(options, name),
            f"needs a method that commits tokens from left to right, but {method!r} fills mask "
            "positions in any order",
        )


def check_token_ids(name: str, tokens: Sequence[object], vocab: int) -> None:
    for token in tokens:
        if not (is_whole_number(token) and 0 <= int(token) < vocab):  # type: ignore[call-overload]
            raise OptionError(name, token, f"must hold token ids from 0 to {vocab - 1}")

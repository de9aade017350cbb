"""What a request may choose, checked before any work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypedDict, cast

from numpy import ndarray
from torch import Tensor

from outpace.constraint.cloze import Parts, checked_cloze
from outpace.constraint.compiler import Compiler, Rule, rule_of
from outpace.decoding import CAUSAL_KINDS, Constraint, Processor, Sampling
from outpace.decoding.processor import Bias, NotBefore, Penalties
from outpace.decoding.sampling_params import is_number, is_whole
from outpace.errors import OptionError
from outpace.methods import METHODS, Method
from outpace.methods.bounds import at_least_one
from outpace.methods.method import LARGEST, check_type
from outpace.methods.options import Named, method_of


class Options(TypedDict, total=False):
    """What a request may choose.

    `method` replaces that of the `LLM`: a `Method`, its name, or `(name, options)`. Without
    `max_tokens` an answer may take what the context has left, at most an equal share of the cache
    for each request of a call; that of a diffusion model has 256. Sampling options (`temperature`,
    `top_p`, `top_k`, `min_p`) default to those of the method, and else of the model's family.

    `stop` ends the text before any of these strings, and `stop_ids` end it before any of these
    tokens. Neither changes what comes before: the answer is the beginning of the one without them.
    `ignore_eos` goes on after end-of-sequence, which then is a token of the answer. Among the first
    `min_tokens` tokens end-of-sequence is not generated, and stop ids and stop strings that begin
    there do not end the answer.

    `logit_bias` is added to the logits of tokens. `presence_penalty` and `frequency_penalty` are
    subtracted from those of tokens that the answer has, once and once for each time;
    `repetition_penalty` divides those of tokens that prompt or answer has where they are positive,
    and else multiplies them. The three need a method that commits from left to right.

    `raw` continues a string as it stands, without the chat template; `template` has variables of
    that template, such as `enable_thinking`. `logprobs` asks for the log-probability of each token.

    One of `schema` (a JSON schema or a pydantic model), `regex`, `choices` (strings) and `grammar`
    (Lark) says what the answer must be as a whole; see docs/constraints.md. `cloze` (text and
    `Hole`s) is an answer of which only the holes are left to fill; see docs/fill.md.
    """

    method: Named | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int
    stop: str | Sequence[str]
    stop_ids: Sequence[int] | Set[int] | ndarray | Tensor
    ignore_eos: bool
    min_tokens: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    raw: bool
    template: Mapping[str, Any]
    logprobs: bool
    schema: Any
    regex: str | None
    choices: Sequence[str] | None
    grammar: str | None
    cloze: Parts | None


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The `Options` of one request. Raises `OptionError` for values that mean nothing."""

    method: Method | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int = 0
    stop: str | Sequence[str] = ()
    stop_ids: Sequence[int] | Set[int] | ndarray | Tensor = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    raw: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    logprobs: bool = False
    schema: Any = None
    regex: str | None = None
    choices: Sequence[str] | None = None
    grammar: str | None = None
    cloze: Parts | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Chosen:
        """Options by their names; `OptionError` for a name that is none."""
        known = [option.name for option in fields(cls)]
        if unknown := sorted(set(options) - set(known)):
            message = f"{unknown[0]}: unknown option {unknown[0]!r}; known are {', '.join(known)}"
            raise OptionError(unknown[0], options[unknown[0]], message)
        method = options.get("method")
        return cls(**{**options, "method": None if method is None else method_of(method)})

    def __post_init__(self) -> None:
        check_type("max_tokens", self.max_tokens, int | None)
        at_least_one(max_tokens=self.max_tokens)
        for name in ("ignore_eos", "raw", "logprobs"):
            check_type(name, getattr(self, name), bool)
        if not (is_whole(self.min_tokens) and self.min_tokens >= 0):
            message = f"min_tokens must be a whole number from 0 on, not {self.min_tokens}"
            raise OptionError("min_tokens", self.min_tokens, message)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}"
            raise OptionError("min_tokens", self.min_tokens, message)
        for name in ("presence_penalty", "frequency_penalty"):
            check_within(name, getattr(self, name), -LARGEST)
        check_within("repetition_penalty", self.repetition_penalty, 1 / LARGEST)
        if not isinstance(self.logit_bias, Mapping):
            message = f"logit_bias must map token ids to numbers, not {self.logit_bias!r}"
            raise OptionError("logit_bias", self.logit_bias, message)
        for token, bias in self.logit_bias.items():
            check_within("logit_bias", bias, -LARGEST, f" of token {token!r}")
        if not isinstance(self.template, Mapping):
            message = f"template must map names to values, not {self.template!r}"
            raise OptionError("template", self.template, message)
        self.check_rule()

    @cached_property
    def rule(self) -> Rule | None:
        """What the answer must be. Raises `OptionError` for what is no constraint."""
        return rule_of(
            schema=self.schema, regex=self.regex, choices=self.choices, grammar=self.grammar
        )

    def check_rule(self) -> None:
        """Raise `OptionError` for options that would cut a constrained answer, or prolong it."""
        rule = self.rule
        what = rule[0] if rule else None
        names: tuple[str, ...] = ("stop", "ignore_eos", "min_tokens")
        if self.cloze is not None:
            checked_cloze(self.cloze)
            what = "cloze"
            names += ("stop_ids", "max_tokens", "schema", "regex", "choices", "grammar")
        if what is None:
            return
        for name in names:
            if (value := getattr(self, name)) not in (None, (), [], False, 0):
                message = f"{name} would break the {what} of an answer: give one of the two"
                raise OptionError(name, value, message)

    def sampling(self, usual: Mapping[str, float]) -> Sampling:
        """How tokens are drawn; what is not chosen is as `usual`."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        chosen = {name: value for name, value in given.items() if value is not None}
        return Sampling(seed=self.seed, **{**usual, **chosen})

    def ends(
        self, eos: frozenset[int], vocab: int, silent: Set[int]
    ) -> tuple[frozenset[int], frozenset[int]]:
        """End-of-sequence of the answer, and the tokens that end it wherever they come.

        `eos` are those of the model, `silent` tokens that have no text. A constrained answer must
        end: where a model has no `eos`, its stop ids take their place. Raises `OptionError` for an
        invalid token, and for one that would cut a constrained answer.
        """
        given: Any = self.stop_ids
        if isinstance(given, ndarray | Tensor):
            given = given.tolist()
        listed = list(given) if isinstance(given, Sequence | Set) else [given]
        check_tokens("stop_ids", listed, vocab)
        stops = frozenset(map(int, listed))
        if self.rule is None:
            return frozenset() if self.ignore_eos else eos, stops
        if not eos:
            return stops, frozenset()
        if spoken := sorted(stops - eos - silent):
            raise OptionError(
                "stop_ids",
                spoken[0],
                f"stop_ids would break the {self.rule[0]} of an answer, which may contain token "
                f"{spoken[0]}: give special tokens only, or one of the two",
            )
        return eos, stops

    def processors(
        self, method: Method, begin: int, ends: frozenset[int], vocab: int
    ) -> Iterator[Processor]:
        """What changes logits of an answer that begins at slot `begin`, whose model `ends` it so.

        Raises `OptionError` for what the method cannot do, and for tokens that are none.
        """
        penalties = Penalties(
            begin=begin,
            presence=self.presence_penalty,
            frequency=self.frequency_penalty,
            repetition=self.repetition_penalty,
        )
        if penalties != Penalties(begin=begin):
            self.check_order(method)
            yield penalties
        if self.logit_bias:
            check_tokens("logit_bias", list(self.logit_bias), vocab)
            yield Bias({int(token): float(bias) for token, bias in self.logit_bias.items()})
        if self.min_tokens and ends:
            yield NotBefore(ends, begin + self.min_tokens)

    def constraint(
        self,
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
        if self.rule is None:
            return None
        return compiler.constraint(
            self.rule,
            sequential=method.sequential,
            begin=slots.start,
            limit=slots.stop,
            size=vocab,
            ends=ends,
            mask_id=mask_id,
            wait=wait,
        )

    def check_sight(self, method: Method) -> None:
        """Raise `OptionError` for a cloze where a method sees nothing behind a hole."""
        if not method.sees_ahead:
            able = (kind.__name__ for kind in METHODS.values() if kind.decodes != CAUSAL_KINDS)
            raise OptionError(
                "method",
                method,
                f"method: {method!r} sees nothing behind a hole and cannot fill a cloze; "
                f"these do, unverified: {', '.join(able)}",
            )

    def check_order(self, method: Method) -> None:
        """Raise `OptionError` for penalties of a method that fills holes in any order."""
        if not method.sequential:
            usual = Chosen()
            names = ("presence_penalty", "frequency_penalty", "repetition_penalty")
            name = next(n for n in names if getattr(self, n) != getattr(usual, n))
            raise OptionError(
                name,
                getattr(self, name),
                f"{name} needs a method that commits tokens from left to right, "
                f"and {method!r} fills holes in any order",
            )


def check_options(options: Options) -> None:
    """Raise `OptionError` for options that no model and no method could take."""
    Chosen.of(options).sampling({})


def check_within(name: str, value: object, least: float, part: str = "") -> None:
    """Raise `OptionError` for what is no number from `least` to `LARGEST`."""
    if not (is_number(value) and least <= float(value) <= LARGEST):  # type: ignore[arg-type]
        message = f"{name}{part} must be a number from {least:g} to {LARGEST:g}, not {value!r}"
        raise OptionError(name, value, message)


def check_tokens(name: str, tokens: Sequence[object], vocab: int) -> None:
    """Raise `OptionError` for what is no token of a vocabulary."""
    for token in tokens:
        if not (is_whole(token) and 0 <= int(token) < vocab):  # type: ignore[call-overload]
            message = f"{name} holds {token!r}, which is no token from 0 to {vocab - 1}"
            raise OptionError(name, token, message)


def seeded(options: Options, further: int) -> Options:
    """Options of a seed so much further on; `OptionError` for one that is no whole number."""
    seed: object = options.get("seed", 0)
    if not is_whole(seed):
        raise OptionError("seed", seed, f"seed must be a whole number, not {seed!r}")
    return {**options, "seed": cast(int, seed) + further}

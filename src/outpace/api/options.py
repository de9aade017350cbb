"""What a request may choose, checked before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

from numpy import ndarray
from torch import Tensor

from outpace.api.declared import Info, declared
from outpace.constraint.cloze import Parts, checked_cloze
from outpace.constraint.compiler import Rule, rule_of
from outpace.decoding import Sampling
from outpace.decoding.sampling_params import is_number, is_whole
from outpace.errors import OptionError
from outpace.methods import Method
from outpace.methods.bounds import at_least_one
from outpace.methods.method import LARGEST, check_type
from outpace.methods.options import Named, method_of

MOST_TOKENS = 2**20
"""Most tokens of an answer that a request over HTTP may set."""


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
class RequestOptions:
    """The `Options` of one request. Raises `OptionError` for values that mean nothing."""

    method: Annotated[Method | None, Info(fields=("outpace.method",))] = None
    max_tokens: Annotated[
        int | None,
        Info(
            "Most tokens of an answer.",
            "sampling",
            usual="what fits; 256 for diffusion",
            bounds={"ge": 1, "le": MOST_TOKENS},
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Info("0 is greedy.", "sampling", usual="by method or family", bounds={"ge": 0, "le": 2}),
    ] = None
    top_p: Annotated[
        float | None,
        Info(
            "Mass of the nucleus.",
            "sampling",
            usual="by method or family",
            bounds={"gt": 0, "le": 1},
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Info("Draw from the k most probable tokens.", "sampling", bounds={"ge": 1, "lt": 2**31}),
    ] = None
    min_p: Annotated[
        float | None,
        Info(
            "Draw from tokens with this share of the best one's probability.",
            "sampling",
            bounds={"ge": 0, "le": 1},
        ),
    ] = None
    seed: Annotated[
        int,
        Info("Same seed, same text.", "sampling", shows=True, bounds={"ge": -(2**63), "lt": 2**63}),
    ] = 0
    stop: Annotated[
        str | Sequence[str], Info("End before this text.", "ending", typed=list[str])
    ] = ()
    stop_ids: Annotated[
        Sequence[int] | Set[int] | ndarray | Tensor,
        Info(
            "End at this token id.",
            "ending",
            flag="stop-id",
            typed=list[int],
            fields=("stop_token_ids",),
        ),
    ] = ()
    ignore_eos: Annotated[bool, Info("Go on behind end-of-sequence.", "ending", bounds={})] = False
    min_tokens: Annotated[
        int, Info("No end before so many tokens.", "ending", bounds={"ge": 0, "le": MOST_TOKENS})
    ] = 0
    presence_penalty: Annotated[
        float,
        Info(
            "From logits of tokens that the answer has, once.",
            "sampling",
            bounds={"ge": -2, "le": 2},
            least=-LARGEST,
            sequential=True,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Info(
            "The same, for each time.",
            "sampling",
            bounds={"ge": -2, "le": 2},
            least=-LARGEST,
            sequential=True,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Info(
            "Above 1, tokens of prompt and answer are less probable.",
            "sampling",
            bounds={"ge": 0.01, "le": 100},
            least=1 / LARGEST,
            sequential=True,
        ),
    ] = 1.0
    logit_bias: Annotated[
        Mapping[int, float],
        Info(
            "Added to the logit of a token id.", "sampling", typed=list[str], metavar="TOKEN=NUMBER"
        ),
    ] = field(default_factory=dict)
    raw: Annotated[bool, Info("Continue the text, without chat template.", "prompt", fields=())] = (
        False
    )
    template: Annotated[
        Mapping[str, Any],
        Info(
            "Variable of the chat template.",
            "prompt",
            typed=list[str],
            metavar="NAME=VALUE",
            fields=("chat_template_kwargs",),
        ),
    ] = field(default_factory=dict)
    logprobs: Annotated[bool, Info("Show the log-probability of each token.")] = False
    schema: Annotated[
        Any,
        Info(
            "JSON schema that the answer fulfils.",
            "rule",
            typed=Path,
            fields=(
                *("response_format.type", "response_format.json_schema.schema"),
                *("structured_outputs.json", "structured_outputs.json_object", "guided_json"),
            ),
        ),
    ] = None
    regex: Annotated[
        str | None,
        Info(
            "Regular expression of the whole answer.",
            "rule",
            fields=("structured_outputs.regex", "guided_regex"),
        ),
    ] = None
    choices: Annotated[
        Sequence[str] | None,
        Info(
            "One of these is the answer; give several.",
            "rule",
            typed=list[str],
            fields=("structured_outputs.choice", "guided_choice"),
        ),
    ] = None
    grammar: Annotated[
        str | None,
        Info(
            "Grammar, in Lark, that the answer follows.",
            "rule",
            typed=Path,
            fields=("structured_outputs.grammar", "guided_grammar"),
            sequential=True,
        ),
    ] = None
    cloze: Annotated[Parts | None, Info(fields=())] = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RequestOptions:
        """Options by their names; `OptionError` for a name that is none."""
        known = [*REQUEST]
        if unknown := sorted(set(options) - set(known)):
            message = f"{unknown[0]}: unknown option {unknown[0]!r}; known are {', '.join(known)}"
            raise OptionError(unknown[0], options[unknown[0]], message)
        method = options.get("method")
        return cls(**{**options, "method": None if method is None else method_of(method)})

    def __post_init__(self) -> None:
        check_type("max_tokens", self.max_tokens, int | None)
        at_least_one(max_tokens=self.max_tokens)
        for name, option in REQUEST.items():
            if option.kind is bool:
                check_type(name, getattr(self, name), bool)
        if not (is_whole(self.min_tokens) and self.min_tokens >= 0):
            message = f"min_tokens must be a whole number from 0 on, not {self.min_tokens}"
            raise OptionError("min_tokens", self.min_tokens, message)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}"
            raise OptionError("min_tokens", self.min_tokens, message)
        for name, option in REQUEST.items():
            if option.info.least is not None:
                check_within(name, getattr(self, name), option.info.least)
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
        names = [each for each in names_of("ending") if each != "stop_ids"]  # see `ends_of`
        if self.cloze is not None:
            checked_cloze(self.cloze)
            what = "cloze"
            names += ["stop_ids", "max_tokens", *names_of("rule")]
        if what is None:
            return
        for name in names:
            if (value := getattr(self, name)) not in (None, (), [], False, 0):
                message = f"{name} would break the {what} of an answer: give one of the two"
                raise OptionError(name, value, message)

    def sampling(self, usual: Mapping[str, float]) -> Sampling:
        """How tokens are drawn; what is not chosen is as `usual`."""
        given = {each.name: getattr(self, each.name) for each in fields(Sampling)}
        chosen = {name: value for name, value in given.items() if value is not None}
        return Sampling(**{**usual, **chosen})


REQUEST = declared(RequestOptions)
"""The options of a request by their names."""


def names_of(group: str) -> list[str]:
    """Names of the options of a group."""
    return [option.name for option in REQUEST.values() if option.info.group == group]


def check_options(options: Options) -> None:
    """Raise `OptionError` for options that no model and no method could take."""
    RequestOptions.of(options).sampling({})


def check_within(name: str, value: object, least: float, part: str = "") -> None:
    """Raise `OptionError` for what is no number from `least` to `LARGEST`."""
    if not (is_number(value) and least <= float(value) <= LARGEST):  # type: ignore[arg-type]
        message = f"{name}{part} must be a number from {least:g} to {LARGEST:g}, not {value!r}"
        raise OptionError(name, value, message)


def seeded(options: Options, further: int) -> Options:
    """Options of a seed so much further on; `OptionError` for one that is no whole number."""
    seed: object = options.get("seed", 0)
    if not is_whole(seed):
        raise OptionError("seed", seed, f"seed must be a whole number, not {seed!r}")
    return {**options, "seed": cast(int, seed) + further}

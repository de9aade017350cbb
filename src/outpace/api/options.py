"""Options of a request, validated before any computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from numpy import ndarray
from torch import Tensor

from outpace.api.declared import Info, list_options
from outpace.api.option_checks import (
    MAX_TOP_LOGPROBS,
    check_count,
    check_effort,
    check_max_tokens,
    check_range,
)
from outpace.api.option_types import Options as Options
from outpace.api.tools import ToolUse, read_tool_use
from outpace.constraint.cloze import InfillParts, check_template
from outpace.constraint.constraint_rule import ConstraintRule, constraint_rule
from outpace.decoding import Sampling
from outpace.errors import OptionError
from outpace.methods.method import MAX_FLOAT_VALUE, check_type
from outpace.methods.options import AUTO_METHOD, MethodSpec, resolve_method

MAX_ANSWER_TOKENS = 2**20
"""Upper bound of `max_tokens` and `min_tokens` in HTTP requests."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The validated `Options` of one request. Raises `OptionError` for an invalid value."""

    method: Annotated[MethodSpec | None, Info(fields=("outpace.method",))] = None
    adapter: Annotated[str | None, Info(fields=())] = None
    max_tokens: Annotated[
        int | None,
        Info(
            "Maximum number of tokens of an answer.",
            "sampling",
            usual="rest of the context; 256 for diffusion",
            bounds={"ge": 0, "le": MAX_ANSWER_TOKENS},
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Info(
            "Sampling temperature; 0 is greedy.",
            "sampling",
            usual="by method or family",
            bounds={"ge": 0, "le": 2},
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Info(
            "Probability mass of nucleus sampling.",
            "sampling",
            usual="by method or family",
            bounds={"gt": 0, "le": 1},
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Info("Sample from the k most probable tokens.", "sampling", bounds={"ge": 1, "lt": 2**31}),
    ] = None
    min_p: Annotated[
        float | None,
        Info(
            "Minimum probability, relative to the most probable token.",
            "sampling",
            bounds={"ge": 0, "le": 1},
        ),
    ] = None
    seed: Annotated[
        int,
        Info("Random seed.", "sampling", shows=True, bounds={"ge": -(2**63), "lt": 2**63}),
    ] = 0
    stop: Annotated[
        str | Sequence[str],
        Info("Stop string, not part of the answer; may be repeated.", "ending", typed=list[str]),
    ] = ()
    stop_ids: Annotated[
        Sequence[int] | Set[int] | ndarray | Tensor,
        Info(
            "Stop token id; may be repeated.",
            "ending",
            flag="stop-id",
            typed=list[int],
            fields=("stop_token_ids",),
        ),
    ] = ()
    ignore_eos: Annotated[bool, Info("Continue after end-of-sequence.", "ending", bounds={})] = (
        False
    )
    min_tokens: Annotated[
        int,
        Info(
            "Minimum number of tokens of an answer.",
            "ending",
            bounds={"ge": 0, "le": MAX_ANSWER_TOKENS},
        ),
    ] = 0
    presence_penalty: Annotated[
        float,
        Info(
            "Subtracted once from the logits of tokens in the answer.",
            "sampling",
            bounds={"ge": -2, "le": 2},
            least=-MAX_FLOAT_VALUE,
            sequential=True,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Info(
            "Subtracted from the logits of tokens per occurrence in the answer.",
            "sampling",
            bounds={"ge": -2, "le": 2},
            least=-MAX_FLOAT_VALUE,
            sequential=True,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Info(
            "Above 1, makes tokens of prompt and answer less probable.",
            "sampling",
            bounds={"ge": 0.01, "le": 100},
            least=1 / MAX_FLOAT_VALUE,
            sequential=True,
        ),
    ] = 1.0
    logit_bias: Annotated[
        Mapping[int, float],
        Info(
            "Added to the logit of a token id; may be repeated.",
            "sampling",
            typed=list[str],
            metavar="TOKEN=NUMBER",
        ),
    ] = field(default_factory=dict)
    raw: Annotated[
        bool, Info("Continue the text as it is, without the chat template.", "prompt", fields=())
    ] = False
    suffix: Annotated[str | None, Info(None, "prompt", fields=())] = None
    template: Annotated[
        Mapping[str, Any],
        Info(
            "Variable of the chat template; may be repeated.",
            "prompt",
            typed=list[str],
            metavar="NAME=VALUE",
            fields=("chat_template_kwargs",),
        ),
    ] = field(default_factory=dict)
    reasoning_effort: Annotated[
        str | None,
        Info(
            "Effort of reasoning: none, minimal, low, medium, high or xhigh.",
            "prompt",
            fields=("reasoning_effort",),
        ),
    ] = None
    max_reasoning_tokens: Annotated[
        int | None,
        Info(
            "Maximum number of tokens of the thoughts before an answer.",
            "sampling",
            bounds={"ge": 0, "le": MAX_ANSWER_TOKENS},
        ),
    ] = None
    logprobs: Annotated[bool, Info("Show the log-probability of each token.")] = False
    top_logprobs: Annotated[int, Info(fields=())] = 0
    prompt_logprobs: Annotated[int | None, Info(bounds={"ge": 0, "le": MAX_TOP_LOGPROBS})] = None
    schema: Annotated[
        Any,
        Info(
            "File with a JSON schema of the whole answer.",
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
            "Allowed answer; may be repeated.",
            "rule",
            typed=list[str],
            fields=("structured_outputs.choice", "guided_choice"),
        ),
    ] = None
    grammar: Annotated[
        str | None,
        Info(
            "File with a Lark grammar of the whole answer.",
            "rule",
            typed=Path,
            fields=("structured_outputs.grammar", "guided_grammar"),
            sequential=True,
        ),
    ] = None
    tools: Annotated[Sequence[Mapping[str, Any]] | None, Info(None, "calls", fields=())] = None
    tool_choice: Annotated[str | Mapping[str, Any] | None, Info(None, "calls", fields=())] = None
    parallel_tool_calls: Annotated[bool | None, Info(None, "calls", fields=())] = None
    cloze: Annotated[InfillParts | None, Info(fields=())] = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RequestOptions:
        """Create options from a mapping; raises `OptionError` for an unknown name."""
        known = [*REQUEST_OPTIONS]
        if unknown := sorted(set(options) - set(known)):
            message = f"{unknown[0]}: unknown option {unknown[0]!r}; options are {', '.join(known)}"
            raise OptionError(unknown[0], options[unknown[0]], message)
        method = options.get("method")
        if method is not None and method != AUTO_METHOD:
            method = resolve_method(method)
        return cls(**{**options, "method": method})

    def __post_init__(self) -> None:
        check_type("adapter", self.adapter, str | None)
        if not isinstance(self.suffix, str | None):
            message = f"suffix must be a string, got {self.suffix!r}"
            raise OptionError("suffix", self.suffix, message)
        check_max_tokens(self.max_tokens, self.prompt_logprobs)
        for name, option in REQUEST_OPTIONS.items():
            if option.kind is bool:
                check_type(name, getattr(self, name), bool)
        check_count("min_tokens", self.min_tokens)
        if self.max_reasoning_tokens is not None:
            check_count("max_reasoning_tokens", self.max_reasoning_tokens)
        check_count("top_logprobs", self.top_logprobs, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None:
            check_count("prompt_logprobs", self.prompt_logprobs, MAX_TOP_LOGPROBS)
        if self.top_logprobs and not self.logprobs:
            message = "top_logprobs needs logprobs: set both"
            raise OptionError("top_logprobs", self.top_logprobs, message)
        check_effort(self.reasoning_effort)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = (
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
            raise OptionError("min_tokens", self.min_tokens, message)
        for name, option in REQUEST_OPTIONS.items():
            if option.info.least is not None:
                check_range(name, getattr(self, name), option.info.least)
        if not isinstance(self.logit_bias, Mapping):
            message = f"logit_bias must map token ids to numbers, got {self.logit_bias!r}"
            raise OptionError("logit_bias", self.logit_bias, message)
        for token, bias in self.logit_bias.items():
            check_range("logit_bias", bias, -MAX_FLOAT_VALUE, f" of token {token!r}")
        if not isinstance(self.template, Mapping):
            message = f"template must map names to values, got {self.template!r}"
            raise OptionError("template", self.template, message)
        self.check_rule_conflicts()

    @cached_property
    def rule(self) -> ConstraintRule | None:
        """Constraint on the answer. Raises `OptionError` for an invalid constraint."""
        return self.text_rule if self.tool_use is None else ("tools", self.tool_use.rule)

    @cached_property
    def text_rule(self) -> ConstraintRule | None:
        """Constraint on the text of the answer. Raises `OptionError` for an invalid constraint."""
        return constraint_rule(
            schema=self.schema, regex=self.regex, choices=self.choices, grammar=self.grammar
        )

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """Tools that the answer may call. Raises `OptionError` for an invalid one."""
        use = read_tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        if use is None:
            return None
        if self.text_rule is not None and self.text_rule[0] == "grammar":
            self.check_absent(["grammar"], "tools")  # a grammar is no automaton
        return replace(use, text=self.text_rule)

    def check_rule_conflicts(self) -> None:
        """Raise `OptionError` for options that would cut off or extend a constrained answer."""
        rule, use = self.rule, self.tool_use
        what = rule[0] if rule else None
        names = [each for each in option_names("ending") if each != "stop_ids"]  # see `ends_of`
        if use is not None:
            names.remove("stop")
            if use.choice != "auto":
                self.check_absent(["stop"], "tool_choice")
            elif use.text is not None:
                self.check_absent(["stop"], use.text[0])
        if self.cloze is not None:
            check_template(self.cloze)
            what = "cloze"
            names += ["stop_ids", "max_tokens", "max_reasoning_tokens"]
            names += [*option_names("rule"), *option_names("calls")]
        if what is None and self.max_reasoning_tokens is not None:
            what, names = "max_reasoning_tokens", ["ignore_eos", "raw"]
        if what is not None:
            self.check_absent(names, what)
        if self.suffix is not None:
            own = [n for n in option_names("prompt") if n != "raw" and getattr(self, n)]
            names = [*own, "max_reasoning_tokens", *option_names("calls"), "cloze"]
            self.check_absent(names, "suffix")

    def check_absent(self, names: Sequence[str], what: str) -> None:
        """Raise `OptionError` for the first option that is set beside another one."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, ndarray | Tensor):
                value = value.tolist()
            if name != what and value not in (None, (), [], False, 0):
                message = f"{name} cannot be combined with {what}: omit one of the two"
                raise OptionError(name, value, message)

    def build_sampling(self, usual: Mapping[str, float]) -> Sampling:
        """Return the sampling parameters; unset ones are taken from `usual`."""
        values = {each.name: getattr(self, each.name) for each in fields(Sampling)}
        overrides = {name: value for name, value in values.items() if value is not None}
        return Sampling(**{**usual, **overrides})


REQUEST_OPTIONS = list_options(RequestOptions)
"""Options of a request by name."""


def option_names(group: str) -> list[str]:
    """Return the names of the options of a group."""
    return [option.name for option in REQUEST_OPTIONS.values() if option.info.group == group]


def check_options(options: Options) -> None:
    """Raise `OptionError` for options that are invalid for every model and method."""
    RequestOptions.of(options).build_sampling({})

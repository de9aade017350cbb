"""Options of a request, validated before any computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_args

from outpace.errors import OptionError
from outpace.field_types import (
    MAX_FLOAT,
    Bounds,
    Count,
    Fraction,
    Option,
    PositiveFraction,
    Temperature,
    check_fields,
    check_value,
    list_options,
)

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor

    from outpace.api.tools import ToolUse
    from outpace.constraint.cloze import InfillParts
    from outpace.constraint.compiler import ConstraintRule
    from outpace.decoding import Sampling
    from outpace.methods.options import MethodSpec

    TokenIds = Sequence[int] | Set[int] | ndarray | Tensor
else:
    # Declarations are read for help texts, without PyTorch; these values are checked where used.
    InfillParts = MethodSpec = TokenIds = Any

MAX_TOP_LOGPROBS = 20
"""Maximum number of most probable tokens per token of an answer, as OpenAI's."""

MAX_ANSWER_TOKENS = 2**20
"""Upper bound of `max_tokens` and `min_tokens` in HTTP requests."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

EFFORTS = get_args(Effort)
"""Values of `reasoning_effort`, as OpenAI's."""


@dataclass(frozen=True, kw_only=True)
class Info:
    """How commands and requests set an option, as a mark of its annotation."""

    group: str | None = None
    """Name of the group of flags that it belongs to; without one, commands have their own or none.
    """
    usual: str | Literal[True] | None = None
    """Description of the default where a flag is not set; True for the default itself."""
    shows: bool = False
    """Whether the default is that of the flag, too."""
    flag: str | None = None
    """Name of its flag, if different."""
    help: str | None = None
    """Help text of its flag, if different."""
    typed: Any = None
    """Type of its flag, if different: a file, or a list of strings."""
    metavar: str | None = None
    """Placeholder of a value in the help."""
    fields: tuple[str, ...] | None = None
    """Paths of its fields in a request; None for the option's name alone."""
    limits: Bounds | None = None
    """Bounds in requests, if narrower than in Python."""
    sequential: bool = False
    """Whether it needs tokens that are chosen from left to right."""


NO_INFO = Info()


def option_info(option: Option) -> Info:
    return option.mark(Info) or NO_INFO


def describe_default(option: Option) -> str | None:
    """Return the words for the default of an option, if it has any."""
    usual, default = option_info(option).usual, option.default
    if usual is not True:
        return usual
    return f"{default:g}" if isinstance(default, float) else str(default)


def option_texts(kind: type) -> dict[str, str]:
    """Return the texts of the options of a dataclass by name, with defaults that have words."""
    return {
        name: f"{option.text} Default: {usual}." if usual else option.text
        for name, option in list_options(kind).items()
        for usual in [describe_default(option)]
    }


def document_options(kind: type) -> str:
    """Return the section of a docstring that describes the options of a dataclass."""
    lines = (f"        {name}: {text}" for name, text in option_texts(kind).items())
    return "\n".join(("    Attributes:", *lines, "    "))


def options_of_group(kind: type, group: str) -> list[Option]:
    """Return the options of a dataclass that belong to a group."""
    return [each for each in list_options(kind).values() if option_info(each).group == group]


def option_fields(option: Option) -> tuple[str, ...]:
    """Return the paths of the fields of a request that set an option."""
    fields = option_info(option).fields
    return (option.name,) if fields is None else fields


class Options(TypedDict, total=False):
    """Options of one request, passed as keyword arguments; `RequestOptions` describes them."""

    method: MethodSpec | None
    adapter: str | None
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
    suffix: str | None
    continue_final_message: bool
    template: Mapping[str, Any]
    reasoning_effort: str | None
    max_reasoning_tokens: int | None
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: int | None
    schema: Any
    regex: str | None
    choices: Sequence[str] | None
    grammar: str | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    cloze: InfillParts | None


def offset_seed(options: Options, offset: int) -> Options:
    """Return options with `offset` added to the seed; raises `OptionError` for an invalid seed."""
    return {**options, "seed": check_value("seed", options.get("seed", 0), int) + offset}


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The validated `Options` of one request. Raises `OptionError` for an invalid value."""

    method: Annotated[
        MethodSpec | None,
        "A `Method`, its name, or `(name, options)`; by default the `LLM`'s. `auto` is the default "
        "of the model.",
        Info(fields=("outpace.method",)),
    ] = None
    adapter: Annotated[
        str | None,
        "Name of one of the `adapters` of the `LLM`; by default the base weights.",
        Info(fields=()),
    ] = None
    max_tokens: Annotated[
        int | None,
        Bounds(0),
        "Maximum number of tokens of an answer. Requests of a call share the cache equally.",
        Info(
            group="sampling",
            usual="rest of the context; 256 for diffusion",
            limits=Bounds(0, MAX_ANSWER_TOKENS),
        ),
    ] = None
    temperature: Annotated[
        Temperature | None,
        "Sampling temperature; 0 is greedy.",
        Info(group="sampling", usual="by method or family", limits=Bounds(0, 2)),
    ] = None
    top_p: Annotated[
        PositiveFraction | None,
        "Probability mass of nucleus sampling.",
        Info(group="sampling", usual="by method or family"),
    ] = None
    top_k: Annotated[
        Count | None,
        "Sample from the k most probable tokens.",
        Info(group="sampling", usual="by method or family"),
    ] = None
    min_p: Annotated[
        Fraction | None,
        "Minimum probability, relative to the most probable token.",
        Info(group="sampling", usual="by method or family"),
    ] = None
    seed: Annotated[
        int,
        "Random seed. Equal seeds give equal answers.",
        Info(group="sampling", shows=True, limits=Bounds(-(2**63), 2**63, below=True)),
    ] = 0
    stop: Annotated[
        str | Sequence[str],
        "String or strings that end the answer; they are not part of it.",
        Info(
            group="ending",
            help="Stop string, not part of the answer; may be repeated.",
            typed=list[str],
        ),
    ] = ()
    stop_ids: Annotated[
        TokenIds,
        "Token ids that end the answer; they are not part of it.",
        Info(
            group="ending",
            help="Stop token id; may be repeated.",
            flag="stop-id",
            typed=list[int],
            fields=("stop_token_ids",),
        ),
    ] = ()
    ignore_eos: Annotated[
        bool,
        "Continue after end-of-sequence. It then is a token of the answer.",
        Info(group="ending"),
    ] = False
    min_tokens: Annotated[
        int,
        Bounds(0),
        "Minimum number of tokens of an answer. Before it, end-of-sequence, stop ids and `stop` do "
        "not apply.",
        Info(group="ending", limits=Bounds(0, MAX_ANSWER_TOKENS)),
    ] = 0
    presence_penalty: Annotated[
        float,
        "Subtracted once from the logits of tokens in the answer.",
        Info(group="sampling", limits=Bounds(-2, 2), sequential=True),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        "Subtracted from the logits of tokens per occurrence in the answer.",
        Info(group="sampling", limits=Bounds(-2, 2), sequential=True),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Bounds(1 / MAX_FLOAT, MAX_FLOAT),
        "Above 1, makes tokens of prompt and answer less probable. It divides positive and "
        "multiplies negative logits. The three penalties need a method that commits tokens from "
        "left to right.",
        Info(group="sampling", limits=Bounds(0.01, 100), sequential=True),
    ] = 1.0
    logit_bias: Annotated[
        Mapping[int, float],
        "Values added to logits, by token id.",
        Info(
            group="sampling",
            help="Added to the logit of a token id; may be repeated.",
            typed=list[str],
            metavar="TOKEN=NUMBER",
        ),
    ] = field(default_factory=dict)
    raw: Annotated[
        bool,
        "Continue the text as it is, without the chat template.",
        Info(group="prompt", fields=()),
    ] = False
    suffix: Annotated[
        str | None,
        "Text after the answer, which is then the text between the two, without the chat template. "
        "Causal models need tokens for it, which prompts of token ids already contain; others fill "
        "`max_tokens` slots or fewer, see docs/fill.md.",
        Info(group="prompt", fields=()),
    ] = None
    continue_final_message: Annotated[
        bool,
        "Continue the last message, the beginning of an answer, in its turn.",
        Info(group="prompt", fields=()),
    ] = False
    template: Annotated[
        Mapping[str, Any],
        "Variables of the chat template, such as `enable_thinking`.",
        Info(
            group="prompt",
            help="Variable of the chat template; may be repeated.",
            typed=list[str],
            metavar="NAME=VALUE",
            fields=("chat_template_kwargs",),
        ),
    ] = field(default_factory=dict)
    reasoning_effort: Annotated[
        Effort | None,
        "Effort of reasoning: none, minimal, low, medium, high or xhigh. Sets the variable "
        "`reasoning_effort` of the chat template, or else `enable_thinking`, false for `none`.",
        Info(group="prompt", typed=str, fields=("reasoning_effort",)),
    ] = None
    max_reasoning_tokens: Annotated[
        int | None,
        Bounds(0),
        "Maximum number of tokens of the thoughts before an answer.",
        Info(group="sampling", limits=Bounds(0, MAX_ANSWER_TOKENS)),
    ] = None
    logprobs: Annotated[
        bool,
        "Show the log-probability of each token. Of each of the `choices` too, which needs a "
        "causal model.",
    ] = False
    top_logprobs: Annotated[
        int,
        Bounds(0, MAX_TOP_LOGPROBS),
        "Number of most probable tokens per token; needs `logprobs`.",
        Info(fields=()),
    ] = 0
    prompt_logprobs: Annotated[
        int | None,
        Bounds(0, MAX_TOP_LOGPROBS),
        "Return the log-probability of each token of the prompt, with this many most probable "
        "tokens. Causal models only.",
    ] = None
    schema: Annotated[
        Any,
        "JSON schema or pydantic model of the whole answer, see docs/constraints.md.",
        Info(
            group="rule",
            help="File with a JSON schema of the whole answer.",
            typed=Path,
            fields=(
                *("response_format.type", "response_format.json_schema.schema"),
                "response_format.schema",
                *("structured_outputs.json", "structured_outputs.json_object"),
            ),
        ),
    ] = None
    regex: Annotated[
        str | None,
        "Regular expression of the whole answer.",
        Info(group="rule", fields=("structured_outputs.regex",)),
    ] = None
    choices: Annotated[
        Sequence[str] | None,
        "Strings of which the answer is one.",
        Info(
            group="rule",
            help="Allowed answer; may be repeated.",
            typed=list[str],
            fields=("structured_outputs.choice",),
        ),
    ] = None
    grammar: Annotated[
        str | None,
        "Lark grammar of the whole answer. At most one of these four can be set.",
        Info(
            group="rule",
            help="File with a Lark grammar of the whole answer.",
            typed=Path,
            fields=("structured_outputs.grammar",),
            sequential=True,
        ),
    ] = None
    tools: Annotated[
        Sequence[Mapping[str, Any]] | None,
        "Functions that the answer may call, in OpenAI's form, see docs/server.md.",
        Info(group="calls", fields=()),
    ] = None
    tool_choice: Annotated[
        str | Mapping[str, Any] | None,
        "`none`, `auto` (the default), `required`, or a function in OpenAI's form.",
        Info(group="calls", fields=()),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None,
        "Whether an answer may have several calls, as by default.",
        Info(group="calls", fields=()),
    ] = None
    cloze: Annotated[
        InfillParts | None,
        "Infill template: text and `Hole`s to fill, see docs/fill.md.",
        Info(fields=()),
    ] = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RequestOptions:
        """Create options from a mapping; raises `OptionError` for an unknown name."""
        known = [*REQUEST_OPTIONS]
        if unknown := sorted(set(options) - set(known)):
            reason = f"unknown option {unknown[0]!r}; options are {', '.join(known)}"
            raise OptionError(unknown[0], options[unknown[0]], reason)
        from outpace.methods import AUTO_METHOD
        from outpace.methods.options import resolve_method

        method = options.get("method")
        if method is not None and method != AUTO_METHOD:
            method = resolve_method(method)
        return cls(**{**options, "method": method})

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise OptionError("max_tokens", 0, "must be at least 1, or 0 with prompt_logprobs")
        if self.top_logprobs and not self.logprobs:
            raise OptionError("top_logprobs", self.top_logprobs, "needs logprobs: set both")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise OptionError(
                "min_tokens", self.min_tokens, f"must be at most max_tokens={self.max_tokens}"
            )
        for bias in self.logit_bias.values():
            check_value("logit_bias", bias, float)
        self.check_rule_conflicts()

    @cached_property
    def rule(self) -> ConstraintRule | None:
        """Constraint on the answer. Raises `OptionError` for an invalid constraint."""
        return self.text_rule if self.tool_use is None else ("tools", self.tool_use.rule)

    @cached_property
    def text_rule(self) -> ConstraintRule | None:
        """Constraint on the text of the answer. Raises `OptionError` for an invalid constraint."""
        from outpace.constraint.compiler import constraint_rule

        return constraint_rule(
            schema=self.schema, regex=self.regex, choices=self.choices, grammar=self.grammar
        )

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """Tools that the answer may call. Raises `OptionError` for an invalid one."""
        from outpace.api.tools import read_tool_use

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
        names = [
            each for each in option_names("ending") if each != "stop_ids"
        ]  # see `resolve_stop_ids`
        if use is not None:
            names.remove("stop")
            if use.choice != "auto":
                self.check_absent(["stop"], "tool_choice")
            elif use.text is not None:
                self.check_absent(["stop"], use.text[0])
        if self.cloze is not None:
            from outpace.constraint.cloze import check_template

            check_template(self.cloze)
            what = "cloze"
            names += ["stop_ids", "max_tokens", "max_reasoning_tokens"]
            names += [*option_names("rule"), *option_names("calls"), "continue_final_message"]
        if what is None and self.max_reasoning_tokens is not None:
            what, names = "max_reasoning_tokens", ["ignore_eos", "raw"]
        if what is not None:
            self.check_absent(names, what)
        if self.continue_final_message:
            self.check_absent(["raw", "max_reasoning_tokens"], "continue_final_message")
        if self.suffix is not None:
            own = [n for n in option_names("prompt") if n != "raw" and getattr(self, n)]
            names = [*own, "max_reasoning_tokens", *option_names("calls"), "cloze"]
            self.check_absent(names, "suffix")

    def check_absent(self, names: Sequence[str], what: str) -> None:
        """Raise `OptionError` for the first option that is set beside another one."""
        for name in names:
            value = getattr(self, name)
            if hasattr(value, "tolist"):  # of an array or tensor, whose truth is not defined
                value = value.tolist()
            if name != what and value not in (None, (), [], False, 0):
                raise OptionError(
                    name, value, f"cannot be combined with {what}: omit one of the two"
                )

    def build_sampling(self, usual: Mapping[str, float]) -> Sampling:
        """Return the sampling parameters; unset ones are taken from `usual`."""
        from outpace.decoding import Sampling

        values = {each.name: getattr(self, each.name) for each in fields(Sampling)}
        overrides = {name: value for name, value in values.items() if value is not None}
        return Sampling(**{**usual, **overrides})


REQUEST_OPTIONS = list_options(RequestOptions)
"""Options of a request by name."""

Options.__doc__ = f"{Options.__doc__}\n\n{document_options(RequestOptions)}"


def option_names(group: str) -> list[str]:
    """Return the names of the options of a group."""
    return [each.name for each in options_of_group(RequestOptions, group)]


def check_options(options: Options) -> None:
    """Raise `OptionError` for options that are invalid for every model and method."""
    RequestOptions.of(options).build_sampling({})

"""Options of a request, validated before any computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, TypedDict, Union, cast, get_args, get_type_hints

from numpy import ndarray
from torch import Tensor

from outpace.api.tools import ToolUse, read_tool_use
from outpace.constraint.cloze import InfillParts, check_template
from outpace.constraint.compiler import ConstraintRule, constraint_rule
from outpace.decoding import Sampling
from outpace.decoding.sampling_params import is_finite_real, is_whole_number
from outpace.errors import OptionError
from outpace.methods.method import MAX_FLOAT_VALUE, check_type
from outpace.methods.options import AUTO_METHOD, MethodSpec, resolve_method


@dataclass(frozen=True)
class Info:
    """Metadata of an option, attached to its field by `Annotated`.

    Attributes:
        help: Help text of its flag; None if it has no flag, or commands have their own text.
        group: Name of the group of flags that it belongs to.
        usual: Description of the default, if no value represents it.
        shows: Whether the help shows the default.
        flag: Name of its flag, if different.
        typed: Type of its flag, if different: a file, or a list of strings.
        metavar: Placeholder of a value in the help.
        fields: Paths of its fields in a request; None for the option's name alone.
        bounds: Bounds that pydantic checks in requests and TOML; None if it has its own type there,
            or no field.
        least: Lower bound in Python, where the upper bound is that of all numbers.
        sequential: Whether it needs tokens that are chosen from left to right.
    """

    help: str | None = None
    group: str | None = None
    _: KW_ONLY
    usual: str | None = None
    shows: bool = False
    flag: str | None = None
    typed: Any = None
    metavar: str | None = None
    fields: tuple[str, ...] | None = None
    bounds: Mapping[str, float] | None = None
    least: float | None = None
    sequential: bool = False


@dataclass(frozen=True, kw_only=True)
class DeclaredOption:
    """One option of a dataclass.

    Attributes:
        name: Name of the field.
        kind: Type of the field.
        default: Default value.
        info: Metadata.
    """

    name: str
    kind: Any
    default: Any
    info: Info = field(default_factory=Info)

    @property
    def plain(self) -> Any:
        """Type of a value, without None."""
        parts = tuple(part for part in get_args(self.kind) if part is not NoneType)
        return Union[parts] if NoneType in get_args(self.kind) else self.kind  # noqa: UP007

    @property
    def fields(self) -> tuple[str, ...]:
        """Paths of its fields in a request."""
        return (self.name,) if self.info.fields is None else self.info.fields


@cache
def list_options(kind: type) -> Mapping[str, DeclaredOption]:
    """Return the options of a dataclass by name."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for each in fields(kind):
        hint, info = get_args(hints[each.name])
        default = each.default if each.default_factory is MISSING else each.default_factory()
        found[each.name] = DeclaredOption(name=each.name, kind=hint, default=default, info=info)
    return MappingProxyType(found)


class Options(TypedDict, total=False):
    """Options of one request, passed as keyword arguments.

    Attributes:
        method: A `Method`, its name, or `(name, options)`; by default the `LLM`'s. "auto" is the
            default of the model.
        adapter: Name of one of the `adapters` of the `LLM`; by default the base weights.
        max_tokens: Maximum number of tokens of the answer. By default the rest of the context, at
            most an equal share of the cache per request of the call; 256 for diffusion models.
        temperature: Sampling temperature, from 0 (greedy) on. This and the next three default to
            the value of the method, else of the model's family.
        top_p: Probability mass of nucleus sampling, above 0 and at most 1.
        top_k: Number of most probable tokens to sample from.
        min_p: Minimum probability of a token relative to the most probable one, from 0 to 1.
        seed: Random seed. Equal seeds give equal answers.
        stop: String or strings that end the answer; they are not part of it.
        stop_ids: Token ids that end the answer; they are not part of it.
        ignore_eos: Continue after end-of-sequence, which then is a token of the answer.
        min_tokens: Minimum length; before it, end-of-sequence, stop ids and `stop` do not apply.
        presence_penalty: Subtracted from the logits of tokens that occur in the answer.
        frequency_penalty: Subtracted from the logits of tokens once per occurrence in the answer.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or
            answer. The three penalties need a method that commits tokens from left to right.
        logit_bias: Values added to logits, by token id.
        raw: Continue a string prompt as it is, without the chat template.
        suffix: Text after the answer, which is then the text between the two, without the chat
            template. Causal models need tokens for it, which prompts of token ids already contain;
            others fill `max_tokens` slots or fewer, see docs/fill.md.
        continue_final_message: Continue the last message, the beginning of an answer, in its turn.
        template: Variables of the chat template, such as `enable_thinking`.
        reasoning_effort: `none`, `minimal`, `low`, `medium`, `high` or `xhigh`. Sets the variable
            `reasoning_effort` of the chat template, or else `enable_thinking`, false for `none`.
        max_reasoning_tokens: Maximum number of tokens before the text that ends the thoughts.
        logprobs: Return the log-probability of each token, and of each of the `choices`. The latter
            needs a causal model.
        top_logprobs: Number of most probable tokens per token, 20 at most; needs `logprobs`.
        prompt_logprobs: Return the log-probability of each token of the prompt, with this many most
            probable tokens, 20 at most. Causal models only.
        schema: JSON schema or pydantic model of the whole answer, see docs/constraints.md.
        regex: Regular expression that the whole answer matches.
        choices: Strings of which the answer is one.
        grammar: Lark grammar of the whole answer. At most one of these four can be set.
        tools: Functions that the answer may call, in OpenAI's form, see docs/server.md.
        tool_choice: `none`, `auto` (the default), `required`, or a function in OpenAI's form.
        parallel_tool_calls: Whether an answer may have several calls, as by default.
        cloze: Infill template: text and `Hole`s to fill, see docs/fill.md.
    """

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
    seed: object = options.get("seed", 0)
    if not is_whole_number(seed):
        raise OptionError("seed", seed, "must be an integer")
    return {**options, "seed": cast(int, seed) + offset}


MAX_TOP_LOGPROBS = 20
"""Maximum number of most probable tokens per token of an answer, as OpenAI's."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""Values of `reasoning_effort`, as OpenAI's."""


def check_count(name: str, value: Any, most: int | None = None) -> None:
    """Raise `OptionError` for a value that is not an integer from 0 to `most`."""
    if not (is_whole_number(value) and value >= 0 and (most is None or value <= most)):
        allowed = "of at least 0" if most is None else f"from 0 to {most}"
        raise OptionError(name, value, f"must be an integer {allowed}")


def check_max_tokens(max_tokens: Any, prompt_logprobs: Any) -> None:
    """Raise `OptionError` for an invalid limit, and for 0 unless the prompt is scored."""
    check_type("max_tokens", max_tokens, int | None)
    least = 0 if prompt_logprobs is not None else 1
    if max_tokens is not None and max_tokens < least:
        also = "" if max_tokens else ", or 0 with prompt_logprobs"
        raise OptionError("max_tokens", max_tokens, f"must be at least 1{also}")


def check_effort(effort: Any) -> None:
    """Raise `OptionError` for an unknown effort of reasoning."""
    if effort is not None and not (isinstance(effort, str) and effort in EFFORTS):
        raise OptionError("reasoning_effort", effort, f"must be one of {', '.join(EFFORTS)}")


def check_range(name: str, value: object, least: float, part: str = "") -> None:
    """Raise `OptionError` for a value that is not a number from `least` to `MAX_FLOAT_VALUE`."""
    if not (is_finite_real(value) and least <= float(value) <= MAX_FLOAT_VALUE):  # type: ignore[arg-type]
        raise OptionError(
            name, value, f"must be a number from {least:g} to {MAX_FLOAT_VALUE:g}{part}"
        )


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
        int, Info("Random seed.", "sampling", shows=True, bounds={"ge": -(2**63), "lt": 2**63})
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
    continue_final_message: Annotated[bool, Info(None, "prompt", fields=())] = False
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
                "response_format.schema",
                *("structured_outputs.json", "structured_outputs.json_object"),
            ),
        ),
    ] = None
    regex: Annotated[
        str | None,
        Info(
            "Regular expression of the whole answer.", "rule", fields=("structured_outputs.regex",)
        ),
    ] = None
    choices: Annotated[
        Sequence[str] | None,
        Info(
            "Allowed answer; may be repeated.",
            "rule",
            typed=list[str],
            fields=("structured_outputs.choice",),
        ),
    ] = None
    grammar: Annotated[
        str | None,
        Info(
            "File with a Lark grammar of the whole answer.",
            "rule",
            typed=Path,
            fields=("structured_outputs.grammar",),
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
            raise OptionError(
                unknown[0],
                options[unknown[0]],
                f"unknown option {unknown[0]!r}; options are {', '.join(known)}",
            )
        method = options.get("method")
        if method is not None and method != AUTO_METHOD:
            method = resolve_method(method)
        return cls(**{**options, "method": method})

    def __post_init__(self) -> None:
        check_type("adapter", self.adapter, str | None)
        if not isinstance(self.suffix, str | None):
            raise OptionError("suffix", self.suffix, "must be a string")
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
            raise OptionError("top_logprobs", self.top_logprobs, "needs logprobs: set both")
        check_effort(self.reasoning_effort)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise OptionError(
                "min_tokens", self.min_tokens, f"must be at most max_tokens={self.max_tokens}"
            )
        for name, option in REQUEST_OPTIONS.items():
            if option.info.least is not None:
                check_range(name, getattr(self, name), option.info.least)
        if not isinstance(self.logit_bias, Mapping):
            raise OptionError("logit_bias", self.logit_bias, "must map token ids to numbers")
        for token, bias in self.logit_bias.items():
            check_range("logit_bias", bias, -MAX_FLOAT_VALUE, f" for token {token!r}")
        if not isinstance(self.template, Mapping):
            raise OptionError("template", self.template, "must map names to values")
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
            if isinstance(value, ndarray | Tensor):
                value = value.tolist()
            if name != what and value not in (None, (), [], False, 0):
                raise OptionError(
                    name, value, f"cannot be combined with {what}: omit one of the two"
                )

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

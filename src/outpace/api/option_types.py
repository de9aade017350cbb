"""Names and types of the options of a request, as keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, TypedDict, cast

from numpy import ndarray
from torch import Tensor

from outpace.constraint.cloze import InfillParts
from outpace.decoding.sampling_params import is_whole_number
from outpace.errors import OptionError
from outpace.methods.options import MethodSpec


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
        template: Variables of the chat template, such as `enable_thinking`.
        reasoning_effort: `none`, `minimal`, `low`, `medium`, `high` or `xhigh`. Sets the variable
            `reasoning_effort` of the chat template, or else `enable_thinking`, false for `none`.
        max_reasoning_tokens: Maximum number of tokens before the text that ends the thoughts.
        logprobs: Return the log-probability of each token.
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
        raise OptionError("seed", seed, f"seed must be an integer, got {seed!r}")
    return {**options, "seed": cast(int, seed) + offset}

"""Prompts to token ids, and token ids back to text as they are generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from reprlib import repr as brief
from typing import Any

from numpy import integer, ndarray
from torch import Tensor

from outpace.api.chat_template import ChatTemplate, Message
from outpace.api.codec import SharedTokenizer, validate_text
from outpace.api.options import RequestOptions
from outpace.api.parts import PLAIN_FORMAT, AnswerFormat
from outpace.api.tools import ToolUse, link_calls
from outpace.constraint.calls import GENERIC_FORMAT, CallFormat
from outpace.constraint.thoughts import ThoughtFormat
from outpace.decoding import Kind
from outpace.errors import OptionError
from outpace.models.config import ModelConfig
from outpace.tokenizer import TextDecoder, Tokenizer


@dataclass(frozen=True, kw_only=True)
class MiddleFormat:
    """Tokens around the texts of a prompt: `prefix text suffix text middle`.

    Attributes:
        prefix: Token before the text that precedes the answer.
        suffix: Token before the text that follows the answer.
        middle: Token before the answer.
        ends: Further tokens that end an answer, where the vocabulary has them.
    """

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...]


MIDDLE_FORMATS = (
    MiddleFormat(
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        ends=(
            *("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
            "<|file_separator|>",
        ),
    ),
    MiddleFormat(
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        ends=("<|endoftext|>", "<fim_pad>", "<repo_name>", "<file_sep>"),
    ),
    MiddleFormat(
        prefix="<｜fim▁begin｜>",
        suffix="<｜fim▁hole｜>",
        middle="<｜fim▁end｜>",
        ends=("<｜end▁of▁sentence｜>", "<|EOT|>"),
    ),
    MiddleFormat(prefix="▁<PRE>", suffix="▁<SUF>", middle="▁<MID>", ends=("▁<EOT>",)),
)
"""Formats of Qwen2.5-Coder and CodeGemma; of StarCoder and Granite; of DeepSeek-Coder; of CodeLlama
(the order of all four is prefix, suffix, middle)."""

ANCHOR = "☺"
"""Text before a suffix, where a tokenizer adds a space to the beginning of a text."""


@dataclass(frozen=True)
class MiddleTokens:
    """Token ids by which a model fills in the middle.

    Attributes:
        marks: Those before the prefix, the suffix and the answer.
        ends: Those that end an answer.
    """

    marks: tuple[int, int, int]
    ends: frozenset[int]

    def encode(self, codec: SharedTokenizer, prefix: str, suffix: str) -> list[int]:
        """Return the prompt of the text between two texts."""
        before, after, answer = self.marks
        ids = [*codec.encode_plain("", begin=True), before, *codec.encode_plain(prefix)]
        return [*ids, after, *encode_inner(codec, suffix), answer]


def find_middle_tokens(tokenizer: Tokenizer) -> MiddleTokens | None:
    """Return the tokens of the first format that a vocabulary has, or None."""
    ids = tokenizer.get_vocab()
    for form in MIDDLE_FORMATS:
        if all(mark in ids for mark in (form.prefix, form.suffix, form.middle)):
            marks = ids[form.prefix], ids[form.suffix], ids[form.middle]
            return MiddleTokens(
                marks, frozenset({ids[e] for e in form.ends if e in ids} | {*marks})
            )
    return None


def encode_inner(codec: SharedTokenizer, text: str) -> list[int]:
    """Encode text that does not begin a sequence, so without a space before it."""
    lead = codec.encode_plain(ANCHOR)
    if not str(codec.tokenizer.backend_tokenizer.id_to_token(lead[0])).startswith("▁"):
        return codec.encode_plain(text)
    return codec.encode_plain(ANCHOR + text)[len(lead) :]


Prompt = str | Sequence[int] | Sequence[Message] | ndarray | Tensor


def validate_prompt(prompt: Any) -> str | list[Any]:
    """Return a prompt as text, ids or messages; raises `OptionError` if invalid or empty."""
    if isinstance(prompt, ndarray | Tensor):
        prompt = prompt.tolist()
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        raise OptionError("prompt", prompt, "must be text, token ids or chat messages")
    if not prompt:
        raise OptionError("prompt", prompt, "must not be empty: give text or at least one token")
    if isinstance(prompt, str):
        return validate_text("prompt", prompt)
    if any(isinstance(each, dict | str) for each in prompt):
        return link_calls([validate_message(f"messages[{n}]", m) for n, m in enumerate(prompt)])
    return [validate_token_id(n, each) for n, each in enumerate(prompt)]


def list_prompts(prompts: Any) -> list[Any]:
    """Return one prompt or many as a list; each row of a 2-D array of ids is a prompt."""
    if isinstance(prompts, ndarray | Tensor):
        prompts = prompts.tolist()
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        return [prompts]
    many = not prompts or isinstance(prompts[0], Sequence | ndarray | Tensor)
    return list(prompts) if many else [prompts]


def validate_token_id(place: int, token: Any) -> int:
    """Return a token id as `int`; raises `OptionError` if it is not an integer."""
    if isinstance(token, bool) or not isinstance(token, int | integer):
        param = f"prompt[{place}]"
        raise OptionError(param, token, "must be a token id, an integer")
    return int(token)


def validate_message(param: str, message: Any) -> Message:
    """Return the chat message `param` with its text parts joined.

    Raises:
        OptionError: If role or content is not text.
    """
    if isinstance(message, dict) and isinstance(message.get("content"), list):
        parts = (
            read_text_part(f"{param}.content[{n}]", part)
            for n, part in enumerate(message["content"])
        )
        message = {**message, "content": "".join(parts)}
    is_answer = isinstance(message, dict) and message.get("role") == "assistant"
    if is_answer and message.get("content") is None:  # an empty turn, or calls only
        message = {**message, "content": ""}
    problem = f"{brief(message)} is not a chat message: give {{'role': …, 'content': text}}"
    if not isinstance(message, dict):
        raise OptionError(param, message, problem)
    keys = ["role", "content"]
    if message.get("reasoning_content") is not None:
        keys.append("reasoning_content")
        if message.get("role") != "assistant":
            field = f"{param}.reasoning_content"
            raise OptionError(
                field, message["reasoning_content"], "only messages of the assistant may have it"
            )
    for key in keys:
        field, text = f"{param}.{key}", message.get(key)
        if not isinstance(text, str):
            raise OptionError(field, text, problem)
        validate_text(field, text)
    return message


def read_text_part(param: str, part: Any) -> str:
    """Return the text of a message part in OpenAI's format; raises `OptionError` for another."""
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise OptionError(param, part, "must be text, as in {'type': 'text', 'text': …}")


MAX_MARK_TOKENS = 16
"""Tokens at the end of a prompt that may begin or end thoughts."""


class TextCodec:
    """Tokenizer of a model; rejects text if the model has no tokenizer.

    Attributes:
        silent_ids: Ids of special tokens, which have no text.
        is_causal: Whether the model is causal, so that it fills in the middle by its tokens only.
    """

    def __init__(self, name: str, tokenizer: Tokenizer | None) -> None:
        self.name = name
        self.tokenizer = tokenizer
        added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self.codec = None if tokenizer is None else SharedTokenizer(name, tokenizer)
        self.chat_template = None if self.codec is None else ChatTemplate(self.codec)
        self.silent_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.is_causal = False

    @property
    def vocab_size(self) -> int | None:
        """Number of tokens of the tokenizer; None if there is no tokenizer."""
        return None if self.tokenizer is None else len(self.tokenizer)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Ids of special tokens, by name."""
        if self.tokenizer is None:
            return {}
        ids = [*self.silent_ids]
        return dict(zip(map(str, self.tokenizer.convert_ids_to_tokens(ids)), ids, strict=True))

    @property
    def turn_ends(self) -> frozenset[int]:
        """Ids that end an answer by the chat template, which may differ from `eos`."""
        return frozenset() if self.chat_template is None else self.chat_template.turn_ends

    @property
    def eos(self) -> frozenset[int]:
        """End-of-sequence ids of the tokenizer, which may differ from the model's."""
        if self.tokenizer is None or self.tokenizer.eos_token_id is None:
            return frozenset()
        return frozenset((self.tokenizer.eos_token_id,))

    def encode(
        self,
        prompt: Prompt | None,
        *,
        raw: bool = False,
        template: Mapping[str, Any] | None = None,
        tools: ToolUse | None = None,
        effort: str | None = None,
        suffix: str | None = None,
        continues: bool = False,
    ) -> list[int]:
        """Encode a prompt.

        Special tokens in a user's text are encoded as plain text.

        Args:
            prompt: Text, token ids or chat messages.
            raw: Whether text is continued as it is; by default it is a user message.
            template: Variables of the chat template.
            tools: Tools that the answer may call.
            effort: Effort of reasoning, see `Options`.
            suffix: Text after the answer, which a prompt of `middle_tokens` contains.
            continues: Whether the last message is the beginning of the answer.

        Raises:
            OptionError: For an invalid or empty prompt, a malformed message, text that is not UTF-8
                or has no tokenizer, an unknown variable, and if the template fails.
        """
        if suffix is not None:
            return self.encode_prefix(prompt, suffix)
        prompt, template = validate_prompt(prompt), dict(template or {})
        if unknown := [name for name in template if name not in self.template_variables]:
            names = ", ".join(sorted(self.template_variables)) or "none"
            raise OptionError(
                f"template.{unknown[0]}",
                template[unknown[0]],
                f"the chat template of {self.name} has only the variables {names}",
            )
        if isinstance(prompt, list) and not isinstance(prompt[0], dict):
            return prompt
        if self.tokenizer is None:
            raise OptionError(
                "prompt", prompt, f"{self.name} has no tokenizer: give the prompt as token ids"
            )
        instruction = ""
        if tools is not None:
            if raw and isinstance(prompt, str):
                raise OptionError("tools", None, "cannot be combined with raw: omit one")
            template |= self.required_template.tool_variables(tools.tools, tools.choice)
            if self.call_format is GENERIC_FORMAT:
                instruction = tools.instruction
        if effort is not None:
            if raw and isinstance(prompt, str):
                raise OptionError(
                    "reasoning_effort", effort, "cannot be combined with raw: omit one"
                )
            template = self.required_template.effort_variables(effort) | template
        if isinstance(prompt, list):
            return self.required_template.encode(
                prompt, template, instruction=instruction, continues=continues
            )
        if continues:
            raise OptionError(
                "continue_final_message", continues, "needs chat messages as prompt: omit it"
            )
        if raw or self.tokenizer.chat_template is None:
            return self.encode_plain(prompt, begin=True)
        messages = [{"role": "user", "content": prompt}]
        return self.required_template.encode(messages, template, instruction=instruction)

    @property
    def template_variables(self) -> frozenset[str]:
        """Names of the variables of the chat template."""
        return frozenset() if self.chat_template is None else self.chat_template.variables

    def set_model(self, config: ModelConfig) -> None:
        """Set properties of the model: text that cannot fit into its context is not tokenized."""
        self.is_causal = config.kind is Kind.CAUSAL
        if self.codec is not None:
            self.codec.context_length = config.max_length

    @cached_property
    def middle_tokens(self) -> MiddleTokens | None:
        """Tokens by which the model fills in the middle, or None."""
        return find_middle_tokens(self.tokenizer) if self.tokenizer and self.is_causal else None

    def encode_prefix(self, prompt: Prompt | None, suffix: str) -> list[int]:
        """Encode text before an answer with a suffix; token ids are returned unchanged."""
        validate_text("suffix", suffix)
        prompt = "" if prompt == "" else validate_prompt(prompt)
        if isinstance(prompt, list):
            if isinstance(prompt[0], dict):
                raise OptionError(
                    "suffix", suffix, "cannot follow messages: give the prompt as text"
                )
            return prompt
        if self.codec is None:
            raise OptionError(
                "suffix", suffix, f"{self.name} has no tokenizer: give the prompt as token ids"
            )
        if self.middle_tokens is None:
            return self.encode_plain(prompt, begin=True)
        return self.middle_tokens.encode(self.codec, prompt, suffix)

    def encode_plain(self, text: str, *, begin: bool = False) -> list[int]:
        """Encode text without special tokens; `begin` adds those that every text begins with."""
        assert self.codec is not None
        return self.codec.encode_plain(text, begin=begin)

    def render_chat(self, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
        """Render a conversation with the chat template, up to the beginning of the answer."""
        return self.required_template.render(messages, template)

    @property
    def required_template(self) -> ChatTemplate:
        """The chat template; raises `OptionError` if there is none."""
        assert self.chat_template is not None and self.tokenizer is not None
        if self.tokenizer.chat_template is None:
            raise OptionError(
                "messages", None, f"{self.name} has no chat template: give text or token ids"
            )
        return self.chat_template

    @cached_property
    def call_format(self) -> CallFormat | None:
        """Format in which the model calls tools, or None."""
        return None if self.chat_template is None else self.chat_template.call_format

    @cached_property
    def thought_format(self) -> ThoughtFormat | None:
        """Format in which the model thinks, or None."""
        return None if self.chat_template is None else self.chat_template.thought_format

    def encode_request(
        self, prompt: Prompt | None, options: RequestOptions
    ) -> tuple[list[int], AnswerFormat]:
        """Return the token ids of a prompt, and the format of the answer to it.

        An infill template may have no prompt. An answer that continues a text has no thoughts, and
        calls only if they may follow a text.
        """
        tools, continues = options.tool_use, options.continue_final_message
        if prompt is None and options.cloze is not None:
            return [], PLAIN_FORMAT
        ids = self.encode(
            prompt,
            raw=options.raw,
            template=options.template,
            tools=tools,
            effort=options.reasoning_effort,
            suffix=options.suffix,
            continues=continues,
        )
        if tools is None and (options.raw or options.suffix is not None or options.cloze):
            return ids, PLAIN_FORMAT
        thoughts = None if continues else self.thought_format
        if thoughts is not None:
            tail = self.decode(ids[-MAX_MARK_TOKENS:], special=True)
            thoughts = thoughts.after_prompt(tail)
        calls = None if tools is None else tools.call_format(self.call_format)
        if continues and calls is not None and calls.leads:
            raise OptionError(
                "continue_final_message", continues, "cannot be combined with tools: omit one"
            )
        if thoughts is not None and calls is not None:
            thoughts = thoughts.without_preface(calls.preface)
        return ids, AnswerFormat(thoughts, calls)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Decode token ids, without special tokens unless `special`.

        Returns an empty string if there is no tokenizer.
        """
        return "" if self.codec is None or not ids else self.codec.decode(ids, special=special)

    def begin_text(self) -> TextDecoder:
        """Return a decoder of a new text, token by token."""
        return TextDecoder(self.tokenizer)

    def check_same_tokens(self, other: TextCodec, ours: int, theirs: int) -> None:
        """Raise `OptionError` if two models do not share their tokens.

        Tokens at the end that only one model has, such as padding or a mask, are ignored.

        Args:
            other: Tokenizer of the other model.
            ours: Number of embeddings of this model.
            theirs: Number of embeddings of the other model.
        """
        if self.tokenizer is None or other.tokenizer is None:
            if abs(ours - theirs) > MAX_VOCAB_PADDING:
                raise OptionError(
                    "method",
                    other.name,
                    f"{other.name} has a vocabulary of {theirs} tokens and {self.name} one of "
                    f"{ours}: they must share a tokenizer",
                )
            return
        ids = list(range(min(len(self.tokenizer), len(other.tokenizer))))
        own_tokens = self.tokenizer.convert_ids_to_tokens(ids)
        other_tokens = other.tokenizer.convert_ids_to_tokens(ids)
        if own_tokens != other_tokens:
            token = next(token for token in ids if own_tokens[token] != other_tokens[token])
            raise OptionError(
                "method",
                other.name,
                f"{other.name} has a different tokenizer than {self.name}: token {token} is "
                f"{other_tokens[token]!r} there and {own_tokens[token]!r} here",
            )


MAX_VOCAB_PADDING = 512
"""Maximum difference in rows of published embeddings for one tokenizer."""

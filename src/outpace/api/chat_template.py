"""Chat template of a tokenizer: encodes a conversation so that no text turns into a control token.

A *control token* is an added token that a user's text must not turn into. It is either special, or
written by the template and not whitespace, such as the roles of DeepSeek and `<tool_call>` of
Qwen. In an assistant's message only special tokens are hidden. Decoders write all others as text,
so `<think>` in a returned answer is the token that the model generated.

The template is rendered a second time with markers in place of the first and last characters of
control tokens in the conversation. If the prompt is otherwise the same, the markers show which
tokens come from the conversation. These are then encoded as text. If the template itself searches
for such a token, as gpt-oss does, the token stays and only its borders are marked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateError
from jinja2.ext import LoopControlExtension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Call, Const, Getattr, Template, TemplateData
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from outpace.api.codec import (
    SharedTokenizer,
    TokenSpan,
    take_unused_character,
    unused_characters,
    validate_text,
)
from outpace.constraint.calls import TOOL_VARIABLES, CallFormat, find_call_format
from outpace.constraint.thoughts import CHANNELS, ThoughtFormat, find_thought_format
from outpace.errors import OptionError

Message = dict[str, Any]
AuthorMap = dict[int, bool]
"""Whether the assistant wrote a character, by position in the prompt; not of the template's."""
AuthorPatterns = Mapping[bool, re.Pattern[str]]
"""Patterns to search for in a string, by whether the assistant wrote it."""
AuthorWords = Mapping[bool, Sequence[str]]
"""Words to search for in a string, by whether the assistant wrote it."""
TextChange = Callable[[str, bool], str]
"""Function from a string, and whether the assistant wrote it, to a new string."""


def match_any(words: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the words, the longest first."""
    longest = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)")


@dataclass(frozen=True)
class TemplatePart:
    """A message or a variable of a chat template.

    Attributes:
        name: Name in error messages.
        key: Index of the message, or name of the variable.
        value: The message or value.
        by_assistant: Whether the assistant wrote it.
    """

    name: str
    key: int | str
    value: Any
    by_assistant: bool = False

    @classmethod
    def collect_parts(
        cls, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> list[TemplatePart]:
        """Return all parts of a request that a template can write."""
        return [
            *(
                cls(f"messages[{index}]", index, message, message["role"] == "assistant")
                for index, message in enumerate(messages)
            ),
            *(
                cls("tools" if key in TOOL_VARIABLES else f"template.{key}", key, value)
                for key, value in variables.items()
            ),
        ]

    @property
    def texts(self) -> list[str]:
        """All texts of the part, except the role of a message."""
        found: list[str] = []

        def note(text: str, own: bool) -> str:
            found.append(text)
            return text

        self.map_texts(note)
        return found

    def map_texts(self, change: TextChange) -> TemplatePart:
        """Return the part with `change` applied to each text, also in lists and mappings."""

        def walk(value: Any, *, message: bool = False) -> Any:
            match value:
                case str():
                    return change(value, self.by_assistant)
                case Mapping():
                    return {
                        key if message else walk(key): each
                        if message and key == "role"
                        else walk(each)
                        for key, each in value.items()
                    }
                case list() | tuple():
                    return [walk(each) for each in value]
            return value

        return replace(self, value=walk(self.value, message=isinstance(self.key, int)))

    def matches_any(self, patterns: AuthorPatterns) -> bool:
        """Return whether one of its texts matches the pattern of its author."""
        return any(map(patterns[self.by_assistant].search, self.texts))


CONTINUED = "continue_final_message"
"""Key of the part that holds thoughts and text of the last message, if it is continued."""


class Mark(NamedTuple):
    """What a marker represents: a character, or a border of a word.

    Attributes:
        text: The character or word.
        by_assistant: Whether the assistant wrote it.
        side: 1 for the border before a word, -1 for the border after it, 0 for a character.
        is_lone: Whether the word has no border on its other side.
    """

    text: str
    by_assistant: bool
    side: int = 0
    is_lone: bool = False


class Markers:
    """Replaces control tokens in texts by markers, from which the original text is restored.

    Args:
        hidden: Patterns of control tokens.
        edges: Pattern of their first and last characters.
        kept: Words to leave unchanged, since the template may search for them.
        fenced: Words whose borders are marked, since they are control tokens or parts of them.
        free: Characters that occur nowhere.
        inner: Fenced words with a single border where a string begins or ends with them, since the
            template may search for that.
    """

    def __init__(
        self,
        hidden: AuthorPatterns,
        edges: re.Pattern[str],
        kept: AuthorWords,
        fenced: AuthorWords,
        free: Iterator[str],
        *,
        inner: Collection[str] = (),
    ) -> None:
        self.hidden, self.edges, self.free, self.inner = hidden, edges, free, inner
        # A template that searches for a word inside another may leave a part of the other one.
        words = {word for each in fenced.values() for word in each}
        self.outer_words = {
            word for word in words if not any(each in word for each in words - {word})
        }
        self.patterns = {
            own: re.compile(
                f"(?P<fenced>{match_any(fenced[own]).pattern})|(?P<control>{pattern.pattern})"
                f"|(?P<kept>{match_any(kept[own]).pattern})|{edges.pattern}"
            )
            for own, pattern in hidden.items()
        }
        self.marks: dict[Mark, str] = {}

    def find_marker(self, *fields: Any) -> str:
        """Return the marker character of a `Mark` with these fields."""
        mark = Mark(*fields)
        if mark not in self.marks:
            self.marks[mark] = take_unused_character(self.free)
        return self.marks[mark]

    def fence_word(self, word: str, own: bool, *, first: bool, last: bool) -> str:
        """Return a word with both borders, or with one if it begins or ends a string."""
        if first and last:
            raise ValueError("the text is a word that the template searches for")
        before = "" if first else self.find_marker(word, own, 1, last)
        return before + word + ("" if last else self.find_marker(word, own, -1, first))

    def hide_tokens(self, text: str, own: bool) -> str:
        """Return a string with markers; raises `ValueError` if a control token cannot be hidden."""
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())

        def change(match: re.Match[str]) -> str:
            word = match.group()
            if match.lastgroup == "kept":
                return word
            if match.lastgroup != "fenced":
                return self.edges.sub(lambda edge: self.find_marker(edge.group(), own), word)
            inner = word in self.inner
            first, last = match.start() <= begin, match.end() >= end
            return self.fence_word(word, own, first=inner and first, last=inner and last)

        changed = self.patterns[own].sub(change, text)
        bare = self.patterns[own].sub(
            lambda m: "\0" if m.lastgroup == "fenced" else change(m), text
        )
        if self.hidden[own].search(bare):
            raise ValueError("a control token overlaps a word that the template searches for")
        return changed

    def restore_text(self, rendered: str) -> tuple[str, AuthorMap]:
        """Restore a rendered text.

        Returns:
            The text without markers, and the author of each marked character.

        Raises:
            ValueError: If a part of a word may remain without a marker.
        """
        meanings = {character: mark for mark, character in self.marks.items()}
        pattern = match_any([*meanings])
        authors: AuthorMap = {}
        borders: list[tuple[int, Mark]] = []
        for match in pattern.finditer(rendered):
            mark, place = meanings[match.group()], match.start() - len(borders)
            if mark.side:
                borders.append((place, mark))
            else:
                authors[place] = mark.by_assistant
        plain = pattern.sub(
            lambda match: "" if (mark := meanings[match.group()]).side else mark.text, rendered
        )
        self.restore_words(plain, borders, authors)
        return plain, authors

    def restore_words(
        self, plain: str, borders: Sequence[tuple[int, Mark]], authors: AuthorMap
    ) -> None:
        """Add the author of each word between borders to `authors`."""
        pairs, torn = set(borders), []
        for place, mark in borders:
            size = len(mark.text)
            begin = place if mark.side > 0 else place - size
            far = place + mark.side * size, mark._replace(side=-mark.side)
            # A template that drops a word leaves its borders, perhaps next to the same word.
            if (mark.is_lone or far in pairs) and begin >= 0 and plain.startswith(mark.text, begin):
                authors |= dict.fromkeys(range(begin, begin + size), mark.by_assistant)
            elif mark.text not in self.outer_words:
                torn.append((place, mark))
        for place, mark in torn:
            inside, end = (place, 0) if mark.side > 0 else (place - 1, -1)
            if inside not in authors and plain[inside : inside + 1] == mark.text[end]:
                raise ValueError("a part of a word may remain")


RESERVED_NAMES = {"messages", "add_generation_prompt", "documents", "raise_exception"} | {
    *TOOL_VARIABLES,
    "strftime_now",
    "continue_final_message",
    "chat_template",
    "tokenize",
}
"""Names in a chat template that are not variables of a request."""

REASONING_FIELDS = ("reasoning_content", "thinking")
"""Fields of messages by which chat templates receive thoughts, the usual one first."""


class TemplateSource:
    """Parts of a chat template, by its syntax tree."""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.name, self.tokenizer = name, tokenizer

    @cached_property
    def syntax_trees(self) -> list[Template]:
        """Syntax trees of the template, or of all templates if there are several."""
        sources = self.tokenizer.chat_template or []
        sources = sources.values() if isinstance(sources, dict) else sources
        # The `generation` tags, which training needs, are not part of Jinja.
        plain = [
            re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", source)
            for source in ([sources] if isinstance(sources, str) else sources)
        ]
        try:
            return [Environment(extensions=[LoopControlExtension]).parse(each) for each in plain]
        except TemplateError as error:
            message = f"messages: the chat template of {self.name} fails: {error}"
            raise OptionError("messages", None, message) from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that a request may set."""
        names = {name for tree in self.syntax_trees for name in find_undeclared_variables(tree)}
        return frozenset(name for name in names - RESERVED_NAMES if not name.endswith("_token"))

    @cached_property
    def call_format(self) -> CallFormat | None:
        """Format of the calls of tools that the template describes, or None."""
        return (
            None if self.tool_variable is None else find_call_format(self.tokenizer.chat_template)
        )

    @cached_property
    def tool_variable(self) -> str | None:
        """Variable by which the template receives tools, or None."""
        names = {name for tree in self.syntax_trees for name in find_undeclared_variables(tree)}
        return next((name for name in TOOL_VARIABLES if name in names), None)

    def tool_variables(self, tools: Sequence[Message], choice: str) -> dict[str, Any]:
        """Return the variables by which the template receives tools.

        Raises:
            OptionError: If it does not support them.
        """
        if self.tool_variable is None or self.call_format is None:
            field = "tools" if choice == "auto" else "tool_choice"
            message = (
                f"{field}: the chat template of {self.name} does not describe tools in a known "
                f"format, which tool_choice={choice!r} with tools needs; use tool_choice='none'"
            )
            raise OptionError(field, choice, message)
        return {self.tool_variable: [*tools]}

    @cached_property
    def thought_format(self) -> ThoughtFormat | None:
        """Format of the thoughts that the template describes, or None."""
        return find_thought_format(self.tokenizer.chat_template)

    @cached_property
    def reasoning_field(self) -> str | None:
        """Field of messages by which the template receives thoughts, or None."""
        return next((name for name in REASONING_FIELDS if name in self.message_fields), None)

    def effort_variables(self, effort: str) -> dict[str, Any]:
        """Return the variables by which the template receives an effort of reasoning.

        Raises:
            OptionError: If it has no such variable.
        """
        if "reasoning_effort" in self.variables:
            return {"reasoning_effort": effort}
        if "enable_thinking" in self.variables:
            return {"enable_thinking": effort != "none"}
        message = (
            f"reasoning_effort: the chat template of {self.name} has neither the variable "
            "reasoning_effort nor enable_thinking; omit it"
        )
        raise OptionError("reasoning_effort", effort, message)

    def write_message(self, number: int, message: Message) -> Message:
        """Return a message in the form that the template expects.

        Raises:
            OptionError: If the template supports neither calls nor their results.
        """
        return self.write_calls(number, self.write_thoughts(message))

    def write_thoughts(self, message: Message) -> Message:
        """Return a message with its thoughts in the template's field, or else as text.

        Without a format of thoughts, they are left out.
        """
        if "reasoning_content" not in message:
            return message
        message = {**message}
        thoughts, form = message.pop("reasoning_content"), self.thought_format
        if thoughts and self.reasoning_field is not None:
            message[self.reasoning_field] = thoughts
        elif thoughts and form is not None:
            before = f"{form.begin}\n{thoughts}\n{form.end}\n\n"
            message["content"] = before + message["content"]
        return message

    def write_calls(self, number: int, message: Message) -> Message:
        """Return a message whose calls of tools the template writes, or that has them as text.

        Raises:
            OptionError: If the template supports neither calls nor their results.
        """
        calls = message.get("tool_calls")
        if not calls and "tool_call_id" not in message:
            return message
        if "tool" not in self.string_constants or (self.call_format is None and not self.has_calls):
            field = f"messages[{number}].{'tool_calls' if calls else 'role'}"
            text = f"{field}: the chat template of {self.name} supports no calls of tools"
            raise OptionError(field, None, text)
        if not calls or self.has_calls:
            return message
        assert self.call_format is not None
        functions = [call["function"] for call in calls]
        written = self.call_format.write_calls(
            (each["name"], json.dumps(each["arguments"], ensure_ascii=False)) for each in functions
        )
        content = "\n".join(filter(None, (message["content"], written)))
        return {"role": message["role"], "content": content}

    @property
    def has_calls(self) -> bool:
        """Whether the template writes the calls in a message."""
        return "tool_calls" in self.message_fields

    @cached_property
    def message_fields(self) -> frozenset[str]:
        """Names of attributes and other strings in the template, such as fields of messages."""
        nodes = chain.from_iterable(tree.find_all(Getattr) for tree in self.syntax_trees)
        return self.string_constants | {each.attr for each in nodes}

    @cached_property
    def string_constants(self) -> frozenset[str]:
        """Strings in the template's expressions, which it may search for in a string."""
        found = chain.from_iterable(tree.find_all(Const) for tree in self.syntax_trees)
        return frozenset(each.value for each in found if isinstance(each.value, str) and each.value)

    @cached_property
    def boundary_constants(self) -> frozenset[str]:
        """Strings that the template searches for at the beginning or end of a string."""
        calls = chain.from_iterable(tree.find_all(Call) for tree in self.syntax_trees)
        return frozenset(
            word.value
            for call in calls
            if isinstance(call.node, Getattr) and call.node.attr in ("startswith", "endswith")
            for argument in call.args
            for word in (argument, *argument.find_all(Const))
            if isinstance(word, Const) and isinstance(word.value, str)
        )


class ChatTemplate(TemplateSource):
    """The chat template of a tokenizer."""

    def __init__(self, codec: SharedTokenizer) -> None:
        super().__init__(codec.name, codec.tokenizer)
        self.codec = codec

    @cached_property
    def control_tokens(self) -> dict[int, str]:
        """Control tokens by id."""
        data = chain.from_iterable(tree.find_all(TemplateData) for tree in self.syntax_trees)
        written = "\0".join([*self.string_constants, *(each.data for each in data)])
        return {
            number: text
            for number, token in self.tokenizer.added_tokens_decoder.items()
            if (text := str(token)) and (token.special or (text in written and not text.isspace()))
        }

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """Control tokens that an assistant's text must not turn into either."""
        added = self.tokenizer.added_tokens_decoder
        return {
            number: text for number, text in self.control_tokens.items() if added[number].special
        }

    @cached_property
    def hidden_patterns(self) -> dict[bool, re.Pattern[str]]:
        """Patterns of the control tokens to hide, by whether the assistant wrote the text."""
        return {
            False: match_any([*self.control_tokens.values()]),
            True: match_any([*self.special_tokens.values()]),
        }

    @cached_property
    def edge_pattern(self) -> re.Pattern[str]:
        """Pattern of the first and last characters of control tokens."""
        return match_any(
            sorted({text[end] for text in self.control_tokens.values() for end in (0, -1)})
        )

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """Render a conversation, up to the beginning of the answer.

        Raises:
            OptionError: If the template fails.
            ContextError: If the text exceeds the context.
        """
        try:
            rendered = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **variables
            )
        except Exception as error:  # a template is a program and may raise anything
            message = f"messages: the chat template of {self.name} fails: {error}"
            raise OptionError("messages", messages, message) from error
        self.codec.check_length(str(rendered))
        return validate_text("messages", str(rendered))

    def render_parts(self, parts: Sequence[TemplatePart]) -> str:
        """Render the parts of a conversation."""
        messages = [part.value for part in parts if isinstance(part.key, int)]
        variables = {str(part.key): part.value for part in parts[len(messages) :]}
        continued = variables.pop(CONTINUED, None)
        rendered = self.render(messages, variables)
        return rendered if continued is None else rendered + self.write_begun(rendered, *continued)

    def write_begun(self, rendered: str, thoughts: str, text: str) -> str:
        """Return the beginning of an answer, as the model writes it after a rendered prompt."""
        form = self.thought_format
        if form is None or (form := form.after_prompt(rendered)) is None:
            return text
        if form.begin and not thoughts:
            return form.direct + text
        gap = "" if self.thought_format is CHANNELS else "\n"
        before = f"{form.begin}{gap}" if form.begin else ""
        return f"{before}{thoughts}{gap}{form.end}{gap * 2}{text}"

    def encode(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        continues: bool = False,
    ) -> list[int]:
        """Encode a conversation; if it `continues`, its last message begins the answer.

        Raises:
            OptionError: For a role with a control token, if rendering fails, for a message in
                which control tokens cannot be separated from text, and for a last message that
                cannot be continued.
        """
        for number, message in enumerate(messages):
            if self.hidden_patterns[False].search(role := message["role"]):
                param = f"messages[{number}].role"
                text = f"{param} must not contain a special token, got {role!r}"
                raise OptionError(param, role, text)
        last = self.take_continued(messages) if continues else []
        messages = [
            self.write_message(*e) for e in enumerate(messages[: len(messages) - len(last)])
        ]
        parts = TemplatePart.collect_parts(messages, variables) + last
        text = self.render_parts(parts)
        authors = self.find_authors(parts, text)
        ids, spans = self.codec.encode_with_spans(text)
        control = [self.trim_span(text, span) for span in spans if span[0] in self.control_tokens]
        own = [span for span in control if not self.is_text(span, authors)]
        if own == control:
            return ids
        return self.codec.encode_selected(text, own, frozenset(self.control_tokens))

    def take_continued(self, messages: Sequence[Message]) -> list[TemplatePart]:
        """Return the thoughts and text of the last message as a part.

        Raises:
            OptionError: If it is not the assistant's, has no text, or has calls of tools.
        """
        param, message = f"messages[{len(messages) - 1}]", messages[-1]
        problems = {
            "role": message["role"] != "assistant" and "must be 'assistant'",
            "tool_calls": message.get("tool_calls") and "must be absent",
            "content": not message["content"] and "must not be empty",
        }
        for name, problem in problems.items():
            if problem:
                text = f"{param}.{name}: {problem} in a last message that is continued"
                raise OptionError(f"{param}.{name}", message.get(name), text)
        value = [message.get("reasoning_content", ""), message["content"]]
        return [TemplatePart(param, CONTINUED, value, by_assistant=True)]

    def trim_span(self, text: str, span: TokenSpan) -> TokenSpan:
        """Return the span of a control token without the whitespace that it absorbs."""
        token, begin, end = span
        found = text.find(self.control_tokens[token], begin, end)
        return span if found < 0 else (token, found, found + len(self.control_tokens[token]))

    def is_text(self, span: TokenSpan, authors: AuthorMap) -> bool:
        """Return whether a control token is part of a string that must not contain it."""
        token, begin, end = span
        ends = [authors[place] for place in (begin, end - 1) if place in authors]
        return bool(ends) and (not all(ends) or token in self.special_tokens)

    def find_authors(self, parts: Sequence[TemplatePart], text: str) -> AuthorMap:
        """Find the authors of the first and last characters of control tokens in a prompt.

        Raises:
            OptionError: If they cannot be determined, naming the part.
        """
        edged = [
            part
            for part in parts
            if part.matches_any({True: self.edge_pattern, False: self.edge_pattern})
        ]
        if not edged:
            return {}
        if (found := self.trace_authors(parts, edged, text)) is not None:
            return found
        holders = [part for part in edged if part.matches_any(self.hidden_patterns)]
        suspects, what = (holders, "a") if holders else (edged, "part of a")
        guilty = (part for part in suspects if self.trace_authors(parts, [part], text) is None)
        part = next(guilty, suspects[0])
        raise OptionError(
            part.name,
            part.value,
            f"{part.name} contains {what} special token, which changes the output of the chat "
            f"template of {self.name}: remove it",
        )

    def trace_authors(
        self, parts: Sequence[TemplatePart], edged: Sequence[TemplatePart], text: str
    ) -> AuthorMap | None:
        """Find the authors from markers in the parts `edged`; None if they cannot be determined."""
        same = False
        for markers in self.candidate_markers(
            text, *(each for part in parts for each in part.texts)
        ):
            try:
                shown = [
                    part.map_texts(markers.hide_tokens) if part in edged else part for part in parts
                ]
                rendered = self.render_parts(shown)
                plain, authors = markers.restore_text(rendered)
            except ValueError:  # the template depends on what is hidden
                continue
            if plain == text:
                return authors
            same |= self.hidden_patterns[False].findall(rendered) == self.hidden_patterns[
                False
            ].findall(text)
        # Text without a control token could only be a part of one, which it is not here.
        return (
            {}
            if same and not any(part.matches_any(self.hidden_patterns) for part in edged)
            else None
        )

    def candidate_markers(self, *known: str) -> Iterator[Markers]:
        """Yield candidate ways to mark strings, the strictest first."""
        free = unused_characters(*known, *self.string_constants)
        plain, parts, single, several = self.word_groups
        none: dict[bool, list[str]] = {True: [], False: []}
        yield Markers(self.hidden_patterns, self.edge_pattern, none, none, free)
        yield Markers(self.hidden_patterns, self.edge_pattern, plain, none, free)
        for groups in ((parts, single), (parts, single, several)):
            fenced = {own: [word for group in groups for word in group[own]] for own in none}
            for inner in (frozenset[str](), self.boundary_constants):
                yield Markers(
                    self.hidden_patterns, self.edge_pattern, plain, fenced, free, inner=inner
                )

    @cached_property
    def word_groups(self) -> tuple[dict[bool, list[str]], ...]:
        """Words that the template may search for and that overlap control tokens.

        Returns:
            Four groups: words that share only characters with a token, that may be part of one,
                that are one, and longer words.
        """
        tokens = [*self.control_tokens.values()]
        heads = {token[:end] for token in tokens for end in range(1, len(token))}
        tails = {token[begin:] for token in tokens for begin in range(1, len(token))}

        def classify_word(word: str, own: bool) -> int:
            if self.hidden_patterns[own].search(word):
                return 2 if self.hidden_patterns[own].fullmatch(word) else 3
            ends = range(1, len(word) + 1)
            partial = any(word[-end:] in heads or word[:end] in tails for end in ends)
            return int(partial or any(word in token and word != token for token in tokens))

        words = [word for word in self.string_constants if self.edge_pattern.search(word)]
        return tuple(
            {
                own: [word for word in words if classify_word(word, own) == number]
                for own in (True, False)
            }
            for number in range(4)
        )

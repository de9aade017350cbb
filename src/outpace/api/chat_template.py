"""Chat template of a tokenizer: encodes a conversation so that no text turns into a control token.

A *control token* is an added token that a user's text must not turn into. It is either special, or
written by the template and not white space, such as the roles of DeepSeek and `<tool_call>` of
Qwen. In an assistant's message only special tokens are hidden. Decoders write all others as text,
so `<think>` in a returned answer is the token that the model generated.

The template is rendered a second time with markers in place of the first and last characters of
control tokens in the conversation. If the prompt is otherwise the same, the markers show which
tokens come from the conversation. These are then encoded as text. If the template itself searches
for such a token, as gpt-oss does, the token stays and only its borders are marked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from jinja2 import Environment, TemplateError
from jinja2.ext import LoopControlExtension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Call, Const, Getattr, Template, TemplateData

from outpace.api.codec import Codec, Span, checked_text, free_characters
from outpace.api.markers import Authors, Markers, Message, Part, any_of
from outpace.errors import OptionError

GIVEN = {"messages", "add_generation_prompt", "tools", "documents", "raise_exception"} | {
    "strftime_now",
    "continue_final_message",
    "chat_template",
    "tokenize",
}
"""Names in a chat template that are not variables of a request."""


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, codec: Codec) -> None:
        self.codec, self.name = codec, codec.name
        self.tokenizer = codec.tokenizer

    @cached_property
    def trees(self) -> list[Template]:
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
        names = {name for tree in self.trees for name in find_undeclared_variables(tree)}
        return frozenset(name for name in names - GIVEN if not name.endswith("_token"))

    @cached_property
    def constants(self) -> frozenset[str]:
        """Strings in the template's expressions, which it may search for in a text."""
        found = chain.from_iterable(tree.find_all(Const) for tree in self.trees)
        return frozenset(each.value for each in found if isinstance(each.value, str) and each.value)

    @cached_property
    def control(self) -> dict[int, str]:
        """Control tokens by id."""
        data = chain.from_iterable(tree.find_all(TemplateData) for tree in self.trees)
        written = "\0".join([*self.constants, *(each.data for each in data)])
        return {
            number: text
            for number, token in self.tokenizer.added_tokens_decoder.items()
            if (text := str(token)) and (token.special or (text in written and not text.isspace()))
        }

    @cached_property
    def special(self) -> dict[int, str]:
        """Control tokens that an assistant's text must not turn into either."""
        added = self.tokenizer.added_tokens_decoder
        return {number: text for number, text in self.control.items() if added[number].special}

    @cached_property
    def hidden(self) -> dict[bool, re.Pattern[str]]:
        """Patterns of the control tokens to hide, by whether the assistant wrote the text."""
        return {
            False: any_of([*self.control.values()]),
            True: any_of([*self.special.values()]),
        }

    @cached_property
    def edges(self) -> re.Pattern[str]:
        """Pattern of the first and last characters of control tokens."""
        return any_of(sorted({text[end] for text in self.control.values() for end in (0, -1)}))

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
        return checked_text("messages", str(rendered))

    def render_parts(self, parts: Sequence[Part]) -> str:
        """Render the parts of a conversation."""
        messages = [part.value for part in parts if isinstance(part.key, int)]
        return self.render(messages, {str(part.key): part.value for part in parts[len(messages) :]})

    def encode(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> list[int]:
        """Encode a conversation.

        Raises:
            OptionError: For a role with a control token, if rendering fails, and for a message in
                which control tokens cannot be separated from text.
        """
        for number, message in enumerate(messages):
            if self.hidden[False].search(role := message["role"]):
                param = f"messages[{number}].role"
                text = f"{param} must not contain a special token, got {role!r}"
                raise OptionError(param, role, text)
        parts = Part.all(messages, variables)
        text = self.render_parts(parts)
        authors = self.authors(parts, text)
        ids, spans = self.codec.marked(text)
        control = [self.place(text, span) for span in spans if span[0] in self.control]
        own = [span for span in control if not self.is_text(span, authors)]
        if own == control:
            return ids
        return self.codec.only(text, own, frozenset(self.control))

    def place(self, text: str, span: Span) -> Span:
        """Return the span of a control token without the white space that it absorbs."""
        token, begin, end = span
        found = text.find(self.control[token], begin, end)
        return span if found < 0 else (token, found, found + len(self.control[token]))

    def is_text(self, span: Span, authors: Authors) -> bool:
        """Return whether a control token is part of a text that must not contain it."""
        token, begin, end = span
        ends = [authors[place] for place in (begin, end - 1) if place in authors]
        return bool(ends) and (not all(ends) or token in self.special)

    def authors(self, parts: Sequence[Part], text: str) -> Authors:
        """Find the authors of the first and last characters of control tokens in a prompt.

        Raises:
            OptionError: If they cannot be determined, naming the part.
        """
        edged = [part for part in parts if part.holds({True: self.edges, False: self.edges})]
        if not edged:
            return {}
        if (found := self.trace(parts, edged, text)) is not None:
            return found
        holders = [part for part in edged if part.holds(self.hidden)]
        suspects, what = (holders, "a") if holders else (edged, "part of a")
        guilty = (part for part in suspects if self.trace(parts, [part], text) is None)
        part = next(guilty, suspects[0])
        raise OptionError(
            part.name,
            part.value,
            f"{part.name} contains {what} special token, which changes the output of the chat "
            f"template of {self.name}: remove it",
        )

    def trace(self, parts: Sequence[Part], edged: Sequence[Part], text: str) -> Authors | None:
        """Find the authors from markers in the parts `edged`; None if they cannot be determined."""
        same = False
        for markers in self.markers(text, *(each for part in parts for each in part.texts)):
            try:
                shown = [part.changed(markers.hide) if part in edged else part for part in parts]
                rendered = self.render_parts(shown)
                plain, authors = markers.read(rendered)
            except ValueError:  # the template depends on what is hidden
                continue
            if plain == text:
                return authors
            same |= self.hidden[False].findall(rendered) == self.hidden[False].findall(text)
        # Text without a control token could only be a part of one, which it is not here.
        return {} if same and not any(part.holds(self.hidden) for part in edged) else None

    def markers(self, *known: str) -> Iterator[Markers]:
        """Yield candidate ways to mark texts, the strictest first."""
        free = free_characters(*known, *self.constants)
        plain, parts, single, several = self.words
        none: dict[bool, list[str]] = {True: [], False: []}
        yield Markers(self.hidden, self.edges, none, none, free)
        yield Markers(self.hidden, self.edges, plain, none, free)
        for groups in ((parts, single), (parts, single, several)):
            fenced = {own: [word for group in groups for word in group[own]] for own in none}
            for inner in (frozenset[str](), self.ends):
                yield Markers(self.hidden, self.edges, plain, fenced, free, inner=inner)

    @cached_property
    def ends(self) -> frozenset[str]:
        """Strings that the template searches for at the beginning or end of a text."""
        calls = chain.from_iterable(tree.find_all(Call) for tree in self.trees)
        return frozenset(
            word.value
            for call in calls
            if isinstance(call.node, Getattr) and call.node.attr in ("startswith", "endswith")
            for argument in call.args
            for word in (argument, *argument.find_all(Const))
            if isinstance(word, Const) and isinstance(word.value, str)
        )

    @cached_property
    def words(self) -> tuple[dict[bool, list[str]], ...]:
        """Words that the template may search for and that overlap control tokens.

        Returns:
            Four groups: words that share only characters with a token, that may be part of one,
                that are one, and longer words.
        """
        tokens = [*self.control.values()]
        heads = {token[:end] for token in tokens for end in range(1, len(token))}
        tails = {token[begin:] for token in tokens for begin in range(1, len(token))}

        def group(word: str, own: bool) -> int:
            if self.hidden[own].search(word):
                return 2 if self.hidden[own].fullmatch(word) else 3
            ends = range(1, len(word) + 1)
            partial = any(word[-end:] in heads or word[:end] in tails for end in ends)
            return int(partial or any(word in token and word != token for token in tokens))

        words = [word for word in self.constants if self.edges.search(word)]
        return tuple(
            {own: [word for word in words if group(word, own) == number] for own in (True, False)}
            for number in range(4)
        )

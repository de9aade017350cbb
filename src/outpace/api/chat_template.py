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

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from jinja2.nodes import TemplateData

from outpace.api.codec import SharedTokenizer, TokenSpan, unused_characters, validate_text
from outpace.api.markers import AuthorMap, Markers, Message, TemplatePart, match_any
from outpace.api.template_source import TemplateSource
from outpace.errors import OptionError


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
        return self.render(messages, {str(part.key): part.value for part in parts[len(messages) :]})

    def encode(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> list[int]:
        """Encode a conversation.

        Raises:
            OptionError: For a role with a control token, if rendering fails, and for a message in
                which control tokens cannot be separated from text.
        """
        for number, message in enumerate(messages):
            if self.hidden_patterns[False].search(role := message["role"]):
                param = f"messages[{number}].role"
                text = f"{param} must not contain a special token, got {role!r}"
                raise OptionError(param, role, text)
        messages = [self.write_message(*each) for each in enumerate(messages)]
        parts = TemplatePart.collect_parts(messages, variables)
        text = self.render_parts(parts)
        authors = self.find_authors(parts, text)
        ids, spans = self.codec.encode_with_spans(text)
        control = [self.trim_span(text, span) for span in spans if span[0] in self.control_tokens]
        own = [span for span in control if not self.is_text(span, authors)]
        if own == control:
            return ids
        return self.codec.encode_selected(text, own, frozenset(self.control_tokens))

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

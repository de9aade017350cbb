"""Chat template of a tokenizer: encodes a conversation so that no text turns into a control token.

A *control token* is an added token that a user's text must not turn into. It is either special, or
written by the template and not whitespace, such as the roles of DeepSeek and `<tool_call>` of
Qwen. In an assistant's message only special tokens are hidden. Decoders write all others as text,
so `<think>` in a returned answer is the token that the model generated.

The template is rendered a second time with marks in place of the first and last characters of
control tokens: one kind of mark in the strings that the template writes, another in the texts of
everyone but the assistant. Strings that it only compares with a text stay. If the prompt is
otherwise the same, the marks show who wrote each token. If it is not, as for a template that
searches a user's text for a token, only the template's strings are marked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import (
    Call,
    Compare,
    Const,
    Filter,
    Getattr,
    Getitem,
    Node,
    Template,
    TemplateData,
    Test,
)

from outpace.api.codec import (
    PRIVATE_CODE_POINTS,
    SharedTokenizer,
    TokenSpan,
    take_unused_character,
    unused_characters,
    validate_text,
)
from outpace.api.rendering import find_template, parse_template, render_template, template_errors
from outpace.constraint.calls import GENERIC_FORMAT, TOOL_VARIABLES, CallFormat, find_call_format
from outpace.constraint.thoughts import CHANNELS, ThoughtFormat, find_thought_format
from outpace.errors import OptionError
from outpace.tokenizer import Tokenizer

Message = dict[str, Any]
NamedMessage = tuple[str, Message]
"""A message with its name in errors."""

SEARCHES = {"split", "rsplit", "strip", "lstrip", "rstrip", "startswith", "endswith", "replace"} | {
    *("find", "rfind", "index", "rindex", "count", "partition", "rpartition"),
    *("removeprefix", "removesuffix", "trim"),
}
"""Methods of strings, and filters, whose first argument is searched for and never written."""


def match_any(words: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the words, the longest first."""
    longest = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)")


@dataclass(frozen=True)
class TemplatePart:
    """A message or a variable of a chat template."""

    name: str
    """Name in error messages."""
    key: int | str
    """Index of the message, or name of the variable."""
    value: Any
    by_assistant: bool = False

    @classmethod
    def collect_parts(
        cls, messages: Sequence[NamedMessage], variables: Mapping[str, Any]
    ) -> list[TemplatePart]:
        """Return all parts of a request that a template can write."""
        return [
            *(
                cls(name, index, message, message["role"] == "assistant")
                for index, (name, message) in enumerate(messages)
            ),
            *(
                cls("tools" if key in TOOL_VARIABLES else f"template.{key}", key, value)
                for key, value in variables.items()
            ),
        ]

    def map_texts(self, change: Callable[[str], str]) -> TemplatePart:
        """Return the part with `change` applied to each text, except the role of a message."""

        def walk(value: Any, *, message: bool = False) -> Any:
            match value:
                case str():
                    return change(value)
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

    @cached_property
    def text(self) -> str:
        """All its texts, except the role of a message."""
        found: list[str] = []

        def collect(text: str) -> str:
            found.append(text)
            return text

        self.map_texts(collect)
        return "\0".join(found)


ANSWER_MARK = chr(PRIVATE_CODE_POINTS[0])
"""Text of an answer whose end in the template is searched."""

CONTINUED = "continue_final_message"
"""Key of the part that holds thoughts and text of the last message, if it is continued."""


def searched_nodes(tree: Template) -> Iterator[Node]:
    """Yield the expressions of a template whose value is compared, and never written."""
    for node in tree.find_all((Compare, Test, Getitem, Call, Filter)):
        match node:
            case Compare() | Test():
                yield node
            case Getitem():
                yield node.arg
            case Call(node=Getattr(attr=name)) | Filter(name=name) if name in SEARCHES:
                yield from node.args[:1]


@lru_cache
def mark_template(source: str, table: tuple[tuple[str, str], ...]) -> str:
    """Return a template with characters replaced in all that it writes."""
    tokens = [*Environment(keep_trailing_newline=True).lex(source)]
    numbered = (
        f"{value[:-1]}\0{number}\0{value[-1]}" if kind == "string" else value
        for number, (_, kind, value) in enumerate(tokens)
    )
    searched = {
        int(number)
        for node in searched_nodes(parse_template("".join(numbered)))
        for constant in (node, *node.find_all(Const))
        if isinstance(constant, Const)
        for number in re.findall("\0([0-9]+)\0", str(constant.value))
    }
    change = str.maketrans(dict(table))
    changed: list[str] = []
    for number, (_, kind, value) in enumerate(tokens):
        if kind == "string" and number not in searched:
            decoded = value[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
            changed.append(json.dumps(decoded.translate(change), ensure_ascii=False))
        else:
            changed.append(value.translate(change) if kind == "data" else value)
    return "".join(changed)


def join_user_turns(messages: Sequence[NamedMessage]) -> list[NamedMessage]:
    """Return messages with adjacent ones of the user as one, which many templates require."""
    found: list[NamedMessage] = []
    for name, message in messages:
        if found and found[-1][1]["role"] == message["role"] == "user":
            name, before = found.pop()
            message = {**before, "content": f"{before['content']}\n\n{message['content']}"}
        found.append((name, message))
    return found


def join_system_turns(messages: Sequence[NamedMessage], *, joins_users: bool) -> list[NamedMessage]:
    """Return messages with all turns of the system as one, the first, which has all their texts.

    With `joins_users`, two turns of the user that only one of the system separated are one as well.
    """
    turns: list[NamedMessage] = []
    others: list[NamedMessage] = []
    was_system = False
    for each in messages:
        is_system = each[1]["role"] == "system"
        if is_system:
            turns.append(each)
        elif was_system and joins_users and others:
            others += join_user_turns([others.pop(), each])
        else:
            others.append(each)
        was_system = is_system
    name, first = turns[0]
    content = "\n\n".join(turn["content"] for _, turn in turns)
    return [(name, {**first, "content": content}), *others]


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
        self.needs_description = False
        """Whether tools need a template that describes them."""

    @cached_property
    def syntax_trees(self) -> list[Template]:
        """Syntax trees of the template, or of all templates if there are several."""
        given = self.tokenizer.chat_template or {}
        sources = [given] if isinstance(given, str) else given.values()
        try:
            return [parse_template(source) for source in sources]
        except TemplateError as error:
            raise OptionError(
                "messages", None, f"the chat template of {self.name} fails: {error}"
            ) from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that a request may set."""
        names = {name for tree in self.syntax_trees for name in find_undeclared_variables(tree)}
        return frozenset(name for name in names - RESERVED_NAMES if not name.endswith("_token"))

    @cached_property
    def call_format(self) -> CallFormat | None:
        """Format of the calls of tools, or None if there can be none."""
        form = find_call_format(self.tokenizer.chat_template)
        if form is not None and self.tool_variable is None:
            form = GENERIC_FORMAT
        return None if self.needs_description and form is GENERIC_FORMAT else form

    @cached_property
    def tool_variable(self) -> str | None:
        """Variable by which the template receives tools, or None."""
        names = {name for tree in self.syntax_trees for name in find_undeclared_variables(tree)}
        return next((name for name in TOOL_VARIABLES if name in names), None)

    def tool_variables(self, tools: Sequence[Message], choice: str) -> dict[str, Any]:
        """Return the variables with tools for the template; none if a text declares them."""
        if self.call_format is None:
            field = "tools" if choice == "auto" else "tool_choice"
            raise OptionError(
                field,
                choice,
                f"the chat template of {self.name} does not describe tools in a known format, "
                f"which tool_choice={choice!r} with tools needs; use tool_choice='none'",
            )
        if self.call_format is GENERIC_FORMAT or self.tool_variable is None:
            return {}
        return {self.tool_variable: [*tools]}

    @cached_property
    def thought_format(self) -> ThoughtFormat | None:
        """Format of the thoughts that the template describes, or None."""
        return find_thought_format(self.tokenizer.chat_template)

    @cached_property
    def reasoning_field(self) -> str | None:
        return next((name for name in REASONING_FIELDS if name in self.message_fields), None)

    def effort_variables(self, effort: str) -> dict[str, Any]:
        """Return the variables by which the template receives an effort of reasoning."""
        if "reasoning_effort" in self.variables:
            return {"reasoning_effort": effort}
        if "enable_thinking" in self.variables:
            return {"enable_thinking": effort != "none"}
        raise OptionError(
            "reasoning_effort", effort, f"the chat template of {self.name} cannot set it: omit it"
        )

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

    def write_calls(self, name: str, message: Message) -> Message:
        """Return a message whose calls or result the template writes, or that has them as text."""
        calls = message.get("tool_calls")
        if not calls and message["role"] != "tool":
            return message
        if self.call_format is None and not (self.has_results and self.has_calls):
            field = f"{name}.{'tool_calls' if calls else 'role'}"
            raise OptionError(
                field, None, f"the chat template of {self.name} supports no calls of tools"
            )
        if not calls and not self.has_results:
            content = f"Result of {message.get('name', 'the call')}:\n{message['content']}"
            return {"role": "user", "content": content}
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
    def has_results(self) -> bool:
        return "tool" in self.string_constants

    @property
    def has_calls(self) -> bool:
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


class ChatTemplate(TemplateSource):
    """The chat template of a tokenizer."""

    def __init__(self, codec: SharedTokenizer) -> None:
        super().__init__(codec.name, codec.tokenizer)
        self.codec = codec

    @cached_property
    def control_tokens(self) -> dict[int, str]:
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
    def turn_ends(self) -> frozenset[int]:
        """The control token that the template writes after the text of a last answer, if any.

        One that also ends thoughts is not included, since the answer follows it.
        """
        turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": ANSWER_MARK}]
        try:
            text = self.render(turns, {"add_generation_prompt": False})
        except OptionError:  # the template rejects the conversation: it describes no end
            return frozenset()
        found = self.control_pattern.match(text.partition(ANSWER_MARK)[2].lstrip())
        thoughts = self.thought_format
        if found is None or (thoughts and found[0] in thoughts.end + thoughts.direct):
            return frozenset()
        tokens = self.control_tokens.items()
        return frozenset(number for number, name in tokens if name == found[0])

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        return match_any([*self.control_tokens.values()])

    @cached_property
    def edge_pattern(self) -> re.Pattern[str]:
        return match_any([*self.edges])

    @cached_property
    def edges(self) -> list[str]:
        """First and last characters of control tokens."""
        return sorted({text[end] for text in self.control_tokens.values() for end in (0, -1)})

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        table: Mapping[str, str] | None = None,
    ) -> str:
        """Render a conversation, up to the beginning of the answer.

        Args:
            messages: The conversation.
            variables: Variables of the template.
            table: Characters to replace in what the template writes.
        """
        try:
            source = find_template(self.tokenizer, with_tools=variables.get("tools") is not None)
            special = self.tokenizer.special_tokens_map
            if table is not None:
                change = str.maketrans(dict(table))
                special = {name: text.translate(change) for name, text in special.items()}
                with template_errors():
                    source = mark_template(source, tuple(table.items()))
            rendered = render_template(source, messages, {**special, **variables})
        except (TemplateError, ValueError) as error:
            if isinstance(error, OptionError):
                raise
            raise OptionError(
                "messages", messages, f"the chat template of {self.name} fails: {error}"
            ) from error
        self.codec.check_length(rendered)
        return validate_text("messages", rendered)

    def render_parts(
        self, parts: Sequence[TemplatePart], table: Mapping[str, str] | None = None
    ) -> str:
        messages = [part.value for part in parts if isinstance(part.key, int)]
        variables = {str(part.key): part.value for part in parts[len(messages) :]}
        continued = variables.pop(CONTINUED, None)
        rendered = self.render(messages, variables, table)
        if continued is None:
            return rendered
        return rendered + self.write_begun(rendered, *continued, table=table or {})

    def write_begun(
        self, rendered: str, thoughts: str, text: str, *, table: Mapping[str, str]
    ) -> str:
        """Return the beginning of an answer, as the model writes it after a rendered prompt.

        The table replaces characters in what the model's format adds, as in the prompt.
        """
        change, form = str.maketrans(dict(table)), self.thought_format
        plain = rendered.translate({ord(mark): edge for edge, mark in table.items()})
        if form is None or (form := form.after_prompt(plain)) is None:
            return text
        if form.begin and not thoughts:
            return form.direct.translate(change) + text
        gap = "" if self.thought_format is CHANNELS else "\n"
        before = f"{form.begin}{gap}" if form.begin else ""
        after = f"{gap}{form.end}{gap * 2}"
        return f"{before.translate(change)}{thoughts}{after.translate(change)}{text}"

    @cached_property
    def system_role(self) -> str:
        """Role of a message that instructs the model: `user` if the template has no system turn."""
        system, user = {"role": "system", "content": "<>"}, {"role": "user", "content": "-"}
        try:
            return "system" if "<>" in self.render([system, user], {}) else "user"
        except OptionError:
            return "user"

    def add_instruction(self, messages: Sequence[NamedMessage], text: str) -> list[NamedMessage]:
        """Return messages with a text before that of the system turn, or of the first user turn."""
        role = self.system_role
        front = messages[:1] if role == "system" else messages
        place = next((n for n, (_, each) in enumerate(front) if each["role"] == role), None)
        if place is None:
            return [("tools", {"role": role, "content": text}), *messages]
        name, first = messages[place]
        first = {**first, "content": f"{text}\n\n{first['content']}"}
        return [*messages[:place], (name, first), *messages[place + 1 :]]

    def arrange_system_turns(
        self, messages: list[NamedMessage], variables: Mapping[str, Any]
    ) -> list[NamedMessage]:
        """Return messages in an order in which the template writes all turns of the system.

        Where it refuses the given order, or leaves one out, they are one turn, the first.
        """
        if all(message["role"] != "system" for _, message in messages[1:]):
            return messages
        joined = (join_system_turns(messages, joins_users=each) for each in (False, True))
        orders = chain([messages], joined)
        return next((each for each in orders if self.writes_system(each, variables)), messages)

    def writes_system(self, messages: Sequence[NamedMessage], variables: Mapping[str, Any]) -> bool:
        """Return whether the template renders a conversation with the text of each system turn."""
        marks, marked = [], []
        free = unused_characters(*(str(message["content"]) for _, message in messages))
        for _, message in messages:
            if message["role"] == "system" and message["content"].strip():
                marks.append(take_unused_character(free))
                message = {**message, "content": message["content"] + marks[-1]}
            marked.append(message)
        try:
            rendered = self.render(marked, variables)
        except OptionError:
            return False
        return all(mark in rendered for mark in marks)

    def encode(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        instruction: str = "",
        continues: bool = False,
    ) -> list[int]:
        """Encode a conversation.

        Args:
            messages: The conversation.
            variables: Variables of the template.
            instruction: Text that declares tools, if the template does not.
            continues: Whether the last message begins the answer.
        """
        for number, message in enumerate(messages):
            if self.control_pattern.search(role := message["role"]):
                param = f"messages[{number}].role"
                raise OptionError(param, role, "must not contain a special token")
        # A template would end the last message, so it is rendered as a part after the prompt.
        last = self.take_continued(messages) if continues else []
        named = [
            (name := f"messages[{number}]", self.write_calls(name, self.write_thoughts(message)))
            for number, message in enumerate(messages[: len(messages) - len(last)])
        ]
        if not self.has_results and any(message["role"] == "tool" for message in messages):
            named = join_user_turns(named)
        if instruction:
            named = self.add_instruction(named, instruction)
        named = self.arrange_system_turns(named, variables)
        parts = TemplatePart.collect_parts(named, variables) + last
        text = self.render_parts(parts)
        ids, spans = self.codec.encode_with_spans(text)
        control = [self.trim_span(text, span) for span in spans if span[0] in self.control_tokens]
        # Text of a message that spells a control token must not act as one.
        own = self.select_tokens(control, parts, text)
        if own == control:
            return ids
        return self.codec.encode_selected(text, own, frozenset(self.control_tokens))

    def take_continued(self, messages: Sequence[Message]) -> list[TemplatePart]:
        """Return the thoughts and text of the last message as a part."""
        param, message = f"messages[{len(messages) - 1}]", messages[-1]
        problems = {
            "role": message["role"] != "assistant" and "must be 'assistant'",
            "tool_calls": message.get("tool_calls") and "must be absent",
            "content": not message["content"] and "must not be empty",
        }
        for name, problem in problems.items():
            if problem:
                raise OptionError(
                    f"{param}.{name}",
                    message.get(name),
                    f"{problem} in a last message that is continued",
                )
        value = [message.get("reasoning_content", ""), message["content"]]
        return [TemplatePart(param, CONTINUED, value, by_assistant=True)]

    def trim_span(self, text: str, span: TokenSpan) -> TokenSpan:
        token, begin, end = span
        found = text.find(self.control_tokens[token], begin, end)
        return span if found < 0 else (token, found, found + len(self.control_tokens[token]))

    def select_tokens(
        self, control: list[TokenSpan], parts: Sequence[TemplatePart], text: str
    ) -> list[TokenSpan]:
        """Return the control tokens in a prompt that are not text of the conversation."""
        edged = [part for part in parts if self.edge_pattern.search(part.text)]
        if not edged:
            return control
        # Rendering again, with one character for the edges of tokens from the template and another
        # for those from messages, shows where each token of the prompt comes from.
        free = unused_characters(text, *(part.text for part in parts), *self.string_constants)
        written, by_user = (
            {edge: take_unused_character(free) for edge in self.edges} for _ in ("template", "user")
        )
        # A whole token that no answer contains is text wherever the template does not write it.
        answers = "\0".join(part.text for part in parts if part.by_assistant)
        shared = {token for token, name in self.control_tokens.items() if name in answers}
        whole = match_any([n for token, n in self.control_tokens.items() if token not in shared])
        pattern = re.compile(f"{whole.pattern}|{self.edge_pattern.pattern}")

        def hide(text: str) -> str:
            return pattern.sub(lambda match: by_user.get(match.group(), match.group()), text)

        def is_own(token: int, ends: set[str]) -> bool:
            if ends & {*by_user.values()}:
                return False
            return ends <= {*written.values()} or token in shared - self.special_tokens.keys()

        try:
            hidden = [part if part.by_assistant else part.map_texts(hide) for part in parts]
            marked = self.render_parts(hidden, written)
        except OptionError:  # the template depends on what is hidden
            marked = ""
        plain = {ord(mark): edge for table in (written, by_user) for edge, mark in table.items()}
        # The second rendering counts only if the marks have changed nothing else.
        if marked.translate(plain) == text:
            return [
                each for each in control if is_own(each[0], {marked[each[1]], marked[each[2] - 1]})
            ]
        holders = [part for part in edged if self.control_pattern.search(part.text)]
        if not holders:  # text that could only be a part of a token
            change = str.maketrans(by_user)
            marked = self.render_parts(
                [part.map_texts(lambda text: text.translate(change)) for part in parts]
            )
            if self.control_pattern.findall(marked) == self.control_pattern.findall(text):
                return control
        part = (holders or edged)[0]
        raise OptionError(
            part.name,
            part.value,
            f"has {'a' if holders else 'part of a'} special token, which changes the output "
            f"of the chat template of {self.name}: remove it",
        )

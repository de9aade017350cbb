"""Conversation in the terminal: the command `chat`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer import Option

from outpace.api.options import Options, check_options, option_names
from outpace.cli.draw import AnswerPainter, answer_figures, console, replace_file
from outpace.cli.flags import (
    LOAD_FLAGS,
    PROMPT_FLAGS,
    SAMPLING_FLAGS,
    STOP_FLAGS,
    LoadFlags,
    ModelArgument,
    PromptFlags,
    SamplingFlags,
    StopFlags,
    describe_draft,
    parse_variable,
    read_option_file,
    report_progress,
)
from outpace.cli.options import MethodFlag, format_method, parse_method_words
from outpace.cli.terminal import (
    check_standard_input,
    error_console,
    is_interactive,
    read_typed_messages,
    show_reading,
    show_spinner,
)
from outpace.errors import OptionError
from outpace.methods import AUTO_METHOD, METHODS

if TYPE_CHECKING:
    from outpace.api.chat_template import Message
    from outpace.api.llm import LLM
    from outpace.api.output import Output
    from outpace.api.pending_answer import Stream
    from outpace.methods import Method


CHAT_HELP = """\
/method NAME option=value …  change the method; alone, list the methods
/race NAME option=value …    answer again by another method, and show both
/continue                    continue the last answer, after Ctrl-C or if it was cut
/file PATH text              send a file, after the text
/system text                 change the system prompt; alone, remove it
/set NAME value              set an option, such as temperature; alone, list those that are set
/save PATH, /load PATH       write the conversation to a file, or read it
/reset                       clear the conversation
/help                        show this help
/exit                        exit, as Ctrl-D does; Ctrl-C stops an answer"""

SET_OPTIONS = (*option_names("sampling"), *option_names("ending"), "template", "reasoning_effort")
"""Options that `/set` changes."""


def chat(
    model: ModelArgument,
    method: MethodFlag = None,
    sampling: SamplingFlags = SAMPLING_FLAGS,
    stops: StopFlags = STOP_FLAGS,
    prompt_flags: PromptFlags = PROMPT_FLAGS,
    load_flags: LoadFlags = LOAD_FLAGS,
    opened: Annotated[
        Path | None, Option("--continue", help="Continue a conversation that /save has written.")
    ] = None,
) -> None:
    """Chat in the terminal, coloured by forward pass; the method can be changed between answers.

    /help lists the commands. Ctrl-C stops an answer; Ctrl-D, or Ctrl-C twice at the prompt, exits.
    Without a terminal, each line of standard input is a message; at a terminal, pasted lines are
    one message.
    """
    from outpace.engine.job import DecodingError
    from outpace.engine.runner import describe_caches

    options = sampling.options() | stops.options() | prompt_flags.options()
    check_options(options)
    if opened is not None:
        read_conversation(opened, "--continue")  # before the model is loaded
        if prompt_flags.system is not None:
            raise OptionError("system", None, "cannot be combined with --continue: omit one")
    llm = load_flags.open_model(
        model, method, max_sequences=1
    )  # one answer may use the whole cache
    if llm.text.tokenizer is None or llm.text.tokenizer.chat_template is None:
        raise ValueError(f"{llm.name} has no chat template; use outpace generate")
    first = prompt_flags.system_messages(llm)
    llm.prepare([*first, {"role": "user", "content": "-"}], **options)  # validates the options
    talk = ChatSession(llm, first, options)
    if opened is not None:
        talk.load(str(opened))
    draft = None if method is not None else describe_draft(llm)
    notice = "\n".join(filter(None, (draft, describe_caches(llm.driver.stats.models))))
    for line in read_messages(notice):
        try:
            if not talk.handle_line(line):
                break
        except (ValueError, DecodingError) as error:
            error_console.print(" ".join(str(error).split()), style="red", soft_wrap=True)


def read_messages(notice: str | None) -> Iterator[str]:
    """Yield messages: typed at a prompt after a notice, or the lines of standard input."""
    check_standard_input()
    try:
        if is_interactive():
            yield from read_typed_messages(notice)
        else:
            yield from (line.rstrip("\r\n") for line in iter(sys.stdin.readline, ""))
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from error


def named_path(name: str) -> Path:
    """Return the path that a command names; raises `ValueError` if it is missing."""
    if not name:
        raise ValueError("the path of a file is missing")
    return Path(name).expanduser()


def read_file_message(words: str) -> str:
    """Return the message of `PATH text`: the text and the content of the file."""
    quoted = re.match(r"""\s*(["'])(.+?)\1""", words)
    path = quoted[2] if quoted else words.partition(" ")[0]
    text = words[quoted.end() :] if quoted else words.partition(" ")[2]
    content = read_option_file(named_path(path), "/file")
    return f"{text.strip()}\n\n{content}".strip()


def read_conversation(path: Path, option: str = "/load") -> list[Message]:
    """Return the messages of a file that `/save` has written."""
    from outpace.api.chat_template import Message

    try:
        messages = json.loads(read_option_file(path, option))["messages"]
        roles = [each["role"] for each in messages if isinstance(each["content"], str | None)]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"{path} is not a conversation that /save has written: {error}") from None
    turns = len(messages) // 2 * ["user", "assistant"]
    if roles not in (turns, ["system", *turns]) or len(roles) != len(messages):
        raise ValueError(f"{path}: messages must be turns of user and assistant, with text")
    return cast(list[Message], messages)


@dataclass(slots=True)
class ChatTurn:
    """One answer of a conversation.

    Attributes:
        messages: The conversation up to the answer.
        title: The method in words.
        text: Coloured text so far.
        hint: How to get a longer answer, if it was truncated.
    """

    messages: list[Message]
    title: str
    method: Method
    text: Text = field(default_factory=Text)
    output: Output | None = None
    hint: str = ""

    def stream_answer(
        self,
        llm: LLM,
        options: Options,
        show: Callable[[Text], None],
        begin: Callable[[Stream], object],
    ) -> None:
        """Begin the answer, and show each piece; after Ctrl-C, keep the text so far."""
        continues = self.messages[-1]["role"] == "assistant"
        turn_options: Options = {
            **options,
            "method": self.method,
            "continue_final_message": continues,
        }
        stream = llm.stream(self.messages, **turn_options)
        painter = AnswerPainter(stream.answer.format)
        try:
            begin(stream)
            self.consume_stream(stream, painter, show)
        except KeyboardInterrupt:
            stream.close()
            self.consume_stream(stream, painter, show)
        self.output = stream.output
        if self.output is not None and self.output.finish_reason == "length":
            self.hint = (
                f"\n(cut at {len(self.output.ids)} tokens: increase {length_remedy(llm, options)})"
            )

    def consume_stream(
        self, stream: Stream, painter: AnswerPainter, show: Callable[[Text], None]
    ) -> None:
        for piece in stream:
            self.show_piece(painter.paint(piece), show)
        self.show_piece(painter.paint("", final=True), show)

    def show_piece(self, piece: Text, show: Callable[[Text], None]) -> None:
        self.text.append_text(piece)
        show(piece)

    @property
    def figures(self) -> str:
        """Statistics of the answer, if it has ended."""
        return "" if self.output is None else answer_figures(self.output) + self.hint


def length_remedy(llm: LLM, options: Options) -> str:
    from outpace.decoding.target import Kind

    if options.get("max_tokens") is not None or llm.config.kind is Kind.DIFFUSION:
        return "--max-tokens"
    return "--max-length or --cache-gib, or use /reset: the context is full"


class ChatSession:
    """Messages so far, and the method of the next answer."""

    def __init__(self, llm: LLM, first: list[Message], options: Options) -> None:
        self.llm, self.options = llm, options
        self.initial_messages = first
        self.messages = list(first)
        self.method = llm.method
        self.title = format_method(llm.method)
        self.last_turn: ChatTurn | None = None

    def handle_line(self, line: str) -> bool:
        """Process a line; returns False if it ends the conversation."""
        word, _, rest = line.strip().partition(" ")
        match word if "\n" not in line.strip() else None:
            case "":
                pass
            case "/exit":
                return False
            case "/help":
                console.print(CHAT_HELP)
            case "/continue":
                self.continue_answer()
            case "/reset":
                self.messages, self.last_turn = list(self.initial_messages), None
            case "/file":
                self.answer_message(read_file_message(rest))
            case "/system":
                self.change_system(rest)
            case "/set":
                self.set_option(rest)
            case "/save":
                self.save(rest)
            case "/load":
                self.load(rest)
            case "/method":
                self.choose_method(rest)
            case "/race":
                self.race_method(rest)
            case str() if word.startswith("/"):
                raise ValueError(f"unknown command {word}; /help lists the commands")
            case _:
                self.answer_message(line)
        return True

    def answer_message(self, message: str) -> None:
        messages = [*self.messages, {"role": "user", "content": message}]
        if (answer := self.stream_turn(messages)) is not None:
            self.messages = [*messages, answer]

    def continue_answer(self) -> None:
        if self.last_turn is None:
            raise ValueError("/continue needs an answer: send a message first")
        last = self.messages[-1]
        if (rest := self.stream_turn(self.messages)) is not None:
            self.messages = [
                *self.messages[:-1],
                last | {"content": last["content"] + rest["content"]},
            ]

    def stream_turn(self, messages: list[Message]) -> Message | None:
        """Answer a conversation; return the answer as a message, or None if it is empty."""
        turn = ChatTurn(messages, self.title, self.method)
        try:
            turn.stream_answer(
                self.llm,
                self.options,
                lambda piece: console.print(piece, end="", soft_wrap=True),
                show_reading,
            )
        finally:
            console.print()
        with suppress(KeyboardInterrupt):  # too late to stop the answer, which is kept
            error_console.print(turn.figures, style="dim", soft_wrap=True)
        if turn.output is None or not turn.output.text:
            return None
        self.last_turn = turn
        return turn.output.message

    def change_system(self, text: str) -> None:
        """Replace the system prompt of the conversation so far."""
        system = PromptFlags(system=text or None).system_messages(self.llm)
        self.messages = system + self.messages[len(self.initial_messages) :]
        self.initial_messages = system

    def set_option(self, words: str) -> None:
        """Set an option of the next answers, reset it, or list those that are set."""
        if not words:
            for name, value in self.options.items():
                console.print(f"{name} {json.dumps(value)}", soft_wrap=True)
            return
        name, _, text = words.replace("=", " ", 1).partition(" ")
        name = name.replace("-", "_")
        if name not in SET_OPTIONS:
            raise ValueError(f"/set {name}: choose from {', '.join(SET_OPTIONS)}")
        others = {key: value for key, value in self.options.items() if key != name}
        changed = cast(Options, others | dict([parse_variable(f"{name}={text}")] if text else []))
        self.llm.prepare([*self.initial_messages, {"role": "user", "content": "-"}], **changed)
        self.options = changed

    def save(self, name: str) -> None:
        """Write the conversation as JSON, which only the user can read."""
        path = named_path(name)
        if path.exists():
            read_conversation(path)  # another file is not overwritten
        try:
            with replace_file(path) as draft:
                assert draft is not None
                draft.touch(0o600)
                draft.write_text(json.dumps({"messages": self.messages}, indent=1) + "\n")
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from error
        console.print(f"{len(self.messages)} messages in {path}", style="dim", soft_wrap=True)

    def load(self, name: str) -> None:
        """Continue the conversation of a file."""
        messages = read_conversation(named_path(name))
        self.llm.prepare([*messages, {"role": "user", "content": "-"}], **self.options)
        system = [each for each in messages[:1] if each["role"] == "system"]
        self.messages, self.initial_messages, self.last_turn = messages, system, None
        for message in messages:
            console.print(f"{message['role']}: {message['content']}", style="dim", soft_wrap=True)

    def choose_method(self, words: str) -> None:
        """Change the method; without words, list the methods."""
        if words:
            self.method = self.load_method(words)
            self.title = format_method(self.method)
            return
        names = [
            name for name, kind in METHODS.items() if self.llm.config.kind in kind.target_kinds
        ]
        listed = ", ".join([AUTO_METHOD, *names])
        console.print(f"{self.title}\nmethods of {self.llm.name}: {listed}", soft_wrap=True)

    def load_method(self, words: str) -> Method:
        """Load the models of a method; raises `ValueError` if it does not support this model."""
        from outpace.checkpoints.hub import report_load_progress

        is_auto = words == AUTO_METHOD
        method = self.llm.methods.select_method(words) if is_auto else parse_method_words(words)
        models = dict.fromkeys(self.llm.methods.model_names(method).values())
        if new := [name for name in models if name not in self.llm.runners]:
            with (
                show_spinner(f"loading {', '.join(new)}") as report,
                report_load_progress(partial(report_progress, report)),
            ):
                self.llm.pair(method)
        self.llm.pair(method)
        return method

    def race_method(self, words: str) -> None:
        if self.last_turn is None:
            raise ValueError("/race needs an answer to compare with: send a message first")
        if not words:
            raise ValueError("/race needs a method, such as /race autoregressive")
        other = ChatTurn(self.last_turn.messages, words, self.load_method(words))
        first = self.last_turn
        with Live(side_by_side(first, other), console=console, auto_refresh=False) as live:
            other.stream_answer(
                self.llm,
                self.options,
                lambda _: live.update(side_by_side(first, other), refresh=True),
                iter,  # no second live display
            )
            live.update(side_by_side(first, other), refresh=True)


def side_by_side(*turns: ChatTurn) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True)
    for turn in turns:
        table.add_column(turn.title, ratio=1, header_style="bold underline", overflow="fold")
    table.add_row(*(turn.text for turn in turns))
    table.add_row(*(Text(turn.figures, style="dim") for turn in turns))
    return table

"""A conversation in the terminal: `chat`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from rich.live import Live
from rich.table import Table
from rich.text import Text

from outpace.api.llm import LLM
from outpace.api.options import Options, check_options
from outpace.api.output import Output
from outpace.api.stream import Stream
from outpace.api.text import Message
from outpace.checkpoints.progress import told
from outpace.cli.draw import coloured, console, statistics
from outpace.cli.flags import (
    CHOICE,
    DRESSING,
    ENDING,
    LOADING,
    Choice,
    Dressing,
    Ending,
    Loading,
    ModelName,
    loaded,
)
from outpace.cli.keyboard import is_interactive, typed_messages
from outpace.cli.options import parse_words, words_for
from outpace.cli.terminal import check_input, errors, waiting
from outpace.decoding.target import Kind
from outpace.engine.job import DecodingError
from outpace.engine.pairing import named as models_of
from outpace.methods import METHODS, Method

HELP = """\
/method NAME option=value …  decode by another method; alone, say which there are
/race NAME option=value …    answer again by another method, and show both
/reset                       forget what was said
/help                        show this
/exit                        end, as Ctrl-D does; Ctrl-C ends an answer"""

COMMANDS = ("/method", "/race", "/reset", "/help", "/exit")


def chat(
    model: ModelName,
    method: Method | None = None,
    choice: Choice = CHOICE,
    ending: Ending = ENDING,
    dressing: Dressing = DRESSING,
    loading: Loading = LOADING,
) -> None:
    """A conversation in the terminal, coloured by forward pass; methods change as it goes on.

    /help shows how. Ctrl-C ends an answer, a second one or Ctrl-D the conversation. Without a
    terminal every line of standard input is a message; at one, pasted lines are one message.
    """
    options = choice.options() | ending.options() | dressing.options()
    check_options(options)
    llm = loading.open(model, method, max_sequences=1)  # an answer may have all the memory
    if llm.text.tokenizer is None or llm.text.tokenizer.chat_template is None:
        raise ValueError(f"{llm.name} has no chat template: use outpace generate")
    first = dressing.messages(llm)
    llm.prepare([*first, {"role": "user", "content": "-"}], **options)  # refuses what never can be
    talk = Conversation(llm, first, options)
    for line in lines():
        try:
            if not talk.take(line):
                break
        except (ValueError, DecodingError) as error:
            errors.print(" ".join(str(error).split()), style="red", soft_wrap=True)


def lines() -> Iterator[str]:
    """Yield messages: what is typed at a prompt, or the lines of standard input."""
    check_input()
    try:
        if is_interactive():
            yield from typed_messages(is_command)
            console.print()
        else:
            yield from (line.rstrip("\r\n") for line in iter(sys.stdin.readline, ""))
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from error


def is_command(line: str) -> bool:
    """Whether a line is a command of the conversation."""
    return line.strip().partition(" ")[0] in COMMANDS


@dataclass(slots=True)
class Turn:
    """An answer on its way: what was asked, by which method, what came."""

    asked: list[Message]
    title: str
    method: Method
    text: Text = field(default_factory=Text)
    output: Output | None = None
    hint: str = ""

    def run(self, llm: LLM, options: Options, show: Callable[[Text], None]) -> None:
        """Answer, and show each piece; Ctrl-C ends it, and what is there stays."""
        asked: Options = {**options, "method": self.method}
        stream = llm.stream(self.asked, **asked)
        try:
            self.follow(stream, show)
        except KeyboardInterrupt:
            stream.close()
            self.follow(stream, show)
        self.output = stream.output
        if self.output is not None and self.output.finish_reason == "length":
            self.hint = f"\n(cut at {len(self.output.ids)} tokens: {remedy(llm, options)})"

    def follow(self, stream: Stream, show: Callable[[Text], None]) -> None:
        """Take what comes, to its end."""
        for piece in coloured(stream):
            self.text.append_text(piece)
            show(piece)

    @property
    def figures(self) -> str:
        """How fast it was, as far as it is known."""
        return "" if self.output is None else statistics(self.output) + self.hint


def remedy(llm: LLM, options: Options) -> str:
    """What lengthens the answers that end early."""
    if options.get("max_tokens") is not None or llm.config.kind is Kind.DIFFUSION:
        return "--max-tokens"
    return "the context is full; /reset, or a larger --max-length or --cache-gib"


class Conversation:
    """What was said, and how the next answer is decoded."""

    def __init__(self, llm: LLM, first: list[Message], options: Options) -> None:
        self.llm, self.options = llm, options
        self.first = first
        self.said = list(first)
        self.method = llm.method
        self.title = words_for(llm.method)
        self.last: Turn | None = None

    def take(self, line: str) -> bool:
        """Do what a line says; False where it ends the conversation."""
        word, _, rest = line.strip().partition(" ")
        match word if "\n" not in line.strip() else None:
            case "":
                pass
            case "/exit":
                return False
            case "/help":
                console.print(HELP)
            case "/reset":
                self.said, self.last = list(self.first), None
            case "/method":
                self.choose(rest)
            case "/race":
                self.race(rest)
            case str() if word.startswith("/"):
                raise ValueError(f"there is no {word}; /help shows what there is")
            case _:
                self.answer(line)
        return True

    def answer(self, message: str) -> None:
        """Answer a message, and keep both."""
        asked = [*self.said, {"role": "user", "content": message}]
        turn = Turn(asked, self.title, self.method)
        try:
            turn.run(
                self.llm,
                self.options,
                lambda piece: console.print(piece, end="", soft_wrap=True),
            )
        finally:
            console.print()
        console.print(turn.figures, style="dim", soft_wrap=True)
        if turn.output is not None and turn.output.text:
            self.last = turn
            self.said = [*asked, {"role": "assistant", "content": turn.output.text}]

    def choose(self, words: str) -> None:
        """Decode by another method; without words, say what there is."""
        if words:
            self.method = self.named(words)
            self.title = words_for(self.method)
            return
        known = [name for name, kind in METHODS.items() if self.llm.config.kind in kind.decodes]
        console.print(f"{self.title}\nmethods of {self.llm.name}: {', '.join(known)}")

    def named(self, words: str) -> Method:
        """Load a method that decodes this model; `ValueError` for another."""
        method = parse_words(words)
        models = dict.fromkeys(models_of(method, self.llm.name).values())
        if new := [name for name in models if name not in self.llm.runners]:
            with waiting(f"loading {', '.join(new)}") as say, told(partial(loaded, say)):
                self.llm.pair(method)
        self.llm.pair(method)
        return method

    def race(self, words: str) -> None:
        """Answer the last message again, and show both answers side by side."""
        if self.last is None:
            raise ValueError("there is no answer yet to race against")
        if not words:
            raise ValueError("name a method to race with, such as /race autoregressive")
        other = Turn(self.last.asked, words, self.named(words))
        first = self.last
        with Live(beside(first, other), console=console, auto_refresh=False) as live:
            other.run(
                self.llm,
                self.options,
                lambda _: live.update(beside(first, other), refresh=True),
            )
            live.update(beside(first, other), refresh=True)


def beside(*turns: Turn) -> Table:
    """Answers side by side, their figures below."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True)
    for turn in turns:
        table.add_column(turn.title, ratio=1, header_style="bold underline", overflow="fold")
    table.add_row(*(turn.text for turn in turns))
    table.add_row(*(Text(turn.figures, style="dim") for turn in turns))
    return table

"""Thoughts of models before their answers: formats, their parser, and automata of answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from outpace.constraint.dfa import Dfa, search_table
from outpace.constraint.vocabulary import special_tokens_in
from outpace.tokenizer import Tokenizer, overlap_length

MAX_GAP = 2
"""Maximum number of line breaks between thoughts and answer that belong to neither."""


@dataclass(frozen=True, kw_only=True)
class ThoughtFormat:
    """How a model writes thoughts: `begin thoughts end answer`, or `direct answer`."""

    name: str
    begin: str
    """Text before the thoughts; empty if the prompt ends with it."""
    end: str
    """Text between the thoughts and the answer."""
    direct: str = ""
    """Text before an answer without thoughts."""
    required: tuple[str, ...]
    """Texts that a chat template of this format contains."""

    def after_prompt(self, prompt: str) -> ThoughtFormat | None:
        """Return the format of an answer after the last characters of a prompt.

        None if the prompt ends the thoughts.
        """
        prompt = prompt.rstrip()
        if prompt.endswith((self.end, self.direct or self.end)):
            return None
        is_open = prompt.endswith(self.begin)
        return replace(self, begin="", direct="") if is_open else self

    def without_preface(self, preface: str) -> ThoughtFormat:
        """Return the format without the text that begins an answer, if that may also be a call."""
        end, direct = self.end.removesuffix(preface), self.direct.removesuffix(preface)
        return replace(self, end=end, direct=direct)

    def special_tokens(self, tokenizer: Tokenizer) -> dict[int, str]:
        """Return the special tokens that are part of the format, by id."""
        return special_tokens_in(tokenizer, self.begin, self.end, self.direct)


CHANNELS = ThoughtFormat(
    name="channels",
    begin="<|channel|>analysis<|message|>",
    end="<|end|><|start|>assistant<|channel|>final<|message|>",
    direct="<|channel|>final<|message|>",
    required=("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)

THOUGHT_FORMATS = (
    ThoughtFormat(name="think", begin="<think>", end="</think>", required=("<think>", "</think>")),
    CHANNELS,
)
"""Formats of Qwen3, DeepSeek-R1 and SmolLM3; of gpt-oss."""


def find_thought_format(templates: Any) -> ThoughtFormat | None:
    """Return the format of thoughts in a tokenizer's chat template, or None."""
    sources = templates.values() if isinstance(templates, Mapping) else [templates or ""]
    text = "\0".join(sources)
    return next((f for f in THOUGHT_FORMATS if all(mark in text for mark in f.required)), None)


class ThoughtParser:
    """Splits a growing answer into thoughts and the rest, without the line breaks around them."""

    def __init__(self, form: ThoughtFormat) -> None:
        self.form = form
        self.buffer = ""
        self.part: Literal["start", "thoughts", "gap", "answer"] = "start"
        self.is_blank = True
        self.gap = 0

    def feed(self, piece: str) -> tuple[str, str]:
        """Return new characters of the thoughts and of the answer; marks and breaks wait."""
        self.buffer += piece
        if self.part == "start":
            self.take_start()
        thoughts = self.take_thoughts() if self.part == "thoughts" else ""
        if self.part == "gap":
            while self.gap < MAX_GAP and self.buffer.startswith("\n"):
                self.buffer, self.gap = self.buffer[1:], self.gap + 1
            self.part = "answer" if self.buffer else "gap"
        if self.part != "answer":
            return thoughts, ""
        rest, self.buffer = self.buffer, ""
        return thoughts, rest

    def finish(self) -> tuple[str, str]:
        """Return the characters that waited; the answer is over."""
        rest, self.buffer = self.buffer, ""
        return (rest.rstrip("\n"), "") if self.part == "thoughts" else ("", rest)

    def take_start(self) -> None:
        """Read the text before thoughts or an answer, once it is complete."""
        form, buffer = self.form, self.buffer
        if buffer.startswith(form.begin):
            self.buffer, self.part = buffer.removeprefix(form.begin), "thoughts"
        elif form.direct and buffer.startswith(form.direct):
            self.buffer, self.part = buffer.removeprefix(form.direct), "answer"
        elif not any(mark.startswith(buffer) for mark in (form.begin, form.direct)):
            self.part = "answer"

    def take_thoughts(self) -> str:
        """Return thoughts from the buffer, up to what may be the end or line breaks before it."""
        if self.is_blank:
            self.buffer = self.buffer.lstrip("\n")
        at = self.buffer.find(self.form.end)
        if at >= 0:
            found, self.part = self.buffer[:at].rstrip("\n"), "gap"
            self.buffer = self.buffer[at + len(self.form.end) :]
            return found
        held = overlap_length(self.buffer, self.form.end)
        found = self.buffer[: len(self.buffer) - held].rstrip("\n")
        self.buffer = self.buffer[len(found) :]
        self.is_blank = self.is_blank and not found
        return found


def free_text_dfa() -> Dfa:
    return Dfa(np.zeros((1, 256), dtype=np.int32), np.ones(1, dtype=bool), num_open=1)


def add_thoughts(answer: Dfa, form: ThoughtFormat) -> Dfa:
    """Return the automaton of thoughts and an answer, or of an answer alone."""
    # The states are those before thoughts, of the thoughts, of the gap after them, and of the
    # answer. A text ends in the answer only, so all thoughts are followed by one.
    marks = form.begin.encode(), form.direct.encode()
    prefixes = dict.fromkeys(mark[:size] for mark in marks for size in range(len(mark)))
    nodes = {prefix: number for number, prefix in enumerate(prefixes)}
    end = search_table(form.end.encode())
    thoughts, gap = len(nodes), len(nodes) + len(end)
    inner = gap + MAX_GAP
    shifted = np.where(answer.table < 0, -1, answer.table + inner)
    first = np.full((thoughts, 256), -1, dtype=np.int32)
    accepts = np.zeros(inner, dtype=bool)
    accepts[gap:] = answer.accepts[0]
    for prefix, node in nodes.items():
        state = -1 if form.direct else answer.walk(prefix)
        if state >= 0:
            first[node], accepts[node] = shifted[state], answer.accepts[state]
    for mark, target in zip(marks, (thoughts, inner), strict=True):
        for size, byte in enumerate(mark):
            first[nodes[mark[:size]], byte] = nodes.get(mark[: size + 1], target)
    gaps = np.repeat(shifted[:1], MAX_GAP, axis=0)
    gaps[:, ord("\n")] = np.arange(gap + 1, inner + 1)
    table = np.concatenate([first, end + thoughts, gaps, shifted]).astype(np.int32)
    num_open = inner + answer.num_open if answer.num_open else 0
    accepts = np.concatenate([accepts, answer.accepts])
    return Dfa(table, accepts, num_open=num_open, thoughts=range(thoughts, gap))

"""Chat templates that do what published ones do, tokenizers with tokens like theirs, a reference.

The templates and vocabularies are made up. What they move, trim, drop and look for is what those of
the models of the same name do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace
from tokenizers.normalizers import Sequence as Chain
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from tokenizers.trainers import BpeTrainer

from outpace.tokenizer import Tokenizer

Message = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A template, its special tokens, its other added tokens, and how the tokenizer cuts text."""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    cut: str = "bytes"
    rstrip: bool = False
    like: str | None = None
    """The shape that has the same merges."""


TURNS = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
THOUGHTS = "<think>", "</think>"
TOOLS = "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"
HEADER = "'<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
CHATML = """{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}<|im_start|>system
Be kind.<|im_end|>
{% endif %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
LATE_SYSTEM = """{%- set s = messages[0].content if messages[0].role == 'system' else none %}
{%- set rest = messages[1:] if s is not none else messages %}{{- bos_token }}
{%- for m in rest %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{%- endif %}{%- if m.role == 'user' %}
{%- if loop.last and s is not none %}{{- '[INST]' + GAP + s + '\n\n' + m.content + '[/INST]' }}
{%- else %}{{- '[INST]' + GAP + m.content + '[/INST]' }}{%- endif %}
{%- else %}{{- ' ' + m.content|trim + eos_token }}{%- endif %}{%- endfor %}"""
GEMMA = """{{- bos_token }}{%- for m in rest %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\n' }}{%- if loop.first %}{{- first }}{%- endif %}
{{- m.content | trim }}{{- '<end_of_turn>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""
GEMMA_3 = (
    "{%- if messages[0].role == 'system' %}"
    "{%- set rest, first = messages[1:], messages[0].content + '\n\n' %}"
    "{%- else %}{%- set rest, first = messages, '' %}{%- endif %}" + GEMMA
)
GEMMA_4 = """{{- bos_token }}{%- for m in messages %}{%- set c = m.content %}
{%- if m.role == 'assistant' %}{%- set role, c = 'model', c.split('<channel|>')[-1] %}
{%- else %}{%- set role = m.role %}{%- endif %}
{{- '<|turn>' + role + '\n' + c | trim + '<turn|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\n' }}
{%- if not enable_thinking | default(false) %}{{- '<|channel>thought\n<channel|>' }}{%- endif %}
{%- endif %}"""
LLAMA = (
    "{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set s = messages[0].content|trim %}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set s, rest = '', messages %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nNow: 2024\n\n' + s + '<|eot_id|>' }}"
    "{%- for m in rest %}{{- " + HEADER + " + m.content|trim + '<|eot_id|>' }}{%- endfor %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
PHI = """{%- for m in messages %}{%- if m.role == 'system' and m.content %}
{{- '<|system|>\n' + m.content + '<|end|>\n' }}{%- elif m.role == 'user' %}
{{- '<|user|>\n' + m.content + '<|end|>\n' }}{%- elif m.role == 'assistant' %}
{{- '<|assistant|>\n' + m.content + '<|end|>\n' }}{%- endif %}{%- endfor %}
{{- '<|assistant|>\n' }}"""
QWEN_3 = """{%- set ns = namespace(last=-1, open=true) %}{%- for m in messages[::-1] %}
{%- if ns.open and m.role == 'user' and not (m.content.startswith('<tool_response>')
   and m.content.endswith('</tool_response>')) %}
{%- set ns.open = false %}{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}
{%- endfor %}{%- for m in messages %}{%- set c = m.content %}{%- if m.role == 'assistant' %}
{%- set thought = '' %}{%- if '</think>' in c %}
{%- set thought = c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set c = c.split('</think>')[-1].lstrip('\n') %}{%- endif %}{%- if loop.index0 > ns.last %}
{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
{{- c.lstrip('\n') }}{%- else %}{{- '<|im_start|>assistant\n' + c }}{%- endif %}
{{- '<|im_end|>\n' }}{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + c + '\n</tool_response><|im_end|>\n' }}{%- else %}
{{- '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}{%- endif %}"""
GPT_OSS = """{{- '<|start|>system<|message|>You are a model.\n\nReasoning: low<|end|>' }}
{%- if messages[0].role == 'system' %}
{{- '<|start|>developer<|message|># Instructions\n\n' + messages[0].content + '\n\n<|end|>' }}
{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}{%- for m in rest %}
{%- if m.role == 'assistant' %}{%- if '<|channel|>final<|message|>' in m.content %}
{{- raise_exception('content holds a channel') }}{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- else %}
{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
{{- '<|start|>assistant' }}"""
INST = "[INST]", "[/INST]"

SHAPES: dict[str, Shape] = {
    "qwen2.5": Shape(CHATML, TURNS, (*TOOLS, "<|fim_prefix|>")),
    "qwen3": Shape(QWEN_3, TURNS, (*THOUGHTS, *TOOLS)),
    "llama3.1": Shape(
        LLAMA, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    ),
    "mistral v0.3": Shape(LATE_SYSTEM.replace("GAP", "' '"), ("<s>", "</s>", *INST), cut="first"),
    "nemo": Shape(LATE_SYSTEM.replace("GAP", "''"), ("<s>", "</s>", *INST)),
    "gemma3": Shape(
        GEMMA_3,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        ("\n\n", "\n\n\n", "\u2581\u2581", "<h1>"),
        cut="spaces",
    ),
    "gemma4": Shape(
        GEMMA_4,
        ("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"),
        ("\n\n", "\n\n\n", "\u2581\u2581"),
        cut="spaces",
    ),
    "phi3": Shape(
        PHI,
        ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ("</s>",),
        cut="legacy",
        rstrip=True,
    ),
    "gpt-oss": Shape(GPT_OSS, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>")),
}
CORPUS = [
    "a<b <| |> im_start im_end think|> </ > [INST x] INST user model system",
    "hi user, model and system. If a < b: [x]  {{ y }} \n\n  \u4e2d\U0001f600",
]
"""Texts of which merges are learnt, with those of the template and of the tokens."""


def spaced(text: str) -> str:
    return text.replace(" ", "\u2581")


@cache
def merges(name: str) -> BPE:
    """Pieces that reach over the borders of tokens."""
    shape = SHAPES[name]
    if shape.like is not None:
        return merges(shape.like)
    corpus = [*CORPUS, shape.template, " ".join((*shape.special, *shape.added))] * 9
    tokenizer = Backend(BPE())
    if shape.cut == "bytes":
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        alphabet, vocab = ByteLevel.alphabet(), {}
    else:
        corpus = [spaced(text) for text in corpus]
        alphabet = ["\u2581"]
        # Here control tokens have their place in the vocabulary, and bytes stand for what has none.
        first = [*shape.special, *shape.added, *(f"<0x{byte:02X}>" for byte in range(256))]
        vocab = {text: number for number, text in enumerate(first)}
    trainer = BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    for text in learnt["vocab"]:
        vocab.setdefault(text, len(vocab))
    # As published, no merge makes a control token out of text.
    pairs = [(a, b) for a, b in learnt["merges"] if a + b not in (*shape.special, *shape.added)]
    return BPE(vocab, pairs, byte_fallback=shape.cut != "bytes")


def backend(name: str, *, cut: str | None = None, without: Sequence[str] = ()) -> Backend:
    shape = SHAPES[name]
    tokenizer = Backend(merges(name))
    match cut or shape.cut:
        case "bytes":
            tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        case "first" | "never" as scheme:
            tokenizer.pre_tokenizer = Metaspace(prepend_scheme=scheme, split=False)
        case "spaces":
            tokenizer.normalizer = Replace(" ", "\u2581")
        case "legacy":
            tokenizer.normalizer = Chain([Prepend("\u2581"), Replace(" ", "\u2581")])
    tokenizer.add_tokens(
        [
            AddedToken(text, special=text in shape.special, normalized=False, rstrip=shape.rstrip)
            for text in (*shape.special, *shape.added)
            if text not in without
        ]
    )
    return tokenizer


@cache
def tokenizer(name: str) -> Tokenizer:
    shape = SHAPES[name]
    bos, eos = shape.special[:2]
    found = Tokenizer(backend(name), {"bos_token": bos, "eos_token": eos}, shape.template)
    assert {str(t) for t in found.added_tokens_decoder.values() if t.special} == {*shape.special}
    return found


# The reference.


class Tagged(str):
    """Text of which every character knows who wrote it: a role, or None for the template."""

    tags: tuple[str | None, ...]

    @classmethod
    def of(cls, text: str, tags: Sequence[str | None] | str | None = None) -> Tagged:
        if isinstance(text, Tagged):
            return text
        found = cls(text)
        found.tags = tuple(tags) if isinstance(tags, list | tuple) else (tags,) * len(text)
        return found

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> Tagged:
        return Tagged.of(str.__add__(self, other), [*self.tags, *Tagged.of(other).tags])

    def __radd__(self, other: str) -> Tagged:
        return Tagged.of(other) + self

    def __getitem__(self, at: Any) -> Tagged:
        tags = self.tags[at]
        return Tagged.of(str.__getitem__(self, at), list(tags) if isinstance(at, slice) else [tags])

    def lstrip(self, characters: str | None = None) -> Tagged:
        return self[len(self) - len(str.lstrip(self, characters)) :]

    def rstrip(self, characters: str | None = None) -> Tagged:
        return self[: len(str.rstrip(self, characters))]

    def strip(self, characters: str | None = None) -> Tagged:
        return self.lstrip(characters).rstrip(characters)

    def split(self, mark: str) -> list[Tagged]:  # type: ignore[override]
        found, last = [], 0
        while (at := self.find(mark, last)) >= 0:
            found.append(self[last:at])
            last = at + len(mark)
        return [*found, self[last:]]

    def replace(self, old: str, new: str) -> Tagged:  # type: ignore[override]
        first, *rest = self.split(old)
        for piece in rest:
            first = first + new + piece
        return first


def rendered(name: str, messages: Sequence[Message], **variables: Any) -> Tagged:
    """A conversation under a template that does not see that characters are tagged."""
    shape = SHAPES[name]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = lambda reason: refuse(reason)
    pieces = environment.from_string(shape.template).generate(
        messages=[{**m, "content": Tagged.of(m["content"], m["role"])} for m in messages],
        bos_token=shape.special[0],
        eos_token=shape.special[1],
        add_generation_prompt=True,
        **variables,
    )
    whole = Tagged.of("")
    for piece in pieces:
        whole = whole + piece
    return whole


def refuse(reason: str) -> None:
    raise TemplateError(reason)


def control(name: str) -> list[str]:
    """Tokens that a user's text must not become: special ones and what the template writes."""
    shape = SHAPES[name]
    written = [each for each in shape.added if not each.isspace() and each in shape.template]
    return [*shape.special, *written]


def own(name: str, text: Tagged, begin: int, mark: str) -> bool:
    """Whether a control token is one, and not text of the conversation."""
    authors = {text.tags[begin], text.tags[begin + len(mark) - 1]} - {None}
    return not authors or (authors == {"assistant"} and mark not in SHAPES[name].special)


def expected(name: str, messages: Sequence[Message], **variables: Any) -> list[int]:
    shape, text = SHAPES[name], rendered(name, messages, **variables)
    marks = sorted((*shape.special, *shape.added), key=len, reverse=True)
    hidden = control(name)
    ids: list[int] = []
    begin = last = 0
    while begin < len(text):
        mark = next((mark for mark in marks if text.startswith(mark, begin)), "")
        if mark in hidden and own(name, text, begin, mark):
            ids += plain(name, str.__getitem__(text, slice(last, begin)), first=last == 0)
            ids.append(tokenizer(name).backend_tokenizer.token_to_id(mark))
            begin += len(mark)
            while shape.rstrip and begin < len(text) and text[begin].isspace():
                begin += 1
            last = begin
        else:
            begin += len(mark) or 1
    return ids + plain(name, str.__getitem__(text, slice(last, None)), first=last == 0)


def plain(name: str, text: str, *, first: bool) -> list[int]:
    cut = "never" if SHAPES[name].cut == "first" and not first else None
    known, short = tokenizer(name), bare(name, cut)
    found = short.encode(text, add_special_tokens=False).ids
    return [known.backend_tokenizer.token_to_id(short.id_to_token(each)) for each in found]


@cache
def bare(name: str, cut: str | None) -> Backend:
    return backend(name, cut=cut, without=control(name))

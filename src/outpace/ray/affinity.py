"""Which replica answers a prompt: where prompts with the same beginning went before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

BEGINNING = 256
"""Characters, or token ids, that prompts have alike where they share a replica."""

SLACK = 8
"""Requests that a replica may have more than the next one, and still get those that are its own."""


def beginning_of(body: bytes) -> str:
    """A word for how a request begins: for its model and the first characters of its prompt.

    Of several prompts it is the first. It is empty for a body without one, which any replica may
    answer or refuse.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(asked, dict):
        return ""
    prompt = asked.get("messages") or asked.get("prompt")
    return "" if prompt is None else digest(f"{asked.get('model')!s:.256} {begun(prompt)}").hex()


def begun(prompt: Any) -> str:
    """The first characters of a prompt, in any form that a request may give it."""
    match prompt:
        case [str() | [*_] as first, *_]:
            prompt = first
    match prompt:
        case str():
            return prompt[:BEGINNING]
        case [dict(), *_]:
            return "\n".join(map(said, prompt))[:BEGINNING]
        case [*ids]:
            return " ".join(str(each) for each in ids[:BEGINNING] if isinstance(each, int))
    return ""


def said(message: Any) -> str:
    """Role and text of a message; what is none says nothing."""
    match message:
        case {"role": str(role), "content": str(text)}:
            return f"{role} {text}"
        case {"role": str(role), "content": [*parts]}:
            texts = (part.get("text") for part in parts if isinstance(part, dict))
            return " ".join([role, *(text for text in texts if isinstance(text, str))])
    return ""


def digest(text: str) -> bytes:
    """The same for the same text, in every process."""
    return blake2b(text.encode(errors="replace"), digest_size=16).digest()


def ranked(beginning: str, names: Sequence[str]) -> list[str]:
    """Names in the order in which a beginning prefers them (rendezvous hashing).

    Where one goes, only what was its own moves; where one comes, what moves goes to it.
    """
    return sorted(names, key=lambda name: digest(f"{name} {beginning}"), reverse=True)


def chosen(beginning: str, loads: Mapping[str, int], slack: int = SLACK) -> list[list[str]]:
    """Names by rank, given how many requests each has; of one rank the least loaded is meant.

    A beginning has its own name and a second one. It goes to the less loaded of the two where its
    own has more requests by over `slack`, and to others where neither has room. Without a
    beginning all rank alike.
    """
    if not beginning:
        return [list(loads)]
    own, *others = ranked(beginning, list(loads))
    second = others[:1]
    if second and loads[own] > loads[second[0]] + slack:
        return [[own, *second], others[1:]]
    return [[own], second, others[1:]]

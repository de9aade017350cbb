"""Workload of a load test: prompts, and the fields common to all requests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from outpace.api.answers import read_prompts
from outpace.api.text import Message
from outpace.benchmark.client import RequestBody
from outpace.evaluation.run import questions_of

Endpoint = Literal["chat", "completions"]
WorkloadPrompt = str | list[Message]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """An endless sequence of requests that cycles through the prompts.

    `fields` are fields of every request, such as `max_tokens` and `outpace`. Request n has the
    seed `seed + n`.

    Raises:
        ValueError: the endpoint is unknown, or does not accept a prompt.
    """

    model: str
    prompts: Sequence[WorkloadPrompt]
    endpoint: Endpoint = "chat"
    seed: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = True

    def __post_init__(self) -> None:
        if self.endpoint not in get_args(Endpoint):
            known = " or ".join(get_args(Endpoint))
            raise ValueError(f"endpoint must be {known}, got {self.endpoint!r}")
        if self.endpoint == "completions":
            for number, prompt in enumerate(self.prompts, 1):
                if not isinstance(prompt, str):
                    raise ValueError(
                        f"prompt {number} is a list of messages, which needs endpoint chat"
                    )

    def request_bodies(self, first: int, count: int) -> Iterator[RequestBody]:
        """Return the bodies of `count` requests, starting with number `first`."""
        return map(self.request_body, range(first, first + count))

    def request_body(self, number: int) -> RequestBody:
        """Return the body of a request."""
        prompt = self.prompts[number % len(self.prompts)]
        body = {"model": self.model, "seed": self.seed + number, **self.fields}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.endpoint == "completions":
            return {**body, "prompt": prompt}
        user = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {**body, "messages": user}


MAX_PROBLEMS = 4096
"""Maximum number of generated story problems."""


def load_prompts(path: Path | None, count: int, seed: int) -> list[WorkloadPrompt]:
    """Load and shuffle the prompts of a file, or `count` held-out story problems without one."""
    prompts: list[WorkloadPrompt]
    if path is None:
        prompts = [
            str(question.prompt) for question in questions_of("story", min(count, MAX_PROBLEMS))
        ]
    else:
        prompts = read_prompts(path)
    random.Random(seed).shuffle(prompts)
    return prompts

"""How often servers choose the right one of two tools, or none, with `tool_choice` auto.

    outpace serve --model coder=qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --port 8000
    llama-server -m qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --jinja -c 4096 --port 8001
    python benchmarks/tool_choice.py --server outpace=http://127.0.0.1:8000 \
        --server llama.cpp=http://127.0.0.1:8001 --json benchmarks/results/tool_choice.json

Each server has one model. Greedy, one request at a time. An answer is right if all its calls are of
the expected tool, or if no tool is expected and there is no call. `unparsed` are answers without a
call whose text has the name of the expected tool. The first server must be right at least as often
as each other one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from harness import Bar, Row, arguments, finish, save, show

QUESTIONS = Path(__file__).with_name("tool_choice_questions.json")
TIMEOUT = 300.0
"""Seconds that an answer may take."""


class Question(NamedTuple):
    """A question with its tools, and the name of the tool to call; empty if none is."""

    text: str
    tools: list[dict[str, Any]]
    expected: str


def read_questions() -> Iterator[Question]:
    """Yield the questions; every parameter of a tool is required."""
    for group in json.loads(QUESTIONS.read_text()):
        tools = [
            {"type": "function", "function": {**tool, "parameters": schema(tool["parameters"])}}
            for tool in group["tools"]
        ]
        for expected, text in group["questions"].items():
            yield Question(text, tools, expected)


def schema(types: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON schema of an object from the types of its properties."""
    properties = {name: {"type": kind} for name, kind in types.items()}
    return {"type": "object", "properties": properties, "required": [*types]}


def find_model(client: httpx2.Client) -> str:
    """Return the name of a server's first model."""
    return str(client.get("/v1/models").raise_for_status().json()["data"][0]["id"])


def ask(client: httpx2.Client, model: str, question: Question, tokens: int) -> dict[str, Any]:
    """Return the message of a server."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question.text}],
        "tools": question.tools,
        "tool_choice": "auto",
        "temperature": 0,
        "max_tokens": tokens,
    }
    reply = client.post("/v1/chat/completions", json=body)
    if reply.status_code != 200:
        raise SystemExit(f"{client.base_url} refuses a question: {reply.text}")
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


def judge(server: str, question: Question, message: Mapping[str, Any]) -> Row:
    """Return what a server answered to a question."""
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    text, expected = message.get("content") or "", question.expected
    return {
        "server": server,
        "question": question.text,
        "expected": expected,
        "calls": " ".join(names),
        "right": {*names} == ({expected} if expected else set()),
        "unparsed": bool(expected) and not names and expected in text,
        "text": text,
    }


def summarize(server: str, rows: list[Row]) -> Row:
    """Return the counts of a server."""
    own = [row for row in rows if row["server"] == server]
    return {
        "server": server,
        "questions": len(own),
        "right": sum(row["right"] for row in own),
        "of tools": sum(row["right"] for row in own if row["expected"]),
        "of no tool": sum(row["right"] for row in own if not row["expected"]),
        "unparsed": sum(row["unparsed"] for row in own),
    }


def parse_server(text: str) -> tuple[str, str]:
    """Return the name and the URL in `name=url`."""
    name, found, url = text.partition("=")
    if not (name and found and url):
        raise argparse.ArgumentTypeError(f"must be name=url, got {text!r}")
    return name, url


def main() -> None:
    """Ask all servers and compare them."""
    parser = arguments(__doc__, rounds=None, threads=None)
    parser.add_argument(
        "--server",
        type=parse_server,
        action="append",
        required=True,
        help="name=url of a server; may be repeated",
    )
    parser.add_argument("--limit", type=int, help="questions (all)")
    parser.add_argument("--tokens", type=int, default=96, help="maximum per answer (96)")
    options = parser.parse_args()
    rows: list[Row] = []
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(httpx2.Client(base_url=url, timeout=TIMEOUT))
            for name, url in options.server
        }
        models = {name: find_model(client) for name, client in clients.items()}
        for question in [*read_questions()][: options.limit]:
            for name, client in clients.items():
                message = ask(client, models[name], question, options.tokens)
                rows.append(judge(name, question, message))
            save(options, {"answers": rows}, [])
    counts = [summarize(name, rows) for name in clients]
    show("tool choice", counts)
    first, *others = counts
    bars = [
        Bar(
            what=f"right, {first['server']} - {other['server']}",
            value=first["right"] - other["right"],
            limit=0,
            at_least=True,
        )
        for other in others
    ]
    finish(options, {"servers": counts, "answers": rows}, bars)


if __name__ == "__main__":
    main()

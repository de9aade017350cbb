"""Calls of the official OpenAI client to a server, for the installed release of the client.

A separate program, since a process can import only one release: `python conformance.py URL`. It
prints a line per model and method, and exits with an error if the API contract is violated.
"""

import asyncio
import re
import sys
from typing import Any

import openai
from pydantic import BaseModel

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does Tom have?"
SHEET = "Solve:\n4000\n3104\n1030\n0000"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def chat(client: openai.OpenAI, model: str, method: str) -> None:
    """Chat completions, whole and streamed, with seed, stop, n and usage."""
    asked: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": SHEET}] if "sudoku" in model else MESSAGES,
        "max_tokens": 24,
        "seed": 7,
        "temperature": 0.8,
        "extra_body": {"outpace": {"method": method}},
    }
    create: Any = client.chat.completions.create
    whole = create(**asked)
    text, usage = whole.choices[0].message.content, whole.usage
    assert whole.object == "chat.completion" and whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert create(**asked).choices[0].message.content == text  # the same seed
    chunks = list(create(**asked, stream=True, stream_options={"include_usage": True}))
    # The second prompt is cached.
    assert text_of(chunks) == text and chunks[-1].usage.total_tokens == usage.total_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] is not None
    mark = text[len(text) // 2 : len(text) // 2 + 3]
    cut = create(**asked, stop=[mark])
    assert cut.choices[0].message.content == text[: text.index(mark)]
    assert cut.choices[0].finish_reason == "stop"
    two = create(**asked, n=2)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].message.content == text
    assert two.usage.prompt_tokens == usage.prompt_tokens
    scored = create(**asked, logprobs=True).choices[0].logprobs
    assert len(scored.content) == usage.completion_tokens
    assert all(entry.logprob <= 1e-4 for entry in scored.content)


def complete(client: openai.OpenAI, model: str, method: str) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "max_tokens": 12,
        "seed": 3,
        "extra_body": {"outpace": {"method": method}},
    }
    create: Any = client.completions.create
    one = create(prompt="There are", **asked)
    assert one.object == "text_completion"
    pieces = [chunk.choices[0].text for chunk in create(prompt="There are", stream=True, **asked)]
    assert "".join(pieces) == one.choices[0].text
    both = create(prompt=["There are", "Tom has"], **asked)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == one.choices[0].text


class Basket(BaseModel):
    """An object that answers describe."""

    fruit: str
    count: int


REGEX = r"[A-Z][a-z]+ has \d{1,3} apples\."


def constrained(client: openai.OpenAI, model: str, method: str) -> None:
    """Constraints: a pydantic model, a schema, any object, and vLLM's fields."""
    outpace = {"outpace": {"method": method}}
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 60, "seed": 1}
    parsed = client.chat.completions.parse(**asked, response_format=Basket, extra_body=outpace)
    assert isinstance(parsed.choices[0].message.parsed, Basket)
    create: Any = client.chat.completions.create
    chunks = create(
        **asked, stream=True, extra_body=outpace | {"structured_outputs": {"regex": REGEX}}
    )
    assert re.fullmatch(REGEX, text_of(list(chunks)))
    lines = {"structured_outputs": {"choice": ["yes", "no"]}}
    plain = client.completions.create(
        model=model, prompt="Is it?", max_tokens=8, extra_body=outpace | lines
    )
    assert plain.choices[0].text in ("yes", "no")


def refused(client: openai.OpenAI, error: type[Exception], param: str | None, **asked: Any) -> None:
    """Assert that a call fails with a client error that names the field."""
    asked = {"model": "tiny-ar", "messages": MESSAGES, **asked}
    try:
        client.chat.completions.create(**asked)
    except error as found:
        assert found.param == param, (param, found.param)  # type: ignore[attr-defined]
        return
    raise AssertionError(f"{asked} is not refused")


def errors(client: openai.OpenAI) -> None:
    """Unknown models, out-of-range values and unsupported fields."""
    bad = openai.BadRequestError
    refused(client, openai.NotFoundError, "model", model="nobody")
    refused(client, bad, "n", n=99)
    refused(
        client, bad, "structured_outputs.regex", extra_body={"structured_outputs": {"regex": "["}}
    )
    refused(client, bad, "messages", messages=[])


async def together(url: str) -> None:
    """The asyncio client: concurrent requests, and an abandoned stream."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "tiny-ar", "messages": MESSAGES, "temperature": 0}
        create: Any = client.chat.completions.create
        answers = await asyncio.gather(*(create(**asked) for _ in range(8)))
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        stream = await create(**asked, stream=True)
        async for _ in stream:
            break
        await stream.close()


def main(url: str) -> None:
    """Make all calls to a server of the zoo."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for model in client.models.list():
            assert client.models.retrieve(model.id).id == model.id
            for method in (model.model_extra or {})["outpace"]["methods"]:
                chat(client, model.id, method)
                complete(client, model.id, method)
                constrained(client, model.id, method)
                print(model.id, method)
        errors(client)
    asyncio.run(together(url))
    print("openai", openai.__version__)


if __name__ == "__main__":
    main(sys.argv[1])

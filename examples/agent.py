"""Let an agent of pydantic-ai answer questions about a shop with two tools of a served model.

    pip install 'pydantic-ai-slim[openai]'
    outpace serve --model coder=qwen2.5-coder-1.5b-instruct-q4_k_m.gguf
    python examples/agent.py coder

Arguments of a call always match its schema, so `fruit` is one of the three.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Literal

from openai import AsyncOpenAI
from pydantic_ai import Agent, RunContext, Tool, ToolDefinition
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

Fruit = Literal["apples", "pears", "plums"]

STOCK: dict[Fruit, int] = {"apples": 12, "pears": 5, "plums": 0}
CENTS: dict[Fruit, int] = {"apples": 40, "pears": 65, "plums": 20}

QUESTIONS = (
    "How many pears are in stock?",
    "What does one pear cost?",
    "How many apples does the shop have?",
)


def count_stock(fruit: Fruit) -> str:
    """Return how many fruits of a kind are in stock."""
    return f"There are {STOCK[fruit]} {fruit} in stock."


def find_price(fruit: Fruit) -> str:
    """Return the price of one fruit of a kind."""
    return f"The price of {fruit} is {CENTS[fruit]} cents each."


async def offer_before_result(
    context: RunContext[None], tool: ToolDefinition
) -> ToolDefinition | None:
    """Offer a tool until one has returned.

    Models of this size repeat the call after its result: Qwen2.5-Coder 1.5B does so with llama.cpp,
    too, from the same prompt. A larger model needs no such limit.
    """
    parts = (part for message in context.messages for part in message.parts)
    return None if any(part.part_kind == "tool-return" for part in parts) else tool


async def answer_questions(model: str, client: AsyncOpenAI) -> None:
    """Ask the questions one after the other, and print calls, results and answers."""
    agent = Agent(
        OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client)),
        instructions="You answer questions about a fruit shop. Use the tools.",
        tools=[Tool(each, prepare=offer_before_result) for each in (count_stock, find_price)],
        model_settings={"temperature": 0.0, "max_tokens": 200, "parallel_tool_calls": False},
    )
    async with client:
        for question in QUESTIONS:
            print(f"> {question}")
            result = await agent.run(question)
            for message in result.new_messages():
                for part in message.parts:
                    if part.part_kind == "tool-call":
                        print(f"  {part.tool_name}({part.args})")
                    elif part.part_kind == "tool-return":
                        print(f"  = {part.content}")
            print(result.output)


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask an agent questions about a fruit shop."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", help="name of the served model")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none", help="API key of the server")
    flags = parser.parse_args(arguments)
    client = AsyncOpenAI(base_url=flags.url, api_key=flags.key)
    asyncio.run(answer_questions(flags.model, client))


if __name__ == "__main__":
    main()

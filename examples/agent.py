"""Let an agent of pydantic-ai use two tools of a shop, in three turns with a served model.

    pip install 'pydantic-ai-slim[openai]'
    outpace serve coder=qwen2.5-coder-1.5b-instruct-q4_k_m.gguf
    python examples/agent.py coder

The chat template of the model must describe tools. Arguments of a call always match its schema.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pydantic_ai import Agent, ModelMessage
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

STOCK = {"apples": 12, "pears": 5, "plums": 0}
CENTS = {"apples": 40, "pears": 65, "plums": 20}

QUESTIONS = (
    "How many pears are in stock?",
    "And what does one of them cost?",
    "Compare that with the price and the stock of apples.",
)


def count_stock(fruit: str) -> str:
    """Return how many fruits of a kind are in stock.

    Args:
        fruit: Plural of the fruit, such as apples.
    """
    return f"{STOCK[fruit]} {fruit}" if fruit in STOCK else f"the shop does not sell {fruit}"


def find_price(fruit: str) -> str:
    """Return the price of one fruit of a kind.

    Args:
        fruit: Plural of the fruit, such as apples.
    """
    return f"{CENTS[fruit]} cents" if fruit in CENTS else f"the shop does not sell {fruit}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask the questions one after the other, and print calls, results and answers."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", help="name of the served model")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none", help="API key of the server")
    flags = parser.parse_args(arguments)
    provider = OpenAIProvider(base_url=flags.url, api_key=flags.key)
    agent = Agent(
        OpenAIChatModel(flags.model, provider=provider),
        instructions="You answer questions about a fruit shop. Use the tools.",
        tools=[count_stock, find_price],
        model_settings={"temperature": 0.0, "max_tokens": 200, "parallel_tool_calls": False},
    )
    history: list[ModelMessage] = []
    for question in QUESTIONS:
        print(f"> {question}")
        result = agent.run_sync(question, message_history=history)
        for message in result.new_messages():
            for part in message.parts:
                if part.part_kind == "tool-call":
                    print(f"  {part.tool_name}({part.args})")
                elif part.part_kind == "tool-return":
                    print(f"  = {part.content}")
        print(result.output)
        history = result.all_messages()


if __name__ == "__main__":
    main()

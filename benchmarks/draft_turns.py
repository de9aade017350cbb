"""Acceptance and speed of DFlash drafts after earlier turns of a conversation.

    python benchmarks/draft_turns.py --model qwen2.5-coder-0.5b-instruct-q4_k_m.gguf \
        --gsm8k test.jsonl --draft full=drafts/old --draft "window 256=drafts/new" \
        --json benchmarks/results/draft-turns.json

The earlier turns are questions of GSM8K with the model's answers; the last one is another question,
or a prompt for prose. The rows of a draft are `tokens=7`, whose tokens per forward are its
acceptance length, and `lookup=true`, as by default. All rows answer the same prompts, greedily, in
turns; the earlier turns are in the prefix cache of each, so that its seconds are those of the last
question and its answer. `equal` is whether all texts are those of plain decoding.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from draft_lengths import WARM_UP, Setting
from harness import Row, arguments, prepare, save, show
from outpace import LLM
from outpace.lab.run import questions_of
from outpace.methods import Autoregressive, DFlash, Lookup, Method

Chat = list[dict[str, str]]

FIRST_EARLIER = 20
"""Number of the first question of GSM8K that is an earlier turn."""


def ask(chat: Chat, question: str) -> Chat:
    """A conversation with one more question."""
    return [*chat, {"role": "user", "content": question}]


def converse(llm: LLM, questions: list[str]) -> Chat:
    """Questions with the model's answers."""
    chat: Chat = []
    for question in questions:
        chat = ask(chat, question)
        (output,) = llm.generate([chat], max_tokens=200, temperature=0.0)
        chat.append({"role": "assistant", "content": output.text})
    return chat


def measure_turns(llm: LLM, options: argparse.Namespace) -> Iterator[Row]:
    """Rows of all methods and tasks after each number of earlier turns."""
    drafts = dict(each.split("=", 1) for each in options.draft)
    methods: dict[str, Method] = {"plain": Autoregressive(), "lookup": Lookup()}
    for name, path in drafts.items():
        methods[f"{name}, tokens=7"] = DFlash(draft=path, tokens=7)
        methods[f"{name}, lookup=true"] = DFlash(draft=path, lookup=True)
    source = "gsm8k" if options.gsm8k else "story"
    asked = [str(each.prompt) for each in questions_of(source, 100, options.gsm8k)]
    prose = [str(each.prompt) for each in questions_of("prose", options.prompts)]
    tasks = {source: asked[: options.prompts], "prose": prose}
    for turns in options.turns:
        chat = converse(llm, asked[FIRST_EARLIER : FIRST_EARLIER + turns])
        context = len(llm.text.encode(chat)) if chat else 0
        for task, questions in tasks.items():
            settings = {name: Setting(llm, method) for name, method in methods.items()}
            every = list(settings.values())
            for setting in every:  # fills the prefix cache
                setting.answer(ask(chat, asked[FIRST_EARLIER - 1]), WARM_UP)
                setting.outputs, setting.timings = [], []
            for number, question in enumerate(questions):
                turn = number % len(every)
                for setting in [*every[turn:], *every[:turn]]:
                    setting.answer(ask(chat, question), options.tokens)
            rates = {}
            for name, setting in settings.items():
                row = setting.row(name, settings["plain"])
                rates[name] = row["tokens per second"]
                yield {
                    "earlier turns": turns,
                    "context": context,
                    "task": task,
                    "method": name,
                    "tokens": row["tokens"],
                    "tokens per forward": row["tokens"]
                    / sum(output.forwards for output in setting.outputs),
                    "tokens per second": rates[name],
                    "gain": rates[name] / rates["plain"],
                    "equal": row["equal texts"] == 1,
                }


def main() -> None:
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("--model", required=True, help="target")
    parser.add_argument("--gsm8k", help="test.jsonl of GSM8K (story problems of the package)")
    parser.add_argument("--draft", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--turns", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--prompts", type=int, default=6, help="questions of a task (6)")
    parser.add_argument("--tokens", type=int, default=80, help="of an answer (80)")
    options = parser.parse_args()
    prepare(options)
    llm, rows = LLM(options.model, method=Autoregressive()), list[Row]()
    for row in measure_turns(llm, options):
        rows.append(row)
        print(*row.values(), flush=True)
    show("after earlier turns", rows)
    save(options, {"results": rows}, [])


if __name__ == "__main__":
    main()

"""Tokens per second of everyday tasks on a published model, with other programs beside.

    python benchmarks/everyday.py --model qwen2.5-coder-1.5b-instruct-q4_k_m.gguf \
        --draft qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --humaneval HumanEval.jsonl.gz \
        --gsm8k test.jsonl --threads 2 --json everyday.json

Other programs: OpenVINO and transformers where they are installed, and any server with the chat
endpoint of OpenAI, which `--server NAME COMMAND` starts (`{port}` stands for the port):

    --server "llama.cpp, plain" "llama-server -m model.gguf -t 2 --port {port}"
    --server "outpace, serve" "outpace serve model.gguf --port {port}"

Tasks: functions of HumanEval, questions of GSM8K, edits of a file of 60 lines, summaries with
quotations, prose, and JSON after a schema, greedy. One request at a time, or with `--requests 16`
that many in a batch, without other programs. All sides answer the same prompts and take turns at
every one, in an order that rotates. `--only` selects tasks, `--sides` programs. A speed is all
tokens of a task over all seconds, prefill included; a gain is relative to plain decoding of the
same program. A server's tokens are those of its text, and its seconds those of the whole request.
`equal` is the share of answers with the text of plain decoding of outpace: for methods of outpace
it must be 1, other programs round differently. `texts` are the answers, null where equal.
"""

from __future__ import annotations

import argparse
import json
from itertools import cycle, islice
from pathlib import Path

import matplotlib

from everyday_parts.sides import PROGRAMS, Side, build_sides
from everyday_parts.tasks import Task, build_tasks
from harness import Bar, Row, arguments, finish, prepare, save, show
from outpace import LLM

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {
    "outpace": "tab:blue",
    "llama.cpp": "tab:orange",
    "OpenVINO": "tab:green",
    "transformers": "tab:red",
    "vLLM": "tab:purple",
}

GAINS = {"humaneval": 1.4, "rewrite": 2.5, "prose": 0.98}
"""Least gain of lookup over plain decoding, one request at a time."""

BATCH_GAIN = 0.98
"""Least gain with several requests at a time, in every task."""

LEADS = {"humaneval": 2.0, "rewrite": 2.0, "gsm8k": 1.4, "quote": 1.4, "json": 1.4, "prose": 1.1}
"""Least speed of our server (or lookup, its default) over the fastest other program."""


def measure_task(sides: list[Side], task: Task, llm: LLM, rounds: int, requests: int) -> list[Row]:
    """Rows of all sides that can answer a task; prompts repeat until the last batch is full."""
    able = [side for side in sides if task.schema is None or side.obeys_schemas]
    repeated = cycle(task.prompts)
    batches = [[*islice(repeated, requests)] for _ in range(0, len(task.prompts), requests)]
    for side in able:  # servers keep prompts, and n-grams of answers
        side.run(["Count from 1 to 40."] * requests, task)
        side.answers, side.timings = [], []
    for index in range(rounds):
        for number, batch in enumerate(batches):
            turn = (index + number) % len(able)
            for side in [*able[turn:], *able[:turn]]:
                side.run(batch, task)
    return [make_row(side, able, task, llm, requests) for side in able]


def make_row(side: Side, sides: list[Side], task: Task, llm: LLM, requests: int) -> Row:
    """Figures of one side; the gain is relative to the plain side of the same program, or ours."""
    program = [each for each in sides if each.program == side.program]
    plain = next((each for each in program if each.way == "plain"), sides[0])
    first, texts = ([llm.text.decode(ids) for ids in each.answers] for each in (sides[0], side))
    equal = [one == other for one, other in zip(texts, first, strict=True)]
    return {
        "task": task.name,
        "side": side.name,
        "requests": requests,
        "answers": len(side.answers),
        "tokens": sum(map(len, side.answers)),
        "tokens per second": speed(side),
        "gain": speed(side) / speed(plain),
        "equal": sum(equal) / len(equal),
        "texts": [
            None if same and side is not sides[0] else text
            for text, same in zip(texts, equal, strict=True)
        ],
    }


def speed(side: Side) -> float:
    """Tokens of all answers over the wall seconds that they took."""
    return sum(map(len, side.answers)) / sum(timing.wall for timing in side.timings)


def find_bars(rows: list[Row]) -> list[Bar]:
    """Bars of lookup over plain decoding, of equal texts, and over other programs."""
    bars = []
    for row in rows:
        limit = GAINS.get(row["task"]) if row["requests"] == 1 else BATCH_GAIN
        if row["side"] == "outpace, lookup" and limit is not None:
            what = f"{row['task']}: lookup over plain decoding, {row['requests']} at a time"
            bars.append(Bar(what=what, value=row["gain"], limit=limit, at_least=True))
        if row["side"].startswith("outpace"):
            what = f"{row['task']}: {row['side']}: share equal to plain decoding"
            bars.append(Bar(what=what, value=row["equal"], limit=1.0, at_least=True))
    for task, limit in LEADS.items():
        speeds = {row["side"]: row["tokens per second"] for row in rows if row["task"] == task}
        ours = speeds.get("outpace, serve", speeds.get("outpace, lookup"))
        theirs = [value for side, value in speeds.items() if not side.startswith("outpace")]
        if ours is not None and theirs:
            value, what = ours / max(theirs), f"{task}: default over fastest other program"
            bars.append(Bar(what=what, value=value, limit=limit, at_least=True))
    return bars


def draw_speeds(rows: list[Row], path: Path) -> None:
    """Draw tokens per second of each program, with and without drafts, task by task."""
    tasks, sides = (list(dict.fromkeys(row[key] for row in rows)) for key in ("task", "side"))
    speeds = {(row["task"], row["side"]): row["tokens per second"] for row in rows}
    width = 0.8 / len(sides)
    figure, pane = plt.subplots(figsize=(1.5 + 2.2 * len(tasks), 4), layout="constrained")
    for number, side in enumerate(sides):
        at = [place + (number - (len(sides) - 1) / 2) * width for place in range(len(tasks))]
        heights = [speeds.get((task, side), 0.0) for task in tasks]
        program, _, way = side.partition(", ")
        strength = 0.45 if way == "plain" else 1.0
        bars = pane.bar(
            at, heights, 0.92 * width, color=COLOURS.get(program, "tab:gray"), alpha=strength
        )
        bars.set_label(side)
        pane.bar_label(bars, fmt="%.0f", fontsize=7)
        for bar in bars:
            bar.set_hatch("//" if "draft" in way else "")
    pane.set_xticks(range(len(tasks)), tasks)
    pane.set_ylabel("tokens per second")
    pane.spines[["top", "right"]].set_visible(False)
    pane.legend(fontsize=7, ncols=2, frameon=False, loc="upper left")
    pane.set_ylim(top=1.35 * max(speeds.values()))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Measure all tasks and write each as it ends; or only draw."""
    parser = arguments(__doc__, rounds=1, threads=2)
    parser.add_argument("--model", help="model, for other programs a file or folder")
    parser.add_argument("--draft", help="smaller model with the same tokenizer")
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("--gsm8k", type=Path, help="test.jsonl")
    parser.add_argument("--limit", type=int, default=20, help="prompts of a task (20)")
    parser.add_argument("--only", nargs="+", default=[], help="tasks (all)")
    names = ["outpace", *PROGRAMS]
    parser.add_argument("--sides", nargs="*", choices=names, default=names, help="(all)")
    parser.add_argument(
        "--server", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"), help="server"
    )
    parser.add_argument("--requests", type=int, default=1, help="requests at a time (1)")
    parser.add_argument("--quantize", help="bits of outpace (those of the file)")
    parser.add_argument("--png", type=Path, help="picture")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only draw what this file holds")
    options = parser.parse_args()
    if options.draw is not None:
        draw_speeds(json.loads(options.draw.read_text())["rows"], options.png)
        return
    if options.model is None:
        parser.error("--model is required")
    prepare(options)
    run(options)


def run(options: argparse.Namespace) -> None:
    """Load all sides, then measure."""
    # Every side reads each prompt itself.
    llm = LLM(options.model, "lookup", quantize=options.quantize, prefix_cache=False)
    sides, rows = build_sides(llm, options), []
    for task in build_tasks(options):
        found = measure_task(sides, task, llm, options.rounds, options.requests)
        show(task.name, [{key: row[key] for key in row if key != "texts"} for row in found])
        rows += found
        for side in sides:
            side.answers, side.timings = [], []
        save(options, {"rows": rows}, find_bars(rows))
    finish(options, {"rows": rows}, find_bars(rows))
    if options.png is not None:
        draw_speeds(rows, options.png)


if __name__ == "__main__":
    main()

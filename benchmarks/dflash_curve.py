"""What a DFlash draft gains on `tiny-ar`, and what of its training matters: numbers and picture.

    python benchmarks/dflash_curve.py --json benchmarks/results/dflash-curve.json \
        --png docs/dflash-curve.png --run "as published=runs/dflash/published" …

Two measurements on held-out story problems, greedily, on the CPU. *Decoding*: the target alone and
with the draft take turns over slices of the problems, one request at a time and many; the texts
must be equal, and *faster* is the median over the slices of the ratio of CPU times. *Training*:
each run that is named, all of the recipe `tiny-dflash` with other settings, such as

    outpace train tiny-dflash steps=400 out=runs/dflash/no-decay gamma=0

is judged by how many tokens a verification would keep of each block on the target's own answers,
which is what decoding keeps. `--draw` makes the picture again from the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from rich.progress import track

from harness import Bar, Row, Timing, arguments, finish, prepare, ratio, save, show, spread, timed
from outpace import LLM
from outpace.api.output import Output
from outpace.api.text import Prompt
from outpace.checkpoints.load import load_draft
from outpace.lab.metrics import accepted_lengths
from outpace.lab.run import questions_of
from outpace.methods import Autoregressive, DFlash, Method
from outpace.models.draft import DFlashDraft
from outpace.models.transformer import Transformer
from outpace.training import objectives
from outpace.training.objective import Models

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TARGET = "tiny-ar"
WHOLE = 10**6
"""More drafts than any block has: all of a block are verified."""

SLICE = 50
MAX_TOKENS = 128
BARS = ("#888888", "#92c5de", "#2166ac")


def slices(items: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Neighbours, so many at a time."""
    for first in range(0, len(items), SLICE):
        yield list(items[first : first + SLICE])


def decode(
    methods: dict[str, Method], prompts: Sequence[Prompt], batch: int
) -> tuple[dict[str, list[Output]], dict[str, list[Timing]]]:
    """Outputs and seconds per slice of each method, in turns and alternating order."""
    llm = LLM(TARGET, max_length=256, max_sequences=batch, prefix_cache=False)
    outputs: dict[str, list[Output]] = {name: [] for name in methods}
    timings: dict[str, list[Timing]] = {name: [] for name in methods}
    for method in methods.values():
        llm.generate(list(prompts[:batch]), method=method, max_tokens=MAX_TOKENS, temperature=0)
    for index, part in enumerate(track(list(slices(prompts)), f"batch {batch}")):
        for name in sorted(methods, key=list(methods).index, reverse=bool(index % 2)):

            def run(name: str = name, part: list[Prompt] = part) -> None:
                method = methods[name]
                outputs[name] += llm.generate(
                    part, method=method, max_tokens=MAX_TOKENS, temperature=0
                )

            timings[name].append(timed(run))
    return outputs, timings


def compare(draft: str, limit: int, batches: Sequence[int]) -> tuple[list[Row], list[Bar]]:
    """Tokens per second of the target alone and with its draft, and whether the texts agree."""
    prompts = [question.prompt for question in questions_of("story", limit)]
    rows: list[Row] = []
    bars: list[Bar] = []
    for batch in batches:
        methods: dict[str, Method] = {
            "alone": Autoregressive(),
            "whole blocks": DFlash(draft=draft, tokens=WHOLE),
            "adaptive": DFlash(draft=draft),
        }
        outputs, timings = decode(methods, prompts, batch)
        alone, *others = outputs.values()
        same = sum(
            all(answer.ids == first.ids for answer in rest)
            for first, *rest in zip(alone, *others, strict=True)
        )
        for name in methods:
            tokens = sum(len(output.ids) for output in outputs[name])
            lengths = [length for output in outputs[name] for length in accepted_lengths(output)]
            rows.append(
                {
                    "method": name,
                    "batch": batch,
                    "problems": len(prompts),
                    "equal texts": same,
                    "acceptance length": float(np.mean(lengths)),
                    "tokens per second": tokens / sum(t.wall for t in timings[name]),
                    "tokens per cpu second": tokens / sum(t.cpu for t in timings[name]),
                    "faster": ratio(timings["alone"], timings[name]),
                    "slices": spread(timings["alone"], timings[name]),
                    "faster by the clock": ratio(timings["alone"], timings[name], "wall"),
                }
            )
        show(f"batch {batch}", rows[-len(methods) :])
        bars.append(
            Bar(what=f"equal texts at batch {batch}", value=same, limit=limit, at_least=True)
        )
        least = 2.0 if batch == 1 else 1.0
        faster = float(rows[-1]["faster"])
        bars.append(Bar(what=f"faster at batch {batch}", value=faster, limit=least, at_least=True))
    length = float(rows[2]["acceptance length"])
    bars.append(Bar(what="mean acceptance length", value=length, limit=4.5, at_least=True))
    return rows, bars


def answers(limit: int) -> tuple[LLM, list[tuple[list[int], list[int]]]]:
    """The target, and prompts with its answers, end token included."""
    llm = LLM(TARGET, "autoregressive", max_length=256, prefix_cache=False)
    prompts = [llm.text.encode(question.prompt) for question in questions_of("story", limit)]
    outputs = llm.generate(prompts, max_tokens=MAX_TOKENS, temperature=0)
    end = next(iter(llm.eos))
    return llm, [(p, [*output.ids, end]) for p, output in zip(prompts, outputs, strict=True)]


@torch.inference_mode()
def reach(
    draft: DFlashDraft,
    objective: objectives.DFlash,
    models: Models,
    prompt: list[int],
    answer: list[int],
) -> list[int]:
    """How many drafts are right in a row, of a block anchored at each token of an answer."""
    tokens = np.array([*prompt, *answer])
    scored = np.arange(len(tokens)) >= len(prompt)
    rows = objective.block_rows(tokens, scored, np.flatnonzero(scored)[:-1])
    out = objective.run_models(models, rows)
    hits = draft.compute_logits(out.hidden).argmax(-1) == rows.labels[out.block]
    assert objective.block is not None
    lengths: list[int] = hits.view(-1, objective.block)[:, 1:].long().cumprod(1).sum(1).tolist()
    return lengths


def judge(run: Path, llm: LLM, problems: Sequence[tuple[list[int], list[int]]]) -> Row:
    """Acceptance of the draft that a run exported, as decoding would meet it."""
    target = llm.target.model
    assert isinstance(target, Transformer)
    facts = json.loads((run / "run.json").read_text())["settings"]
    draft = load_draft(run / "export", target)
    assert isinstance(draft, DFlashDraft)
    objective = objectives.DFlash().bind(draft.config)
    models = Models(draft, {"target": target})
    lengths: list[int] = []
    block = draft.config.block
    assert block is not None
    alive = np.zeros((2, block))  # blocks that got so far, and that could have
    for prompt, answer in track(problems, run.name):
        right = reach(draft, objective, models, prompt, answer)
        at = 0
        while at < len(right):
            ahead = min(block, len(answer) - at)
            alive[0, : right[at] + 1] += 1
            alive[1, :ahead] += 1
            lengths.append(min(right[at] + 1, len(answer) - 2 - at))  # the end is not counted
            at += right[at] + 1
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "acceptance length": float(np.mean(lengths)),
        "by position": (alive[0] / alive[1])[1:].round(4).tolist(),
        "fixed": facts["objective"]["fixed"],
        "steps": facts["train"]["steps"],
        "examples per step": facts["train"]["batch"],
        "seconds": metrics[-1]["seconds"],
        "curve": [[line["step"], line["accepted"]] for line in metrics],
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Acceptance by position and over training, and tokens per second."""
    figure, panes = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    colours = plt.get_cmap("tab10")
    for number, row in enumerate(result["training"]):
        style = {"color": colours(number), "label": f"{row['run']}: {row['acceptance length']:.1f}"}
        positions = range(1, len(row["by position"]) + 1)
        panes[0].plot(positions, row["by position"], marker="o", markersize=3, **style)
        if not row["fixed"]:  # other blocks than those of the rest
            panes[1].plot(*zip(*row["curve"], strict=True), **style)
    panes[0].set(xlabel="draft in the block", ylabel="share of verifications that keep it")
    panes[0].legend(fontsize=8, title="mean acceptance length", title_fontsize=8)
    panes[1].set(xlabel="training step", ylabel="acceptance length at random anchors")
    rows = result["decoding"]
    batches = sorted({row["batch"] for row in rows})
    names = list(dict.fromkeys(row["method"] for row in rows))
    for number, name in enumerate(names):
        speeds = [row["tokens per cpu second"] for row in rows if row["method"] == name]
        places = [place + 0.27 * (number - 1) for place in range(len(batches))]
        label = TARGET + " alone" if name == "alone" else f"with tiny-dflash, {name}"
        drawn = panes[2].bar(places, speeds, 0.25, label=label, color=BARS[number])
        panes[2].bar_label(drawn, fmt="{:.0f}", fontsize=8)
    panes[2].set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    panes[2].set_ylabel("tokens per second of CPU time")
    panes[2].legend(fontsize=8)
    for pane in panes[:2]:
        pane.grid(alpha=0.3)
    figure.suptitle("DFlash on tiny-ar, held-out story problems, one CPU thread")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, write and draw."""
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("--draft", default="tiny-dflash", help="of tiny-ar (tiny-dflash)")
    parser.add_argument("--limit", type=int, default=500, help="problems (500)")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16], help="at a time (1 16)")
    parser.add_argument(
        "--run", action="append", default=[], metavar="NAME=FOLDER", help="a training to draw"
    )
    parser.add_argument("--png", type=Path, help="picture")
    parser.add_argument("--draw", action="store_true", help="only draw what the JSON holds")
    options = parser.parse_args()
    if not options.draw:
        prepare(options)
        decoding, bars = compare(options.draft, options.limit, options.batch)
        training: list[Row] = []
        llm, problems = answers(options.limit)
        for named in options.run:
            name, _, folder = named.partition("=")
            training.append({"run": name, **judge(Path(folder), llm, problems)})
            save(options, {"decoding": decoding, "training": training}, bars)
        finish(options, {"decoding": decoding, "training": training}, bars)
    if options.png:
        draw(json.loads(options.json.read_text()), options.png)


if __name__ == "__main__":
    main()

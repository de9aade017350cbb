"""Train the drafts and adapters of docs/real-text.md and measure them, in calls of limited time.

    python benchmarks/real_text.py --target qwen2.5-coder-1.5b-instruct-q4_k_m.gguf \
        --small smollm2-135m-instruct-q4_1.gguf --prompts prompts.jsonl \
        --gsm8k test.jsonl --humaneval HumanEval.jsonl.gz --folder runs/real-text --seconds 540

The stages are: on a GPU, its benchmark; a DFlash draft for the target and for the small model; the
small model's adapters for WeDLM, Dream and D2F; and their figures. Each is a command that goes on
where it was stopped. At the end of its time a call stops the command and exits with status 75; call
it again, until the status is 0. `stages.json` in the folder has the seconds of each stage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

CONTINUES = 75
"""Exit status if stages are left, EX_TEMPFAIL of sysexits.h."""

GRACE = 60.0
"""Seconds in which a stopped command must have saved its state."""


def list_stages(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each stage, in order."""
    folder, small = options.folder, options.small
    outpace, changes = [sys.executable, "-m", "outpace"], options.change
    draft = [*outpace, "train", "draft"]
    prompts = ["--data", options.prompts]
    answers = folder / "small-dflash" / "data"
    stages: dict[str, list[str]] = {}
    if torch.cuda.is_available():
        benchmark = Path(__file__).parent / "gpu.py"
        stages["gpu"] = [sys.executable, str(benchmark), "--json", str(folder / "gpu.json")]
    for name, model in (("target", options.target), ("small", small)):
        out = f"{folder / name}-dflash"
        stages[f"{name}-dflash"] = [*draft, model, *prompts, "--output", out, *changes]
    for name in ("wedlm", "dream", "d2f"):
        words = [f"model.init={small}", f"data.path={answers / 'train.jsonl'}"]
        words += [f"held_out.path={answers / 'held.jsonl'}", f"out={folder / name}"]
        stages[name] = [*outpace, "train", f"smollm2-135m-{name}", *words, *changes]
    given = {"target": small, "dflash": folder / "small-dflash" / "draft", "judge": options.target}
    given |= {name: folder / name / "export" for name in ("wedlm", "dream", "d2f")}
    figures = {
        "wedlm:figure1": ("dflash", "wedlm"),
        "apd:prose": ("dream", "judge"),
        "d2f:tables": ("dream", "d2f"),
        "d2f:tradeoff": ("d2f",),
    }
    for figure, models in figures.items():
        words = [figure, "--scale", "small", "--out", str(folder / "figures")]
        for name in ("target", *models):
            words += ["--model", f"{name}={given[name]}"]
        words += ["--data", f"gsm8k={options.gsm8k}", "--max-length", "2048"]
        if figure == "wedlm:figure1":
            words += ["--data", f"humaneval={options.humaneval}"]
        if options.limit is not None:
            words += ["--limit", str(options.limit)]
        stages[figure] = [*outpace, "reproduce", *words]
    return stages


def run_command(words: list[str], seconds: float) -> int | None:
    """Run a command; stop it after some seconds and return None, else its exit status."""
    process = subprocess.Popen(words)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


def main() -> None:
    """Run the stages that are left, as far as the time goes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("target", "small", "prompts", "gsm8k", "humaneval"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="state and results")
    parser.add_argument("--seconds", type=float, default=540.0, help="time of this call (540)")
    parser.add_argument("--limit", type=int, help="problems of a figure")
    parser.add_argument("--change", action="append", default=[], help="key=value of all recipes")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    state, end = options.folder / "stages.json", time.monotonic() + options.seconds
    done = json.loads(state.read_text()) if state.exists() else {}
    for name, words in list_stages(options).items():
        if done.get(name, {}).get("complete"):
            continue
        began = time.monotonic()
        status = run_command(words, max(end - began, 1.0))
        spent = done.get(name, {}).get("seconds", 0.0) + time.monotonic() - began
        done[name] = {"complete": status == 0, "seconds": round(spent, 1)}
        state.write_text(json.dumps(done, indent=2) + "\n")
        if status != 0:
            print(f"{name}: " + ("goes on in the next call" if status is None else "failed"))
            sys.exit(CONTINUES if status is None else status)


if __name__ == "__main__":
    main()

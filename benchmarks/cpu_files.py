"""Load time, memory and speed of GGUF files on this computer, beside other programs, in one run.

    python benchmarks/cpu_files.py FILE … --json benchmarks/results/cpu-files.json

Each program loads a file in a new process and generates one token: the wall time includes imports
and the start of Python. Then both take turns, with the threads of `--threads`: a pass over a prompt
of `--prompt` tokens, and passes of 1 to 32 rows after it, each of which returns the most probable
token of every row. The tables have medians of wall time. llama.cpp needs the package `llama_cpp`.
With `--sides llama.cpp transformers`, transformers is measured too, which dequantizes the file to
float32, its fastest type.

`--avx2` limits outpace's kernels to AVX2, for processors that have more. Limit the others likewise:
`ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2` for PyTorch, and a llama.cpp built for AVX2.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import llama
from checkpoints import prompt
from cpu import ROWS, make_feed, settled
from everyday_parts.sides import load_transformers
from harness import Bar, Row, alternate, arguments, finish, median, prepare, save, show

AVX2_ONLY = """
from outpace.kernels.loader import Isa, load_library
load_library().outpace_has_isa = Isa.AVX2.__eq__
"""
"""Limits outpace's kernels to AVX2, before any is chosen."""

LOADS = {
    "outpace": """
from outpace import LLM
LLM(sys.argv[1], "lookup", cache_gib=0.1).generate([[1, 2, 3]], max_tokens=1)
""",
    "llama.cpp": """
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=512, n_threads=int(sys.argv[2]), verbose=False)
model.eval([1, 2, 3])
model.sample(temp=0.0)
""",
    "transformers": """
from pathlib import Path
import torch
from everyday_parts.sides import load_transformers
torch.set_num_threads(int(sys.argv[2]))
load_transformers(Path(sys.argv[1]))(torch.tensor([[1, 2, 3]])).logits[0, -1].argmax()
""",
}
"""Programs that load a file and generate one token."""

PEAK = """
from pathlib import Path
import re
print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
"""
"""Prints the peak memory of the process in KiB, on Linux."""


def measure_load(side: str, path: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Return seconds of a process from its start to the first token, and its peak memory in MB."""
    limit = AVX2_ONLY if options.avx2 and side == "outpace" else ""
    folder = str(Path(__file__).parent)
    code = f"import sys\nsys.path.insert(0, {folder!r})\n{limit}{LOADS[side]}{PEAK}"
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(options.threads)],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.perf_counter() - begin
    return seconds, int(re.findall(r"\d+", done.stdout)[-1]) * 1024 / 1e6


def make_outpace_step(path: Path, ids: list[int]) -> dict[int, Any]:
    """Return passes of outpace by rows; 0 is the prompt."""
    run_pass = make_feed(path, len(ids) + max(ROWS), cache_gib=0.25)
    steps = {0: partial(run_pass, ids, 0)}
    for count in ROWS:
        predict = range(len(ids) + 1, len(ids) + 1 + count)
        steps[count] = partial(run_pass, ids[:count], len(ids), predict)
    return steps


def make_llama_step(path: Path, ids: list[int]) -> dict[int, Any]:
    """Return passes of llama.cpp by rows; 0 is the prompt, of which only the last row is read."""
    feed = llama.decoder(path, most=len(ids), slots=len(ids) + max(ROWS))
    steps = {0: partial(feed, [ids], 0, last=True)}
    for count in ROWS:
        steps[count] = partial(feed, [ids[:count]], len(ids))
    return steps


def make_transformers_step(path: Path, ids: list[int]) -> dict[int, Any]:
    """Return passes of transformers by rows; 0 is the prompt, read at its last row only."""
    from transformers import DynamicCache

    model, cache = load_transformers(path), DynamicCache()

    def run_pass(tokens: list[int], start: int, rows: int) -> torch.Tensor:
        if surplus := cache.get_seq_length() - start:
            cache.crop(-surplus)
        with torch.inference_mode():
            passed = model(torch.tensor([tokens]), past_key_values=cache, logits_to_keep=rows)
        top: torch.Tensor = passed.logits.argmax(-1)
        return top

    steps = {0: partial(run_pass, ids, 0, 1)}
    for count in ROWS:
        steps[count] = partial(run_pass, ids[:count], len(ids), count)
    return steps


STEP_MAKERS = {
    "outpace": make_outpace_step,
    "llama.cpp": make_llama_step,
    "transformers": make_transformers_step,
}


def measure_file(path: Path, sides: list[str], options: argparse.Namespace) -> list[Row]:
    """Return one row per program."""
    ids = prompt(options.prompt, 260)
    rows: dict[str, Row] = {side: {"file": path.name, "side": side} for side in sides}
    loads: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for _ in range(options.loads):
        for side in sides:
            loads[side].append(measure_load(side, path, options))
    for side in sides:
        seconds, peaks = zip(*sorted(loads[side]), strict=True)
        rows[side]["load s"] = seconds[len(seconds) // 2]
        rows[side]["peak MB"] = min(peaks)
    steps = {side: STEP_MAKERS[side](path, ids) for side in sides}
    for count in (0, *ROWS):
        turns = {side: steps[side][count] for side in sides}
        rounds = options.rounds if count else max(options.rounds // 3, 1)
        for side, timings in alternate(turns, rounds, settled).items():
            name = f"{count} rows ms" if count else "prompt ms"
            rows[side][name] = median(timings, "wall") * 1e3
    return list(rows.values())


LIMITS = {"1 rows ms": 1.0, "16 rows ms": 0.35, "prompt ms": 1.0}
"""Most time of a pass, over that of llama.cpp."""


def find_bars(rows: list[Row]) -> list[Bar]:
    """Return the bars of outpace over llama.cpp, for each file."""
    bars = []
    ours_by_file = {row["file"]: row for row in rows if row["side"] == "outpace"}
    for theirs in rows:
        if theirs["side"] != "llama.cpp":
            continue
        ours = ours_by_file[theirs["file"]]
        for name, limit in LIMITS.items():
            what = f"{ours['file']}: {name}, over llama.cpp"
            bars.append(Bar(what=what, value=ours[name] / theirs[name], limit=limit))
        limit = 2 * theirs["load s"] + 1.5
        bars.append(Bar(what=f"{ours['file']}: load s", value=ours["load s"], limit=limit))
    return bars


def main() -> None:
    """Measure all files and write each as it ends."""
    parser = arguments(__doc__, rounds=9, threads=2)
    parser.add_argument("files", nargs="+", type=Path, help="GGUF files")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt (512)")
    parser.add_argument("--loads", type=int, default=3, help="loads of each file (3)")
    parser.add_argument(
        "--sides",
        nargs="*",
        choices=list(STEP_MAKERS)[1:],
        default=["llama.cpp"],
        help="other programs (llama.cpp)",
    )
    parser.add_argument("--avx2", action="store_true", help="no more than AVX2 for outpace")
    options = parser.parse_args()
    prepare(options)
    if options.avx2:
        exec(AVX2_ONLY)
    sides, rows = ["outpace", *options.sides], []
    if "llama.cpp" in sides and (missing := llama.available()):
        print(f"llama.cpp is left out: {missing} (pip install '.[llama]')")
        sides.remove("llama.cpp")
    elif "llama.cpp" in sides:
        print(llama.built()["system"])
    for path in options.files:
        found = measure_file(path, sides, options)
        show(path.name, found)
        rows += found
        save(options, {"rows": rows}, find_bars(rows))
    finish(options, {"rows": rows}, find_bars(rows))


if __name__ == "__main__":
    main()

"""What the program for a GPU counts, judges and leaves out, as far as a CPU can tell."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu
from gpu_parts.device import Where
from gpu_parts.shapes import TARGETS, TINY
from gpu_parts.steps import FLOOR, SIXTEEN, cycle_bars, floor_bars, moved, weights

HERE = Where(device="cpu", dtype=torch.bfloat16, most=TINY)


@pytest.mark.parametrize("tied", [False, True])
def test_floor_is_of_what_a_step_reads(tied: bool) -> None:
    published = {**TARGETS["Qwen3-8B"], "tie_word_embeddings": tied}
    runner = HERE.runner("target", HERE.model(published), 64)
    dim, mlp, layers, size, vocab = 64, 128, 8, 16, 1000
    matrices = dim * (4 + 2 + 2) * size + 4 * size * dim + 3 * dim * mlp
    block = matrices + 2 * dim + 2 * size  # norms, of queries and keys too
    assert weights(runner, head=False) == layers * block + dim
    assert weights(runner) == layers * block + dim + vocab * dim
    keys = 3 * 10 * 2 * layers * 2 * size  # three sequences of ten slots, two key heads
    assert moved(runner, 3, 10) == 2 * (weights(runner) + keys)


def test_bars_judge_what_was_measured() -> None:
    steps = [
        {"shape": shape, "batch": batch, "rows": rows, "share of the floor": 0.9, "step ms": taken}
        for shape in ("Qwen3-8B", "Dream-7B")
        for batch in (1, 8)
        for rows, taken in ((1, 4.0), (16, 4.2), (32, 5.0))
    ]
    floor, rows = floor_bars(steps)
    assert (floor.value, floor.limit, floor.met) == (0.9, FLOOR, True)
    assert (rows.value, rows.limit, rows.met) == (pytest.approx(1.05), SIXTEEN, True)
    assert len(floor_bars(steps[:1])) == 1 and not floor_bars(steps[3:])
    cycles = [
        {"shape": "Dream-7B", "method": name, "batch": batch, "time outside kernels": share}
        for name, batch, share in (("APD", 1, 0.2), ("APD", 32, 0.09), ("D2F", 32, None))
    ]
    (bar,) = cycle_bars(cycles)
    assert bar.what == "Dream-7B, APD, 32 requests: time outside kernels" and not bar.met


def run_with(
    parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str
) -> Path:
    """Set the parts and arguments of the program; return the path of its report."""
    monkeypatch.setattr(gpu, "PARTS", parts)
    path = tmp_path / "a.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words, "--cpu-smoke", "--json", str(path)])
    return path


@pytest.mark.nightly
def test_named_parts_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def part(name: str) -> Any:
        return lambda *_: (order.append(name), ({name: [{"figure": 1.0}]}, []))[1]

    parts = {name: part(name) for name in ("one", "two", "three")}
    path = run_with(parts, tmp_path, monkeypatch, "three", "one", "three")
    gpu.main()
    assert order == ["one", "three"]
    written = json.loads(path.read_text())
    assert {"card", "one", "three"} <= set(written) and "two" not in written
    run_with(parts, tmp_path, monkeypatch, "nobody")
    with pytest.raises(SystemExit) as end:
        gpu.main()
    assert end.value.code == 2


@pytest.mark.nightly
def test_what_fails_ends_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> gpu.Found:
        raise MemoryError("too large")

    parts = {"one": fails, "two": lambda *_: ({"table": [{"figure": 1.0}]}, [])}
    path = run_with(parts, tmp_path, monkeypatch)
    with pytest.raises(SystemExit) as end:
        gpu.main()
    assert end.value.code
    written = json.loads(path.read_text())
    assert written["table"] == [{"figure": 1.0}]
    assert written["failed"] == [{"part": "one", "error": "MemoryError('too large')"}]
    assert set(written["card"][0]) == {"copy GB/s", "products TFLOP/s"}

"""llama.cpp as a side of `benchmarks/cpu.py`: it has the same model, and takes the same steps."""

from pathlib import Path

import pytest

import cpu
import llama
from checkpoints import TINY_AR, prompt
from outpace.checkpoints.load import load_model

BITS = {"f32": 0.0, "bf16": 0.0, "q8_0": 0.01, "q4_0": 0.15}
"""Formats of llama.cpp, and what of a matrix they may lose."""

PROMPT = prompt(cpu.PROMPT, TINY_AR["vocab_size"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cpu.made(TINY_AR, tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("kind", llama.FORMATS)
def test_what_llama_cpp_is_given_is_the_checkpoint(kind: str, folder: Path) -> None:
    ours = load_model(folder).state_dict()
    theirs = load_model(llama.write(folder, kind, folder / f"{kind}.gguf"), plain=True).state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        lost = (theirs[name] - tensor).norm()
        assert lost <= BITS[kind] * tensor.norm(), name


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_step_of_llama_cpp_says_the_same_tokens(rows: int, folder: Path) -> None:
    pytest.importorskip("llama_cpp", reason="pip install '.[llama]'")
    ours = cpu.with_outpace(folder, PROMPT, {"dtype": "float32"})
    path = llama.write(folder, "f32", folder / "steps.gguf")
    theirs = llama.stepper(path, PROMPT, 32)
    ids = prompt(rows, TINY_AR["vocab_size"], seed=rows)
    wanted = ours(ids)
    assert theirs(ids) == wanted
    theirs(prompt(7, TINY_AR["vocab_size"], seed=9))
    assert theirs(ids) == wanted


@pytest.mark.nightly
def test_memory_is_that_of_the_process_that_loads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "OURS", {"outpace int8": {"quantize": "int8"}})
    ballast = bytearray(10**9)
    rows = cpu.memory(folder)
    del ballast
    assert [row["side"] for row in rows] == ["outpace int8", cpu.WRITTEN]
    assert all(0.05 < row["of them before loading"] <= row["peak GB"] < 0.9 for row in rows)

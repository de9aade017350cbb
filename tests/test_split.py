"""Models that several processes hold: slices, sums, and what becomes of a process that fails."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread, current_thread

import pytest
import torch
from torch import Tensor

import split
from helpers import dense, published, random_model
from outpace import LLM
from outpace.checkpoints.checkpoint import Checkpoint
from outpace.checkpoints.load import WeightFormat, build_model, save_model
from outpace.models import split as sums
from outpace.models.split import ModelShard
from outpace.models.transformer import Transformer

SECONDS = 240
"""Within which all processes have ended when one has."""


def load_shard(folder: Path, share: ModelShard) -> Transformer:
    checkpoint = Checkpoint(folder)
    return build_model(Transformer, checkpoint, checkpoint.config, WeightFormat(share=share))


def joined(parts: list[Tensor], whole: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Slices of a parameter side by side again, as far as it was cut."""
    if parts[0].shape == whole.shape:
        return parts[0]
    if parts[0].shape[1:] != whole.shape[1:]:
        return torch.cat(parts, 1)
    pieces = [part.split([size // len(parts) for size in sizes]) for part in parts]
    return torch.cat([piece for each in zip(*pieces, strict=True) for piece in each])


def sizes(model: Transformer, name: str) -> tuple[int, ...]:
    """Rows of what is stacked in a parameter."""
    config = model.config
    if ".qkv." in name:
        return tuple(n * config.head_dim for n in (config.heads, config.kv_heads, config.kv_heads))
    if ".gate_up." in name:
        return config.mlp, config.mlp
    return (len(model.get_parameter(name)) + 1,)


FAMILIES = {
    "qwen": published(),
    "stacked": published("Phi3ForCausalLM", tie_word_embeddings=False, rms_norm_eps=1e-6),
    "experts": published(
        "MixtralForCausalLM", num_local_experts=3, num_experts_per_tok=2, rms_norm_eps=1e-6
    ),
    "wide norms": published("Olmo2ForCausalLM", rms_norm_eps=1e-6),
    "odd": published(vocab_size=25, tie_word_embeddings=True),
    "biases": published("LlamaForCausalLM", attention_bias=True, mlp_bias=True, rms_norm_eps=1e-6),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_are_the_whole(family: str, tmp_path: Path) -> None:
    model = random_model(FAMILIES[family])
    save_model(model, tmp_path, dtype=torch.float32)
    parts = [load_shard(tmp_path, ModelShard(rank, 2)) for rank in range(2)]
    for name, parameter in model.named_parameters():
        own = [part.get_parameter(name) for part in parts]
        if "embedding" in name:
            padded = torch.cat(own)
            assert torch.equal(padded[: len(parameter)], parameter)
            assert not padded[len(parameter) :].any()
        else:
            assert torch.equal(joined(own, parameter, sizes(model, name)), parameter), name
            if name.endswith((".out.bias", ".down.bias")):  # added once
                assert not own[1].any()
    assert parts[1].config == replace(
        model.config, heads=2, kv_heads=1, mlp=24, source=parts[1].config.source
    )


class Room:
    """Two threads in place of two processes, which exchange what they have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.doors = Barrier(2, timeout=20)
        self.parts: dict[str, Tensor] = {}
        monkeypatch.setattr(sums, "all_reduce_sum", lambda part: sum(self.exchange(part)))
        monkeypatch.setattr(
            sums, "gather_logits", lambda part, vocab: torch.cat(self.exchange(part), -1)[:, :vocab]
        )
        monkeypatch.setattr(sums.dist, "get_world_size", lambda: 2)

    def exchange(self, part: Tensor) -> list[Tensor]:
        """What both have, in their order."""
        self.parts[current_thread().name] = part
        self.doors.wait()
        both = [self.parts[name] for name in ("0", "1")]
        self.doors.wait()
        return both

    def run(self, models: list[Transformer], ids: Tensor) -> list[Tensor]:
        found: dict[str, Tensor] = {}

        def work(name: str, model: Transformer) -> None:
            found[name] = logits(model, ids)

        threads = [Thread(target=work, args=(str(n), m), name=str(n)) for n, m in enumerate(models)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[name] for name in ("0", "1")]


def logits(model: Transformer, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.compute_logits(model(ids, torch.arange(len(ids)), dense(causal=True)))


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_add_up(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(FAMILIES[family])
    save_model(model, tmp_path, dtype=torch.float32)
    parts = [load_shard(tmp_path, ModelShard(rank, 2)) for rank in range(2)]
    ids = torch.arange(20)
    expected = logits(model, ids)
    for found in Room(monkeypatch).run(parts, ids):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_heads_must_divide(tmp_path: Path) -> None:
    save_model(random_model(published()), tmp_path)
    with pytest.raises(ValueError, match="tensor_parallel"):
        load_shard(tmp_path, ModelShard(0, 3))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tensor_parallel": 2}, "needs 2 processes that were started together"),
        ({"tensor_parallel": 0}, "at least 1, got 0"),
        ({"tensor_parallel": 1.5}, "tensor_parallel"),
        ({"tensor_parallel": 2, "quantize": "int8"}, "cannot be combined with"),
    ],
)
def test_bad_teams_are_refused(options: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        LLM("tiny-ar", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "models", [["tiny-wedlm"], pytest.param([*split.METHODS], marks=pytest.mark.nightly)]
)
def test_two_processes_answer_like_one(models: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    out = tmp_path / "answers.json"
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(split.__file__)), str(out), *models],
            env={**os.environ, **meeting, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        expected = {
            name: ids
            for model in models
            for name, ids in split.answers(LLM(model, cache_gib=0.05), model).items()
        }
        _, fault = processes[1].communicate(timeout=240)
        _, lost = processes[0].communicate(timeout=SECONDS)
    finally:
        for process in processes:
            process.kill()
    # A thread of the group that still runs at the end may turn exit status 1 into an abort.
    assert "this process has a fault" in fault and processes[1].returncode != 0
    assert "the processes of a split model end" in lost and processes[0].returncode != 0
    assert json.loads(out.read_text()) == expected

"""Small runs for the tests of training."""

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from helpers import causal_model, published
from outpace.checkpoints.hub import ZOO_FOLDER, ZOO_TOKENIZER
from outpace.models.attention import Attend
from outpace.models.transformer import Transformer
from outpace.training import Objective, Trainer, weights
from outpace.training.lora import LoRA
from outpace.training.objectives import D2F, MDLM, SFT
from outpace.training.rows import UNSCORED, Ints, Response, Rows

RECIPE = f"""
[model]
tokenizer = "{ZOO_FOLDER / "vocabulary"}"
config = {json.dumps(published(vocab_size=1024)).replace(": ", " = ")}
[objective]
name = "sft"
[data]
path = "story:train"
[optim]
optimizer = "muon"
lr = 1e-2
warmup = 2
decay = 0
[train]
steps = 12
batch = 4
log_every = 1
save_every = 4
"""


def trainer(out: Path, architecture: str = "Qwen2ForCausalLM", **options: Any) -> Trainer:
    """A trainer of a tiny random model on the story."""
    mask = {} if architecture.startswith("Qwen") else {"mask_token_id": 1021}
    config = published(architecture, vocab_size=1024, **mask)
    objective = MDLM(suffix=0.3, anchored=0.3) if mask else SFT()
    defaults = {
        "data": "story:train",
        "optimizer": "muon",
        "lr": 1e-2,
        "warmup": 2,
        "batch": 4,
        "save_every": 4,
    }
    return Trainer(
        weights.random_model(config, 0),
        objective,
        out=out,
        tokenizer=ZOO_FOLDER / "vocabulary",
        **{**defaults, **options},
    )


def adapter_trainer(out: Path, **options: Any) -> Trainer:
    """A trainer of an adapter with dropout, which draws from PyTorch's generator."""
    torch.manual_seed(5)
    defaults: dict[str, Any] = {"data": "story:train", "batch": 2, "log_every": 1}
    defaults |= {"lr": 1e-2, "warmup": 0, "adapter": LoRA(rank=2, dropout=0.5)}
    return Trainer("tiny-dream", D2F(canvas=(40, 48)), out=out, **{**defaults, **options})


def draft_trainer(
    out: Path,
    config: dict[str, Any],
    objective: Objective,
    target: Transformer | None = None,
    **options: Any,
) -> Trainer:
    """A trainer of a tiny draft for a tiny target of random weights."""
    target = target or causal_model(vocab_size=1024)
    defaults = {"data": "story:train", "lr": 1e-2, "warmup": 2, "decay": 0, "batch": 4}
    return Trainer(
        weights.build_draft(config, target, 0),
        objective,
        out=out,
        tokenizer=ZOO_TOKENIZER,
        others={"target": target},
        **{**defaults, "save_every": 4, "log_every": 2, **options},
    )


def write_lines(path: Path, *records: object) -> str:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def plain_response(tokens: Ints) -> Response:
    """A response without padding or marks, of weight 1."""
    return Response(tokens, np.ones(len(tokens)), np.zeros(len(tokens), dtype=bool))


def scored_rows(rows: Rows) -> dict[int, tuple[int, float]]:
    table = zip(rows.labels.tolist(), rows.weights.tolist(), strict=True)
    return {r: (label, round(w, 4)) for r, (label, w) in enumerate(table) if label != UNSCORED}


def attend_where(seen: Tensor) -> Attend:
    """Attention of one document under a dense mask."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


def same_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Whether two files of tensors are equal."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)


def metrics(out: Path) -> list[dict[str, float]]:
    """The lines that a run has logged, without times."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    clock = ("rows_per_second", "tokens_per_second", "seconds")
    return [{name: line[name] for name in line if name not in clock} for line in lines]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in metrics(out)]


def start(path: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    """Train a recipe in a separate process."""
    command = [sys.executable, "-m", "outpace.training.recipe", str(path), f"out={out}", *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


class PeakMemory(TorchDispatchMode):
    """Counts the storage of tensors and of the results of operations until they are freed."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0
        self.track([each for m in modules for each in (*m.parameters(), *m.buffers())])

    def track(self, results: object) -> None:
        for tensor in tree_iter(results):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.live.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.track(results := func(*args, **(kwargs or {})))
        return results

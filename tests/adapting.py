"""Random low-rank adapters for the tests' models and those of the zoo."""

from pathlib import Path

import torch
from torch import nn

from outpace.checkpoints.adapter import LowRank, save_adapter
from outpace.checkpoints.weights import parameter_parts
from outpace.models.config import ModelConfig
from outpace.models.transformer import Transformer


def write_adapter(
    folder: Path,
    config: ModelConfig,
    *,
    seed: int = 0,
    rank: int = 4,
    size: float = 0.3,
    parts: tuple[str, ...] = ("attention", "mlp", "unembedding"),
) -> Path:
    """Write an adapter of the linear layers of a model whose paths contain one of some `parts`."""
    with torch.device("meta"):
        model = Transformer(config)
    generator = torch.Generator().manual_seed(seed)
    updates = {}
    for name, sources in parameter_parts(model, ()).items():
        layer = model.get_submodule(name.rpartition(".")[0])
        if not (isinstance(layer, nn.Linear) and any(part in name for part in parts)):
            continue
        for source in sources if name.endswith(".weight") else ():
            outputs, inputs = source.shape
            down, up = (
                size * torch.randn(*shape, generator=generator)
                for shape in ((rank, inputs), (outputs, rank))
            )
            updates[source.source] = LowRank(down, up, 2.0)
    config_fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    save_adapter(folder, updates, config_fields)
    return folder

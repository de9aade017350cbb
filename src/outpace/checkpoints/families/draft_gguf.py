"""How llama.cpp writes drafts into GGUF files.

Both list the target layers whose inputs are read, with the embedding as layer 0.
"""

from __future__ import annotations

from outpace.checkpoints.families.gguf_format import GGUFFormat
from outpace.checkpoints.families.gguf_orders import PAIRED_ROWS

DFLASH_GGUF = GGUFFormat(
    architecture="dflash",
    named_like="qwen3",
    implied={"use_sliding_window": lambda ours: "sliding_window" in ours},
    tensors={"hidden_norm.weight": ("enc.output_norm.weight",)},
    prefixes={"layers.": "model.layers.", "norm.": "model.norm."},
)

EAGLE_GGUF = GGUFFormat(
    architecture="eagle3",
    named_like="llama",
    rows=PAIRED_ROWS,
    tensors={
        "midlayer.hidden_norm.weight": ("blk.0.attn_norm_2.weight",),
        "input_norm.weight": ("enc.output_norm.weight",),
    },
    prefixes={"midlayer.": "model.layers.0.", "norm.": "model.norm."},
)

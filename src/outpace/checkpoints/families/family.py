"""A family translates one published format: the fields of its config, the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from dataclasses import field as member
from operator import itemgetter

from outpace.checkpoints.families.ropes import STATED_ROPE
from outpace.checkpoints.families.rotary import ROPE
from outpace.checkpoints.families.sights import FULL
from outpace.checkpoints.fields import (
    Field,
    Given,
    checked,
    count,
    few,
    field,
    flag,
    index,
    indices,
    mapping,
    names_of,
    number,
    refuse_other,
    refuse_unknown,
    taken,
    words,
)
from outpace.decoding.target import Kind
from outpace.models.config import ModelConfig

Names = Mapping[str, str | tuple[str, ...]]
"""Our parameter names to published ones; `{}` is a layer, or an expert of a layer behind it.

A tuple is stacked by rows. `[{}]` at the end is an entry of a stack, `[{}].T` one that is turned.
"""

HUGGING_FACE_NAMES: Names = {
    "embedding.weight": "model.embed_tokens.weight",
    "blocks.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blocks.{}.attention.qkv.weight": (
        "model.layers.{}.self_attn.q_proj.weight",
        "model.layers.{}.self_attn.k_proj.weight",
        "model.layers.{}.self_attn.v_proj.weight",
    ),
    "blocks.{}.attention.qkv.bias": (
        "model.layers.{}.self_attn.q_proj.bias",
        "model.layers.{}.self_attn.k_proj.bias",
        "model.layers.{}.self_attn.v_proj.bias",
    ),
    "blocks.{}.attention.q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "blocks.{}.attention.k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "blocks.{}.attention.out.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blocks.{}.attention.out.bias": "model.layers.{}.self_attn.o_proj.bias",
    "blocks.{}.mlp_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blocks.{}.mlp.gate_up.weight": (
        "model.layers.{}.mlp.gate_proj.weight",
        "model.layers.{}.mlp.up_proj.weight",
    ),
    "blocks.{}.mlp.gate_up.bias": (
        "model.layers.{}.mlp.gate_proj.bias",
        "model.layers.{}.mlp.up_proj.bias",
    ),
    "blocks.{}.mlp.down.weight": "model.layers.{}.mlp.down_proj.weight",
    "blocks.{}.mlp.down.bias": "model.layers.{}.mlp.down_proj.bias",
    "norm.weight": "model.norm.weight",
    "unembedding.weight": "lm_head.weight",
}


NORMS_AFTER: Names = {
    **HUGGING_FACE_NAMES,
    "blocks.{}.attention_after.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blocks.{}.mlp_after.weight": "model.layers.{}.post_feedforward_layernorm.weight",
}
"""The same names, but those of norms behind attention and MLP."""


def with_experts(module: str, gate: str, up: str, down: str) -> Names:
    """The same names, but those of a mixture of experts, as a family calls it and its parts."""
    layer = f"model.layers.{{}}.{module}"
    dense = {ours: theirs for ours, theirs in HUGGING_FACE_NAMES.items() if ".mlp." not in ours}
    return dense | {
        "blocks.{}.mlp.router.weight": f"{layer}.gate.weight",
        "blocks.{}.mlp.experts.{}.gate_up.weight": (
            f"{layer}.experts.{{}}.{gate}.weight",
            f"{layer}.experts.{{}}.{up}.weight",
        ),
        "blocks.{}.mlp.experts.{}.down.weight": f"{layer}.experts.{{}}.{down}.weight",
    }


def without_prefix(names: Names, prefix: str) -> Names:
    """The same names, but published ones without a prefix."""
    return {
        ours: theirs.removeprefix(prefix)
        if isinstance(theirs, str)
        else tuple(name.removeprefix(prefix) for name in theirs)
        for ours, theirs in names.items()
    }


def share(ours: Given) -> int:
    """Head size where none is given: the width over the heads."""
    size, rest = divmod(ours["dim"], ours["heads"])
    if rest:
        raise ValueError(
            f"{ours['heads']} attention heads cannot share a hidden size of {ours['dim']}; give "
            "head_dim"
        )
    return int(size)


def mask(usual: int) -> Field:
    """The mask token; where a checkpoint names none, the `usual` one if there is such a token."""
    return field("mask_token_id", index, lambda ours: usual if ours["vocab"] > usual else None)


EOS = field("eos_token_id", indices, ())
DECODER: Given = {
    "vocab": field("vocab_size", count),
    "dim": field("hidden_size", count),
    "layers": field("num_hidden_layers", few),
    "heads": field("num_attention_heads", few),
    "kv_heads": field("num_key_value_heads", few, itemgetter("heads")),
    "head_dim": field("head_dim", few, share),
    "mlp": field("intermediate_size", count),
    "max_length": field("max_position_embeddings", count, 2048),
    "norm_eps": field("rms_norm_eps", number, 1e-6),
    "rope": ROPE,
    "sights": FULL,
    "tied": field("tie_word_embeddings", flag, False),
    "mask_id": field("mask_token_id", index, None),
    "kind": lambda ours: Kind.causal(ours["mask_id"]),
    "eos": EOS,
}
"""Our fields of every Hugging Face decoder."""

STATED: Given = {
    **DECODER,
    "kv_heads": field("num_key_value_heads", few),
    "max_length": field("max_position_embeddings", count),
    "norm_eps": field("rms_norm_eps", number),
    "rope": STATED_ROPE,
    "tied": field("tie_word_embeddings", flag),
}
"""The same, but fields must be there of which families have different defaults."""

BIASED: Given = dict.fromkeys(("qkv_bias", "out_bias"), field("attention_bias", flag, False))
"""Biases of attention, in families that may have them."""

FIXED: Given = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
"""Published fields that have one value in all decoders that load."""

IGNORED = words(
    """
    _attn_implementation_autoset _commit_hash _name_or_path architectures attention_dropout
    attn_implementation attn_pdrop auto_map bos_token_id chunk_size_feed_forward dtype embd_pdrop
    embedding_dropout hidden_dropout id2label initializer_range is_llama_config label2id
    max_window_layers model_type name_or_path output_dropout pad_token_id pretraining_tp resid_pdrop
    residual_dropout return_dict tokenizer_class torch_dtype transformers.js_config
    transformers_version unsloth_fixed unsloth_version use_cache
    begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences repetition_penalty temperature top_k top_p typical_p
    """
)
"""Published fields on which no logit depends."""


TOKENS = ("AutoTokenizer", "AutoProcessor")
"""Keys of `auto_map` that do not concern the model."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One published checkpoint format, and how its authors sample from it.

    `fields` has a value of each field of our configuration that is not the usual one: a `Field` of
    the published one, a function of those before it, or the value. A published field that is not
    looked up there must have the value that is `fixed`, must be given and have the one `stated`, or
    is `ignored`; a checkpoint with any other is refused.
    """

    name: str
    about: str
    architectures: tuple[str, ...]
    fields: Given
    names: Names
    fixed: Given = member(default_factory=lambda: FIXED)
    stated: Given = member(default_factory=dict)
    ignored: Collection[str] = IGNORED
    remote: Collection[str] = ()
    """Classes of code in `auto_map` that compute what is computed here, as `module.Class`."""
    aliases: Given = member(default_factory=dict)
    """Architectures of other families that its checkpoints name as well, and a field that tells."""
    flat: Callable[[Given], Given] = dict
    """Published fields side by side where a format nests them."""
    method: str = "autoregressive"
    """What decodes its models where no method is chosen."""
    temperature: float = 0.0
    top_p: float = 1.0
    template: str | None = None
    """Chat template of a tokenizer that comes without one."""
    checkpoints: tuple[str, ...] = ()
    """Some that are published in this format, by their names on the hub."""
    compared: str = "transformers"
    """What its logits and its text were compared with."""
    gguf: str = ""
    """What llama.cpp calls it; empty where its files of it are not read."""
    gguf_stated: Given = member(default_factory=dict)
    """Metadata of such a file that have one value."""
    gguf_pairs: tuple[str, ...] = ()
    """Ends of published tensors whose heads such a file has in pairs and not in halves."""

    def config(self, published: Given) -> ModelConfig:
        """A `config.json` as ours; `ValueError` for a field that is wrong, missing or unknown."""
        given = self.flat(published)
        remedy = f"what loads is {self.about}; unquantised, without such fields"
        fixed = {**self.fixed, **self.stated}
        refuse_unknown(given, {*names_of(self.fields), *fixed, *self.ignored}, remedy)
        if missing := [name for name in self.stated if given.get(name) is None]:
            raise ValueError(f"the field {missing[0]!r} is missing")
        ours = taken(self.fields, given)
        refuse_other(given, fixed, ours, remedy)
        return ModelConfig(
            family=self.name,
            architecture=published["architectures"][0],
            source=published,
            **ours,
        )

    def check_remote(self, published: Given) -> None:
        """Raise `ValueError` where `auto_map` names code that may compute something else."""
        if not (named := published.get("auto_map")):
            return
        for key, value in checked("auto_map", named, mapping).items():
            classes = value if isinstance(value, list) else [value]
            # A tokenizer's class is read as the plain one that it is, see `load_tokenizer`.
            for name in classes if key not in TOKENS else ():
                if str(name).rpartition("--")[2] not in self.remote:
                    raise ValueError(
                        f"auto_map names {str(name)[:200]!r}, code of the checkpoint that is not "
                        f"run, and may compute something else than {self.about}; if it computes "
                        "the same, remove auto_map from config.json"
                    )

    def published(self, name: str) -> tuple[str, ...]:
        """Published tensors that make our parameter `name`, in stacking order."""
        parts = name.split(".")
        numbers = [part for part in parts if part.isdigit()]
        theirs = self.names[".".join("{}" if part.isdigit() else part for part in parts)]
        group = (theirs,) if isinstance(theirs, str) else theirs
        return tuple(entry.format(*numbers) for entry in group)


def part_sizes(config: ModelConfig, name: str) -> tuple[int, ...]:
    """Rows of each published tensor stacked in our fused parameter `name`."""
    if ".qkv." in name:
        kv = config.kv_heads * config.head_dim
        return config.heads * config.head_dim, kv, kv
    width = config.shared_mlp if ".shared." in name else config.mlp
    if name.startswith("blocks.") and int(name.split(".")[1]) < config.dense_layers:
        width = config.dense_mlp
    return width, width

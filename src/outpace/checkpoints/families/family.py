"""Model families: the translation of a published format's fields and tensor names to ours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from dataclasses import field as member
from operator import itemgetter

from outpace.checkpoints.families.attention_windows import FULL_WINDOWS
from outpace.checkpoints.families.gguf_format import GGUFFormat
from outpace.checkpoints.families.rotary import REQUIRED_ROPE, ROPE, ROPE_NAMES
from outpace.checkpoints.fields import (
    Field,
    Fields,
    count,
    few,
    field,
    flag,
    index,
    indices,
    inner,
    mapping,
    merge_fields,
    number,
    parse_value,
    published_names,
    read_fields,
    refuse_others,
    refuse_unknown_fields,
    words,
)
from outpace.decoding.target import Kind
from outpace.models.config import ModelConfig

TensorNames = Mapping[str, str | tuple[str, ...]]
"""Our parameter names to published ones; `{}` is the index of a layer, and then of an expert.

A tuple is stacked by rows. `[{}]` at the end is an entry of a stack, `[{}].T` its transpose.
"""

HUGGING_FACE_NAMES: TensorNames = {
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


POST_NORM_NAMES: TensorNames = {
    **HUGGING_FACE_NAMES,
    "blocks.{}.attention_after.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blocks.{}.mlp_after.weight": "model.layers.{}.post_feedforward_layernorm.weight",
}
"""Hugging Face's names for models with norms after attention and MLP."""


def with_experts(module: str, gate: str, up: str, down: str) -> TensorNames:
    """Return Hugging Face's names with a mixture of experts instead of the MLP.

    Args:
        module: Published name of the mixture.
        gate: Published name of an expert's gate projection.
        up: Published name of an expert's up projection.
        down: Published name of an expert's down projection.
    """
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


def replace_prefix(names: TensorNames, prefix: str, other: str = "") -> TensorNames:

    def renamed(name: str) -> str:
        return other + name.removeprefix(prefix) if name.startswith(prefix) else name

    return {
        ours: renamed(theirs) if isinstance(theirs, str) else tuple(map(renamed, theirs))
        for ours, theirs in names.items()
    }


def head_dim(ours: Fields) -> int:
    """Return the default head size: the hidden size divided by the heads."""
    size, rest = divmod(ours["dim"], ours["heads"])
    if rest:
        raise ValueError(
            f"hidden_size must be a multiple of the {ours['heads']} attention heads, got "
            f"{ours['dim']}; give head_dim"
        )
    return int(size)


def mask_id(usual: int) -> Field:
    """Return the field of the mask token; default is `usual` if the vocabulary has that token."""
    return field("mask_token_id", index, lambda ours: usual if ours["vocab"] > usual else None)


EOS = field("eos_token_id", indices, ())
DECODER: Fields = {
    "vocab": field("vocab_size", count),
    "dim": field("hidden_size", count),
    "layers": field("num_hidden_layers", few),
    "heads": field("num_attention_heads", few),
    "kv_heads": field("num_key_value_heads", few, itemgetter("heads")),
    "head_dim": field("head_dim", few, head_dim),
    "mlp": field("intermediate_size", count),
    "max_length": field("max_position_embeddings", count, 2048),
    "norm_eps": field("rms_norm_eps", number, 1e-6),
    "rope": ROPE,
    "windows": FULL_WINDOWS,
    "tied": field("tie_word_embeddings", flag, False),
    "mask_id": field("mask_token_id", index, None),
    "kind": lambda ours: Kind.causal_kind(ours["mask_id"]),
    "eos": EOS,
}
"""Our fields for every Hugging Face decoder."""

STRICT_DECODER: Fields = {
    **DECODER,
    "kv_heads": field("num_key_value_heads", few),
    "max_length": field("max_position_embeddings", count),
    "norm_eps": field("rms_norm_eps", number),
    "rope": REQUIRED_ROPE,
    "tied": field("tie_word_embeddings", flag),
}
"""The same, with fields required whose defaults differ between families."""

BIASES: Fields = dict.fromkeys(("qkv_bias", "out_bias"), field("attention_bias", flag, False))
"""Attention biases, for families that may have them."""

FIXED_FIELDS: Fields = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
"""Published fields with only one supported value in all decoders."""

IGNORABLE = words(
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
"""Published fields that do not affect logits."""


CLASS_SUFFIXES = ("Model", "ForCausalLM")
"""Suffixes of the remote classes of a model."""

HEAD_PREFIX = "mtp."
"""Prefix of the tensors of a head for multi-token prediction."""

TOKENIZER_KEYS = ("AutoTokenizer", "AutoProcessor")
"""Keys of `auto_map` that are not about the model."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One published checkpoint format, and its authors' sampling defaults.

    `fields` defines the fields of our configuration that differ from the defaults: by a `Field`
    that reads published ones, a function of earlier values, or a constant. Any other published
    field must have its value in `fixed` if present, must be present with its value in `stated`, or
    is `ignored`. Any further field raises an error that names it.
    """

    name: str
    about: str
    architectures: tuple[str, ...]
    fields: Fields
    names: TensorNames
    fixed: Fields = member(default_factory=lambda: FIXED_FIELDS)
    stated: Fields = member(default_factory=dict)
    ignored: Collection[str] = IGNORABLE
    fused: Mapping[str, str] = member(default_factory=dict)
    """Names of tensors that some checkpoints have in place of those in `names`."""
    unread: tuple[str, ...] = ()
    """Prefixes of published tensors that the model does not have."""
    remote: Collection[str] = ()
    """Classes in `auto_map` that this family implements, as `module.Class`."""
    aliases: Fields = member(default_factory=dict)
    """Architectures shared with other families, and the field that identifies this one."""
    flat: Callable[[Fields], Fields] = dict
    """Moves nested published fields to the top level."""
    method: str = "lookup"
    """Default decoding method."""
    temperature: float = 0.0
    top_p: float = 1.0
    template: str | None = None
    """Chat template for a tokenizer without one."""
    checkpoints: tuple[str, ...] = ()
    """Examples on the hub in this format."""
    compared: str = "transformers"
    """Reference that logits and text were compared with."""
    gguf: GGUFFormat | None = None
    """Its GGUF files, if llama.cpp writes them."""
    mtp: Family | None = None
    """Format of its head for multi-token prediction, which is read as a draft only."""

    def build_config(self, published: Fields) -> ModelConfig:
        """Translate a `config.json`; raise `ValueError` for an invalid or unknown field."""
        flattened = self.flat(published)
        remedy = f"supported: {self.about}; unquantized, without such fields"
        fixed = {**self.fixed, **self.stated}
        refuse_unknown_fields(
            flattened, {*published_names(self.fields), *fixed, *self.ignored}, remedy
        )
        if missing := [name for name in self.stated if flattened.get(name) is None]:
            raise ValueError(f"field {missing[0]!r} is missing")
        ours = read_fields(self.fields, flattened)
        refuse_others(flattened, fixed, ours, remedy)
        return ModelConfig(
            family=self.name, architecture=published["architectures"][0], source=published, **ours
        )

    def check_remote(self, published: Fields) -> None:
        """Raise `ValueError` if `auto_map` names code that may compute something else."""
        if not (auto_map := published.get("auto_map")):
            return
        for key, value in parse_value("auto_map", auto_map, mapping).items():
            classes = value if isinstance(value, list) else [value]
            # Tokenizers of remote code are read by their plain class, see `load_tokenizer`.
            for name in classes if key not in TOKENIZER_KEYS else ():
                if str(name).rpartition("--")[2] not in self.remote:
                    raise ValueError(
                        f"auto_map names {str(name)[:200]!r}, code of the checkpoint that is not "
                        f"run, and may compute something else than {self.about}; if it computes "
                        "the same, remove auto_map from config.json"
                    )

    def tensor_names(self, name: str, stored: Container[str] = ()) -> tuple[str, ...]:
        """Return the published tensors of our parameter `name`, in stacking order.

        If the `stored` tensors of a checkpoint have its name in `fused`, it is that one.
        """
        parts = name.split(".")
        numbers = [part for part in parts if part.isdigit()]
        ours = ".".join("{}" if part.isdigit() else part for part in parts)
        if (whole := self.fused.get(ours, "").format(*numbers)) and whole in stored:
            return (whole,)
        theirs = self.names[ours]
        group = (theirs,) if isinstance(theirs, str) else theirs
        return tuple(entry.format(*numbers) for entry in group)


def part_sizes(config: ModelConfig, name: str) -> tuple[int, ...]:
    """Return the row count of each published tensor stacked in our fused parameter `name`.

    Tensors that its layer does not have, have no rows.
    """
    if name.startswith("blocks."):
        layer = int(name.split(".")[1])
        owns_keys, config = config.kv_layer(layer) == layer, config.layer_config(layer)
    if ".qkv." in name:
        kv, gated = config.kv_heads * config.head_dim, 2 if config.output_gate else 1
        k, v = kv if owns_keys else 0, kv if owns_keys and not config.keys_as_values else 0
        return gated * config.heads * config.head_dim, k, v
    if (delta := config.delta) is not None and ".attention." in name:
        gates = delta.value_heads, delta.value_heads
        return gates if ".gates." in name else (delta.mixed_size, delta.value_size)
    width = config.shared_mlp if ".shared." in name else config.mlp
    if ".dense." in name or (name.startswith("blocks.") and layer < config.dense_layers):
        width = config.dense_mlp
    return width, width


TEXT_CONFIG = "text_config"
IMAGES = words(
    "image_token_id video_token_id vision_config vision_end_token_id vision_start_token_id"
)
"""Fields that matter only for images."""
IMAGE_ROPE = ("mrope_section", "mrope_interleaved")
"""Rotary fields that matter only for images: rows of text have equal positions in all parts."""
OUTER = IGNORABLE | {"tie_word_embeddings", "eos_token_id"}
"""Fields of the whole model where both levels have them."""


def flatten_text(published: Fields) -> Fields:
    """Move the fields of the text model to the top level, without those for images."""
    outer = {name: value for name, value in published.items() if name != TEXT_CONFIG}
    nested = inner(published, TEXT_CONFIG)
    own = {name: value for name, value in nested.items() if name not in OUTER & outer.keys()}
    merged = dict(merge_fields(outer, own))
    for name in ROPE_NAMES:
        if isinstance(part := merged.get(name), Mapping):
            merged[name] = {key: part[key] for key in part if key not in IMAGE_ROPE}
    return merged


def nest_names(names: TensorNames) -> TensorNames:
    """Return the names of a text model in one that also reads images."""
    return replace_prefix(names, "model.", "model.language_model.")

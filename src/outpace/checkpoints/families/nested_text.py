"""The text model in a published model that also reads images."""

from __future__ import annotations

from collections.abc import Mapping

from outpace.checkpoints.families.family import IGNORABLE, TensorNames, replace_prefix
from outpace.checkpoints.families.rotary import ROPE_NAMES
from outpace.checkpoints.fields import Fields, inner, merge_fields, words

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

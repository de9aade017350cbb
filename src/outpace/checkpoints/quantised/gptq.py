"""GPTQ (Frantar et al., 2023): codes of 4 or 8 bits packed into words along the inputs."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.checkpoints.fields import Fields, choice, field, flag, read_known_fields, words
from outpace.checkpoints.quantised.scheme import (
    GroupedCodes,
    GroupedScheme,
    TensorSource,
    group_inputs,
    parse_bits,
    parse_group_size,
    read_group_indices,
    read_scales,
    unpack_codes,
)

GPTQ_ABOUT = "GPTQ of 4 or 8 bits in the formats gptq and gptq_v2"


ZERO_STEPS = {"gptq": 1, "gptq_v2": 0}
"""Formats, and the number that is added to their stored zero points."""

GPTQ_FIELDS: Fields = {
    "bits": field("bits", parse_bits),
    "size": field("group_size", parse_group_size),
    "step": field("checkpoint_format format", choice(ZERO_STEPS), 1),
    "sym": field("sym", flag, True),
    "desc_act": field("desc_act", flag, False),
}
GPTQ_FIXED: Fields = {"quant_method": "gptq", "pack_dtype": "int32", "method": "gptq"}
GPTQ_IGNORED = words(
    """
    act_group_aware backend batch_size block_name_to_quantize cache_block_outputs
    damp_auto_increment damp_percent dataset disable_exllama exllama_config failsafe hyb_act
    lm_head max_input_length meta model_file_base_name model_name_or_path model_seqlen
    module_name_preceding_first_block modules_in_block_to_quantize mse pad_token_id quantizer
    static_groups tokenizer true_sequential use_cuda_fp16 use_exllama
    """
)
"""Ignored fields about how the codes were computed, and for other programs."""


@dataclass(frozen=True)
class GPTQ(GroupedScheme):
    """Codes of `bits` bits with one scale and zero point per group of inputs.

    Attributes:
        bits: Bits of a code, 4 or 8.
        size: Inputs of a group; -1 for all.
        step: Number to add to stored zero points.
        has_group_indices: Whether the group of each input is stored, since inputs were ordered by
            importance before grouping.
    """

    bits: int
    size: int
    step: int
    has_group_indices: bool
    about = GPTQ_ABOUT

    @classmethod
    def from_config(cls, config: Fields) -> GPTQ:
        remedy = f"supported: {GPTQ_ABOUT}"
        ours = read_known_fields(
            GPTQ_FIELDS, config, fixed=GPTQ_FIXED, ignored=GPTQ_IGNORED, remedy=remedy
        )
        return cls(
            ours["bits"], ours["size"], ours["step"], ours["desc_act"] and ours["size"] != -1
        )

    def part_names(self, source: TensorSource, name: str) -> tuple[str, ...]:
        mixed = f"{name.removesuffix('weight')}g_idx"
        parts = super().part_names(source, name)
        if parts and (self.has_group_indices or mixed in source):
            return *parts, mixed
        return parts

    def read_groups(self, source: TensorSource, name: str, shape: tuple[int, ...]) -> GroupedCodes:
        codes, zeros, scale, *mixed = self.part_names(source, name)
        count, group = group_inputs(shape, self.size)
        if mixed:
            group = read_group_indices(source, mixed[0], shape, count)
        out, inputs = shape
        codes_per_word = 32 // self.bits
        packed_codes = source.read_stored(codes, ((-(-inputs // codes_per_word), out),), ("I32",))
        packed_zeros = source.read_stored(zeros, ((count, -(-out // codes_per_word)),), ("I32",))
        # The format stores the zero point minus one, so 0 is stored as the largest code.
        zero = (unpack_codes(packed_zeros, self.bits)[:, :out] + self.step) & (2**self.bits - 1)
        return GroupedCodes(
            unpack_codes(packed_codes.t(), self.bits)[:, :inputs],
            read_scales(source, scale, (count, out)).t(),
            zero.t(),
            group,
        )

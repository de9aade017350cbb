"""GPTQ (Frantar et al., 2023): codes of 4 or 8 bits packed into words along the inputs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outpace.checkpoints.fields import (
    Fields,
    field,
    flag,
    published_names,
    read_fields,
    refuse_others,
    refuse_unknown_fields,
    words,
)
from outpace.checkpoints.quantised.scheme import (
    GroupedCodes,
    Scheme,
    TensorSource,
    group_inputs,
    is_matrix,
    parse_bits,
    parse_group_size,
    read_group_indices,
    read_scales,
    unpack_codes,
)

GPTQ_ABOUT = "GPTQ of 4 or 8 bits in the formats gptq and gptq_v2"


def parse_zero_step(value: object) -> int:
    """Parse a format's name to the number that is added to its stored zero points."""
    steps = {"gptq": 1, "gptq_v2": 0}
    if isinstance(value, str) and value in steps:
        return steps[value]
    raise ValueError(f"{' or '.join(map(repr, steps))}")


GPTQ_FIELDS: Fields = {
    "bits": field("bits", parse_bits),
    "size": field("group_size", parse_group_size),
    "step": field("checkpoint_format format", parse_zero_step, 1),
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
class GPTQ(Scheme):
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
        refuse_unknown_fields(
            config, {*published_names(GPTQ_FIELDS), *GPTQ_FIXED, *GPTQ_IGNORED}, remedy
        )
        refuse_others(config, GPTQ_FIXED, {}, remedy)
        ours = read_fields(GPTQ_FIELDS, config)
        return cls(
            ours["bits"], ours["size"], ours["step"], ours["desc_act"] and ours["size"] != -1
        )

    def part_names(self, source: TensorSource, name: str) -> tuple[str, ...]:
        """Return the names of codes, zero points, scales and, if stored, input groups."""
        stem = name.removesuffix("weight")
        if not is_matrix(name) or f"{stem}qweight" not in source:
            return ()
        mixed = (f"{stem}g_idx",) if self.has_group_indices or f"{stem}g_idx" in source else ()
        return f"{stem}qweight", f"{stem}qzeros", f"{stem}scales", *mixed

    def read_matrix(self, source: TensorSource, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.read_groups(source, name, shape).dequantize()

    @property
    def has_int4(self) -> bool:
        return self.bits == 4

    def read_int4(
        self, source: TensorSource, name: str, shape: tuple[int, ...]
    ) -> GroupedCodes | None:
        if not self.has_int4 or not self.part_names(source, name):
            return None
        return self.read_groups(source, name, shape)

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

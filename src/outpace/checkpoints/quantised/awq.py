"""AWQ (Lin et al., 2024): 4-bit codes packed into words along the outputs, interleaved."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outpace.checkpoints.fields import Fields, choice, field, read_known_fields, words
from outpace.checkpoints.quantised.scheme import (
    GroupedCodes,
    GroupedScheme,
    TensorSource,
    group_inputs,
    parse_group_size,
    read_scales,
    unpack_codes,
)

AWQ_ABOUT = "AWQ of 4 bits with zero points, in the format gemm"

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of the eight outputs of a word: even ones come first."""


AWQ_FIELDS: Fields = {
    "size": field("group_size q_group_size", parse_group_size, 128),
    "version": field("version format", choice(("gemm", "GEMM")), "gemm"),
}
AWQ_FIXED: Fields = {"quant_method": "awq", "bits": 4, "w_bit": 4, "zero_point": True}
AWQ_IGNORED = words(
    "backend do_fuse exllama_config fuse_max_seq_len modules_to_fuse modules_to_not_convert"
)


@dataclass(frozen=True)
class AWQ(GroupedScheme):
    """4-bit codes with one scale and zero point per group of `size` inputs."""

    size: int
    bits = 4
    about = AWQ_ABOUT

    @classmethod
    def from_config(cls, config: Fields) -> AWQ:
        remedy = f"supported: {AWQ_ABOUT}"
        ours = read_known_fields(
            AWQ_FIELDS, config, fixed=AWQ_FIXED, ignored=AWQ_IGNORED, remedy=remedy
        )
        return cls(ours["size"])

    def read_groups(self, source: TensorSource, name: str, shape: tuple[int, ...]) -> GroupedCodes:
        codes, zeros, scale = self.part_names(source, name)
        (out, inputs), (count, group) = shape, group_inputs(shape, self.size)
        packed_codes = source.read_stored(codes, ((inputs, -(-out // 8)),), ("I32",))
        packed_zeros = source.read_stored(zeros, ((count, -(-out // 8)),), ("I32",))
        return GroupedCodes(
            unpack_interleaved(packed_codes, out).t(),
            read_scales(source, scale, (count, out)).t(),
            unpack_interleaved(packed_zeros, out).t(),
            group,
        )


def unpack_interleaved(words_: Tensor, out: int) -> Tensor:
    """Unpack words `i32[n, out / 8]` to codes `u8[n, out]`."""
    return unpack_codes(words_, 4).unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2)[:, :out]

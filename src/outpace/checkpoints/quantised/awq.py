"""AWQ (Lin et al., 2024): 4-bit codes packed into words along the outputs, interleaved."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outpace.checkpoints.fields import (
    Given,
    field,
    names_of,
    refuse_other,
    refuse_unknown,
    taken,
    words,
)
from outpace.checkpoints.quantised.scheme import (
    Scheme,
    Source,
    group_size,
    groups,
    is_matrix,
    scaled,
    scales,
    unpacked,
)

ABOUT = "AWQ of 4 bits with zero points, in the format gemm"

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of the eight outputs of a word: even ones come first."""


def version(value: object) -> str:
    """Parse the packing format."""
    if isinstance(value, str) and value.lower() == "gemm":
        return "gemm"
    raise ValueError("'gemm'")


FIELDS: Given = {
    "size": field("group_size q_group_size", group_size, 128),
    "version": field("version format", version, "gemm"),
}
FIXED: Given = {"quant_method": "awq", "bits": 4, "w_bit": 4, "zero_point": True}
IGNORED = words(
    "backend do_fuse exllama_config fuse_max_seq_len modules_to_fuse modules_to_not_convert"
)


@dataclass(frozen=True)
class AWQ(Scheme):
    """4-bit codes with one scale and zero point per group of `size` inputs."""

    size: int
    about = ABOUT

    @classmethod
    def read(cls, config: Given) -> AWQ:
        """Read a `quantization_config`."""
        remedy = f"supported: {ABOUT}"
        refuse_unknown(config, {*names_of(FIELDS), *FIXED, *IGNORED}, remedy)
        refuse_other(config, FIXED, {}, remedy)
        return cls(taken(FIELDS, config)["size"])

    def parts(self, source: Source, name: str) -> tuple[str, ...]:
        """Return the names of codes, zero points and scales."""
        stem = name.removesuffix("weight")
        if not is_matrix(name) or f"{stem}qweight" not in source:
            return ()
        return f"{stem}qweight", f"{stem}qzeros", f"{stem}scales"

    def plain(self, source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a matrix: (codes - zero point) * scale."""
        codes, zeros, scale = self.parts(source, name)
        (out, inputs), (count, group) = shape, groups(shape, self.size)
        packed_codes = source.stored(codes, ((inputs, -(-out // 8)),), ("I32",))
        packed_zeros = source.stored(zeros, ((count, -(-out // 8)),), ("I32",))
        return scaled(
            ordered(packed_codes, out).t(),
            scales(source, scale, (count, out)).t(),
            ordered(packed_zeros, out).t(),
            group,
        )


def ordered(words_: Tensor, out: int) -> Tensor:
    """Unpack words `i32[n, out / 8]` to codes `u8[n, out]`."""
    return unpacked(words_, 4).unflatten(-1, (-1, 8))[..., PLACES].flatten(-2)[:, :out]

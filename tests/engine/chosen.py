"""Prints the layouts chosen for float matrices on this machine, after testing batch invariance.

The argument is "tiles" or "none"; the latter excludes tiles. oneDNN reads `ONEDNN_MAX_CPU_ISA`
once, so each value of it needs a process.
"""

import sys

import torch

from outpace.kernels import tiles
from outpace.kernels.matmul import (
    LAYOUTS,
    available_layouts,
    bind_product,
    choose_layout,
    is_batch_invariant,
)

SHAPES = ((37, 64), (192, 192), (1152, 896), (896, 4864), (512, 2048))


def check(weight: torch.Tensor, name: str) -> bool:
    """Return whether all numbers of rows give the same bits as the whole."""
    matrix, x = LAYOUTS[name](weight), torch.randn(300, weight.shape[1]).to(weight.dtype)
    product = bind_product(matrix)
    whole = product(x)
    return all(
        torch.equal(product(x[rows]), whole[rows])
        for count in (*range(1, 12), 15, 16, 17, 31, 33, 63, 66, 130, 257)
        for rows in (slice(count), slice(-count, None))
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[1] == "none":
        tiles.find_loop = lambda dtype: None  # type: ignore[assignment]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            for shape in SHAPES:
                weight = torch.randn(shape).to(dtype)
                name = choose_layout(weight)
                assert name == "rows" or check(weight, name), (name, dtype, shape, threads)
                for other in available_layouts(weight):
                    if not is_batch_invariant(other, shape, dtype, threads):
                        assert not check(weight, other), "the trial left out an invariant layout"
                print(name, dtype, *shape, threads)

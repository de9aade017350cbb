"""Compile the kernels for a GPU, which need not be present, and print their shared memory."""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outpace.kernels import attend, rejection
from outpace.kernels import read as reads

SHARED = {"GROUP": 4, "M": 64, "N": 64, "PAGE": 16, "SIZE": 128, "WIDTH": 128, "UPCAST": False}
POINTERS = {
    **dict.fromkeys(("q", "keys", "values", "out", "sinks"), "*bf16"),
    **dict.fromkeys(("sums", "tops", "ratios", "temperatures", "top_ps", "min_ps"), "*fp32"),
    **dict.fromkeys(("tables", "bounds", "items", "merges", "top_ks", "tokens"), "*i64"),
    **dict.fromkeys(("drafted", "places", "coins"), "*i64"),
    "logits": "*bf16",
    "guesses": "*fp32",
    "scores": "*fp32",
    "scale": "fp32",
}
READ = POINTERS | {"keys": "*i64", "drawn": "*i1"}


def build(function: Any, pointers: dict[str, str], constants: dict[str, Any]) -> None:
    """Compile for compute capability 9.0; integers default to 32 bits."""
    names = function.arg_names
    kinds = {name: pointers.get(name, "i32") for name in names}
    source = ASTSource(
        fn=function,
        signature=kinds | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(function.__name__, built.metadata.shared)


if __name__ == "__main__":
    assert isinstance(attend.attend, triton.JITFunction), sys.argv
    build(reads.read, READ, {"BLOCK": 4096, "GUESS": True, "DRAWN": True})
    build(rejection.verify, READ, {"BLOCK": 4096})
    merged = {"HEADS": 32, "BLOCK": 1, "PARTS": 16, "SIZE": 128, "WIDTH": 128}
    for none in ({"sinks": None}, dict[str, Any]()):
        build(attend.merge, POINTERS, merged | none)
        for trees in (False, True):
            build(attend.attend, POINTERS, SHARED | {"TREES": trees} | none)

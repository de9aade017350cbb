"""The decoding methods by name, each imported, with PyTorch, when it is first used."""

from __future__ import annotations

from collections.abc import Iterator as _Iterator
from collections.abc import Mapping as _Mapping
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from outpace.methods.apd import APD
    from outpace.methods.autoregressive import Autoregressive
    from outpace.methods.block_diffusion import BlockDiffusion
    from outpace.methods.d2f import D2F
    from outpace.methods.dflash import DFlash
    from outpace.methods.diffusion import Diffusion
    from outpace.methods.eagle import Eagle
    from outpace.methods.fast_dllm import FastDLLM
    from outpace.methods.left_to_right import LeftToRight
    from outpace.methods.lookup import Lookup
    from outpace.methods.method import Method
    from outpace.methods.speculative import Speculative
    from outpace.methods.wedlm import WeDLM

AUTO_METHOD = "auto"
"""Name that stands for the default method of a model."""

_CLASSES = {
    "apd": "APD",
    "autoregressive": "Autoregressive",
    "block_diffusion": "BlockDiffusion",
    "d2f": "D2F",
    "dflash": "DFlash",
    "diffusion": "Diffusion",
    "eagle": "Eagle",
    "fast_dllm": "FastDLLM",
    "left_to_right": "LeftToRight",
    "lookup": "Lookup",
    "speculative": "Speculative",
    "wedlm": "WeDLM",
}
"""Class of each method, in the file of the method's name."""


class _Methods(_Mapping[str, "type[Method]"]):
    """Methods by name, which can be listed without importing them."""

    def __getitem__(self, name: str) -> type[Method]:
        class_name = _CLASSES[name]  # a `KeyError` for an unknown method
        kind: type[Method] = getattr(_import_module(f"{__name__}.{name}"), class_name)
        return kind

    def __iter__(self) -> _Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)

    def __contains__(self, name: object) -> bool:
        return name in _CLASSES


METHODS: _Mapping[str, type[Method]] = _Methods()

if not _TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a class on first use."""
        for module, kind in (_CLASSES | {"method": "Method"}).items():
            if kind == name:
                globals()[name] = getattr(_import_module(f"{__name__}.{module}"), name)
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "APD",
    "AUTO_METHOD",
    "D2F",
    "METHODS",
    "Autoregressive",
    "BlockDiffusion",
    "DFlash",
    "Diffusion",
    "Eagle",
    "FastDLLM",
    "LeftToRight",
    "Lookup",
    "Method",
    "Speculative",
    "WeDLM",
]

"""The decoding methods by name, as an explicit list."""

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

METHODS: dict[str, type[Method]] = {
    "apd": APD,
    "autoregressive": Autoregressive,
    "block_diffusion": BlockDiffusion,
    "d2f": D2F,
    "dflash": DFlash,
    "diffusion": Diffusion,
    "eagle": Eagle,
    "fast_dllm": FastDLLM,
    "left_to_right": LeftToRight,
    "lookup": Lookup,
    "speculative": Speculative,
    "wedlm": WeDLM,
}

__all__ = [
    "APD",
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

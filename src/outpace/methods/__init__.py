"""The decoding methods, by name; written by hand."""

from outpace.methods.apd import APD
from outpace.methods.autoregressive import Autoregressive
from outpace.methods.diffusion import Diffusion
from outpace.methods.fast_dllm import FastDLLM
from outpace.methods.left_to_right import LeftToRight
from outpace.methods.method import Method

METHODS: dict[str, type[Method]] = {
    "apd": APD,
    "autoregressive": Autoregressive,
    "diffusion": Diffusion,
    "fast_dllm": FastDLLM,
    "left_to_right": LeftToRight,
}

__all__ = ["APD", "METHODS", "Autoregressive", "Diffusion", "FastDLLM", "LeftToRight", "Method"]

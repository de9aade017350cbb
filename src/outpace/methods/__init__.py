"""The decoding methods, by name; written by hand."""

from outpace.methods.apd import APD
from outpace.methods.autoregressive import Autoregressive
from outpace.methods.left_to_right import LeftToRight
from outpace.methods.method import Method
from outpace.methods.wedlm import WeDLM

METHODS: dict[str, type[Method]] = {
    "apd": APD,
    "autoregressive": Autoregressive,
    "left_to_right": LeftToRight,
    "wedlm": WeDLM,
}

__all__ = ["APD", "METHODS", "Autoregressive", "LeftToRight", "Method", "WeDLM"]

"""Parallel decoding of language models: several tokens per forward pass."""

from outpace.llm import LLM
from outpace.output import Output
from outpace.version import __version__

__all__ = ["LLM", "Output", "__version__"]

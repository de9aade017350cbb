"""Parallel decoding of language models: several tokens per forward pass."""

from outpace.async_llm import AsyncLLM
from outpace.constraint.cloze import Hole
from outpace.llm import LLM
from outpace.output import Output
from outpace.version import __version__

__all__ = ["LLM", "AsyncLLM", "Hole", "Output", "__version__"]

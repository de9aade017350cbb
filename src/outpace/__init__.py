"""Parallel decoding of language models: several tokens per forward pass.

Names that need PyTorch, which takes seconds to load, are imported on first use.
"""

from outpace.version import __version__

__all__ = ["LLM", "AsyncLLM", "Hole", "OptionError", "Output", "__version__"]

TYPE_CHECKING = False  # type checkers set it; importing typing takes longer than starting Python

if TYPE_CHECKING:
    from outpace.api.async_llm import AsyncLLM
    from outpace.api.llm import LLM
    from outpace.api.output import Output
    from outpace.constraint.cloze import Hole
    from outpace.errors import OptionError
else:
    _HOMES = {
        "AsyncLLM": "api.async_llm",
        "Hole": "constraint.cloze",
        "LLM": "api.llm",
        "OptionError": "errors",
        "Output": "api.output",
    }

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        return globals()[name]

    def __dir__() -> list[str]:
        """List all public names, imported or not."""
        return sorted({*globals(), *__all__})


del TYPE_CHECKING

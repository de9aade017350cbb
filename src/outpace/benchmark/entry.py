"""What takes part in a comparison: a model with a method, once for each value of its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from outpace.evaluation.protocol import method_of
from outpace.methods import Method

RANDOM = "random:"
"""In front of a shape: a model of that shape with random weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model with a method.

    Attributes:
        line: what it shares with its neighbours of a sweep, in words.
        setting: the option in which it differs from them; empty where none is swept.
        adapter: what is merged into the model.
    """

    model: str
    method: Method
    line: str
    setting: str = ""
    adapter: str | None = None

    @property
    def name(self) -> str:
        """As a user writes it."""
        return f"{self.line} {self.setting}".rstrip()

    @property
    def models(self) -> list[str]:
        """Names of all that must be loaded for it."""
        named = (self.model, self.adapter, *self.method.models().values())
        return [str(name) for name in named if name is not None]

    @property
    def random(self) -> bool:
        """Whether weights of some model are, so that what it keeps means nothing."""
        return any(name.startswith(RANDOM) for name in self.models)


def swept(
    model: str, name: str, options: Mapping[str, Sequence[Any]], adapter: str | None = None
) -> list[Entry]:
    """An entry for each combination of values; along a line the last option of several varies.

    Raises `ValueError` for an unknown method or option, or a bad value.
    """
    many = [option for option, values in options.items() if len(values) > 1]
    last = many[-1] if many else None
    names = sorted(options, key=lambda option: option == last)
    entries = []
    for values in product(*(options[option] for option in names)):
        words = {o: f"{o}={word(v)}" for o, v in zip(names, values, strict=True)}
        setting = words.pop(last) if last else ""
        merged = model if adapter is None else f"{model}+{adapter}"
        line = " ".join([merged, name, *(words[option] for option in options if option in words)])
        method = method_of(name, dict(zip(names, values, strict=True)))
        entries.append(
            Entry(model=model, method=method, line=line, setting=setting, adapter=adapter)
        )
    return entries


def word(value: Any) -> str:
    """A value as the command line takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)

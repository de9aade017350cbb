"""Entries of a comparison: a model with a method, one entry per combination of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from outpace.cli.options import format_method, format_value, parse_options, split_method_words
from outpace.engine.pairing import MethodSelector
from outpace.methods import Autoregressive, LeftToRight, Method
from outpace.methods.options import method_from_options, method_name, open_method


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodEntry:
    """A model with a method."""

    model: str
    method: Method
    line: str
    """Label shared by the entries of one line of a sweep."""
    setting: str = ""
    """The swept option and its value; empty if none is swept."""
    adapter: str | None = None
    """Adapter that is merged into the model."""
    protocol: str | None = None
    """Protocol of its lengths and sampling, if not that of the prompts."""
    batch: int | None = None
    """Number of concurrent requests, if not that of the load."""
    task: str | None = None
    """Task of its prompts, one without a file, if not that of the other entries."""

    @property
    def name(self) -> str:
        return f"{self.line} {self.setting}".rstrip()

    @property
    def model_names(self) -> list[str]:
        names = (self.model, self.adapter, *self.method.model_names().values())
        return [str(name) for name in names if name is not None]

    def with_models(self, paths: Mapping[str, str]) -> MethodEntry:
        """Return the entry with models replaced by paths, where there is one of that name."""
        roles = {
            role: paths.get(str(name), name) for role, name in self.method.model_names().items()
        }
        method = replace(self.method, **roles) if roles else self.method
        adapter = self.adapter and paths.get(self.adapter, self.adapter)
        return replace(
            self, model=paths.get(self.model, self.model), method=method, adapter=adapter
        )


def expand_entries(
    model: str, kind: type[Method], options: Mapping[str, Sequence[Any]], adapter: str | None = None
) -> list[MethodEntry]:
    """Return an entry per combination of option values.

    Entries of one line differ in the last option with several values.
    """
    varied = [option for option, values in options.items() if len(values) > 1]
    last = varied[-1] if varied else None
    names = sorted(options, key=lambda option: option == last)
    entries = []
    for values in product(*(options[option] for option in names)):
        words = {o: f"{o}={format_value(v)}" for o, v in zip(names, values, strict=True)}
        setting = words.pop(last) if last else ""
        merged = model if adapter is None else f"{model}+{adapter}"
        line = " ".join(
            [merged, method_name(kind), *(words[option] for option in options if option in words)]
        )
        method = method_from_options(kind, dict(zip(names, values, strict=True)))
        entries.append(
            MethodEntry(model=model, method=method, line=line, setting=setting, adapter=adapter)
        )
    return entries


def parse_entries(text: str, adapter: str | None = None) -> list[MethodEntry]:
    """Parse `MODEL METHOD option=value …`, where commas separate the values of a sweep.

    `MODEL` alone is one token per forward, and the default method of the model with `adapter`.
    """
    if text.strip() and " " not in text.strip():
        return plain_and_default(text.strip(), adapter)
    model, _, words = text.strip().partition(" ")
    if not words:
        raise ValueError(f"{text!r} is not an entry: write 'MODEL METHOD option=value …'")
    name, options = split_method_words(words)
    kind = open_method(name)
    values = {
        o: [parse_options(kind, {o: each})[o] for each in t.split(",")] for o, t in options.items()
    }
    return expand_entries(model, kind, values)


def plain_and_default(model: str, adapter: str | None) -> list[MethodEntry]:
    opened = MethodSelector.open(model, adapter=adapter)
    plain = [
        kind() for kind in (Autoregressive, LeftToRight) if opened.config.kind in kind.target_kinds
    ]
    methods = dict.fromkeys([*plain, opened.default])
    if len(methods) != 2:
        raise ValueError(
            f"{model!r} has no default method to compare with one token per forward: "
            "write 'MODEL METHOD option=value …'"
        )
    return [MethodEntry(model=model, method=m, line=format_entry(model, m)) for m in methods]


def format_entry(model: str, method: Method) -> str:
    """Format model and method as `MODEL METHOD option=value …`, parsed by `parse_entries`."""
    return f"{model} {format_method(method)}"

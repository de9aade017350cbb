"""Entries of a comparison: a model with a method, one entry per combination of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from outpace.evaluation.protocol import method_from_options
from outpace.methods import Method
from outpace.methods.options import method_name


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodEntry:
    """A model with a method.

    Attributes:
        line: label shared by the entries of one line of a sweep.
        setting: the swept option and its value; empty if none is swept.
        adapter: adapter that is merged into the model.
        protocol: protocol of its lengths and sampling, if not that of the prompts.
        batch: number of concurrent requests, if not that of the load.
        task: task of its prompts, one without a file, if not that of the other entries.
    """

    model: str
    method: Method
    line: str
    setting: str = ""
    adapter: str | None = None
    protocol: str | None = None
    batch: int | None = None
    task: str | None = None

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

    Raises:
        ValueError: an option is unknown, or a value is invalid.
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


def format_value(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)

"""Decoding of an export: alone, as an adapter of its base, or as the draft of its target."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outpace.api.llm import LLM
from outpace.evaluation.protocol import method_from_options


@dataclass(frozen=True, kw_only=True)
class ExportDecoder:
    """Method and companion models of an export.

    Attributes:
        method: name and options of the method; empty for the default of the model's family.
        target: the model that the export is a draft of.
        base: the model that the export is an adapter of.
    """

    method: Mapping[str, Any]
    target: str | None = None
    base: str | None = None

    def method_options(self, export: str) -> dict[str, Any]:
        """Return name and options of the method, including the draft."""
        return {**self.method, **({"draft": export} if self.target else {})}

    def load_llm(self, export: Path, device: torch.device) -> LLM:
        """Load the export for decoding, with a KV cache of 0.5 GiB."""
        options = self.method_options(str(export))
        name = options.pop("name", None)
        method = None if name is None else method_from_options(name, options)
        model = self.target or self.base or str(export)
        adapter = export if self.base else None
        return LLM(model, method, adapter=adapter, device=device, cache_gib=0.5)

    def build_command(self, export: Path, prompt: str) -> str:
        """Return the shell command that decodes a prompt."""
        words = ["outpace", "generate", self.target or self.base or str(export), prompt]
        words += ["--adapter", str(export)] if self.base else []
        for option, value in self.method_options(str(export)).items():
            flag = "method" if option == "name" else option.replace("_", "-")
            words += [f"--{flag}", str(value).lower() if isinstance(value, bool) else str(value)]
        return shlex.join(words)

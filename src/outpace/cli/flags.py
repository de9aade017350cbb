"""Flags that several commands have, and what becomes of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from typer import Argument, Option

from outpace.llm import LLM
from outpace.methods import Method
from outpace.options import Options

ModelName = Annotated[str, Argument(help="Folder, hub name, or model of the zoo.")]
MaxTokens = Annotated[int | None, Option(help="Most tokens of an answer; 256 unless given.")]
Temperature = Annotated[float | None, Option(help="0 is greedy; default by method or family.")]
TopP = Annotated[float | None, Option(help="Mass of the nucleus; default by method or family.")]
TopK = Annotated[int | None, Option(help="Sample from the k most probable tokens.")]
Seed = Annotated[int, Option(help="Same seed, same text.")]
Raw = Annotated[bool, Option("--raw", help="Continue the text, without chat template.")]
PrefixCache = Annotated[bool, Option(help="Keep what prompts that begin alike share.")]
Dtype = Annotated[str | None, Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str | None, Option(help="cpu or cuda; cuda where there is one.")]
AdapterName = Annotated[str | None, Option(help="Folder or hub name of a LoRA to merge.")]
Limit = Annotated[int, Option(help="Number of problems.")]
Batch = Annotated[int, Option(help="Requests that run at a time.")]
JsonPath = Annotated[Path | None, Option("--json", help="Write the figures here.")]

SchemaPath = Annotated[Path | None, Option(help="JSON schema that the answer fulfils.")]
Regex = Annotated[str | None, Option(help="Regular expression of the whole answer.")]
Choices = Annotated[list[str] | None, Option(help="One of these is the answer; give several.")]

ClozeText = Annotated[str | None, Option("--fill", help="Text with holes: {{8}}, {{..8}}.")]

SMALL = 20_000_000
"""Parameters below which one thread is fastest, since more only wait for each other."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How tokens are chosen, and how many."""

    max_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    seed: Seed = 0

    def options(self) -> Options:
        """As a request takes them."""
        return cast(Options, asdict(self))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What the whole answer must be."""

    schema: SchemaPath = None
    regex: Regex = None
    choices: Choices = None

    def options(self) -> Options:
        """As a request takes them. Raises `ValueError` for a file that is no JSON."""
        schema = None if self.schema is None else read_json(self.schema)
        return Options(schema=schema, regex=self.regex, choices=self.choices or None)


def read_json(path: Path) -> Any:
    """What a file of JSON holds; `ValueError` where there is none."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no readable JSON: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Loading:
    """What is merged into a model, in which numbers and where it runs."""

    adapter: AdapterName = None
    dtype: Dtype = None
    device: Device = None

    def open(self, model: str, method: Method | None, *, prefix_cache: bool = True) -> LLM:
        """A model ready to decode."""
        llm = LLM(model, method, prefix_cache=prefix_cache, **asdict(self))
        if llm.device.type == "cpu" and llm.target.parameters < SMALL:
            torch.set_num_threads(1)
        return llm


CHOICE = Choice()
LOADING = Loading()
RULE = Rule()

"""Validation during training: loss on held-out examples, and accuracy of decoded answers."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from numpy.random import default_rng
from torch import nn

from outpace.api.llm import LLM
from outpace.data.numbers import final_number, judge_last_number
from outpace.errors import OptionError
from outpace.field_types import Count, NonNegativeInt, check_fields
from outpace.methods.options import find_method, method_from_options
from outpace.tokenizer import Tokenizer
from outpace.training.data import PROBLEM_GENERATORS, STORY_PREFIX, Data, Examples
from outpace.training.objective import Objective
from outpace.training.report import MetricAccumulator, compute_means
from outpace.training.rows import pack_documents


@dataclass(frozen=True, kw_only=True)
class ExportDecoder:
    """Method and companion models of an export."""

    method: Mapping[str, Any]
    """Name and options of the method; empty for the default of the model's family."""
    target: str | None = None
    """The model that the export is a draft of."""
    base: str | None = None
    """The model that the export is an adapter of."""

    def method_options(self, export: str) -> dict[str, Any]:
        return {**self.method, **({"draft": export} if self.target else {})}

    def load_llm(self, export: Path, device: torch.device) -> LLM:
        options = self.method_options(str(export))
        name = options.pop("name", None)
        method = None if name is None else method_from_options(find_method(name), options)
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


COPY_FOLDER = ".decode"
"""Subfolder of the run for the temporary export that is decoded."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out examples, and how and how often they are evaluated."""

    path: str | tuple[str, ...]
    """Source of the examples, as `Data.path`; generated problems use `story:test` or `table:test`.
    """
    fields: tuple[str, str] | None = None
    """Names of the prompt and response fields; as in the data by default."""
    every: Count = 200
    """Steps between validations; there is also one before training and one after it."""
    examples: Count = 64
    """Number of examples, the same each time, with the same noise."""
    decode: NonNegativeInt = 0
    """Number of them that are also decoded greedily, with a temporary export."""
    max_tokens: Count = 128
    """Maximum tokens of a decoded answer."""
    judge: Literal["exact", "number"] = "exact"
    """Comparison of answers with responses: `exact`, or `number`, which compares the last numbers
    in them."""
    method: Mapping[str, Any] = field(default_factory=dict)
    """Name and options of the decoding method; the objective's or family's by default."""
    best: str | None = None
    """Figure by which the best export is kept in the folder `best` of the run; a loss, or the
    divergence from a teacher, is better if lower, other figures if higher."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.method and "name" not in self.method:
            raise ValueError(f"method needs a name in addition to {', '.join(self.method)}")
        if self.decode > self.examples:
            raise OptionError("decode", self.decode, f"must be at most examples ({self.examples})")

    def load_examples(self, data: Data, tokenizer: Tokenizer, seed: int) -> Examples:
        """Open the examples with the settings of the training data.

        Raises:
            ValueError: a held-out path is also trained on.
        """
        paths = (self.path,) if isinstance(self.path, str) else self.path
        plain = data.plain and any(path.startswith(STORY_PREFIX) for path in paths)
        settings = replace(
            data,
            path=self.path,
            fields=self.fields or data.fields,
            turns=None,
            drills=0.0,
            plain=plain,
            features=None,
        )
        if both := sorted(set(settings.paths) & set(data.paths)):
            raise ValueError(f"held_out path {both[0]!r} is trained on; give another path")
        is_generated = any(path.startswith(tuple(PROBLEM_GENERATORS)) for path in settings.paths)
        return Examples(settings, tokenizer, seed, split="test" if is_generated else "train")


class Validator:
    """Evaluates held-out examples without changing the model or any random state."""

    def __init__(
        self,
        settings: HeldOut,
        examples: Examples,
        objective: Objective,
        decoder: ExportDecoder | None,
        accelerator: Accelerator,
        length: int,
    ) -> None:
        """Check the settings against a model of `length` slots, and load the examples."""
        if settings.decode and decoder is None:
            raise ValueError(
                "decode needs models given by name or folder; give them, or decode = 0"
            )
        count = settings.examples
        if count < (processes := accelerator.num_processes):
            raise OptionError("examples", count, f"must be at least the {processes} processes")
        if examples.epoch_size is not None and examples.epoch_size < count:
            size = examples.epoch_size
            raise OptionError(
                "examples", count, f"must be at most {size}, the size of the held-out data"
            )
        self.settings, self.decoder, self.accelerator = settings, decoder, accelerator
        self.examples = [examples[number] for number in range(count)]
        longest = max((len(each.prompt) for each in self.examples[: settings.decode]), default=0)
        if settings.decode and longest + settings.max_tokens > length:
            raise ValueError(
                f"max_tokens {settings.max_tokens} after a prompt of {longest} tokens exceeds the "
                f"model's length of {length}; lower max_tokens"
            )
        self.tokenizer, self.seed = examples.tokenizer, examples.seed
        self.objective = objective

    def validate(
        self, scored: nn.Module, batch: int, write: Callable[[Path], None], out: Path
    ) -> dict[str, float]:
        """Return metrics of the model's current weights; `write` exports it to a folder."""
        with evaluation_mode(self.accelerator, scored):
            figures = self.mean_losses(scored, batch)
            if self.settings.decode:
                write(out / COPY_FOLDER)  # a collective operation
                if self.accelerator.is_main_process:
                    figures |= self.decode_examples(out / COPY_FOLDER)
        return figures

    @torch.no_grad()
    def mean_losses(self, scored: nn.Module, batch: int) -> dict[str, float]:
        numbers = range(
            self.accelerator.process_index, len(self.examples), self.accelerator.num_processes
        )
        parts = [
            self.objective.rows(self.examples[n], default_rng([self.seed, n, 3])) for n in numbers
        ]
        sums, device = MetricAccumulator(self.accelerator, {}), self.accelerator.device
        name = "divergence" if self.objective.needs_teacher else "loss"
        most = -(-len(self.examples) // self.accelerator.num_processes)
        for at in range(0, most, batch):
            chunk = parts[at : at + batch]
            rows = pack_documents(chunk or parts[:1])
            total, metrics = scored(rows.to(device))
            if not chunk:  # sharded processes must all run equally many forwards
                break
            sums.add({name: (total, torch.tensor(rows.normaliser, device=device)), **metrics})
        return compute_means(sums.reduce_sums())

    def decode_examples(self, export: Path) -> dict[str, float]:
        """Return the accuracy and tokens per forward of an export, which is deleted."""
        assert self.decoder is not None
        chosen = self.examples[: self.settings.decode]
        try:
            llm = self.decoder.load_llm(export, self.accelerator.device)
            outputs = llm.generate(
                [example.prompt for example in chosen],
                max_tokens=self.settings.max_tokens,
                temperature=0.0,
            )
        finally:
            shutil.rmtree(export, ignore_errors=True)
        responses = [
            self.tokenizer.decode(example.response, skip_special_tokens=True) for example in chosen
        ]
        right = [
            self.is_right(output.text, response.strip())
            for output, response in zip(outputs, responses, strict=True)
        ]
        forwards = sum(output.forwards for output in outputs)
        tokens = sum(len(output.ids) for output in outputs)
        return {
            "answers_right": sum(right) / len(right),
            "tokens_per_forward": tokens / max(forwards, 1),
        }

    def is_right(self, answer: str, response: str) -> bool:
        """Judge an answer; under `number` a response without a number counts as wrong."""
        if self.settings.judge == "exact":
            return bool(response) and answer.strip() == response
        number = final_number(response)
        return number is not None and judge_last_number(answer, number)


@contextmanager
def evaluation_mode(accelerator: Accelerator, scored: nn.Module) -> Iterator[None]:
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        scored.eval()
        try:
            yield
        finally:
            scored.train()

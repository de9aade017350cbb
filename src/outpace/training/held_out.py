"""Examples that are not learnt: their loss while a run trains, and what they are decoded to."""

from __future__ import annotations

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
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from outpace.evaluation.scoring import SCORERS
from outpace.evaluation.scoring.numbers import final
from outpace.training.data import Data, Examples
from outpace.training.decoder import Decoder
from outpace.training.kinds import Count, Whole, check_bounds
from outpace.training.objective import Objective
from outpace.training.rows import pack
from outpace.training.sources import PROBLEMS, STORY
from outpace.training.sums import Sums, means

RULES = {"exact": "exact", "number": "last-number"}
"""Rules that judge, by the judge's name."""

COPY = ".decode"
"""Folder of the copy that is decoded, under that of the run."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What is looked at while a run trains, and how often.

    Attributes:
        path: where its examples come from, as those of the data do; of problems of the zoo
            `story:test` or `table:test`.
        fields: what prompt and response are called there; as in the data by default.
        every: steps from one look to the next; the first comes before training, and one after it.
        examples: how many are looked at, the same each time, with the same noise.
        decode: how many of them are decoded as well, greedily, by a copy of the model as it is
            exported.
        max_tokens: of an answer.
        judge: how answers are compared with responses: `exact`, or `number`, which compares the
            numbers that they end in.
        method: name and options of the method that decodes; that of objective or family by default.
    """

    path: str | tuple[str, ...]
    fields: tuple[str, str] | None = None
    every: Count = 200
    examples: Count = 64
    decode: Whole = 0
    max_tokens: Count = 128
    judge: Literal["exact", "number"] = "exact"
    method: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.method and "name" not in self.method:
            raise ValueError(f"method needs a name beside {', '.join(self.method)}")
        if self.decode > self.examples:
            raise ValueError(f"decode {self.decode} of {self.examples} examples: raise examples")

    def opened(self, data: Data, tokenizer: PreTrainedTokenizerBase, seed: int) -> Examples:
        """The examples, cut and ended as those that are learnt; refuses those themselves."""
        paths = (self.path,) if isinstance(self.path, str) else self.path
        plain = data.plain and any(path.startswith(STORY) for path in paths)
        apart = replace(
            data,
            path=self.path,
            fields=self.fields or data.fields,
            turns=None,
            drills=0.0,
            plain=plain,
            features=None,
        )
        if both := sorted(set(apart.paths) & set(data.paths)):
            raise ValueError(f"held out is {both[0]!r}, which is trained on; give another path")
        made = any(path.startswith(tuple(PROBLEMS)) for path in apart.paths)
        return Examples(apart, tokenizer, seed, split="test" if made else "train")


class Watch:
    """Looks at held-out examples, and leaves the model and all chance as they were."""

    def __init__(
        self,
        settings: HeldOut,
        examples: Examples,
        objective: Objective,
        decoder: Decoder | None,
        accelerator: Accelerator,
        length: int,
    ) -> None:
        """Refuse what could not be looked at by a model of so many slots."""
        if settings.decode and decoder is None:
            raise ValueError("decode needs models that have a name; give names, or decode = 0")
        count = settings.examples
        if count < accelerator.num_processes:
            raise ValueError(
                f"examples {count} are too few for {accelerator.num_processes} processes"
            )
        if examples.epoch is not None and examples.epoch < count:
            raise ValueError(
                f"held out are {examples.epoch} examples, but {count} are to be looked at; give "
                "fewer examples"
            )
        self.settings, self.decoder, self.accelerator = settings, decoder, accelerator
        self.examples = [examples[number] for number in range(count)]
        longest = max((len(each.prompt) for each in self.examples[: settings.decode]), default=0)
        if settings.decode and longest + settings.max_tokens > length:
            raise ValueError(
                f"max_tokens {settings.max_tokens} do not fit behind a prompt of {longest} tokens "
                f"in the {length} of the model"
            )
        self.tokenizer, self.seed = examples.tokenizer, examples.seed
        self.objective = objective

    def look(
        self, scored: nn.Module, portion: int, write: Callable[[Path], None], out: Path
    ) -> dict[str, float]:
        """Figures of the model as it is; `write` exports it to a folder."""
        with untouched(self.accelerator, scored):
            figures = self.losses(scored, portion)
            if self.settings.decode:
                write(out / COPY)  # which may take all processes
                if self.accelerator.is_main_process:
                    figures |= self.decoded(out / COPY)
        return figures

    @torch.no_grad()
    def losses(self, scored: nn.Module, portion: int) -> dict[str, float]:
        """Loss and metrics of all examples, so many at a time."""
        numbers = range(
            self.accelerator.process_index, len(self.examples), self.accelerator.num_processes
        )
        parts = [
            self.objective.rows(self.examples[n], default_rng([self.seed, n, 3])) for n in numbers
        ]
        sums, device = Sums(self.accelerator, {}), self.accelerator.device
        most = -(-len(self.examples) // self.accelerator.num_processes)
        for at in range(0, most, portion):
            few = parts[at : at + portion]
            rows = pack(few or parts[:1])
            total, metrics = scored(rows.to(device))
            if not few:  # but a process that shares its weights must run as often as the others
                break
            sums.add({"loss": (total, torch.tensor(rows.mass, device=device)), **metrics})
        return means(sums.reduced())

    def decoded(self, export: Path) -> dict[str, float]:
        """Share of right answers of an export, which is dropped, and tokens per forward."""
        assert self.decoder is not None
        chosen = self.examples[: self.settings.decode]
        try:
            llm = self.decoder.llm(export, self.accelerator.device)
            outputs = llm.generate(
                [example.prompt for example in chosen],
                max_tokens=self.settings.max_tokens,
                temperature=0.0,
            )
        finally:
            shutil.rmtree(export, ignore_errors=True)
        right = [
            self.right(output.text, self.text(example.response))
            for output, example in zip(outputs, chosen, strict=True)
        ]
        forwards = sum(output.forwards for output in outputs)
        tokens = sum(len(output.ids) for output in outputs)
        return {
            "answers_right": sum(right) / len(right),
            "tokens_per_forward": tokens / max(forwards, 1),
        }

    def text(self, ids: list[int]) -> str:
        """A response without what ends it."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()

    def right(self, answer: str, response: str) -> bool:
        """By the rule that is chosen; a response without a number has no right answer."""
        reference = final(response) if self.settings.judge == "number" else response
        return bool(reference and SCORERS[RULES[self.settings.judge]](answer, reference))


@contextmanager
def untouched(accelerator: Accelerator, scored: nn.Module) -> Iterator[None]:
    """Evaluate a model, and put it and the generators of chance back as they were."""
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        scored.eval()
        try:
            yield
        finally:
            scored.train()

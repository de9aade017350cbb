"""Fixed draft lengths and "auto" of `Speculative` in turns, on published models."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from harness import Row, Timing, timed
from outpace import LLM, Output
from outpace.api.text import Prompt
from outpace.lab.run import questions_of
from outpace.methods import Autoregressive, Method, Speculative

WARM_UP = 8
"""Tokens that each setting generates before it is timed."""


@dataclass(slots=True)
class Setting:
    """A draft length with its answers and their times."""

    llm: LLM
    method: Method
    outputs: list[Output] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)

    def answer(self, prompt: Prompt, tokens: int) -> None:
        """Answer a prompt and add the time that it took."""

        def run() -> None:
            self.outputs += self.llm.generate(
                [prompt], method=self.method, max_tokens=tokens, temperature=0.0
            )

        self.timings.append(timed(run))

    def row(self, name: str, first: Setting) -> Row:
        """Figures beside those of the first setting, whose texts should be the same."""
        count = sum(len(output.ids) for output in self.outputs)
        steps = [step for output in self.outputs for step in output.steps]
        values = [
            step.draft_length
            for step in steps
            if step.draft_length is not None and step.model == "target"
        ]
        pairs = list(zip(self.outputs, first.outputs, strict=True))
        return {
            "setting": name,
            "answers": len(self.outputs),
            "tokens": count,
            "tokens per CPU second": count / sum(timing.cpu for timing in self.timings),
            "tokens per second": count / sum(timing.wall for timing in self.timings),
            "mean draft length": statistics.fmean(values) if values else None,
            "equal texts": sum(ours.ids == theirs.ids for ours, theirs in pairs) / len(pairs),
        }


def measure_lengths(llm: LLM, options: argparse.Namespace) -> Iterator[list[Row]]:
    """Rows of autoregressive decoding, of fixed draft lengths and of "auto" after every prompt.

    All settings take turns at every prompt. The controller starts anew in every round.
    """
    task = "humaneval" if options.data else "story"
    prompts = [each.prompt for each in questions_of(task, options.prompts, options.data)]
    settings = {"autoregressive": Setting(llm, Autoregressive())}
    for tokens in (*options.fixed, "auto"):
        method = Speculative(draft=options.draft, tokens=tokens)
        settings["auto" if tokens == "auto" else f"tokens={tokens}"] = Setting(llm, method)
    every = list(settings.values())
    for setting in every:
        setting.answer(prompts[0], WARM_UP)
        setting.outputs, setting.timings = [], []
    for index in range(options.rounds):
        llm.engine.controllers.clear()
        for number, prompt in enumerate(prompts):
            turn = (index + number) % len(every)
            for setting in [*every[turn:], *every[:turn]]:
                setting.answer(prompt, options.tokens)
            yield [setting.row(name, every[0]) for name, setting in settings.items()]

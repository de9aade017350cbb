"""Many prompts on Ray Data: blocks of them go to copies of a model, and answers come back."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ray.data
import torch
from ray.data import ActorPoolStrategy, DataContext

from outpace.api.answers import Refused
from outpace.api.llm import LLM
from outpace.api.options import Options
from outpace.api.output import Output
from outpace.api.text import Prompt
from outpace.checkpoints.adapter import title
from outpace.checkpoints.load import load_config
from outpace.engine.pairing import native
from outpace.errors import OptionError
from outpace.evaluation.samples import restored, written
from outpace.methods.options import Named, method_of
from outpace.ray.cluster import check_count, join, share

Row = dict[str, str]
Block = list[tuple[int, Prompt, int]]
"""Prompts with their numbers and seeds."""

FULL = 4
"""Prompts of a block for each that runs at a time: the last ones of a block leave a model idle."""

PARTS = 4
"""Blocks at least for each copy, as long as that leaves each as much as runs at a time."""


class Fleet:
    """Copies of one model on Ray that answer as one `LLM` does.

    `loading` is what `LLM` is told; models are at paths that every machine knows. There is a copy
    for each GPU, or for each core where the model is `small` and on a CPU, unless `replicas` says
    otherwise. Raises `ValueError` for an unknown model and for more copies than find room.
    """

    def __init__(
        self,
        model: str,
        method: Named | None = None,
        *,
        replicas: int | None = None,
        small: bool = False,
        **loading: Any,
    ) -> None:
        if loading.get("tensor_parallel", 1) > 1:
            message = "tensor_parallel: a copy on Ray has one process; leave it out"
            raise OptionError("tensor_parallel", loading["tensor_parallel"], message)
        config = load_config(model)
        self.name = title(model, loading.get("adapter"))
        self.method = native(config) if method is None else method_of(method)
        self.told = {"model": model, "method": self.method, **loading}
        check_count(replicas)
        join()
        self.share = share(replicas, {loading.get("device")}, small=small)

    def serve(
        self, requests: Iterable[tuple[Prompt | None, Options]], *, batch: int
    ) -> Iterator[tuple[int, Output]]:
        """Answer requests, `batch` at a time on each copy, and give each with its number.

        They differ in prompt and seed alone. Answers of a block come together, and each comes
        once, whatever becomes of the copies: the block of one that ends goes to another. Raises
        `Refused` for a request that cannot be run.
        """
        if batch < 1:
            message = f"batch must be a whole number from 1 on, not {batch!r}"
            raise OptionError("batch", batch, message)
        block: Block = []
        common: Mapping[str, Any] | None = None
        for number, (prompt, options) in enumerate(requests):
            rest = {name: value for name, value in options.items() if name != "seed"}
            common = rest if common is None else common
            assert prompt is not None and rest == common
            block.append((number, prompt, options.get("seed", 0)))
        known: set[int] = set()
        for row in self.rows(block, batch, common or {}):
            for number, record in json.loads(row["answers"]):
                if number not in known:
                    known.add(number)
                    yield number, restored(record)
            if row["refused"]:
                number, message, param = json.loads(row["refused"])
                cause = ValueError(message) if param is None else OptionError(param, None, message)
                raise Refused(cause, number)
        assert len(known) == len(block)

    def rows(self, block: Block, batch: int, options: Mapping[str, Any]) -> Iterator[Row]:
        """What became of each part of a block."""
        if not block:
            return iter(())
        quiet = DataContext.get_current()
        quiet.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        size = max(min(FULL * batch, -(-len(block) // (PARTS * self.share.replicas))), 1)
        parts = [block[n : n + size] for n in range(0, len(block), size)]
        rows = [{"block": json.dumps(part)} for part in parts]
        told = {"batch": batch, "threads": self.share.threads, "options": dict(options)}
        answered = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            Copy,
            batch_size=1,
            compute=ActorPoolStrategy(size=self.share.replicas),
            fn_constructor_kwargs={"loading": self.told, **told},
            **self.share.options,
        )
        return iter(answered.iter_rows())


class Copy:
    """One of the copies, in a process of its own."""

    def __init__(
        self, loading: dict[str, Any], options: Options, batch: int, threads: int | None
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)  # before layouts are tried
        self.llm = LLM(**loading)
        self.options = options
        self.batch = batch

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, list[str]]:
        """Answer the one block of a batch of rows."""
        (text,) = rows["block"]
        block: Block = json.loads(str(text))
        taken: list[int] = []
        answers: list[tuple[int, dict[str, Any]]] = []
        refused = ""

        def requests() -> Iterator[tuple[Prompt, Options]]:
            for number, prompt, seed in block:
                taken.append(number)
                yield prompt, {**self.options, "seed": seed}

        try:
            for index, output in self.llm.serve(requests(), batch=self.batch):
                answers.append((taken[index], written(output)))
        except ValueError as error:
            param = error.param if isinstance(error, OptionError) else None
            refused = json.dumps((taken[-1], str(error), param))
        return {"answers": [json.dumps(answers)], "refused": [refused]}

"""Offline generation on Ray Data: blocks of prompts go to copies of a model."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ray.data
import torch
from ray.data import ActorPoolStrategy, DataContext

from outpace.api.llm import LLM
from outpace.api.options import Options
from outpace.api.output import Output
from outpace.api.text import Prompt
from outpace.checkpoints.adapter import model_title
from outpace.checkpoints.load import load_config
from outpace.engine.pairing import MethodSelector
from outpace.errors import OptionError, must
from outpace.evaluation.answers import InvalidRequestError
from outpace.evaluation.samples import output_from_record, output_record
from outpace.methods.options import MethodSpec
from outpace.ray.cluster import allocate_resources, check_replica_count, join_cluster

BlockAnswers = dict[str, str]
PromptBlock = list[tuple[int, Prompt, int]]
"""Prompts with their numbers and seeds."""

PROMPTS_PER_SLOT = 4
"""Prompts per block and concurrent request; several, because slots idle at the end of a block."""

MIN_BLOCKS_PER_COPY = 4
"""Minimum number of blocks per copy, provided that each block fills a batch."""


class Fleet:
    """Copies of one model on Ray, with the interface of one `LLM`.

    Args:
        model: The model, at a path that every machine can read.
        method: The decoding method; the default of the model if None.
        replicas: Number of copies. By default one per GPU, or per core for small models on CPUs.
        small: Whether the model is small enough for one core.
        loading: Options of `LLM`.

    Raises:
        ValueError: If the model is unknown, or the cluster has no room for the copies.
    """

    def __init__(
        self,
        model: str,
        method: MethodSpec | None = None,
        *,
        replicas: int | None = None,
        small: bool = False,
        **loading: Any,
    ) -> None:
        config = load_config(model)
        self.config, self.name = config, model_title(model, loading.get("adapter"))
        self.methods = MethodSelector(method, self.name, config)
        self.method = self.methods.default
        self.load_options = {"model": model, "method": self.method, **loading}
        check_replica_count(replicas)
        join_cluster()
        self.share = allocate_resources(replicas, {loading.get("device")}, small=small)

    def serve(
        self, requests: Iterable[tuple[Prompt | None, Options]], *, batch: int
    ) -> Iterator[tuple[int, Output]]:
        """Answer requests, `batch` at a time on each copy, and yield numbers and answers.

        Requests may differ in prompt and seed only. The answers of a block arrive together, each
        exactly once: if a copy fails, its block is sent to another one.

        Raises:
            Refused: If a request cannot be run.
        """
        if batch < 1:
            raise must("batch", batch, "be an integer of at least 1")
        block: PromptBlock = []
        common: Mapping[str, Any] | None = None
        for number, (prompt, options) in enumerate(requests):
            shared = {name: value for name, value in options.items() if name != "seed"}
            common = shared if common is None else common
            assert prompt is not None and shared == common
            block.append((number, prompt, options.get("seed", 0)))
        answered_numbers: set[int] = set()
        for row in self.answer_blocks(block, batch, common or {}):
            for number, record in json.loads(row["answers"]):
                if number not in answered_numbers:
                    answered_numbers.add(number)
                    yield number, output_from_record(record)
            if row["refused"]:
                number, message, param = json.loads(row["refused"])
                cause = ValueError(message) if param is None else OptionError(param, None, message)
                raise InvalidRequestError(cause, number)
        assert len(answered_numbers) == len(block)

    def answer_blocks(
        self, block: PromptBlock, batch: int, options: Mapping[str, Any]
    ) -> Iterator[BlockAnswers]:
        if not block:
            return iter(())
        context = DataContext.get_current()
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        size = max(
            min(
                PROMPTS_PER_SLOT * batch,
                -(-len(block) // (MIN_BLOCKS_PER_COPY * self.share.replicas)),
            ),
            1,
        )
        parts = [block[n : n + size] for n in range(0, len(block), size)]
        rows = [{"block": json.dumps(part)} for part in parts]
        arguments = {"batch": batch, "threads": self.share.threads, "options": dict(options)}
        results = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            ModelCopy,
            batch_size=1,
            compute=ActorPoolStrategy(size=self.share.replicas),
            fn_constructor_kwargs={"loading": self.load_options, **arguments},
            **self.share.actor_options,
        )
        return iter(results.iter_rows())


class ModelCopy:
    """One copy of the model, in a separate process."""

    def __init__(
        self, loading: dict[str, Any], options: Options, batch: int, threads: int | None
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)  # before weight layouts are benchmarked
        self.llm = LLM(**loading)
        self.options = options
        self.batch = batch

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, list[str]]:
        """Answer the single block of a batch of rows."""
        (text,) = rows["block"]
        block: PromptBlock = json.loads(str(text))
        numbers: list[int] = []
        answers: list[tuple[int, dict[str, Any]]] = []
        refused = ""

        def block_requests() -> Iterator[tuple[Prompt, Options]]:
            for number, prompt, seed in block:
                numbers.append(number)
                yield prompt, {**self.options, "seed": seed}

        try:
            for index, output in self.llm.serve(block_requests(), batch=self.batch):
                answers.append((numbers[index], output_record(output)))
        except ValueError as error:
            param = error.param if isinstance(error, OptionError) else None
            refused = json.dumps((numbers[-1], str(error), param))
        return {"answers": [json.dumps(answers)], "refused": [refused]}

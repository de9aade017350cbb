"""Text in, text out: a model, a decoding method, and the engine that runs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any, Unpack, overload

import torch

from outpace.api.driver import Driver
from outpace.api.effects import check_sight, constraint_of, ends_of, processors_of
from outpace.api.infill import Layout
from outpace.api.options import Options, RequestOptions, seeded
from outpace.api.output import Answer, Output
from outpace.api.stream import Stream
from outpace.api.text import Detokenizer, Prompt, Text, as_many
from outpace.attention.choice import check as check_attention
from outpace.checkpoints.adapter import title
from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.load import (
    load_config,
    load_draft,
    load_model,
    load_tokenizer,
    resolve,
    target_config,
)
from outpace.constraint.cloze import Parts
from outpace.constraint.compiler import Compiler, Unread
from outpace.decoding import DRAFT_KINDS, Request
from outpace.decoding.sampling_params import is_whole
from outpace.engine.cache import cache_bytes, cache_slots, check_gib
from outpace.engine.engine import Engine, Pacing
from outpace.engine.fuse import check as check_compile
from outpace.engine.graphs import recorder
from outpace.engine.pairing import CONCURRENT, Pairing, check_models, named, native
from outpace.engine.runner import Runner
from outpace.engine.team import Team
from outpace.errors import OptionError
from outpace.methods import Method
from outpace.methods.method import check_type
from outpace.methods.options import Named, method_of
from outpace.models.config import ModelConfig
from outpace.models.device import resolve_device, resolve_dtype
from outpace.models.low_bits import check, default_bits
from outpace.models.transformer import Stack

MOST_ANSWERS = 2**16


class LLM:
    """A target model with a decoding method, ready for many prompts at once.

    `model` is a checkpoint folder, a GGUF file, a hub name, or a model of the zoo; `adapter` a
    folder or hub name of a low-rank adapter that is merged into it. `method` is a `Method`, its
    name, or `(name, options)`; without one it decodes as its family does. `dtype` is float32 on the
    CPU and bfloat16 elsewhere unless given; `quantize` keeps matrices in `int8`, on a GPU in `fp8`,
    `int8` or `int4`, in further models too. On a CPU, matrices of a GGUF file stay in its own bits
    (`native`) where neither is given. `cache_gib` is memory for keys and values of each model
    (2 GiB on the CPU and half of what is free on a GPU by default); `max_length` limits prompt and
    answer together; `mask_id` names the mask token where `config.json` does not; `prefix_cache`
    lets causal models find what they computed for prompts that began alike; `pace="auto"` lets
    methods be less parallel than their options say where that is faster at the present load;
    `attention` is `dense`, `compiled` (on a CPU), `triton` (on a GPU), or `auto`; on a GPU `graphs`
    record passes, and `compile` has PyTorch make kernels of layers.
    `tensor_parallel` splits every model over so many processes that were started together: the
    first one has an `LLM` like any other; the others work for it here until it ends, and end then
    (`SystemExit`). Raises `ValueError` for what cannot be loaded or does not fit.
    """

    def __init__(
        self,
        model: str | Path,
        method: Named | None = None,
        *,
        adapter: str | Path | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        quantize: str | None = None,
        max_length: int | None = None,
        mask_id: int | None = None,
        cache_gib: float | None = None,
        max_rows: int = 2048,
        max_sequences: int = 256,
        prefix_cache: bool = True,
        tensor_parallel: int = 1,
        attention: str = "auto",
        graphs: bool = False,
        compile: bool = False,
        pace: Pacing = "off",
    ) -> None:
        check_gib(cache_gib)
        check_type("prefix_cache", prefix_cache, bool)
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        check(quantize, self.device, self.dtype)
        check_attention(attention, self.device)
        check_compile(compile, self.device, tensor_parallel)
        own = {"prefix_cache": prefix_cache, "attention": attention, "compile": compile}
        self.running = {**own, "record": recorder(graphs, self.device, tensor_parallel)}
        self.team = Team.of(tensor_parallel, self.device, quantize)
        self.device = self.team.device
        quantize = default_bits(quantize, dtype, self.device, tensor_parallel)
        self.quantize, self.max_length, self.cache_gib = quantize, max_length, cache_gib
        self.engine = Engine(max_rows=max_rows, max_sequences=max_sequences, pace=pace)
        self.driver, self.loading = Driver(self.engine), Lock()
        self.runners: dict[str, Runner] = {}
        self.pairings: dict[tuple[object, ...], Pairing] = {}
        self.name = title(model, adapter)
        # Whatever does not fit is refused before weights and vocabularies are read.
        limits: dict[str, Any] = {"max_length": max_length, "mask_id": mask_id}
        self.config, folder = target_config(model, **limits), resolve(model)
        self.method = native(self.config) if method is None else method_of(method)
        further = check_models(self.method, self.name, self.config)
        self.text = Text(self.name, load_tokenizer(folder))
        self.vocabularies: dict[str, int | None] = {}
        self.check_tokens(further)
        to: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "quantize": quantize}
        self.model = load_model(folder, adapter=adapter, share=self.team.share, **limits, **to)
        self.team.divide(self.model, self.further, attention)
        self.target = self.add(self.name, self.model, self.text.size)
        self.config = self.target.config
        self.text.limit(self.config.max_length)
        self.eos = frozenset(self.config.eos) | self.text.eos
        self.compiler = Compiler(self.text.tokenizer, self.config.mask_id)
        self.pair(self.method)

    def __repr__(self) -> str:
        return f"LLM({self.name!r}, {self.method!r})"

    def add(self, name: str, model: Stack, vocab: int | None) -> Runner:
        """Let the engine run a model, of which `vocab` tokens are known."""
        slots = cache_slots(model.config, self.dtype, cache_bytes(self.cache_gib, self.device))
        runner = self.team.runner(name, model, slots=slots, vocab=vocab, **self.running)
        self.engine.add(runner)
        self.runners[name] = runner
        return runner

    def load(self, name: str) -> Runner:
        """The runner of a further model of a method, of a kind that it takes; loaded once."""
        if name in self.runners:
            return self.runners[name]
        return self.add(name, self.further(name), self.vocabularies.get(name, self.target.vocab))

    def further(self, name: str) -> Stack:
        """A further model of a method; of a kind that reads the features of the target or not."""
        numbers = {"max_length": self.max_length, "quantize": self.quantize}
        more: dict[str, Any] = {**numbers, "share": self.team.share}
        if load_config(name).kind not in DRAFT_KINDS:
            return load_model(name, dtype=self.dtype, device=self.device, **more)
        try:
            return load_draft(name, self.model, **more)
        except ValueError as error:
            message = f"draft: {name} cannot draft for {self.name}: {error}"
            raise OptionError("draft", name, message) from error

    def check_tokens(self, further: Mapping[str, ModelConfig]) -> None:
        """Raise `ValueError` for a further model, by name, that does not share the tokenizer."""
        for name, config in further.items():
            if config.kind not in DRAFT_KINDS and name not in {*self.vocabularies, self.name}:
                text = Text(name, load_tokenizer(name))
                self.text.agrees(text, self.config.vocab, config.vocab)
                self.vocabularies[name] = text.size

    def pair(self, method: Method, *, wait: bool = True) -> Pairing:
        """The models of a method, checked once and then looked up.

        Raises `ValueError` where one is of another kind than the method wants, or does not share
        a tokenizer with the target; and unless it shall `wait`, `Unread` where they are not loaded.
        """
        if not isinstance(method, Method):
            message = f"method must be a Method, such as Autoregressive(), not {method!r}"
            raise OptionError("method", method, message)
        models = named(method, self.name)
        key = (type(method), *models.items())
        if key not in self.pairings:
            if not wait:
                raise Unread
            with self.loading:
                self.check_tokens(check_models(method, self.name, self.config))
                further = {role: self.load(name) for role, name in models.items()}
                self.pairings[key] = Pairing.of({"target": self.target, **further})
        return self.pairings[key]

    def usual(self, method: Method) -> dict[str, float]:
        """Sampling options where a request leaves them open: the method's, or the family's."""
        family = FAMILIES[self.config.family]
        return {"temperature": family.temperature, "top_p": family.top_p, **method.usual}

    def prepare(
        self,
        prompt: Prompt | None,
        *,
        streams: bool = False,
        wait: bool = True,
        requests: int = CONCURRENT,
        limit: int | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """A request that is ready to be submitted. Raises `ValueError` for bad input.

        `streams` is that of an `Answer`. Only a cloze needs no prompt. Unless it shall `wait`, a
        constraint or a model that was not read yet is an `Unread`. Without `max_tokens` so many
        `requests` share the cache, and an answer has at most `limit` tokens.
        """
        chosen = RequestOptions.of(options)
        method = self.method if chosen.method is None else chosen.method
        ids, layout = self.laid_out(prompt, chosen, method)
        pairing = self.pair(method, wait=wait)
        max_tokens = chosen.max_tokens if layout is None else layout.size
        if max_tokens is None:
            share, least = min(requests, self.engine.max_sequences), chosen.min_tokens
            max_tokens = pairing.default_max_tokens(method, len(ids), share, least, limit)
        answer = Answer(Detokenizer(self.text, chosen.stop, chosen.min_tokens), streams, layout)

        def listen(request: Request) -> None:
            if answer.push(request):
                self.engine.cancel(answer.job)

        ends, stop_ids = ends_of(chosen, self.eos, pairing.vocab, self.text.silent)
        processors = [*processors_of(chosen, method, len(ids), ends, pairing.vocab)]
        if layout is None:
            slots = range(len(ids), len(ids) + int(max_tokens))
            known = slots, ends, pairing.vocab, pairing.target.mask_id
            constraint = constraint_of(chosen, self.compiler, method, *known, wait)
        else:
            constraint = layout.constraint(self.compiler, method.sequential, pairing.vocab, wait)
        processors += [] if constraint is None else [constraint]
        request = pairing.request(
            ids,
            max_tokens=int(max_tokens),
            sampling=chosen.sampling(self.usual(method)),
            eos=ends if layout is None else frozenset(),
            stop_ids=stop_ids,
            min_tokens=int(chosen.min_tokens),
            logprobs=chosen.logprobs,
            processors=tuple(processors),
            constraint=constraint,
            given=None if layout is None else layout.given,
        )
        hears = listen if streams or chosen.stop else None
        answer.job = self.engine.job(method, request, pairing, hears)
        return answer

    def laid_out(
        self, prompt: Prompt | None, chosen: RequestOptions, method: Method
    ) -> tuple[list[int], Layout | None]:
        """Tokens in front of what is to be decoded; of a cloze, where all of it stands."""
        encode = partial(self.text.encode, raw=chosen.raw, template=chosen.template)
        if chosen.cloze is None:
            return encode(prompt), None
        check_sight(method)
        front = None if prompt is None else encode(prompt)
        layout = Layout.of(chosen.cloze, self.text, front, self.eos)
        return layout.prompt, layout

    def submit(
        self, prompt: Prompt | None, *, requests: int = CONCURRENT, **options: Unpack[Options]
    ) -> Answer:
        """Queue a prompt; `driver.step()` moves it on. Takes and raises as `prepare`."""
        answer = self.prepare(prompt, requests=requests, **options)
        self.driver.submit(answer.job)
        return answer

    def serve(
        self, requests: Iterable[tuple[Prompt | None, Options]], *, batch: int | None = None
    ) -> Iterator[tuple[int, Output]]:
        """Answer requests, `batch` of them at a time, and give each with its number as it ends.

        Requests are taken as they are needed: without `batch` all at once, so that bad input is a
        `ValueError` before any work. Leaving the loop cancels what is left.
        """
        if not (batch is None or is_whole(batch) and batch >= 1):
            message = f"batch must be a whole number from 1 on, not {batch!r}"
            raise OptionError("batch", batch, message)
        batch = len(requests := list(requests)) if batch is None else batch
        return self.answers(requests, max(int(batch), 1))

    def answers(
        self, requests: Iterable[tuple[Prompt | None, Options]], batch: int
    ) -> Iterator[tuple[int, Output]]:
        """The one loop that drives the engine for many requests."""
        waiting: dict[int, Answer] = {}
        coming = enumerate(requests)
        try:
            while True:
                while len(waiting) < batch and (entry := next(coming, None)):
                    number, (prompt, options) = entry
                    waiting[number] = self.submit(prompt, requests=batch, **options)
                if not waiting:
                    return
                self.driver.step()
                for number in [number for number, answer in waiting.items() if answer.job.over]:
                    yield number, waiting.pop(number).output()
        finally:
            for answer in waiting.values():
                self.driver.cancel(answer.job)

    @overload
    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, n: None = None, **options: Unpack[Options]
    ) -> list[Output]: ...

    @overload
    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, n: int, **options: Unpack[Options]
    ) -> list[list[Output]]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> list[Output] | list[list[Output]]:
        """Answer one prompt or many, together; outputs in the order of the prompts.

        A prompt is a string (a user's message; continued as it stands with `raw`), a list of
        token ids, or a list of chat messages. With `n` each has a list of so many outputs, of the
        seeds `seed`, `seed + 1` and so on. Raises `ValueError` for bad input before any work.
        """
        if n is not None and not (is_whole(n) and 1 <= n <= MOST_ANSWERS):
            message = f"n must be a whole number from 1 to {MOST_ANSWERS}, not {n!r}"
            raise OptionError("n", n, message)
        each = [options] if n is None else [seeded(options, number) for number in range(n)]
        served = self.serve((prompt, chosen) for prompt in as_many(prompts) for chosen in each)
        outputs = [output for _, output in sorted(served, key=itemgetter(0))]
        begins = range(0, len(outputs), n or 1)
        return outputs if n is None else [outputs[begin : begin + n] for begin in begins]

    def fill(
        self, parts: Parts, *, prompt: Prompt | None = None, **options: Unpack[Options]
    ) -> Output:
        """Fill the holes of a text, of which each token sees what stands left and right of it.

        The text stands alone, or is the answer to a `prompt`. Raises `ValueError` for bad input,
        and for methods that see nothing behind a hole.
        """
        ((_, output),) = self.serve([(prompt, {**options, "cloze": parts})])
        return output

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Answer one prompt piece by piece, a piece for each forward that brought text."""
        answer = self.prepare(prompt, streams=True, **options)
        self.driver.submit(answer.job)
        return Stream(self.driver, answer)

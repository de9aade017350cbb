"""Text in, text out: a model, a decoding method, and the engine that runs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Unpack, overload
from weakref import finalize

import torch

from outpace.api.answer_plan import AnswerPlan, check_supported
from outpace.api.driver import Driver
from outpace.api.infill import InfillLayout
from outpace.api.loading import LoadOptions, resolve_types
from outpace.api.options import Options, RequestOptions, document_options, offset_seed
from outpace.api.output import Output
from outpace.api.parts import AnswerFormat
from outpace.api.pending_answer import PendingAnswer, Stream
from outpace.api.text import Prompt, TextCodec, list_prompts
from outpace.checkpoints.adapter_fit import load_adapters
from outpace.checkpoints.checkpoint import Checkpoint
from outpace.checkpoints.fingerprint import digest_files
from outpace.checkpoints.load import WeightFormat, build_draft, build_model
from outpace.constraint.cloze import InfillParts
from outpace.constraint.compiler import Compiler, NotCompiledError
from outpace.decoding import DRAFT_KINDS, Kind, Request
from outpace.engine.adapters import check_adapter_name, check_adapters
from outpace.engine.cache import (
    cache_bytes,
    check_memory,
    context_bytes,
    default_dtype,
    resolve_cache,
    slot_bytes,
)
from outpace.engine.controllers import ControllerTable, StoredPassCosts
from outpace.engine.engine import Engine, Pacing
from outpace.engine.graphs import make_recorder
from outpace.engine.pairing import ASSUMED_CONCURRENCY, MethodSelector, Pairing
from outpace.engine.prefix_store import PrefixStore
from outpace.engine.recurrent import share_budget
from outpace.engine.runner import Runner
from outpace.engine.tensor_parallel import TensorParallelGroup
from outpace.errors import OptionError
from outpace.field_types import Bounds, PositiveInt, check_value
from outpace.measurements import MeasurementFile
from outpace.methods import Method
from outpace.methods.options import MethodSpec
from outpace.models.config import ModelConfig
from outpace.models.int8 import is_quantized
from outpace.models.low_bits import default_quantize
from outpace.models.transformer import Stack, Transformer


class LLM:
    """A target model with a decoding method, for one or many concurrent requests, from any thread.

    Args:
        model: Checkpoint folder, GGUF file, hub name, or name of an embedded model.
        method: A `Method`, its name, or `(name, options)`; by default "auto": a draft on this
            machine or `Lookup` for causal models, the family's method for others.
        options: Those that `LoadOptions` describes.

    Raises:
        ValueError: If a model cannot be loaded, or options or models do not fit each other.
    """

    def __init__(
        self,
        model: str | Path,
        method: MethodSpec | None = None,
        *,
        adapter: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        quantize: str | None = None,
        max_length: int | None = None,
        mask_id: int | None = None,
        cache_gib: float | None = None,
        cache_dtype: str | torch.dtype | None = None,
        max_rows: int | None = None,
        max_sequences: int = 256,
        prefix_cache: bool = True,
        prefix_dir: str | Path | None = None,
        prefix_gib: float = 8.0,
        tensor_parallel: int = 1,
        attention: str = "auto",
        graphs: bool = False,
        compile: bool = False,
        pace: Pacing = "off",
    ) -> None:
        self.cache_gib, self.cache_dtype = cache_gib, resolve_cache(cache_gib, cache_dtype)
        check_value("prefix_cache", prefix_cache, bool)
        self.store = PrefixStore.open(
            prefix_dir, prefix_gib, prefix_cache=prefix_cache, tensor_parallel=tensor_parallel
        )
        self.device, self.dtype = resolve_types(
            device, dtype, quantize, attention, compile, graphs, tensor_parallel
        )
        own: dict[str, Any] = {"attention": attention, "compile": compile}
        own |= {"record": make_recorder(graphs, self.device, tensor_parallel)}
        self.runner_options = own | {"prefix_cache": prefix_cache}
        self.group = TensorParallelGroup.join_processes(tensor_parallel, self.device, quantize)
        self.device = self.group.device
        self.form = WeightFormat(
            dtype=self.dtype,
            device=self.device,
            quantize=default_quantize(quantize, dtype, self.device, tensor_parallel),
            share=self.group.share,
            positions=0,  # the runner extends the rotary tables to the length of its cache
        )
        if max_rows is None:
            max_rows = 512 if self.device.type == "cpu" else 2048
        sizes: dict[str, Any] = {"max_rows": max_rows, "max_sequences": max_sequences}
        self.engine = Engine(
            **sizes, pace=pace, pass_costs=StoredPassCosts(MeasurementFile.of_user())
        )
        self.finish = finalize(self.engine, finish_engine, self.engine.controllers, self.store)
        self.driver, self.load_lock = Driver(self.engine), Lock()
        self.runners: dict[str, Runner] = {}
        self.weights = ""
        """What identifies the weights of the target, where prefixes are kept."""
        self.pairings: dict[tuple[object, ...], Pairing] = {}
        # Invalid combinations are rejected before weights and vocabularies are read.
        self.methods = MethodSelector.open(
            model,
            method,
            max_length=max_length,
            mask_id=mask_id,
            adapter=adapter,
            sharded=tensor_parallel > 1,
        )
        self.name, self.config = self.methods.name, self.methods.config
        self.method = self.methods.default
        further = self.methods.open_models(self.method)
        self.check_prefixes(prefix_dir, further.values())
        self.text = TextCodec(self.name, self.methods.checkpoint.load_tokenizer())
        self.vocab_sizes: dict[str, int | None] = {}
        self.configs = {self.name: self.config, **{str(m): m.config for m in further.values()}}
        least = self.cache_dtype or min(self.dtype, torch.float16, key=attrgetter("itemsize"))
        slots = [slot_bytes(each, least) for each in self.configs.values()] * tensor_parallel
        check_memory(cache_gib, max_length and self.config.max_length, slots, self.device)
        self.check_further(further.values())
        self.target = self.load_target(adapters)
        self.config = self.target.config
        self.text.set_model(self.config)
        self.compiler = Compiler(self.text.tokenizer, self.config.mask_id)
        for each in (None, *self.adapters):
            self.pair(self.method, each)

    @property
    def eos(self) -> frozenset[int]:
        """Ids that end an answer: those of the model, its tokenizer and its chat template."""
        return frozenset(self.config.eos) | self.text.eos | self.text.turn_ends

    def __repr__(self) -> str:
        return f"LLM({self.name!r}, {self.method!r})"

    def load_target(self, adapters: Mapping[str, str | Path] | None) -> Runner:
        """Load the target, with the adapters that requests select; return its runner."""
        own, opened = self.runner_options, self.methods
        used = {"graphs": own["record"] is not None, "compile": own["compile"]}
        check_adapters(adapters, **used, tensor_parallel=self.form.share is not None)
        updates = load_adapters(adapters or {}, self.config, self.dtype)
        self.adapters = (*updates,)
        self.model = build_model(
            Transformer, opened.checkpoint, self.config, self.form, opened.adapter
        )
        if self.cache_dtype is None:
            self.cache_dtype = default_dtype(self.dtype, quantized=is_quantized(self.model))
        self.runner_options = own = {**own, "cache_dtype": self.cache_dtype}
        shared = {name: own[name] for name in ("attention", "cache_dtype")}
        self.group.start_workers(self.model, self.load_further, **shared)
        if self.store is not None:
            merged = () if opened.adapter is None else (opened.adapter.name,)
            files = digest_files([opened.checkpoint.name, *merged, *(adapters or {}).values()])
            self.weights = repr((files, self.form.quantize, own["attention"], used))
        return self.add_runner(
            self.name, self.model, self.text.vocab_size, adapters=updates, weights=self.weights
        )

    def check_prefixes(self, folder: str | Path | None, models: Iterable[Checkpoint]) -> None:
        """Raise `OptionError` for a folder of prefixes where no model has any."""
        kinds = {self.config.kind, *(each.config.kind for each in models)}
        if folder is not None and kinds == {Kind.DIFFUSION}:
            reason = f"cannot be used: {self.name} is a diffusion model, which has no prefixes"
            raise OptionError("prefix_dir", folder, reason)

    def check_further(self, models: Iterable[Checkpoint]) -> None:
        """Raise `OptionError` for another tokenizer, or a head that the checkpoint lacks."""
        for each in models:
            name, config = str(each), each.config
            if config.is_head:
                try:
                    each.check_weights()
                except ValueError as error:
                    reason = f"{error}: it has no head for multi-token prediction"
                    raise OptionError("draft", name, f"{reason}; give another draft") from error
            if config.kind not in DRAFT_KINDS and name not in {*self.vocab_sizes, self.name}:
                text = TextCodec(name, each.load_tokenizer())
                self.text.check_same_tokens(text, self.config.vocab, config.vocab)
                self.vocab_sizes[name] = text.vocab_size

    def load_further(self, name: str) -> Stack:
        """Load a further model of a method: an independent model, or a draft for the target."""
        checkpoint, max_length = self.methods.open_model(name), self.methods.max_length
        if checkpoint.config.kind not in DRAFT_KINDS:
            config = checkpoint.target_config(max_length=max_length)
            return build_model(Transformer, checkpoint, config, self.form)
        try:
            return build_draft(checkpoint, self.model, max_length, self.form)
        except ValueError as error:
            reason = f"{name} cannot draft for {self.name}: {error}"
            raise OptionError("draft", name, reason) from error

    def add_runner(self, name: str, model: Stack, vocab: int | None, **options: Any) -> Runner:
        """Add a model with `vocab` usable tokens to the engine."""
        sizes: dict[str, Any] = share_budget(
            model.config,
            self.dtype,
            self.cache_budget(name, model.config),
            self.engine.max_sequences,
            cache_dtype=self.cache_dtype,
        )
        runner = self.group.make_runner(
            name, model, vocab=vocab, store=self.store, **options, **sizes, **self.runner_options
        )
        self.engine.add_runner(runner)
        self.runners[name] = runner
        return runner

    def cache_budget(self, name: str, config: ModelConfig) -> int:
        """Return the bytes of the cache of a model, beside those of the default method."""
        assert self.cache_dtype is not None
        sizes = {
            each: slot_bytes(found, self.cache_dtype)
            for each, found in {**self.configs, name: config}.items()
        }
        context = context_bytes(config, self.config.max_length, self.cache_dtype)
        share = sizes[name] / sum(sizes.values()) / self.group.size
        return cache_bytes(self.cache_gib, self.device, context=context, share=share)

    def load_runner(self, name: str) -> Runner:
        """Return the runner of a further model of a method, which is loaded once."""
        if name in self.runners:
            return self.runners[name]
        vocab, weights = self.vocab_sizes.get(name, self.target.vocab), self.weights
        if self.store is not None:  # a draft may depend on the target
            weights += digest_files([self.methods.open_model(name).name])
        return self.add_runner(name, self.load_further(name), vocab, weights=weights)

    def pair(self, method: Method, adapter: str | None = None, *, wait: bool = True) -> Pairing:
        """Load and check the models of a method, once per combination with an adapter.

        Returns:
            The models by role, and their common limits.

        Raises:
            OptionError: If a model is of an unsupported kind, or has a different tokenizer, or the
                adapter is unknown.
            NotCompiledError: If a model is not loaded yet and `wait` is not set.
        """
        if not isinstance(method, Method):
            raise OptionError("method", method, "must be a Method, such as Autoregressive()")
        models = self.methods.model_names(method)
        key = (type(method), adapter, *models.items())
        if key not in self.pairings:
            check_adapter_name(adapter, self.adapters, self.name)
            if not wait:
                raise NotCompiledError
            with self.load_lock:
                self.check_further(self.methods.open_models(method).values())
                further = {role: self.load_runner(name) for role, name in models.items()}
                runners = {"target": self.target, **further}
                self.pairings[key] = Pairing.from_runners(runners, adapter)
        return self.pairings[key]

    def prepare(
        self,
        prompt: Prompt | None,
        *,
        streams: bool = False,
        requests: int | None = None,
        **options: Unpack[Options],
    ) -> PendingAnswer:
        """Prepare a request, which can be submitted to `driver`.

        `streams` collects pieces of text. Without `max_tokens`, this many `requests` share the
        cache. Raises `ValueError` for invalid input.
        """
        checked = RequestOptions.of(options)
        ids, form = self.text.encode_request(prompt, checked)
        return self.prepare_answer(ids, form, checked, streams=streams, requests=requests)

    def prepare_answer(
        self,
        ids: list[int],
        form: AnswerFormat,
        options: RequestOptions,
        *,
        streams: bool = False,
        wait: bool = True,
        requests: int | None = None,
        limit: int | None = None,
        fits: bool = False,
    ) -> PendingAnswer:
        """Return a request that the engine accepts; unless `wait`, raise `NotCompiledError`.

        This many `requests` share the cache; None is any number, without shares where pages are
        taken as a text grows. `limit` bounds an answer without `max_tokens`; `fits` reduces a
        greater `max_tokens` to the room after the prompt.
        """
        text, method = self.text, self.methods.select_method(options.method)
        check_supported(options, text, self.config.kind, method)
        layout, suffix = None, None
        if options.cloze is not None:
            layout = InfillLayout.of(options.cloze, text, ids, self.eos)
        elif options.suffix is not None and text.middle_tokens is None:
            suffix = text.encode_plain(options.suffix)
        prompt = ids if layout is None else layout.prompt
        if requests is None:
            requests = 1 if method.is_resumable else ASSUMED_CONCURRENCY
        pairing = self.pair(method, options.adapter, wait=wait)
        room = pairing.plan(
            method,
            len(prompt) + len(suffix or ()),
            max_tokens=options.max_tokens,
            min_tokens=options.min_tokens,
            requests=min(requests, self.engine.max_sequences),
            limit=limit,
            fits=fits,
        )
        if suffix is not None:
            layout = InfillLayout.before_suffix(text, prompt, suffix, room, self.eos)
        plan = AnswerPlan(
            options=options,
            text=text,
            eos=self.eos,
            pairing=pairing,
            method=room.method,
            prompt=prompt,
            max_tokens=room.max_tokens if layout is None else layout.size,
            format=form,
            layout=layout,
        )
        usual = self.methods.default_sampling(plan.method)
        answer = plan.build_answer(self.compiler, usual, streams=streams, wait=wait)

        def on_tokens(_: Request) -> None:
            if answer.decode_tokens():
                self.engine.cancel(answer)

        answer.listener = on_tokens if streams or answer.detokenizer.may_stop else None
        self.engine.prepare_job(answer)
        return answer

    def submit(
        self, prompt: Prompt | None, *, requests: int | None = None, **options: Unpack[Options]
    ) -> PendingAnswer:
        """Submit a prompt; each `driver.step()` advances it.

        Without `max_tokens`, this many `requests` share the cache. See `Options` for options.

        Returns:
            The answer in progress.

        Raises:
            ValueError: For an invalid prompt or option.
        """
        answer = self.prepare(prompt, requests=requests, **options)
        self.driver.submit(answer)
        return answer

    def serve(
        self, requests: Iterable[tuple[Prompt | None, Options]], *, batch: int | None = None
    ) -> Iterator[tuple[int, Output]]:
        """Yield number and output of requests as they complete; leaving the loop cancels the rest.

        Args:
            requests: Prompt and options of each request, consumed lazily if `batch` is set.
            batch: Maximum number of requests at a time; all of them by default.

        Raises:
            ValueError: For invalid input; without `batch`, before any computation.
            DecodingError: If a method or a forward pass fails.
        """
        batch = check_value("batch", batch, PositiveInt | None)
        batch = len(requests := list(requests)) if batch is None else batch
        return self.answer_requests(requests, max(batch, 1))

    def answer_requests(
        self, requests: Iterable[tuple[Prompt | None, Options]], batch: int
    ) -> Iterator[tuple[int, Output]]:
        waiting: dict[int, PendingAnswer] = {}
        numbered = enumerate(requests)
        try:
            while True:
                while len(waiting) < batch and (entry := next(numbered, None)):
                    number, (prompt, options) = entry
                    waiting[number] = self.submit(prompt, requests=batch, **options)
                if not waiting:
                    return
                self.driver.step()
                for number in [number for number, answer in waiting.items() if answer.is_finished]:
                    yield number, waiting.pop(number).build_output()
        finally:
            for answer in waiting.values():
                self.driver.cancel(answer)

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
        """Answer one prompt or many together.

        Args:
            prompts: One prompt or several. A prompt is text (a user message, or with `raw` text to
                continue), a list of token ids, or a list of chat messages.
            n: Number of answers per prompt, with the seeds `seed`, `seed + 1` and so on.
            **options: Options of all requests, see `Options`.

        Returns:
            One output per prompt, in order; with `n`, a list of `n` outputs per prompt.

        Raises:
            ValueError: For invalid input, before any computation.
            DecodingError: If a method or a forward pass fails.
        """
        variants = answer_variants(options, n)
        served = self.serve(
            (prompt, variant) for prompt in list_prompts(prompts) for variant in variants
        )
        outputs = [output for _, output in sorted(served, key=itemgetter(0))]
        begins = range(0, len(outputs), n or 1)
        return outputs if n is None else [outputs[begin : begin + n] for begin in begins]

    def fill(
        self, parts: InfillParts, *, prompt: Prompt | None = None, **options: Unpack[Options]
    ) -> Output:
        """Fill the holes of a template, each token conditioned on the text before and after it.

        Args:
            parts: Text and `Hole`s.
            prompt: Prompt that the text answers; None if there is no prompt.
            **options: Options of the request, see `Options`.

        Returns:
            The full text, with the text of each hole in `holes`.

        Raises:
            ValueError: For invalid input, and for methods that cannot condition on text after a
                hole.
            DecodingError: If a hole stays unfilled, or a forward pass fails.
        """
        ((_, output),) = self.serve([(prompt, {**options, "cloze": parts})])
        return output

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Stream the answer to a prompt.

        Args:
            prompt: Text of a user message, token ids, or chat messages.
            **options: Options of the request, see `Options`.

        Returns:
            An iterator over pieces of text, one per forward; its `output` is set at the end.

        Raises:
            ValueError: For an invalid prompt or option.
        """
        answer = self.prepare(prompt, streams=True, **options)
        self.driver.submit(answer)
        return Stream(self.driver, answer)


LLM.__doc__ = f"{LLM.__doc__}\n{document_options(LoadOptions)}"


def finish_engine(controllers: ControllerTable, store: PrefixStore | None) -> None:
    """Store what later processes use: measured times, and prefixes."""
    controllers.store_costs()
    if store is not None:
        store.close()


MAX_ANSWERS = 2**16
"""Maximum number of answers per prompt."""


def answer_variants(options: Options, n: int | None) -> list[Options]:
    """Return the options of `n` answers to a prompt, which have consecutive seeds."""
    if n is None:
        return [options]
    count = check_value("n", n, Annotated[int, Bounds(1, MAX_ANSWERS)])
    return [offset_seed(options, number) for number in range(count)]

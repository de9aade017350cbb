"""Text in, text out: a model, a decoding method, and the engine that runs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any, Unpack, overload
from weakref import finalize

import torch

from outpace.api import preparation
from outpace.api.driver import Driver
from outpace.api.further import check_further, load_further
from outpace.api.loading import resolve_types
from outpace.api.options import Options, RequestOptions
from outpace.api.output import Output
from outpace.api.pending_answer import PendingAnswer
from outpace.api.prompts import Prompt, list_prompts
from outpace.api.stream import Stream
from outpace.api.text import TextCodec
from outpace.checkpoints.adapter import model_title
from outpace.checkpoints.adapter_fit import load_adapters
from outpace.checkpoints.load import load_model, load_tokenizer, resolve_checkpoint, target_config
from outpace.constraint.cloze import InfillParts
from outpace.constraint.compiler import Compiler, NotCompiledError
from outpace.engine.adapters import check_adapter_name, check_adapters
from outpace.engine.cache import cache_bytes, check_cache_gib
from outpace.engine.engine import Engine, Pacing
from outpace.engine.graphs import make_recorder
from outpace.engine.method_selector import MethodSelector
from outpace.engine.pairing import ASSUMED_CONCURRENCY, Pairing, check_models, further_models
from outpace.engine.pass_times import PassTimes
from outpace.engine.recurrent import share_budget
from outpace.engine.runner import Runner
from outpace.engine.tensor_parallel import TensorParallelGroup
from outpace.errors import OptionError
from outpace.measurements import MeasurementFile
from outpace.methods import Method
from outpace.methods.method import check_type
from outpace.methods.options import MethodSpec
from outpace.models.adapted import ModelUpdates
from outpace.models.low_bits import default_quantize
from outpace.models.transformer import Stack


class LLM:
    """A target model with a decoding method, for one or many concurrent requests, from any thread.

    Args:
        model: Checkpoint folder, GGUF file, hub name, or name of an embedded model.
        method: A `Method`, its name, or `(name, options)`; by default "auto": a draft on this
            machine or `Lookup` for causal models, the family's method for others.
        adapter: Folder or hub name of a low-rank adapter to merge into the model.
        adapters: Folders or hub names of low-rank adapters that requests select, by name.
        device: Device of the models; by default `cuda` if available.
        dtype: Data type; by default float32 on a CPU and bfloat16 elsewhere.
        quantize: Weight format of all models: `int8` or `int4`, on a CPU also `native`, on a GPU
            `fp8`. On a CPU, files of 4 to 8 bits stay `native` unless `dtype` or this is set.
        max_length: Maximum number of tokens of prompt and answer; by default the model's.
        mask_id: Id of the mask token, if `config.json` does not have it.
        cache_gib: GiB of each KV cache; by default 2 on a CPU, half of the free memory on a GPU.
        max_rows: Maximum number of rows (query tokens) per pass.
        max_sequences: Maximum number of running requests.
        prefix_cache: Whether causal models reuse the cache of prompts with a common prefix.
        tensor_parallel: Number of processes, started together, that split each model. All but the
            first execute commands of the first in the constructor, then raise `SystemExit`.
        attention: Attention back end: `auto`, `dense`, `compiled` (CPU) or `triton` (GPU).
        graphs: Whether to record passes as CUDA graphs (GPU only).
        compile: Whether to compile layers with `torch.compile` (GPU only).
        pace: `off`, or `auto`: reduce parallelism when that is faster at the current load.

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
        max_rows: int = 2048,
        max_sequences: int = 256,
        prefix_cache: bool = True,
        tensor_parallel: int = 1,
        attention: str = "auto",
        graphs: bool = False,
        compile: bool = False,
        pace: Pacing = "off",
    ) -> None:
        check_cache_gib(cache_gib)
        check_type("prefix_cache", prefix_cache, bool)
        self.device, self.dtype = resolve_types(
            device, dtype, quantize, attention, compile, graphs, tensor_parallel
        )
        own: dict[str, Any] = {"attention": attention, "compile": compile}
        own |= {"record": make_recorder(graphs, self.device, tensor_parallel)}
        self.runner_options = own | {"prefix_cache": prefix_cache}
        self.group = TensorParallelGroup.join_processes(tensor_parallel, self.device, quantize)
        self.device = self.group.device
        quantize = default_quantize(quantize, dtype, self.device, tensor_parallel)
        self.quantize, self.max_length, self.cache_gib = quantize, max_length, cache_gib
        sizes: dict[str, Any] = {"max_rows": max_rows, "max_sequences": max_sequences}
        self.engine = Engine(**sizes, pace=pace, pass_times=PassTimes(MeasurementFile.of_user()))
        finalize(self.engine, self.engine.controllers.store_times)
        self.driver, self.load_lock = Driver(self.engine), Lock()
        self.runners: dict[str, Runner] = {}
        self.pairings: dict[tuple[object, ...], Pairing] = {}
        self.name, self.path = model_title(model, adapter), str(model)
        # Invalid combinations are rejected before weights and vocabularies are read.
        limits: dict[str, Any] = {"max_length": max_length, "mask_id": mask_id}
        self.config, folder = target_config(model, **limits), resolve_checkpoint(model)
        self.methods = MethodSelector(method, self.name, self.config)
        self.method = self.methods.default
        further = check_models(self.method, self.path, self.config)
        self.text = TextCodec(self.name, load_tokenizer(folder))
        self.vocab_sizes: dict[str, int | None] = {}
        check_further(self, further)
        self.target = self.load_target(folder, adapters, adapter=adapter, **limits)
        self.config = self.target.config
        self.text.set_model(self.config)
        self.eos = frozenset(self.config.eos) | self.text.eos
        self.compiler = Compiler(self.text.tokenizer, self.config.mask_id)
        for each in (None, *self.adapters):
            self.pair(self.method, each)

    def __repr__(self) -> str:
        return f"LLM({self.name!r}, {self.method!r})"

    def load_target(
        self, folder: Path, adapters: Mapping[str, str | Path] | None, **options: Any
    ) -> Runner:
        """Load the target, with the adapters that requests select; return its runner."""
        own, share = self.runner_options, self.group.share
        used = {"graphs": own["record"] is not None, "compile": own["compile"]}
        check_adapters(adapters, **used, tensor_parallel=share is not None)
        updates = load_adapters(adapters or {}, self.config, self.dtype)
        self.adapters = (*updates,)
        to: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "share": share}
        self.model = load_model(folder, quantize=self.quantize, **to, **options)
        self.group.start_workers(self.model, partial(load_further, self), own["attention"])
        return self.add_runner(self.name, self.model, self.text.vocab_size, updates)

    def add_runner(
        self,
        name: str,
        model: Stack,
        vocab: int | None,
        adapters: Mapping[str, ModelUpdates] | None = None,
    ) -> Runner:
        """Add a model with `vocab` usable tokens to the engine."""
        budget = cache_bytes(self.cache_gib, self.device)
        sizes = share_budget(model.config, self.dtype, budget, self.engine.max_sequences)
        runner = self.group.make_runner(
            name, model, vocab=vocab, adapters=adapters, **sizes, **self.runner_options
        )
        self.engine.add_runner(runner)
        self.runners[name] = runner
        return runner

    def load_runner(self, name: str) -> Runner:
        """Return the runner of a further model of a method, which is loaded once."""
        if name in self.runners:
            return self.runners[name]
        return self.add_runner(
            name, load_further(self, name), self.vocab_sizes.get(name, self.target.vocab)
        )

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
            message = f"method must be a Method, such as Autoregressive(), got {method!r}"
            raise OptionError("method", method, message)
        check_adapter_name(adapter, self.adapters, self.name)
        models = further_models(method, self.path, self.config)
        key = (type(method), adapter, *models.items())
        if key not in self.pairings:
            if not wait:
                raise NotCompiledError
            with self.load_lock:
                check_further(self, check_models(method, self.path, self.config))
                further = {role: self.load_runner(name) for role, name in models.items()}
                runners = {"target": self.target, **further}
                self.pairings[key] = Pairing.from_runners(runners, adapter)
        return self.pairings[key]

    def prepare(
        self,
        prompt: Prompt | None,
        *,
        streams: bool = False,
        wait: bool = True,
        requests: int = ASSUMED_CONCURRENCY,
        limit: int | None = None,
        **options: Unpack[Options],
    ) -> PendingAnswer:
        """Prepare a request; its `job` can be submitted to `driver`.

        `streams` collects pieces of text. Without `max_tokens`, the answer has at most `limit`
        tokens and this many `requests` share the cache. Without `wait`, an uncompiled constraint or
        a model that is not loaded raises `NotCompiledError`. Raises `ValueError` for invalid input.
        """
        checked = RequestOptions.of(options)
        return preparation.prepare_answer(self, prompt, checked, streams, wait, requests, limit)

    def submit(
        self,
        prompt: Prompt | None,
        *,
        requests: int = ASSUMED_CONCURRENCY,
        **options: Unpack[Options],
    ) -> PendingAnswer:
        """Submit a prompt; each `driver.step()` advances it.

        Without `max_tokens`, this many `requests` share the cache. See `Options` for options.

        Returns:
            The answer in progress.

        Raises:
            ValueError: For an invalid prompt or option.
        """
        answer = self.prepare(prompt, requests=requests, **options)
        self.driver.submit(answer.job)
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
        preparation.check_batch(batch)
        batch = len(requests := list(requests)) if batch is None else batch
        return preparation.answer_requests(self, requests, max(int(batch), 1))

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
        variants = preparation.answer_variants(options, n)
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
        self.driver.submit(answer.job)
        return Stream(self.driver, answer)

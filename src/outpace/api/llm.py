"""Text in, text out: a model, a decoding method, and the engine that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any, Unpack, overload
from weakref import finalize

import torch
from numpy import ndarray
from torch import Tensor

from outpace.api.detokenizer import Detokenizer
from outpace.api.driver import Driver
from outpace.api.infill import InfillLayout
from outpace.api.loading import LoadOptions, resolve_types
from outpace.api.options import (
    REQUEST_OPTIONS,
    Options,
    RequestOptions,
    document_options,
    offset_seed,
    option_info,
    option_names,
)
from outpace.api.output import Output
from outpace.api.parts import AnswerFormat
from outpace.api.pending_answer import PendingAnswer, Stream
from outpace.api.text import Prompt, TextCodec, encode_inner, list_prompts
from outpace.checkpoints.adapter_fit import load_adapters
from outpace.checkpoints.checkpoint import Checkpoint
from outpace.checkpoints.load import WeightFormat, build_draft, build_model
from outpace.constraint.cloze import InfillParts
from outpace.constraint.compiler import FREE_RULE, Compiler, NotCompiledError
from outpace.constraint.thoughts import ThoughtFormat
from outpace.decoding import CAUSAL_KINDS, DRAFT_KINDS, Constraint, Kind, Processor, Request
from outpace.decoding.processor import MinTokens, Penalties, TokenBias
from outpace.engine.adapters import check_adapter_name, check_adapters
from outpace.engine.cache import cache_bytes, check_cache_gib
from outpace.engine.controllers import PassTimes
from outpace.engine.engine import Engine, Pacing
from outpace.engine.graphs import make_recorder
from outpace.engine.pairing import ASSUMED_CONCURRENCY, MethodSelector, Pairing
from outpace.engine.recurrent import share_budget
from outpace.engine.runner import Runner
from outpace.engine.tensor_parallel import TensorParallelGroup
from outpace.errors import ContextError, OptionError
from outpace.field_types import check_value, is_whole_number
from outpace.measurements import MeasurementFile
from outpace.methods import METHODS, Method
from outpace.methods.options import MethodSpec
from outpace.models.adapted import ModelUpdates
from outpace.models.low_bits import default_quantize
from outpace.models.transformer import Stack, Transformer


def resolve_stop_ids(
    llm: LLM, options: RequestOptions, vocab: int
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the end-of-sequence ids of an answer, and the ids that end it at any position.

    A constrained answer must be able to end. If the model has no end-of-sequence, the stop ids
    replace it.

    Raises:
        OptionError: For an invalid token id, or one that could cut off a constrained answer.
    """
    eos = answer_ends(llm, options)
    listed: Any = options.stop_ids
    if isinstance(listed, ndarray | Tensor):
        listed = listed.tolist()
    tokens = list(listed) if isinstance(listed, Sequence | Set) else [listed]
    check_token_ids("stop_ids", tokens, vocab)
    stops = frozenset(map(int, tokens))
    if options.rule is None:
        return frozenset() if options.ignore_eos else eos, stops
    if not eos:
        return stops, frozenset()
    if conflicts := sorted(stops - eos - llm.text.silent_ids):
        raise OptionError(
            "stop_ids",
            conflicts[0],
            f"cannot be combined with {options.rule[0]} here: the answer may hold token "
            f"{conflicts[0]}; use special tokens only, or omit one of the two options",
        )
    return eos, stops


def build_processors(
    options: RequestOptions, method: Method, begin: int, ends: frozenset[int], vocab: int
) -> Iterator[Processor]:
    """Yield the logits processors of an answer.

    Args:
        options: Options of the request.
        method: Decoding method of the request.
        begin: First slot of the answer.
        ends: End-of-sequence ids.
        vocab: Size of the vocabulary.

    Raises:
        OptionError: For options that the method does not support, and for invalid token ids.
    """
    penalties = Penalties(
        begin=begin,
        presence=options.presence_penalty,
        frequency=options.frequency_penalty,
        repetition=options.repetition_penalty,
    )
    if penalties != Penalties(begin=begin):
        check_sequential(options, method)
        yield penalties
    if options.logit_bias:
        check_token_ids("logit_bias", list(options.logit_bias), vocab)
        yield TokenBias({int(token): float(bias) for token, bias in options.logit_bias.items()})
    if options.min_tokens and ends:
        yield MinTokens(ends, begin + options.min_tokens)


def build_constraint(
    llm: LLM, options: RequestOptions, answer: PendingAnswer, wait: bool
) -> Constraint | None:
    """Return the constraint on an answer, or None if it is unconstrained.

    The length is checked first, because a compilation may take seconds.

    Raises:
        OptionError: If no answer satisfies the constraint, or the prompt is too long.
        Exception: That of the compiler for an uncompiled constraint, unless `wait` is set.
    """
    pairing, sequential = answer.pairing, answer.method.is_sequential
    if answer.layout is not None:
        return answer.layout.build_constraint(llm.compiler, sequential, pairing.vocab, wait)
    pairing.check_room(answer.method, answer)
    most, rule, thoughts = options.max_reasoning_tokens, options.rule, answer.format.thoughts
    if most is not None and thoughts is not None:
        rule = rule or FREE_RULE
    if rule is None:
        return None
    if rule[0] == "grammar" and most is None and thoughts is not None and thoughts.begin:
        thoughts = None  # a grammar cannot follow thoughts, which the prompt does not require
    return llm.compiler.build_constraint(
        rule,
        sequential=sequential,
        begin=len(answer.prompt),
        limit=answer.limit,
        size=pairing.vocab,
        ends=answer.eos | answer.stop_ids,
        mask_id=pairing.target.mask_id,
        wait=wait,
        thoughts=thoughts,
        max_thoughts=most,
        calls=answer.format.calls,
    )


def check_reasoning_limit(options: RequestOptions, text: TextCodec) -> None:
    """Raise `OptionError` for a limit of thoughts if the model's answers have none."""
    if options.max_reasoning_tokens is not None and text.thought_format is None:
        raise OptionError(
            "max_reasoning_tokens",
            options.max_reasoning_tokens,
            f"needs a chat template with thoughts, unlike that of {text.name}: omit it",
        )


def check_prompt_logprobs(options: RequestOptions, name: str, kind: Kind) -> None:
    """Raise `OptionError` for log-probabilities of the prompt if the model is not causal."""
    if options.prompt_logprobs is not None and kind not in CAUSAL_KINDS:
        raise OptionError(
            "prompt_logprobs",
            options.prompt_logprobs,
            f"needs a causal model, and {name} is a {kind.value}: omit it",
        )


def encode_choices(
    llm: LLM, options: RequestOptions, thoughts: ThoughtFormat | None, max_tokens: int
) -> dict[str, list[int]]:
    """Return the tokens of each choice whose log-probability is wanted.

    Raises:
        OptionError: If the model does not predict it after the prompt, or a choice does not fit.
    """
    codec = llm.text.codec
    if options.choices is None or not options.logprobs or codec is None:
        return {}
    problem = None
    if llm.config.kind not in CAUSAL_KINDS:
        problem = f"need a causal model, but {llm.name} is a {llm.config.kind.value}"
    elif thoughts is not None and not thoughts.begin:
        problem = "cannot follow a prompt that begins thoughts; turn them off"
    if problem is not None:
        raise OptionError(
            "logprobs",
            options.logprobs,
            f"log-probabilities of choices {problem}, or omit logprobs",
        )
    choices = {text: encode_inner(codec, text) for text in options.choices}
    if (longest := max(map(len, choices.values()))) > max_tokens:
        raise OptionError(
            "max_tokens", max_tokens, f"a choice has {longest} tokens, got {max_tokens}; raise it"
        )
    return choices


def check_can_infill(method: Method) -> None:
    """Raise `OptionError` if a method cannot condition on text after a hole."""
    if not method.sees_ahead:
        able = (kind.__name__ for kind in METHODS.values() if kind.target_kinds != CAUSAL_KINDS)
        raise OptionError(
            "method",
            method,
            f"{method!r} cannot condition on text after a hole, so it cannot infill; use one of "
            f"these, unverified: {', '.join(able)}",
        )


def check_suffix(options: RequestOptions, method: Method, text: TextCodec) -> None:
    """Raise `OptionError` for a suffix, or an option beside it, that the model does not support."""
    if text.middle_tokens is not None:
        return
    if not method.sees_ahead:
        raise OptionError(
            "suffix",
            options.suffix,
            f"{text.name} has no tokens to fill in the middle, and {method!r} cannot condition on "
            "text after the answer; omit suffix",
        )
    names = ["stop_ids", "ignore_eos", "min_tokens", *option_names("rule")]
    options.check_absent(names, "suffix")


def check_sequential(options: RequestOptions, method: Method) -> None:
    """Raise `OptionError` for penalties with a method that fills mask positions in any order."""
    if not method.is_sequential:
        ordered = (each for each in REQUEST_OPTIONS.values() if option_info(each).sequential)
        name = next(o.name for o in ordered if getattr(options, o.name) != o.default)
        raise OptionError(
            name,
            getattr(options, name),
            f"needs a method that commits tokens from left to right, but {method!r} fills mask "
            "positions in any order",
        )


def check_token_ids(name: str, tokens: Sequence[object], vocab: int) -> None:
    """Raise `OptionError` for an invalid token id."""
    for token in tokens:
        if not (is_whole_number(token) and 0 <= int(token) < vocab):  # type: ignore[call-overload]
            raise OptionError(name, token, f"must hold token ids from 0 to {vocab - 1}")


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
        max_rows: int | None = None,
        max_sequences: int = 256,
        prefix_cache: bool = True,
        tensor_parallel: int = 1,
        attention: str = "auto",
        graphs: bool = False,
        compile: bool = False,
        pace: Pacing = "off",
    ) -> None:
        check_cache_gib(cache_gib)
        check_value("prefix_cache", prefix_cache, bool)
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
        self.cache_gib = cache_gib
        if max_rows is None:
            max_rows = 512 if self.device.type == "cpu" else 2048
        sizes: dict[str, Any] = {"max_rows": max_rows, "max_sequences": max_sequences}
        self.engine = Engine(**sizes, pace=pace, pass_times=PassTimes(MeasurementFile.of_user()))
        finalize(self.engine, self.engine.controllers.store_times)
        self.driver, self.load_lock = Driver(self.engine), Lock()
        self.runners: dict[str, Runner] = {}
        self.pairings: dict[tuple[object, ...], Pairing] = {}
        # Invalid combinations are rejected before weights and vocabularies are read.
        self.methods = MethodSelector.open(
            model, method, max_length=max_length, mask_id=mask_id, adapter=adapter
        )
        self.name, self.config = self.methods.name, self.methods.config
        self.method = self.methods.default
        further = self.methods.open_models(self.method)
        self.text = TextCodec(self.name, self.methods.checkpoint.load_tokenizer())
        self.vocab_sizes: dict[str, int | None] = {}
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
        self.group.start_workers(self.model, self.load_further, own["attention"])
        return self.add_runner(self.name, self.model, self.text.vocab_size, updates)

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

    def add_runner(
        self,
        name: str,
        model: Stack,
        vocab: int | None,
        adapters: Mapping[str, ModelUpdates] | None = None,
    ) -> Runner:
        """Add a model with `vocab` usable tokens to the engine."""
        budget = cache_bytes(self.cache_gib, self.device)
        sizes: dict[str, Any] = share_budget(
            model.config, self.dtype, budget, self.engine.max_sequences
        )
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
            name, self.load_further(name), self.vocab_sizes.get(name, self.target.vocab)
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
        requests: int = ASSUMED_CONCURRENCY,
        **options: Unpack[Options],
    ) -> PendingAnswer:
        """Prepare a request, which can be submitted to `driver`.

        `streams` collects pieces of text. Without `max_tokens`, this many `requests` share the
        cache. Raises `ValueError` for invalid input.
        """
        checked = RequestOptions.of(options)
        ids, form = self.text.encode_request(prompt, checked)
        return prepare_answer(self, ids, form, checked, streams=streams, requests=requests)

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
        check_batch(batch)
        batch = len(requests := list(requests)) if batch is None else batch
        return answer_requests(self, requests, max(int(batch), 1))

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


MAX_ANSWERS = 2**16
"""Maximum number of answers per prompt."""


def prepare_answer(
    llm: LLM,
    ids: list[int],
    form: AnswerFormat,
    options: RequestOptions,
    *,
    streams: bool = False,
    wait: bool = True,
    requests: int = ASSUMED_CONCURRENCY,
    limit: int | None = None,
    fits: bool = False,
) -> PendingAnswer:
    """Return a request that the engine accepts; unless `wait`, raise `NotCompiledError`."""
    check_reasoning_limit(options, llm.text)
    check_prompt_logprobs(options, llm.name, llm.config.kind)
    method = llm.methods.select_method(options.method)
    layout = lay_out_template(llm, ids, options, method)
    ids = ids if layout is None else layout.prompt
    pairing = llm.pair(method, options.adapter, wait=wait)
    method = method.fit_target(pairing.target)
    choose_max_tokens = max_tokens_chooser(llm, options, method, pairing, requests, limit, fits)
    if options.suffix is not None and llm.text.middle_tokens is None:
        layout = lay_out_suffix(llm, options.suffix, method, pairing, ids, choose_max_tokens)
    max_tokens = choose_max_tokens(len(ids)) if layout is None else layout.size
    padding = frozenset[int]() if layout is None else layout.ends
    detokenizer = Detokenizer(llm.text, options.stop, options.min_tokens, form, padding)
    ends, stop_ids = resolve_stop_ids(llm, options, pairing.vocab)
    processors = [*build_processors(options, method, len(ids), ends, pairing.vocab)]
    if layout is None:
        stop_ids |= detokenizer.stop_tokens.keys()
    answer = PendingAnswer(
        method=method,
        pairing=pairing,
        detokenizer=detokenizer,
        layout=layout,
        streams=streams,
        prompt=ids,
        max_tokens=max_tokens,
        sampling=options.build_sampling(llm.methods.default_sampling(method)),
        eos=ends if layout is None else frozenset(),
        stop_ids=stop_ids,
        min_tokens=int(options.min_tokens),
        logprobs=options.logprobs,
        top_logprobs=int(options.top_logprobs),
        prompt_logprobs=options.prompt_logprobs,
        choices=encode_choices(llm, options, form.thoughts, max_tokens),
        processors=tuple(processors),
        fixed_tokens={} if layout is None else layout.given,
        is_infill=layout is not None,
    )

    def on_tokens(_: Request) -> None:
        if answer.decode_tokens():
            llm.engine.cancel(answer)

    answer.listener = on_tokens if streams or detokenizer.may_stop else None
    constraint = build_constraint(llm, options, answer, wait)
    if constraint is not None:
        answer.constraint = constraint
        answer.processors += (constraint,)
    llm.engine.prepare_job(answer)
    return answer


def lay_out_template(
    llm: LLM, prompt: list[int], options: RequestOptions, method: Method
) -> InfillLayout | None:
    """Return the layout of an infill template, or None; the method must support it or a suffix."""
    if options.suffix is not None:
        check_suffix(options, method, llm.text)
    if options.cloze is None:
        return None
    check_can_infill(method)
    return InfillLayout.of(options.cloze, llm.text, prompt, llm.eos)


def max_tokens_chooser(
    llm: LLM,
    options: RequestOptions,
    method: Method,
    pairing: Pairing,
    requests: int,
    limit: int | None,
    fits: bool,
) -> Callable[[int], int]:
    """Return a function from the length of a prompt to the maximum number of tokens after it."""
    share, least = min(requests, llm.engine.max_sequences), options.min_tokens

    def choose(length: int) -> int:
        if options.max_tokens is not None:
            room = max(pairing.free_tokens(method, length), 1) if fits else options.max_tokens
            return int(min(options.max_tokens, room))
        return pairing.default_max_tokens(method, length, share, least, limit)

    return choose


def answer_ends(llm: LLM, options: RequestOptions) -> frozenset[int]:
    """Return the end-of-sequence ids, with those that end an answer before a suffix."""
    middle = None if options.suffix is None else llm.text.middle_tokens
    return llm.eos if middle is None else llm.eos | middle.ends


def lay_out_suffix(
    llm: LLM,
    suffix: str,
    method: Method,
    pairing: Pairing,
    prompt: list[int],
    choose_max_tokens: Callable[[int], int],
) -> InfillLayout:
    """Return the layout of an answer between a prompt and a suffix, which is infilled.

    Raises:
        OptionError: If no text precedes the answer.
        ContextError: If answer and suffix do not fit.
    """
    after = llm.text.encode_plain(suffix)
    if not prompt:
        raise OptionError("prompt", prompt, "must not be empty: give at least one token")
    size = choose_max_tokens(len(prompt) + len(after))
    room = pairing.free_tokens(method, len(prompt) + len(after))
    if size > room:
        raise ContextError(
            "max_tokens",
            size,
            f"must be at most {max(room, 0)} between {len(prompt)} tokens and {len(after)}",
        )
    return InfillLayout.before_suffix(llm.text, prompt, after, size, llm.eos)


def answer_variants(options: Options, n: int | None) -> list[Options]:
    """Return the options of `n` answers to a prompt, which have consecutive seeds."""
    if n is None:
        return [options]
    if not (is_whole_number(n) and 1 <= n <= MAX_ANSWERS):
        raise OptionError("n", n, f"must be an integer from 1 to {MAX_ANSWERS}")
    return [offset_seed(options, number) for number in range(n)]


def check_batch(batch: int | None) -> None:
    """Raise `OptionError` for a batch that is not a positive integer or None."""
    if not (batch is None or is_whole_number(batch) and batch >= 1):
        raise OptionError("batch", batch, "must be an integer of at least 1")


def answer_requests(
    llm: LLM, requests: Iterable[tuple[Prompt | None, Options]], batch: int
) -> Iterator[tuple[int, Output]]:
    """Submit requests, `batch` at a time, and drive the engine until all are answered."""
    waiting: dict[int, PendingAnswer] = {}
    numbered = enumerate(requests)
    try:
        while True:
            while len(waiting) < batch and (entry := next(numbered, None)):
                number, (prompt, options) = entry
                waiting[number] = llm.submit(prompt, requests=batch, **options)
            if not waiting:
                return
            llm.driver.step()
            for number in [number for number, answer in waiting.items() if answer.is_finished]:
                yield number, waiting.pop(number).build_output()
    finally:
        for answer in waiting.values():
            llm.driver.cancel(answer)

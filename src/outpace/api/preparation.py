"""Requests of an `LLM`: prompt, options and models become a job, and many jobs are answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from outpace.api.detokenizer import Detokenizer
from outpace.api.effects import (
    build_constraint,
    build_processors,
    check_can_infill,
    check_prompt_logprobs,
    check_reasoning_limit,
    check_suffix,
    resolve_stop_ids,
)
from outpace.api.infill import InfillLayout
from outpace.api.option_types import offset_seed
from outpace.api.options import Options, RequestOptions
from outpace.api.output import Output
from outpace.api.pending_answer import PendingAnswer
from outpace.api.text import Prompt
from outpace.decoding import Request
from outpace.decoding.sampling_params import is_whole_number
from outpace.engine.pairing import Pairing
from outpace.errors import ContextError, OptionError
from outpace.methods import Method

if TYPE_CHECKING:
    from outpace.api.llm import LLM

MAX_ANSWERS = 2**16
"""Maximum number of answers per prompt."""


def prepare_answer(
    llm: LLM,
    prompt: Prompt | None,
    options: RequestOptions,
    streams: bool,
    wait: bool,
    requests: int,
    limit: int | None,
) -> PendingAnswer:
    """Create the answer and the job of a request; see `LLM.prepare`."""
    check_reasoning_limit(options, llm.text)
    check_prompt_logprobs(options, llm.name, llm.config.kind)
    method = llm.methods.select_method(options.method)
    ids, layout = encode_prompt(llm, prompt, options, method)
    pairing = llm.pair(method, options.adapter, wait=wait)
    method = method.fit_target(pairing.target)
    choose_max_tokens = max_tokens_chooser(llm, options, method, pairing, requests, limit)
    if options.suffix is not None and llm.text.middle_tokens is None:
        layout = lay_out_suffix(llm, options.suffix, method, pairing, ids, choose_max_tokens)
    max_tokens = choose_max_tokens(len(ids)) if layout is None else layout.size
    is_raw = options.raw or layout is not None or options.suffix is not None
    form = llm.text.find_answer_format(ids, options.tool_use, raw=is_raw)
    padding = frozenset[int]() if layout is None else layout.ends
    detokenizer = Detokenizer(llm.text, options.stop, options.min_tokens, form, padding)
    answer = PendingAnswer(detokenizer, streams, layout)

    def on_tokens(request: Request) -> None:
        if answer.decode_tokens(request):
            llm.engine.cancel(answer.job)

    ends, stop_ids = resolve_stop_ids(
        options, answer_ends(llm, options), pairing.vocab, llm.text.silent_ids
    )
    processors = [*build_processors(options, method, len(ids), ends, pairing.vocab)]
    if layout is None:
        slots = range(len(ids), len(ids) + max_tokens)
        sizes = slots, ends | stop_ids, pairing.vocab, pairing.target.mask_id
        constraint = build_constraint(options, llm.compiler, method, form.thoughts, *sizes, wait)
    else:
        sequential = method.is_sequential
        constraint = layout.build_constraint(llm.compiler, sequential, pairing.vocab, wait)
    processors += [] if constraint is None else [constraint]
    request = pairing.make_request(
        ids,
        max_tokens=max_tokens,
        sampling=options.build_sampling(llm.methods.default_sampling(method)),
        eos=ends if layout is None else frozenset(),
        stop_ids=stop_ids,
        min_tokens=int(options.min_tokens),
        logprobs=options.logprobs,
        top_logprobs=int(options.top_logprobs),
        prompt_logprobs=options.prompt_logprobs,
        processors=tuple(processors),
        constraint=constraint,
        fixed_tokens=None if layout is None else layout.given,
    )
    callback = on_tokens if streams or options.stop else None
    answer.job = llm.engine.make_job(method, request, pairing, callback)
    return answer


def encode_prompt(
    llm: LLM, prompt: Prompt | None, options: RequestOptions, method: Method
) -> tuple[list[int], InfillLayout | None]:
    """Return the token ids before the first decoded slot, and the layout of an infill template."""
    encode = partial(
        llm.text.encode,
        raw=options.raw,
        template=options.template,
        tools=options.tool_use,
        effort=options.reasoning_effort,
        suffix=options.suffix,
    )
    if options.suffix is not None:
        check_suffix(options, method, llm.text)
    if options.cloze is None:
        return encode(prompt), None
    check_can_infill(method)
    prefix = None if prompt is None else encode(prompt)
    layout = InfillLayout.of(options.cloze, llm.text, prefix, llm.eos)
    return layout.prompt, layout


def max_tokens_chooser(
    llm: LLM,
    options: RequestOptions,
    method: Method,
    pairing: Pairing,
    requests: int,
    limit: int | None,
) -> Callable[[int], int]:
    """Return a function from the length of a prompt to the maximum number of tokens after it."""
    share, least = min(requests, llm.engine.max_sequences), options.min_tokens

    def choose(length: int) -> int:
        if options.max_tokens is not None:
            return int(options.max_tokens)
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
        raise OptionError("prompt", prompt, "prompt must not be empty: give at least one token")
    size = choose_max_tokens(len(prompt) + len(after))
    room = pairing.free_tokens(method, len(prompt) + len(after))
    if size > room:
        message = (
            f"max_tokens: {max(room, 0)} tokens fit between a prompt of {len(prompt)} and a suffix "
            f"of {len(after)} tokens, got {size}"
        )
        raise ContextError("max_tokens", size, message)
    return InfillLayout.before_suffix(llm.text, prompt, after, size, llm.eos)


def answer_variants(options: Options, n: int | None) -> list[Options]:
    """Return the options of `n` answers to a prompt, which have consecutive seeds."""
    if n is None:
        return [options]
    if not (is_whole_number(n) and 1 <= n <= MAX_ANSWERS):
        message = f"n must be an integer from 1 to {MAX_ANSWERS}, got {n!r}"
        raise OptionError("n", n, message)
    return [offset_seed(options, number) for number in range(n)]


def check_batch(batch: int | None) -> None:
    """Raise `OptionError` for a batch that is not a positive integer or None."""
    if not (batch is None or is_whole_number(batch) and batch >= 1):
        message = f"batch must be an integer of at least 1, got {batch!r}"
        raise OptionError("batch", batch, message)


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
            for number in [number for number, answer in waiting.items() if answer.job.is_finished]:
                yield number, waiting.pop(number).build_output()
    finally:
        for answer in waiting.values():
            llm.driver.cancel(answer.job)

"""Text in, text out: a model, a decoding method, and the engine that runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, Unpack

import torch

from outpace.decoding import Sampling, Step
from outpace.decoding import Sequence as Request
from outpace.decoding.sequence import FinishReason
from outpace.engine.admission import check_method, check_role
from outpace.engine.cache import cache_slots
from outpace.engine.engine import Engine, Job
from outpace.engine.runner import Runner
from outpace.methods import METHODS, Method
from outpace.models.config import DraftConfig
from outpace.models.draft import FeatureDraft
from outpace.models.families import FAMILIES
from outpace.models.load import DTYPES, load_config, load_draft, load_model, load_tokenizer
from outpace.models.transformer import Transformer
from outpace.text import Detokenizer, Prompt, Text

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What became of a prompt.

    Attributes:
        text: the answer, without end-of-sequence and cut at a stop string.
        ids: its tokens.
        finish_reason: `stop` (end-of-sequence or stop string), `length` or `cancelled`.
        steps: every forward pass, of every model.
        prompt_tokens: length of the prompt.
        seconds: from the first forward to the last.
    """

    text: str
    ids: list[int]
    finish_reason: FinishReason
    steps: list[Step] = field(repr=False)
    prompt_tokens: int
    seconds: float

    @property
    def forwards(self) -> int:
        """Forward passes of the target model."""
        return sum(step.model == "target" for step in self.steps)

    @property
    def tokens_per_forward(self) -> float:
        """Output tokens for each forward pass of the target model."""
        return len(self.ids) / self.forwards if self.forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens for each second that the request ran."""
        return len(self.ids) / self.seconds if self.seconds else 0.0


class Options(TypedDict, total=False):
    """What a request may choose; sampling options default to those of the model's family.

    `method` replaces that of the `LLM`; `max_tokens` is 256 at most unless given; `stop` ends
    the text before any of these strings; `raw` continues a string as it stands, without the chat
    template.
    """

    method: Method | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int
    stop: str | Sequence[str]
    raw: bool


@dataclass(slots=True, eq=False)
class Answer:
    """A request on its way and the text that it has so far."""

    detokenizer: Detokenizer
    job: Job = field(init=False)
    read: int = 0

    def push(self, seq: Request) -> bool:
        """Decode the tokens that are new; True where a stop string ends the answer."""
        tokens = seq.ids[len(seq.prompt) + self.read :]
        self.read += len(tokens)
        return self.detokenizer.push(tokens)

    def output(self) -> Output:
        """What became of it, once it has ended; raises what its method raised."""
        if self.job.error is not None:
            raise self.job.error
        seq = self.job.seq
        assert seq.finish_reason is not None
        self.detokenizer.take(final=True)
        return Output(
            text=self.detokenizer.text,
            ids=self.detokenizer.ids,
            finish_reason="stop" if self.detokenizer.stopped else seq.finish_reason,
            steps=seq.trace,
            prompt_tokens=len(seq.prompt),
            seconds=self.job.ended - self.job.began,
        )


class Stream(Iterator[str]):
    """Pieces of one answer, one for each forward that committed text; then `output` is set.

    Closing it, or leaving it to the garbage collector, cancels the request.
    """

    def __init__(self, llm: LLM, answer: Answer) -> None:
        self.llm = llm
        self.answer = answer
        self.output: Output | None = None

    def __next__(self) -> str:
        """The next piece; raises what the method raised."""
        while self.output is None:
            alive = not self.answer.job.done and self.llm.engine.step()
            piece = self.answer.detokenizer.take(final=self.answer.job.done)
            if not alive or self.answer.job.done:
                self.output = self.answer.output()
            if piece:
                return piece
        raise StopIteration

    def close(self) -> None:
        """Cancel what is left of the request."""
        self.llm.engine.cancel(self.answer.job)

    def __del__(self) -> None:
        if self.output is None:
            self.close()


class LLM:
    """A target model with a decoding method, ready for many prompts at once.

    `model` is a checkpoint folder, a hub name, or a model of the zoo; `adapter` a folder or
    hub name of a low-rank adapter that is merged into it. Without `method` it decodes with the one
    of its family. `dtype` is float32 on the CPU and bfloat16 elsewhere unless given; `cache_gib` is
    memory for keys and values of each model (2 GiB on the CPU and half of what is free on a GPU by
    default); `max_length` limits prompt and answer together; `mask_id` names the mask token where
    `config.json` does not; `prefix_cache` lets causal models find what they computed for prompts
    that began alike. Raises `ValueError` for what cannot be loaded or does not fit together.
    """

    def __init__(
        self,
        model: str | Path,
        method: Method | None = None,
        *,
        adapter: str | Path | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        max_length: int | None = None,
        mask_id: int | None = None,
        cache_gib: float | None = None,
        max_rows: int = 2048,
        max_sequences: int = 256,
        prefix_cache: bool = True,
    ) -> None:
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        self.max_length = max_length
        self.cache_gib = cache_gib
        self.prefix_cache = prefix_cache
        self.engine = Engine(max_rows=max_rows, max_sequences=max_sequences)
        self.runners: dict[str, Runner] = {}
        self.texts: dict[str, Text] = {}
        self.name = str(model) if adapter is None else f"{model} + {adapter}"
        self.target = self.load(str(model), adapter, mask_id)
        self.text = self.texts[self.name]
        self.config = self.target.config
        self.eos = frozenset(self.config.eos) | self.text_eos()
        self.method = method or METHODS[FAMILIES[self.config.family].method]()
        self.bind(self.method)

    def load(
        self, name: str, adapter: str | Path | None = None, mask_id: int | None = None
    ) -> Runner:
        """The runner of a model, loaded on first use."""
        key = name if adapter is None else f"{name} + {adapter}"
        if key in self.runners:
            return self.runners[key]
        model: Transformer | FeatureDraft
        if self.runners and isinstance(load_config(name), DraftConfig):
            model = self.load_draft(name)
            vocab: int | None = self.target.vocab
        else:
            model = load_model(
                name,
                dtype=self.dtype,
                device=self.device,
                max_length=self.max_length,
                adapter=adapter,
                mask_id=mask_id,
            )
            tokenizer = load_tokenizer(name)
            self.texts[key] = Text(key, tokenizer)
            vocab = None if tokenizer is None else len(tokenizer)
        slots = cache_slots(model.config, self.dtype, self.cache_bytes())
        runner = Runner(key, model, slots=slots, vocab=vocab, prefix_cache=self.prefix_cache)
        self.engine.add(runner)
        self.runners[key] = runner
        return runner

    def load_draft(self, name: str) -> FeatureDraft:
        """A draft that reads the features of the target."""
        assert isinstance(self.target.model, Transformer)
        try:
            return load_draft(name, self.target.model, max_length=self.max_length)
        except ValueError as error:
            raise ValueError(f"{name} cannot draft for {self.name}: {error}") from error

    def cache_bytes(self) -> int:
        """Memory for the cache of the next model."""
        if self.cache_gib is not None:
            return int(self.cache_gib * 2**30)
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0] // 2
        return 2 * 2**30

    def text_eos(self) -> frozenset[int]:
        """End-of-sequence of the tokenizer, which may be another than the model's."""
        tokenizer = self.text.tokenizer
        if tokenizer is None or tokenizer.eos_token_id is None:
            return frozenset()
        return frozenset((tokenizer.eos_token_id,))

    def bind(self, method: Method) -> dict[str, Runner]:
        """The model of each role of a method.

        Raises `ValueError` where one is of another kind than the method wants, or does not share
        a tokenizer with the target.
        """
        check_method(method, self.target)
        runners = {"target": self.target}
        for role, name in method.models().items():
            runner = runners[role] = self.load(name)
            check_role(method, role, runner)
            if name in self.texts:
                self.text.agrees(self.texts[name], self.config.vocab, runner.config.vocab)
            # What only the longer of two embeddings has is padding, and never to be said.
            self.target.vocab = min(self.target.vocab, runner.config.vocab)
            runner.vocab = min(runner.vocab, self.target.vocab)
        return runners

    def sampling(
        self,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int = 0,
    ) -> Sampling:
        """Sampling options, the family's own where not given."""
        family = FAMILIES[self.config.family]
        return Sampling(
            temperature=family.temperature if temperature is None else temperature,
            top_p=family.top_p if top_p is None else top_p,
            top_k=top_k,
            seed=seed,
        )

    def submit(
        self,
        prompt: Prompt,
        *,
        method: Method | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        raw: bool = False,
    ) -> Answer:
        """Queue a prompt; `engine.step()` moves it on. Options as in `Options`.

        Raises `ValueError` for bad input.
        """
        ids = self.text.encode(prompt, raw=raw)
        method = method or self.method
        runners = self.bind(method)
        if not isinstance(max_tokens, int | None):
            raise ValueError(f"max_tokens must be a whole number, not {max_tokens!r}")
        if max_tokens is None:
            length = min(runner.config.max_length for runner in runners.values())
            max_tokens = max(min(DEFAULT_MAX_TOKENS, length - method.slots(len(ids), 0)), 1)
        answer = Answer(Detokenizer(self.text, [stop] if isinstance(stop, str) else stop))

        def listen(seq: Request) -> None:
            if answer.push(seq):
                self.engine.cancel(answer.job)

        answer.job = self.engine.submit(
            method,
            ids,
            runners=runners,
            max_tokens=max_tokens,
            sampling=self.sampling(temperature, top_p, top_k, seed),
            eos=self.eos,
            listener=listen,
        )
        return answer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[Options]
    ) -> list[Output]:
        """Answer one prompt or many, together; outputs in the order of the prompts.

        A prompt is a string (a user's message; continued as it stands with `raw`), a list of
        token ids, or a list of chat messages. Raises `ValueError` for bad input before any work.
        """
        answers: list[Answer] = []
        try:
            for prompt in as_many(prompts):
                answers.append(self.submit(prompt, **options))
            while not all(answer.job.done for answer in answers):
                self.engine.step()
            return [answer.output() for answer in answers]
        finally:
            for answer in answers:
                self.engine.cancel(answer.job)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Answer one prompt piece by piece, a piece for each forward that brought text."""
        return Stream(self, self.submit(prompt, **options))


def as_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many as a list of prompts."""
    if isinstance(prompts, str) or not prompts or isinstance(prompts[0], int | dict):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def resolve_device(device: str | torch.device | None) -> torch.device:
    """A device by name; by default a GPU where there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"no device {str(device)!r}: {error}") from error
    return torch.device(device)


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """A dtype by name, or the default of a device."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    return DTYPES[dtype] if isinstance(dtype, str) else dtype

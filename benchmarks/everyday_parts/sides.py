"""Programs that answer the same prompts: outpace with several methods, and three others."""

from __future__ import annotations

import argparse
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from everyday_parts.tasks import Task
from harness import Timing, timed
from outpace import LLM
from outpace.methods import Autoregressive, Lookup, Method, Speculative

CONTEXT = 4096
"""Slots of a sequence in llama.cpp."""
LOOKUP_TOKENS = 10
"""Tokens that the other programs copy at a time, their own default."""
PROGRAMS = {"llama.cpp": "llama_cpp", "OpenVINO": "openvino_genai", "transformers": "transformers"}
"""Other programs, and their packages."""

LOG = logging.getLogger(__name__)


class Answerer(Protocol):
    """One program with one way of decoding."""

    def answer(self, ids: list[int], task: Task) -> list[int]:
        """Answer a prompt greedily; returns the token ids of the answer."""


@dataclass(slots=True)
class Outpace:
    """A method of this library."""

    llm: LLM
    method: Method

    def answer(self, ids: list[int], task: Task) -> list[int]:
        """Answer one request."""
        return self.answer_together([ids], task)[0]

    def answer_together(self, prompts: list[list[int]], task: Task) -> list[list[int]]:
        """Answer requests in one batch, under the schema of the task if it has one."""
        outputs = self.llm.generate(
            prompts,
            method=self.method,
            max_tokens=task.max_tokens,
            temperature=0.0,
            schema=task.schema,
        )
        return [output.ids for output in outputs]


class LlamaCpp:
    """llama.cpp through its Python package, plain or with prompt lookup."""

    def __init__(self, path: Path, threads: int, *, lookup: bool) -> None:
        from llama_cpp import Llama, llama_model_get_vocab, llama_vocab_is_eog
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS) if lookup else None
        self.llama: Any = Llama(
            str(path),
            n_ctx=CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=draft,
            logits_all=lookup,
            verbose=False,
        )
        self.ends_answer = partial(llama_vocab_is_eog, llama_model_get_vocab(self.llama.model))

    def answer(self, ids: list[int], task: Task) -> list[int]:
        """Answer one request, without a schema."""
        self.llama.reset()
        answer: list[int] = []
        for token in self.llama.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
            if self.ends_answer(token):
                break
            answer.append(int(token))
            if len(answer) == task.max_tokens:
                break
        return answer


class OpenVino:
    """OpenVINO GenAI, which reads GGUF files of Q4_0 and Q8_0, plain or with prompt lookup."""

    def __init__(self, path: Path, threads: int, *, lookup: bool) -> None:
        import openvino_genai

        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if lookup:
            settings["prompt_lookup"] = True
        self.pipeline: Any = openvino_genai.LLMPipeline(str(path), "CPU", **settings)
        self.config: Any = openvino_genai.GenerationConfig()
        self.config.do_sample, self.config.apply_chat_template = False, False
        if lookup:
            self.config.num_assistant_tokens, self.config.max_ngram_size = LOOKUP_TOKENS, 3

    def answer(self, ids: list[int], task: Task) -> list[int]:
        """Answer one request."""
        import openvino as ov

        self.config.max_new_tokens = task.max_tokens
        result = self.pipeline.generate(ov.Tensor(np.array([ids], dtype=np.int64)), self.config)
        return [int(token) for token in result.tokens[0]]


class Transformers:
    """transformers: plain, with prompt lookup, or assisted generation by a draft."""

    def __init__(self, path: Path, eos: list[int], **assistance: Any) -> None:
        self.model, self.eos, self.assistance = load_transformers(path), eos, assistance

    def answer(self, ids: list[int], task: Task) -> list[int]:
        """Answer one request, without a schema."""
        text = torch.tensor([ids])
        result = self.model.generate(
            text,
            attention_mask=torch.ones_like(text),
            max_new_tokens=task.max_tokens,
            do_sample=False,
            eos_token_id=self.eos,
            pad_token_id=self.eos[0],
            **self.assistance,
        )
        answer: list[int] = result[0, len(ids) :].tolist()
        return answer[:-1] if answer[-1] in self.eos else answer


@cache
def load_transformers(path: Path) -> Any:
    """Load a checkpoint folder, or a GGUF file in float32, in which it is fastest there."""
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    if path.suffix == ".gguf":
        return load(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    return load(path, dtype="auto").eval()


@dataclass(slots=True)
class Side:
    """A way of answering, with the answers and times of one task."""

    program: str
    way: str
    answerer: Answerer
    answers: list[list[int]] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Program and way, as tables show them."""
        return f"{self.program}, {self.way}"

    def run(self, prompts: list[list[int]], task: Task) -> None:
        """Answer prompts, several of them in one batch, and keep the answers and the time."""
        match self.answerer, prompts:
            case Outpace() as ours, _:
                run = partial(ours.answer_together, prompts, task)
            case other, [prompt]:
                run = partial(lambda: [other.answer(prompt, task)])
        self.timings.append(timed(lambda: self.answers.extend(run())))


def build_sides(llm: LLM, options: argparse.Namespace) -> list[Side]:
    """Sides whose packages are installed, the first of them plain decoding here.

    Other programs answer one request at a time, and read files and folders only.
    """
    sides = [Side("outpace", "plain", Outpace(llm, Autoregressive()))]
    if "outpace" in options.sides:
        sides.append(Side("outpace", "lookup", Outpace(llm, Lookup())))
        if options.draft is not None:
            method = Speculative(draft=options.draft, lookup=True)
            sides.append(Side("outpace", "draft and lookup", Outpace(llm, method)))
    if options.requests == 1 and Path(options.model).exists():
        for program in PROGRAMS:
            if program in options.sides:
                sides += build_program(program, llm, options)
    return sides


def build_program(program: str, llm: LLM, options: argparse.Namespace) -> list[Side]:
    """Sides of another program; none if it is not installed or does not read the model."""
    path, threads = Path(options.model), options.threads
    ways: dict[str, Callable[[], Answerer]]
    match program:
        case "llama.cpp":
            ways = {
                "plain": partial(LlamaCpp, path, threads, lookup=False),
                "lookup": partial(LlamaCpp, path, threads, lookup=True),
            }
        case "OpenVINO":
            ways = {
                "plain": partial(OpenVino, path, threads, lookup=False),
                "lookup": partial(OpenVino, path, threads, lookup=True),
            }
        case _:
            build = partial(Transformers, path, sorted(llm.eos))
            ways = {
                "plain": build,
                "lookup": partial(build, prompt_lookup_num_tokens=LOOKUP_TOKENS),
            }
            if options.draft is not None:
                ways["draft"] = lambda: build(
                    assistant_model=load_transformers(Path(options.draft))
                )
    if importlib.util.find_spec(PROGRAMS[program]) is None:
        LOG.warning("%s is not installed and is left out", PROGRAMS[program])
        return []
    try:
        return [Side(program, way, make()) for way, make in ways.items()]
    except (RuntimeError, OSError, ValueError) as error:
        LOG.warning("%s does not read %s: %s", program, path, str(error).split("\n")[0])
        return []

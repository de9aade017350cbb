"""Programs that answer the same prompts: outpace with several methods, llama.cpp, OpenVINO."""

from __future__ import annotations

import argparse
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from everyday_parts.tasks import Task
from harness import Timing, timed
from outpace import LLM
from outpace.methods import Autoregressive, Lookup, Method, Speculative

CONTEXT = 4096
"""Slots of a sequence in llama.cpp."""
LOOKUP_TOKENS = 10
"""Tokens that the other programs copy at a time, their own default."""

LOG = logging.getLogger(__name__)


class Answerer(Protocol):
    """One program with one way of decoding."""

    def answer(self, ids: Sequence[int], task: Task) -> list[int]:
        """Answer a prompt greedily; returns the token ids of the answer."""


@dataclass(slots=True)
class Outpace:
    """A method of this library."""

    llm: LLM
    method: Method

    def answer(self, ids: Sequence[int], task: Task) -> list[int]:
        """Answer one request, under the schema of the task if it has one."""
        (output,) = self.llm.generate(
            [list(ids)],
            method=self.method,
            max_tokens=task.max_tokens,
            temperature=0.0,
            schema=task.schema,
        )
        return list(output.ids)


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

    def answer(self, ids: Sequence[int], task: Task) -> list[int]:
        """Answer one request, without a schema."""
        self.llama.reset()
        answer: list[int] = []
        for token in self.llama.generate(list(ids), temp=0.0, top_k=1, repeat_penalty=1.0):
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

    def answer(self, ids: Sequence[int], task: Task) -> list[int]:
        """Answer one request."""
        import openvino as ov

        self.config.max_new_tokens = task.max_tokens
        result = self.pipeline.generate(ov.Tensor(np.array([ids], dtype=np.int64)), self.config)
        return [int(token) for token in result.tokens[0]]


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

    def run(self, ids: Sequence[int], task: Task) -> None:
        """Answer a prompt and keep the answer and the time."""
        self.timings.append(timed(lambda: self.answers.append(self.answerer.answer(ids, task))))


def build_sides(llm: LLM, options: argparse.Namespace) -> list[Side]:
    """Sides whose packages are installed, the first of them plain decoding here."""
    sides = [
        Side("outpace", "plain", Outpace(llm, Autoregressive())),
        Side("outpace", "lookup", Outpace(llm, Lookup())),
    ]
    if options.draft is not None:
        method = Speculative(draft=options.draft, lookup=True)
        sides.append(Side("outpace", "draft and lookup", Outpace(llm, method)))
    for name, module, kind in (
        ("llama.cpp", "llama_cpp", LlamaCpp),
        ("OpenVINO", "openvino_genai", OpenVino),
    ):
        if importlib.util.find_spec(module) is None:
            LOG.warning("%s is not installed and is left out", module)
            continue
        try:
            for way, lookup in (("plain", False), ("lookup", True)):
                answerer = kind(Path(options.model), options.threads, lookup=lookup)
                sides.append(Side(name, way, answerer))
        except RuntimeError as error:
            LOG.warning("%s does not read %s: %s", name, options.model, str(error).split("\n")[0])
    return sides

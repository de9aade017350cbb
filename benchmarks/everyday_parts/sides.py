"""Programs that answer the same prompts: outpace with several methods, others, and servers."""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import logging
import shlex
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol
from urllib.request import Request, urlopen

import numpy as np
import torch

from everyday_parts.tasks import Task
from harness import Timing, timed
from outpace import LLM
from outpace.methods import Autoregressive, Lookup, Method, Speculative

START_SECONDS = 300
"""Seconds until a server must answer."""
LOOKUP_TOKENS = 10
"""Tokens that the other programs copy at a time, their own default."""
PROGRAMS = {"OpenVINO": "openvino_genai", "transformers": "transformers"}
"""Other programs, and their packages."""

LOG = logging.getLogger(__name__)

Encode = Callable[[str], list[int]]


class Answerer(Protocol):
    """One program with one way of decoding."""

    def answer(self, prompt: str, task: Task) -> list[int]:
        """Answer a prompt greedily; returns the token ids of the answer."""


@dataclass(slots=True)
class Outpace:
    """A method of this library."""

    llm: LLM
    method: Method

    def answer(self, prompt: str, task: Task) -> list[int]:
        """Answer one request."""
        return self.answer_together([prompt], task)[0]

    def answer_together(self, prompts: list[str], task: Task) -> list[list[int]]:
        """Answer requests in one batch, under the schema of the task if it has one."""
        outputs = self.llm.generate(
            prompts,
            method=self.method,
            max_tokens=task.max_tokens,
            temperature=0.0,
            schema=task.schema,
        )
        return [output.ids for output in outputs]


class Server:
    """A server with the chat endpoint of OpenAI, started by a command and left with its defaults.

    Attributes:
        url: address of the server.
        model: name of its model.
    """

    def __init__(self, command: str, encode: Encode) -> None:
        """Start `command`, in which `{port}` is the port; `OSError` if it ends or stays silent."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.encode, self.url = encode, f"http://127.0.0.1:{port}"
        words = shlex.split(command.replace("{port}", str(port)))
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        atexit.register(self.process.terminate)
        end = time.monotonic() + START_SECONDS
        while not self.is_ready(f"{self.url}/health"):
            if self.process.poll() is not None or time.monotonic() > end:
                raise OSError(f"{command!r} did not start a server")
            time.sleep(0.2)
        with urlopen(f"{self.url}/v1/models") as reply:
            self.model: str = json.load(reply)["data"][0]["id"]

    @staticmethod
    def is_ready(url: str) -> bool:
        """Whether the server answers."""
        try:
            with urlopen(url, timeout=5) as reply:
                return bool(reply.status == HTTPStatus.OK)
        except OSError:
            return False

    def answer(self, prompt: str, task: Task) -> list[int]:
        """Answer one request, under the schema of the task if it has one."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": task.max_tokens,
            "temperature": 0,
        }
        if task.schema is not None:
            schema = {"name": task.name, "schema": task.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        headers = {"Content-Type": "application/json"}
        url = f"{self.url}/v1/chat/completions"
        with urlopen(Request(url, json.dumps(body).encode(), headers)) as reply:
            text: str = json.load(reply)["choices"][0]["message"]["content"]
        return self.encode(text)


class OpenVino:
    """OpenVINO GenAI, which reads GGUF files of Q4_0 and Q8_0, plain or with prompt lookup."""

    def __init__(self, path: Path, encode: Encode, threads: int, *, lookup: bool) -> None:
        import openvino_genai

        self.encode = encode
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if lookup:
            settings["prompt_lookup"] = True
        self.pipeline: Any = openvino_genai.LLMPipeline(str(path), "CPU", **settings)
        self.config: Any = openvino_genai.GenerationConfig()
        self.config.do_sample, self.config.apply_chat_template = False, False
        if lookup:
            self.config.num_assistant_tokens, self.config.max_ngram_size = LOOKUP_TOKENS, 3

    def answer(self, prompt: str, task: Task) -> list[int]:
        """Answer one request, without a schema."""
        import openvino as ov

        self.config.max_new_tokens = task.max_tokens
        ids = np.array([self.encode(prompt)], dtype=np.int64)
        result = self.pipeline.generate(ov.Tensor(ids), self.config)
        return [int(token) for token in result.tokens[0]]


class Transformers:
    """transformers: plain, with prompt lookup, or assisted generation by a draft."""

    def __init__(self, path: Path, encode: Encode, eos: list[int], **assistance: Any) -> None:
        self.model, self.encode = load_transformers(path), encode
        self.eos, self.assistance = eos, assistance

    def answer(self, prompt: str, task: Task) -> list[int]:
        """Answer one request, without a schema."""
        text = torch.tensor([self.encode(prompt)])
        result = self.model.generate(
            text,
            attention_mask=torch.ones_like(text),
            max_new_tokens=task.max_tokens,
            do_sample=False,
            eos_token_id=self.eos,
            pad_token_id=self.eos[0],
            **self.assistance,
        )
        answer: list[int] = result[0, text.shape[1] :].tolist()
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

    @property
    def obeys_schemas(self) -> bool:
        """Whether a task with a schema can be given to it."""
        return isinstance(self.answerer, Outpace | Server)

    def run(self, prompts: list[str], task: Task) -> None:
        """Answer prompts, several of them in one batch, and keep the answers and the time."""
        match self.answerer, prompts:
            case Outpace() as ours, _:
                run = partial(ours.answer_together, prompts, task)
            case other, [prompt]:
                run = partial(lambda: [other.answer(prompt, task)])
        self.timings.append(timed(lambda: self.answers.extend(run())))


def build_sides(llm: LLM, options: argparse.Namespace) -> list[Side]:
    """Sides whose packages are installed, and servers; the first side is plain decoding here.

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
    encode = partial(llm.text.encode_plain, begin=False)
    for name, command in options.server:
        program, _, way = name.partition(", ")
        sides.append(Side(program, way or "server", Server(command, encode)))
    return sides


def build_program(program: str, llm: LLM, options: argparse.Namespace) -> list[Side]:
    """Sides of another program; none if it is not installed or does not read the model."""
    path, encode = Path(options.model), llm.text.encode
    ways: dict[str, Callable[[], Answerer]]
    if program == "OpenVINO":
        build = partial(OpenVino, path, encode, options.threads)
        ways = {"plain": partial(build, lookup=False), "lookup": partial(build, lookup=True)}
    else:
        make = partial(Transformers, path, encode, sorted(llm.eos))
        ways = {"plain": make, "lookup": partial(make, prompt_lookup_num_tokens=LOOKUP_TOKENS)}
        if options.draft is not None:
            ways["draft"] = lambda: make(assistant_model=load_transformers(Path(options.draft)))
    if importlib.util.find_spec(PROGRAMS[program]) is None:
        LOG.warning("%s is not installed and is left out", PROGRAMS[program])
        return []
    try:
        return [Side(program, way, load()) for way, load in ways.items()]
    except (RuntimeError, OSError, ValueError) as error:
        LOG.warning("%s does not read %s: %s", program, path, str(error).split("\n")[0])
        return []

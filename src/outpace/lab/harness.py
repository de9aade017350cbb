"""Model class for lm-evaluation-harness, for any model with any method."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from outpace.errors import OptionError, install_extra

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ValueError(f"{error}; lm-evaluation-harness {install_extra('evaluate')}") from error

from outpace.api.llm import LLM
from outpace.api.options import Options
from outpace.api.output import Output
from outpace.decoding import CAUSAL_KINDS
from outpace.field_types import is_finite_real
from outpace.lab.likelihood import CausalLikelihood, LeftToRightLikelihood, MonteCarloLikelihood
from outpace.lab.samples import Samples, output_record, resume_samples

RESULT_KEYS = ("results", "groups", "n-shot", "n-samples")
"""Keys of the harness's results that are returned."""

LikelihoodRequest = tuple[Any, list[int], list[int]]
"""The harness's request, its context tokens, and the tokens to be scored."""


class OutpaceHarness(TemplateLM):  # type: ignore[misc]
    """An lm-eval model that decodes with any method, many requests at a time.

    Strings are tokenized as the harness's own `hf` model does it. Sampling options of the tasks
    apply.

    Args:
        llm: The model.
        batch_size: Number of concurrent requests.
        max_tokens: Token limit for tasks that do not set one.
        seed: Seed of all requests.
        draws: Random maskings in LLaDA's likelihood estimate for diffusion models; 0 computes the
            exact likelihood from left to right.
        temperature: Temperature in place of that of the tasks.
        top_p: Nucleus sampling threshold in place of that of the tasks.
        template: Variables of the chat template.
        samples: File of answers and likelihoods, from which an interrupted run resumes.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        batch_size: int = 1,
        max_tokens: int = 256,
        seed: int = 0,
        draws: int = 128,
        temperature: float | None = None,
        top_p: float | None = None,
        template: Mapping[str, Any] | None = None,
        samples: str | Path | None = None,
    ) -> None:
        super().__init__()
        if llm.text.tokenizer is None:
            raise ValueError(f"{llm.name} has no tokenizer, which all tasks need")
        if not llm.text.eos:
            raise ValueError(f"the tokenizer of {llm.name} has no end-of-sequence token")
        self.llm = llm
        self.tokenizer = llm.text.tokenizer.to_transformers()
        self.batch = batch_size
        self.max_tokens, self.seed, self.draws = max_tokens, seed, draws
        self.temperature, self.top_p, self.template = temperature, top_p, dict(template or {})
        self.samples = None if samples is None else Path(samples)
        self.questions: list[str] = []
        self.outputs: list[Output] = []
        self.outputs_by_task: dict[str, list[Output]] = {}
        self.seconds = 0.0

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token id before a string without context, as for `hf`."""
        begin = self.tokenizer.bos_token_id
        return int(self.eot_token_id if begin is None else begin)

    @property
    def tokenizer_name(self) -> str:
        return self.llm.name.replace("/", "__")

    @property
    def max_length(self) -> int:
        return self.llm.config.max_length

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return token ids; special tokens in the text are recognized, since templates add them."""
        if add_special_tokens is None:
            begin = str(self.tokenizer.decode([self.prefix_token_id]))
            add_special_tokens = not string.startswith(begin)
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self.template,
            )
        )

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        encoded = [self.encode_request(*request.args) for request in requests]
        keys = [request_key("generate_until", [tokens, options]) for tokens, options in encoded]
        with self.open_samples() as samples:
            clocks: Iterator[Any] = (record.get("clock") for record in samples.records.values())
            earlier = [float(clock) for clock in clocks if is_finite_real(clock)]
            self.seconds = max([self.seconds, *earlier])
            began = time.perf_counter() - self.seconds
            for index, output in self.decode_missing(keys, encoded, samples):
                self.seconds = time.perf_counter() - began
                clock = {"clock": self.seconds}
                samples.add_record(keys[index], {**clock, **output_record(output)})
            outputs = samples.load_outputs(keys)
        self.questions += [request_key("asked", request.args) for request in requests]
        self.outputs += [outputs[each] for each in keys]
        for request, each in zip(requests, keys, strict=True):
            self.outputs_by_task.setdefault(str(request.task_name), []).append(outputs[each])
        return [outputs[each].text for each in keys]

    def decoding_figures(self, task: str) -> dict[str, float]:
        """Return tokens per forward of a task's answers, and per second of those of all tasks.

        Empty for a task without generated answers.
        """
        answers = self.outputs_by_task.get(task)
        if not answers:
            return {}
        forwards = sum(answer.forwards for answer in answers)
        decoded = {id(answer): answer for answer in self.outputs}.values()  # a repetition once
        return {
            "tokens_per_forward": sum(len(answer.ids) for answer in answers) / max(forwards, 1),
            "tokens_per_second": sum(len(answer.ids) for answer in decoded) / self.seconds,
        }

    def encode_request(
        self, context: str, generation_options: Mapping[str, Any]
    ) -> tuple[list[int], Options]:
        """Return tokens and options of a request; long contexts lose their beginning."""
        settings = normalize_gen_kwargs(dict(generation_options), self.max_tokens)
        limit = int(settings["max_gen_toks"])
        room = self.max_length - self.llm.method.slots_needed(0, limit)
        if room < 1:
            raise ValueError(
                f"max_gen_toks={limit} leaves no room for a prompt in {self.max_length} tokens"
            )
        temperature = settings.get("temperature") if self.temperature is None else self.temperature
        top_p = settings.get("top_p") if self.top_p is None else self.top_p
        options = Options(
            max_tokens=limit,
            temperature=float(temperature or 0.0),
            top_p=float(top_p or 1.0),
            stop=[mark for mark in settings.get("until") or [] if mark],
            seed=self.seed,
        )
        return self.tok_encode(context)[-room:], options

    def _loglikelihood_tokens(
        self, requests: Sequence[LikelihoodRequest], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return log-likelihoods of tokens after a context, and whether they are greedy."""
        methods, encoded = [], []
        room = self.max_length + (self.llm.config.kind in CAUSAL_KINDS)
        for _, context, text in requests:
            ids = [*context, *text][-room:]
            methods.append(self.likelihood_method(max(len(ids) - len(text), 1)))
            encoded.append((ids, Options(method=methods[-1], max_tokens=1, temperature=0.0)))
        keys = [request_key("loglikelihood", request[1:]) for request in requests]
        with self.open_samples() as samples:
            for index, _ in self.decode_missing(keys, encoded, samples):
                result = methods[index].found
                record = {"logprob": result.logprob, "greedy": result.greedy}
                samples.add_record(keys[index], record)
            records = [samples.records[each] for each in keys]
        return [(float(record["logprob"]), bool(record["greedy"])) for record in records]

    def open_samples(self) -> AbstractContextManager[Samples]:
        names = ("max_tokens", "seed", "draws")
        settings = {name: getattr(self, name) for name in names}
        return resume_samples(
            self.samples, {"model": self.llm.name, "method": repr(self.llm.method), **settings}
        )

    def decode_missing(
        self, keys: Sequence[str], encoded: Sequence[tuple[list[int], Options]], samples: Samples
    ) -> Iterator[tuple[int, Output]]:
        """Decode requests without a stored result, duplicates once; yield each with its index."""
        first = {each: number for number, each in reversed(list(enumerate(keys)))}
        todo = [number for each, number in first.items() if each not in samples.records]
        for index, output in self.llm.serve((encoded[n] for n in todo), batch=self.batch):
            yield todo[index], output

    def likelihood_method(
        self, known: int
    ) -> CausalLikelihood | LeftToRightLikelihood | MonteCarloLikelihood:
        if self.llm.config.kind in CAUSAL_KINDS:
            return CausalLikelihood(known=known)
        if self.draws == 0:
            return LeftToRightLikelihood(known=known)
        return MonteCarloLikelihood(known=known, draws=self.draws, seed=self.seed)

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log-likelihoods of whole strings, in windows of the context length."""
        totals = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, 1
            )
            pieces = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(pieces)))
        return totals


def request_key(kind: str, contents: Any) -> str:
    return hashlib.sha256(json.dumps([kind, contents], default=str).encode()).hexdigest()[:32]


def run_tasks(
    harness: OutpaceHarness,
    tasks: Sequence[str],
    *,
    include: str | None = None,
    shots: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    system: str | None = None,
) -> dict[str, Any]:
    """Return the harness's results of tasks.

    Args:
        harness: The model.
        tasks: Names of tasks.
        include: Folder with other task definitions.
        shots: Number of few-shot examples; the task's own if None.
        limit: Number of questions per task; all if None.
        chat: Whether to apply the chat template.
        system: System prompt.

    Raises:
        ValueError: If a task is unknown, or runs generated code.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        near = get_close_matches(unknown[0], manager.all_tasks, 8)
        raise ValueError(
            f"unknown task {unknown[0]!r} of lm-evaluation-harness"
            + (f"; similar: {', '.join(near)}" if near else "; add its folder with --include")
        )
    try:
        results = simple_evaluate(
            harness,
            tasks=list(tasks),
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            apply_chat_template=chat,
            system_instruction=system,
            bootstrap_iters=0,
            log_samples=False,
        )
    except ValueError as error:
        if "marked as unsafe" not in str(error):
            raise
        raise OptionError(
            "tasks",
            None,
            "the harness would run generated code outside the sandbox; use --task humaneval",
        ) from error
    for task, metrics in results["results"].items():
        metrics |= harness.decoding_figures(task)
    return {name: results[name] for name in RESULT_KEYS if name in results}

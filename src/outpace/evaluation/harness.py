"""lm-evaluation-harness: any model with any method as a model of its own.

    python -m outpace.evaluation.harness run --model outpace \\
        --model_args model=tiny-dream,method=d2f,block=16 --tasks gsm8k_cot

is the command of the harness, which then knows a model `outpace`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import (
        get_rolling_token_windows,
        make_disjoint_window,
        simple_parse_args_string,
    )
except ImportError as error:
    raise ValueError(
        f"{error}; tasks of lm-evaluation-harness need: pip install 'outpace[evaluate]'"
    ) from error

from outpace.api.llm import LLM
from outpace.api.options import Options
from outpace.api.output import Output
from outpace.decoding import CAUSAL_KINDS
from outpace.evaluation.likelihood import Likelihood, MonteCarloLikelihood
from outpace.evaluation.protocol import method_of
from outpace.evaluation.samples import Samples, kept, written
from outpace.methods import METHODS

LOADING = ("adapter", "device", "dtype", "quantize", "max_length", "mask_id")
"""Arguments of `LLM` that the harness may give."""

REPORTED = ("results", "groups", "n-shot", "n-samples")
"""What is kept of the harness's results."""

Request = tuple[Any, list[int], list[int]]
"""What was asked, the tokens that are known, and those behind them."""


@register_model("outpace")
class Harness(TemplateLM):  # type: ignore[misc]
    """A model of the harness that decodes with any method, many requests at a time.

    Answers and likelihoods are added to the file `samples`, from which a killed run goes on. The
    text of a request is tokenized as the harness's own `hf` does it. Sampling options of the
    tasks hold, and `max_tokens` where a task has none. A diffusion model's likelihood is LLaDA's
    estimate of so many `draws`.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        batch_size: int | str = 1,
        max_tokens: int = 256,
        seed: int = 0,
        draws: int = 128,
        samples: str | Path | None = None,
    ) -> None:
        super().__init__()
        if llm.text.tokenizer is None:
            raise ValueError(f"{llm.name} has no tokenizer, without which it can read no task")
        if not llm.text.eos:
            raise ValueError(f"the tokenizer of {llm.name} names no end-of-sequence")
        if not str(batch_size).isdigit():
            raise ValueError(f"batch_size must be a whole number, not {batch_size!r}")
        self.llm = llm
        self.tokenizer = llm.text.tokenizer
        self.batch = int(batch_size)
        self.max_tokens, self.seed, self.draws = max_tokens, seed, draws
        self.samples = None if samples is None else Path(samples)
        self.questions: list[str] = []
        self.outputs: list[Output] = []
        self.seconds = 0.0

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> Harness:
        """As `--model_args` has it: `model=…,method=…` and options of the method."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> Harness:
        """Arguments of the model, of the method and of this class, told apart by their names."""
        given = {name: value for name, value in (additional_config or {}).items() if value}
        if str(given.get("device")).startswith("cuda") and not torch.cuda.is_available():
            del given["device"]  # what the harness says where nobody has chosen
        given = {**given, **arg_dict}
        if "model" not in given:
            raise ValueError("name a model: --model_args model=FOLDER,method=NAME,option=value")
        model, method = str(given.pop("model")), given.pop("method", None)
        given.pop("max_batch_size", None)
        loading = {name: given.pop(name) for name in LOADING if name in given}
        known = ("batch_size", "max_tokens", "seed", "draws", "samples")
        own = {name: given.pop(name) for name in known if name in given}
        if method is None and given:
            raise ValueError(f"{', '.join(given)} need a method; known are {', '.join(METHODS)}")
        chosen = None if method is None else method_of(str(method), given)
        return cls(LLM(model, chosen, **loading), **own)

    @property
    def eot_token_id(self) -> int:
        """End-of-sequence."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands in front of a text without context, as for `hf`."""
        begin = self.tokenizer.bos_token_id
        return int(self.eot_token_id if begin is None else begin)

    @property
    def tokenizer_name(self) -> str:
        """What tells its templates from others'."""
        return self.llm.name.replace("/", "__")

    @property
    def max_length(self) -> int:
        """Tokens that the model has room for."""
        return self.llm.config.max_length

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Tokens of a text in which special tokens are what they are, since templates make it."""
        if add_special_tokens is None:
            begin = str(self.tokenizer.decode([self.prefix_token_id]))
            add_special_tokens = not string.startswith(begin)
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the text of the model's template; the last message may go on."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, each cut at a stop string of its task."""
        asked = [self.asked(*request.args) for request in requests]
        keys = [key("generate_until", [tokens, options]) for tokens, options in asked]
        with self.kept() as samples:
            began = time.perf_counter()
            for index, output in self.serve(keys, asked, samples):
                samples.add(keys[index], written(output))
            self.seconds += time.perf_counter() - began
            found = samples.outputs(keys)
        self.questions += [key("asked", request.args) for request in requests]
        self.outputs += [found[each] for each in keys]
        return [found[each].text for each in keys]

    def asked(self, context: str, given: Mapping[str, Any]) -> tuple[list[int], Options]:
        """Tokens and options of a request; a context that is too long loses its beginning."""
        wanted = normalize_gen_kwargs(dict(given), self.max_tokens)
        limit = int(wanted["max_gen_toks"])
        room = self.max_length - self.llm.method.slots(0, limit)
        if room < 1:
            raise ValueError(
                f"max_gen_toks={limit} leave no room for a prompt in {self.max_length} tokens"
            )
        options = Options(
            max_tokens=limit,
            temperature=float(wanted.get("temperature") or 0.0),
            top_p=float(wanted.get("top_p") or 1.0),
            stop=[mark for mark in wanted.get("until") or [] if mark],
            seed=self.seed,
        )
        return self.tok_encode(context)[-room:], options

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of tokens behind others, and whether they are the most probable ones."""
        methods, asked = [], []
        room = self.max_length + (self.llm.config.kind in CAUSAL_KINDS)
        for _, context, text in requests:
            ids = [*context, *text][-room:]
            methods.append(self.likelihood(max(len(ids) - len(text), 1)))
            asked.append((ids, Options(method=methods[-1], max_tokens=1, temperature=0.0)))
        keys = [key("loglikelihood", request[1:]) for request in requests]
        with self.kept() as samples:
            for index, _ in self.serve(keys, asked, samples):
                found = methods[index].found
                record = {"logprob": found.logprob, "greedy": found.greedy}
                samples.add(keys[index], record)
            records = [samples.records[each] for each in keys]
        return [(float(record["logprob"]), bool(record["greedy"])) for record in records]

    def kept(self) -> AbstractContextManager[Samples]:
        """What an earlier run has found."""
        names = ("max_tokens", "seed", "draws")
        own = {name: getattr(self, name) for name in names}
        return kept(self.samples, {"model": self.llm.name, "method": repr(self.llm.method), **own})

    def serve(
        self,
        keys: Sequence[str],
        asked: Sequence[tuple[list[int], Options]],
        samples: Samples,
    ) -> Iterator[tuple[int, Output]]:
        """What is not known yet, each with its number as it ends; the same is asked once."""
        first = {each: number for number, each in reversed(list(enumerate(keys)))}
        todo = [number for each, number in first.items() if each not in samples.records]
        for index, output in self.llm.serve((asked[n] for n in todo), batch=self.batch):
            yield todo[index], output

    def likelihood(self, known: int) -> Likelihood | MonteCarloLikelihood:
        """How this kind of model is asked."""
        if self.llm.config.kind in CAUSAL_KINDS:
            return Likelihood(known=known)
        return MonteCarloLikelihood(known=known, draws=self.draws, seed=self.seed)

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole texts, in windows of the model's length."""
        totals = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, 1
            )
            pieces = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(found for found, _ in self._loglikelihood_tokens(pieces)))
        return totals


def key(kind: str, asked: Any) -> str:
    """What tells one request from another."""
    return hashlib.sha256(json.dumps([kind, asked], default=str).encode()).hexdigest()[:32]


def run_tasks(
    harness: Harness,
    tasks: Sequence[str],
    *,
    include: str | None = None,
    shots: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    system: str | None = None,
) -> dict[str, Any]:
    """Results of tasks by name, as the harness gives them.

    `include` is a folder with tasks of one's own, such as those that read local files. Raises
    `ValueError` with what is near for an unknown task.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        near = get_close_matches(unknown[0], manager.all_tasks, 8)
        raise ValueError(
            f"unknown task {unknown[0]!r} of lm-evaluation-harness"
            + (f"; near are {', '.join(near)}" if near else "; name a folder with --include")
        )
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
    return {name: results[name] for name in REPORTED if name in results}


def main() -> None:
    """The command of the harness."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()

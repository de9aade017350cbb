"""Tokens per second of requests that run together, without adapters and with some.

    python benchmarks/adapters.py --model tiny-ar

Random adapters of all linear layers but the head. Each side answers the same random prompts in one
batch, autoregressively and to the same length: without an adapter, with one for all requests, and
with one for each. The sides take turns. Times are CPU seconds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from checkpoints import prompt
from harness import Row, alternate, arguments, median, prepare, ratio, save, show, spread
from outpace import LLM
from outpace.api.options import Options
from outpace.checkpoints.adapter import LowRank, save_adapter
from outpace.checkpoints.load import load_config
from outpace.checkpoints.weights import parameter_parts
from outpace.methods import Autoregressive
from outpace.models.transformer import Transformer

PROMPT = 4
"""Tokens of a prompt."""


def write_adapter(folder: Path, model: Transformer, rank: int, seed: int) -> str:
    """Write a random adapter and return its path."""
    generator, updates = torch.Generator().manual_seed(seed), {}
    for name, sources in parameter_parts(model, ()).items():
        layer = model.get_submodule(name.rpartition(".")[0])
        is_adapted = isinstance(layer, nn.Linear) and name.endswith("weight")
        for source in sources if is_adapted and "unembedding" not in name else ():
            outputs, inputs = source.shape
            down, up = (
                0.02 * torch.randn(*shape, generator=generator)
                for shape in ((rank, inputs), (outputs, rank))
            )
            updates[source.source] = LowRank(down, up, 1.0)
    save_adapter(folder, updates, {"peft_type": "LORA", "r": rank, "lora_alpha": rank})
    return str(folder)


def answer(llm: LLM, tokens: int, adapters: Sequence[str | None]) -> None:
    """Answer a request for each adapter, all in one batch."""
    usual = Options(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    prompts = (prompt(PROMPT, llm.config.vocab, seed) for seed in range(len(adapters)))
    requests = [
        (ids, usual | Options(adapter=adapter))
        for ids, adapter in zip(prompts, adapters, strict=True)
    ]
    assert all(len(output.ids) == tokens for _, output in llm.serve(requests))


def measure(options: argparse.Namespace) -> list[Row]:
    """Return the figures of each side."""
    with torch.device("meta"):
        model = Transformer(load_config(options.model))
    numbers = range(options.requests)
    with tempfile.TemporaryDirectory() as folder:
        adapters = {
            str(number): write_adapter(Path(folder, str(number)), model, options.rank, number)
            for number in numbers
        }
        llm = LLM(options.model, adapters=adapters, method=Autoregressive(), prefix_cache=False)
    choices: dict[str, list[str | None]] = {
        "no adapter": [None for _ in numbers],
        "one adapter": ["0" for _ in numbers],
        f"{options.requests} adapters": [str(number) for number in numbers],
    }
    runs = {name: partial(answer, llm, options.tokens, each) for name, each in choices.items()}
    timings = alternate(runs, options.rounds)
    first = timings["no adapter"]
    return [
        {
            "model": Path(options.model).stem,
            "side": name,
            "tokens per second": options.requests * options.tokens / median(each),
            "ratio of times": ratio(each, first),
            "range": spread(each, first),
        }
        for name, each in timings.items()
    ]


def main() -> None:
    """Measure, show and write."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--model", default="tiny-ar", help="a causal model (tiny-ar)")
    parser.add_argument("--requests", type=int, default=8, help="at a time, and adapters (8)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (8)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer (64)")
    options = parser.parse_args()
    prepare(options)
    rows = measure(options)
    show("adapters per request", rows)
    save(options, {"adapters": rows}, [])


if __name__ == "__main__":
    main()

"""A program for two processes that split models of the zoo: python split.py FILE MODEL ...

The first writes what each method answers. In the last model the other one fails.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outpace import LLM
from outpace.engine import tensor_parallel
from outpace.models.split import ModelShard

METHODS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "tiny-ar": [
        ("autoregressive", {}),
        ("speculative", {"draft": "tiny-aux"}),
        ("speculative", {"draft": "tiny-aux", "verify": "rejection", "tokens": 4}),
        ("dflash", {"draft": "tiny-dflash"}),
    ],
    "tiny-wedlm": [("wedlm", {}), ("autoregressive", {})],
    "tiny-dream": [
        ("left_to_right", {}),
        ("diffusion", {"steps": 16}),
        ("fast_dllm", {"threshold": 0.9}),
        ("apd", {"verifier": "tiny-aux"}),
    ],
    "tiny-llada": [("diffusion", {"steps": 16})],
    "tiny-d2f": [("d2f", {})],
}
PROMPTS = ["Tom has 5 bags of 4 apples. How many apples has he?", "What is 17 + 25?"]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": True},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3},
]


def answers(llm: LLM, model: str) -> dict[str, list[list[int]]]:
    """Tokens of each method's answers; the second time some of the prompts is found."""
    found = {}
    for method, options in METHODS[model]:
        for sampling in SAMPLINGS:
            outputs = llm.generate(PROMPTS, method=(method, options), max_tokens=32, **sampling)
            found[f"{model} {method} {options} {sampling}"] = [each.ids for each in outputs]
    return found


def fail(*given: Any) -> None:
    """A pass that goes wrong in one process only."""
    raise RuntimeError("this process has a fault")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tensor_parallel.join_group = lambda size, device: (ModelShard(rank, size), device)
    found: dict[str, list[list[int]]] = {}
    for model in sys.argv[2:]:
        try:
            llm = LLM(model, tensor_parallel=2, cache_gib=0.05)
        except SystemExit:
            continue
        found |= answers(llm, model)
        llm.group.close()
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    else:
        tensor_parallel.WorkerModel.run_pass = fail  # type: ignore[method-assign]
    LLM("tiny-ar", tensor_parallel=2, cache_gib=0.05).generate("?", max_tokens=4)


if __name__ == "__main__":
    main()

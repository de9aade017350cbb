"""How a method is compared with its naive loop."""

from collections.abc import Callable, Mapping

import naive
from helpers import enter, finish, runner, tokens
from outpace.engine.engine import Engine
from outpace.methods import Method

PROMPTS = [[5], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
TOKENS = 16


def newest(output: list[int]) -> int:
    """The token that comes last for the first time: as end-of-sequence it cuts late."""
    return max(set(output), key=output.index)


def check_verified(
    engine: Engine,
    method: Method,
    roles: Mapping[str, str],
    prompt: list[int],
    loop: Callable[..., naive.Verified],
) -> None:
    """Compare tokens and the number that each verification accepts with those of a loop.

    `roles` are names of the engine's models: the target, and a draft where the method has one.
    `loop` gets `eos`, an end-of-sequence token or None. The output is that of the target alone.
    """
    runners = {role: runner(engine, name) for role, name in roles.items()}
    target = runners["target"].model
    plain = naive.autoregressive(target, prompt, TOKENS)
    for eos in (None, newest(plain)):
        ends = frozenset() if eos is None else frozenset([eos])
        job = enter(engine, method, prompt, runners=runners, max_tokens=TOKENS, eos=ends)
        finish(engine)
        accepted = [step.committed for step in job.trace if step.model == "target"]
        assert (tokens(job), accepted) == loop(eos=eos)
        assert tokens(job) == naive.autoregressive(target, prompt, TOKENS, eos)

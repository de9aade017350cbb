"""Who may enter: what a method, its models and a request must agree on."""

from __future__ import annotations

from collections.abc import Mapping

from outpace.decoding import Sequence
from outpace.engine.runner import Runner
from outpace.methods import Method
from outpace.models.config import DraftConfig, ModelConfig

KINDS = {True: "diffusion model", False: "causal model"}
"""What a model is, by whether it is bidirectional."""

DRAFT = "draft that reads features"


def kind(config: ModelConfig) -> str:
    """What a model is, in the words of messages."""
    return DRAFT if isinstance(config, DraftConfig) else KINDS[config.bidirectional]


def check_method(method: Method, target: Runner) -> None:
    """Raise `ValueError` for a method that decodes models of another kind."""
    wanted, found = KINDS[method.bidirectional], kind(target.config)
    if found != wanted:
        raise ValueError(
            f"{type(method).__name__} decodes {wanted}s, but {target.name} is a {found}"
        )
    if method.masked and target.config.mask_id is None:
        raise ValueError(
            f"{type(method).__name__} feeds masks, but {target.name} has no mask token: "
            "name one (mask_id), or choose a model that was trained with it"
        )


def check_role(method: Method, role: str, runner: Runner) -> None:
    """Raise `ValueError` for a further model of another kind than the method wants there."""
    wanted, found = DRAFT if role in method.feature_roles else KINDS[False], kind(runner.config)
    if found != wanted:
        raise ValueError(
            f"{type(method).__name__} takes a {wanted} as its {role}, "
            f"but {runner.name} is a {found}"
        )


def check_request(method: Method, seq: Sequence, runners: Mapping[str, Runner]) -> None:
    """Raise `ValueError` for a request that the models of its roles could never serve."""
    check_method(method, runners["target"])
    for role in method.roles:
        check_role(method, role, runners[role])
    if not seq.prompt:
        raise ValueError("the prompt is empty: give at least one token")
    if seq.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {seq.max_tokens}")
    method.check(seq)
    slots = method.slots(len(seq.prompt), seq.max_tokens)
    for runner in runners.values():
        bad = [token for token in seq.prompt if not 0 <= token < runner.vocab]
        if bad:
            raise ValueError(
                f"prompt token {bad[0]} lies outside the vocabulary of {runner.name}, "
                f"which has {runner.vocab} tokens"
            )
        limit = min(runner.config.max_length, len(runner.cache))
        if slots > limit:
            extra = f" with {method!r}" if slots > len(seq.prompt) + seq.max_tokens else ""
            raise ValueError(
                f"a prompt of {len(seq.prompt)} tokens and max_tokens={seq.max_tokens} need "
                f"{slots} slots{extra}, but {runner.name} has {limit}: shorten one of them"
            )

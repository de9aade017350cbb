"""`Pairing`: the models of a method, and which method each request of a model uses."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

from outpace.checkpoints.adapter import Adapter, model_title
from outpace.checkpoints.checkpoint import Checkpoint
from outpace.checkpoints.drafts import AUTO_DRAFT, LocalDraft, best_local_draft, find_local_draft
from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.name import head_name
from outpace.decoding import DRAFT_KINDS, MASKED_DRAFT_KINDS, Kind, Processor, Request, Target
from outpace.decoding.processor import VocabularyLimit
from outpace.decoding.target import plural_noun, singular_noun
from outpace.engine.cache import PAGE_SIZE
from outpace.engine.runner import Runner
from outpace.errors import ContextError, OptionError
from outpace.methods import AUTO_METHOD, METHODS, Lookup, Method
from outpace.methods.copies import AnswerStore
from outpace.methods.options import MethodSpec, make_method, resolve_method
from outpace.models.config import ModelConfig
from outpace.models.extending import fit_draft_config
from outpace.models.split import find_unsharded_part

DEFAULT_CANVAS_TOKENS = 256
"""Default `max_tokens` of diffusion models, and the lowest default of all others, if it fits."""

ASSUMED_CONCURRENCY = 16
"""Requests that share a cache where their number is unknown and each reserves its memory."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How the models of a pairing answer a request."""

    method: Method
    """The method, fitted to its target."""
    room: int
    """Number of tokens that fit after the prompt."""
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairing:
    """The models of a method by role, and their common properties."""

    runners: Mapping[str, Runner]
    """The model of each role."""
    vocab: int
    """Size of the vocabulary that all of them share."""
    target: Target
    """Properties of the target that methods may use."""
    processors: Mapping[str, tuple[Processor, ...]]
    """For each role, processors that keep its tokens below `vocab`."""
    adapter: str | None = None
    """Adapter of the target; None for the base weights."""
    answers: AnswerStore = field(default_factory=AnswerStore)
    """Answers that requests share, if their method does."""

    @classmethod
    def from_runners(cls, runners: Mapping[str, Runner], adapter: str | None = None) -> Pairing:
        """Build a pairing of models whose kinds have been checked."""
        vocab = min(runner.vocab for runner in runners.values())
        return cls(
            runners=dict(runners),
            vocab=vocab,
            target=make_target({role: runner.config for role, runner in runners.items()}),
            processors={
                role: (VocabularyLimit(vocab),) if runner.vocab > vocab else ()
                for role, runner in runners.items()
            },
            adapter=adapter,
        )

    def plan(
        self,
        method: Method,
        prompt: int,
        *,
        max_tokens: int | None,
        min_tokens: int,
        requests: int,
        limit: int | None = None,
        fits: bool = False,
    ) -> Plan:
        """Return how these models answer a prompt of `prompt` tokens.

        Without `max_tokens`, it is the rest of the context, at most an equal share of the cache for
        each of `requests`, so that all of them run together. It is not below
        `DEFAULT_CANVAS_TOKENS` where that much fits. The canvas of a diffusion model is part of its
        input, and so is fixed: `DEFAULT_CANVAS_TOKENS`, or what fits. This default is never above
        `limit`, nor below `min_tokens`. With `fits`, a given `max_tokens` is reduced to the room.
        """
        method = method.fit_target(self.target)
        room = most = self.free_tokens(method, prompt)
        if max_tokens is not None:
            return Plan(method, room, int(min(max_tokens, max(room, 1)) if fits else max_tokens))
        own = method.slots_needed(prompt, 0)
        for runner in self.runners.values():
            # Whole pages only: requests share none for writing.
            share = runner.cache.num_pages // requests * PAGE_SIZE - own
            most = min(most, max(share, DEFAULT_CANVAS_TOKENS))
        if self.runners["target"].config.kind is Kind.DIFFUSION:
            most = min(most, DEFAULT_CANVAS_TOKENS)
        if limit is not None:
            most = min(most, limit)
        return Plan(method, room, max(most, int(min_tokens), 1))

    def free_tokens(self, method: Method, prompt: int) -> int:
        """Return how many tokens fit after a prompt in the context and cache of every model."""
        limits = [min(each.config.max_length, len(each.cache)) for each in self.runners.values()]
        return min(limits) - method.slots_needed(prompt, 0)

    def check_request(self, method: Method, request: Request) -> None:
        """Raise `ValueError` for a request that these models could never serve."""
        if not request.prompt:
            raise OptionError(
                "prompt", request.prompt, "the prompt is empty: give at least one token"
            )
        method.check_request(request)
        if bad := [token for token in request.prompt if not 0 <= token < self.vocab]:
            smallest = min(self.runners.values(), key=lambda runner: runner.vocab)
            raise OptionError(
                "prompt",
                bad[0],
                f"token {bad[0]} is outside the {self.vocab} tokens of {smallest.name}",
            )
        self.check_room(method, request)

    def check_room(self, method: Method, request: Request) -> None:
        """Raise `ContextError` for a request that is longer than a context or a cache.

        It names the prompt where not one token fits after it, and else `max_tokens`, in the words
        of Anthropic's server, by which agents find that they have to shorten a conversation.
        """
        prompt = len(request.prompt)
        answer, least = (
            method.slots_needed(prompt, tokens) - prompt for tokens in (request.max_tokens, 1)
        )
        for runner in self.runners.values():
            model, limit = runner.config.max_length, len(runner.cache)
            where = f"the context of {runner.name}"
            if limit < model:
                where = f"the cache; {runner.name} takes {model} with a larger cache_gib"
            limit = min(limit, model)
            if prompt + answer <= limit:
                continue
            if request.is_infill or prompt + least > limit:
                tokens = prompt + (answer if request.is_infill else least)
                reason = f"prompt is too long: {tokens} tokens > {limit} maximum context length"
                raise ContextError("prompt", prompt, f"{reason}, {where}")
            reason = "input length and `max_tokens` exceed context limit"
            if answer > request.max_tokens:
                where += f"; {method!r} takes {answer} for {request.max_tokens}"
            raise ContextError(
                "max_tokens",
                request.max_tokens,
                f"{reason}: {prompt} + {answer} > {limit}, {where}",
            )


def accepts_head(method: type[Method]) -> bool:
    """Return whether the draft of a method may be a head for multi-token prediction."""
    return Kind.EAGLE in method.roles.get("draft", ())


def check_kinds(method: type[Method], models: Mapping[str, tuple[str, Kind]]) -> None:
    """Check that the models of a method, by name and kind in each role, have the kinds it needs."""
    name, kind = models["target"]
    if kind not in method.target_kinds:
        remedy = ""
        if kind is Kind.CAUSAL and Kind.MASK_FILLING in method.target_kinds:
            remedy = (
                " that has no mask token: set mask_id, or choose a model that was trained with one"
            )
        raise OptionError(
            "method",
            method.__name__,
            f"{method.__name__} decodes {plural_noun(method.target_kinds)}, but {name} is a "
            f"{kind.value}{remedy}",
        )
    for role, allowed in method.roles.items():
        name, kind = models[role]
        if kind not in allowed:
            raise OptionError(
                role,
                name,
                f"{method.__name__} takes a {singular_noun(allowed)} as its {role}, but {name} is "
                f"a {kind.value}",
            )


def make_target(configs: Mapping[str, ModelConfig]) -> Target:
    """Return the properties of the target, with those of the model that reads masks."""
    target = configs["target"]
    masked = next((each for each in configs.values() if each.kind in MASKED_DRAFT_KINDS), target)
    return Target(
        shift=target.shift,
        mask_id=-1 if masked.mask_id is None else masked.mask_id,
        block=masked.block,
        drafts_from_last=masked.is_draft and masked.shift == 1,
        predicts_acceptance=masked.chain is not None and masked.chain.predicts_acceptance,
        is_block_causal=target.kind is Kind.BLOCK,
        order=target.order,
        eps=target.eps,
        score_as_drawn=target.drawn,
        null_prompt=target.null_prompt,
        padding=target.eos[:1],
        adds_features=masked.kind is Kind.DFLASH_FUSED,
        is_recurrent=target.delta is not None,
        mask_shift=target.mask_shift,
        has_mtp_draft=any(each.is_head for each in configs.values()),
    )


LOG = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class MethodSelector:
    """Selects the method of each request to a model, and opens the further models of methods."""

    checkpoint: Checkpoint
    method: MethodSpec | None = None
    """Method of requests that set none; None and "auto" select that of the model."""
    max_length: int | None = None
    mask_id: int | None = None
    adapter: Adapter | None = None
    sharded: bool = False
    """Whether the model is sharded, for `tensor_parallel`."""
    opened: dict[str, Checkpoint] = field(default_factory=dict)
    """Further models by name."""

    @classmethod
    def open(
        cls,
        model: str | Path,
        method: MethodSpec | None = None,
        *,
        max_length: int | None = None,
        mask_id: int | None = None,
        adapter: str | Path | None = None,
        sharded: bool = False,
    ) -> Self:
        return cls(
            checkpoint=Checkpoint(model),
            method=method,
            max_length=max_length,
            mask_id=mask_id,
            adapter=None if adapter is None else Adapter(adapter),
            sharded=sharded,
        )

    @property
    def name(self) -> str:
        """Name of the model, followed by that of its adapter."""
        adapter = None if self.adapter is None else self.adapter.name
        return model_title(self.checkpoint.name, adapter)

    @cached_property
    def config(self) -> ModelConfig:
        """Configuration of the model, as it is loaded."""
        return self.checkpoint.target_config(
            max_length=self.max_length, mask_id=self.mask_id, adapter=self.adapter
        )

    @cached_property
    def default(self) -> Method:
        return self.native if self.method is None else self.select_method(self.method)

    def select_method(self, method: MethodSpec | None) -> Method:
        """Return the method of a request; "auto" is that of the model."""
        if method is None:
            return self.default
        return self.native if method == AUTO_METHOD else resolve_method(method)

    def default_sampling(self, method: Method) -> dict[str, float]:
        """Return default sampling options by name: the method's, or else the model family's."""
        family = FAMILIES[self.config.family]
        return {"temperature": family.temperature, "top_p": family.top_p, **method.default_sampling}

    @cached_property
    def draft(self) -> LocalDraft | None:
        """The best published draft of a causal model on this machine, looked for once.

        None for a sharded model if the draft cannot be sharded.
        """
        is_causal = isinstance(family_method(self.config), Lookup)
        found = best_local_draft(self.name) if is_causal else None
        if found and self.sharded:
            config = self.open_model(found.place, "draft").config
            return None if find_unsharded_part(config) else found
        return found

    @cached_property
    def native(self) -> Method:
        """The model's own method.

        For a causal model with a published draft on this machine, it is the method of the draft,
        with copies, unless a measured task gains too little; otherwise that of the family.
        """
        if self.draft is None or not self.draft.is_default:
            return family_method(self.config)
        LOG.info("%s", self.draft.describe(self.name))
        return make_method(METHODS[self.draft.method], {"draft": self.draft.place, "lookup": True})

    def model_names(self, method: Method) -> dict[str, str]:
        """Return the model name of each further role; "auto" selects the draft of the target.

        That is the head for multi-token prediction in its checkpoint, if it has one.
        """
        models = {role: str(name) for role, name in method.model_names().items()}
        if models.get("draft") == AUTO_DRAFT:
            may_be_head = accepts_head(type(method))
            if may_be_head and self.checkpoint.config.mtp_heads:
                return {**models, "draft": head_name(self.checkpoint.name)}
            kind = type(method)
            name = next((name for name, each in METHODS.items() if each is kind), kind.__name__)
            try:
                models["draft"] = find_local_draft(self.checkpoint.name, name)
            except OptionError as error:
                if not may_be_head:
                    raise
                raise OptionError(
                    "draft",
                    AUTO_DRAFT,
                    f"{error.reason}; there is no head for multi-token prediction (MTP)",
                ) from error
        return models

    def open_model(self, name: str, role: str = "model") -> Checkpoint:
        """Return the checkpoint of a further model, which is opened once."""
        if name not in self.opened:
            is_head = name == head_name(self.checkpoint.name)
            self.opened[name] = self.checkpoint.open_head() if is_head else Checkpoint(name, role)
        return self.opened[name]

    def open_models(self, method: Method) -> dict[str, Checkpoint]:
        """Return the further models of a method by role; no weights are read."""
        target, config = self.checkpoint, self.config
        models = {r: self.open_model(name, r) for r, name in self.model_names(method).items()}
        kinds = {role: (str(each), each.config.kind) for role, each in models.items()}
        check_kinds(type(method), {"target": (str(target), config.kind), **kinds})
        tree = None if method.tree_option is None else getattr(method, method.tree_option)
        if config.delta is not None and tree not in (None, 1):
            raise OptionError(
                "method",
                type(method).__name__,
                f"{method!r} verifies trees, but {target} has gated delta layers, which "
                f"run chains only: set {method.tree_option}=1",
            )
        for role, each in models.items():
            if each.config.kind in DRAFT_KINDS:
                try:
                    fit_draft_config(each.config, config)
                except ValueError as error:
                    raise OptionError(
                        role, str(each), f"{each} cannot draft for {target}: {error}"
                    ) from error
        return models


def family_method(config: ModelConfig) -> Method:
    """Return the default method of a model without a draft, that of its family."""
    return METHODS[FAMILIES[config.family].method]()

"""Served models: methods, names, descriptions, and models that load on request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from outpace.api.engine_client import ModelClient
from outpace.api.engine_loop import LazyModel
from outpace.api.llm import LLM
from outpace.api.loading import resolve_types
from outpace.api.text import TextCodec
from outpace.checkpoints.adapter import Adapter, model_title
from outpace.checkpoints.checkpoint import Checkpoint
from outpace.checkpoints.hub import resolve_checkpoint
from outpace.checkpoints.stored_size import has_quantized_matrices, loaded_bytes
from outpace.engine.cache import (
    cache_bytes,
    check_memory,
    context_bytes,
    default_dtype,
    resolve_cache,
    slot_bytes,
)
from outpace.engine.engine import Pacing
from outpace.engine.pairing import family_method
from outpace.engine.prefix_store import PrefixStore
from outpace.errors import OptionError, prefix_error
from outpace.field_types import check_value
from outpace.methods import AUTO_METHOD
from outpace.methods.options import method_name
from outpace.models.config import ModelConfig
from outpace.models.low_bits import default_quantize
from outpace.server.http_error import HttpError
from outpace.server.logs import LOG, log_loading
from outpace.server.method_choice import MethodChoice, method_choices, method_variants
from outpace.server.settings import Entry

DEFAULT_KEEP = "10m"

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DURATION = re.compile(r"([0-9]{1,6})([smhd])")


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as `10m`; raises `OptionError` for any other text."""
    if (found := DURATION.fullmatch(text)) is None:
        raise OptionError("keep", text, "must be a whole number with s, m, h or d, such as 10m")
    return float(found[1]) * UNIT_SECONDS[found[2]]


def check_lazy_options(entry: Entry) -> None:
    if entry.keep is not None:
        parse_duration(entry.keep)
        if not entry.lazy:
            raise OptionError("keep", entry.keep, "needs lazy: set lazy as well, or omit keep")
    if entry.lazy and entry.tensor_parallel > 1:
        raise OptionError("lazy", entry.lazy, "cannot be combined with tensor_parallel: omit one")


def make_lazy_model(entry: Entry, load: Callable[[], LLM]) -> LazyModel:
    """Check the files and options of a lazy model, and measure the memory that it needs."""
    cache_dtype = resolve_cache(entry.cache_gib, entry.cache_dtype)
    check_value("pace", entry.pace, Pacing)
    device, dtype = resolve_types(
        entry.device,
        entry.dtype,
        entry.quantize,
        entry.attention,
        entry.compile,
        entry.graphs,
        entry.tensor_parallel,
    )
    quantize = default_quantize(entry.quantize, entry.dtype, device, entry.tensor_parallel)
    for folder in (entry.adapter, *(entry.adapters or {}).values()):
        if folder is not None:
            Adapter(folder).read_updates()
    paths = {entry.path, *entry.further_models().values()}
    configs = {path: Checkpoint(path).config for path in paths}
    length = entry.max_length or configs[entry.path].max_length
    if cache_dtype is None:
        quantized = has_quantized_matrices(entry.path, quantize)
        cache_dtype = default_dtype(dtype, quantized=quantized)
    slots = [slot_bytes(config, cache_dtype) for config in configs.values()]
    check_memory(entry.cache_gib, entry.max_length, slots, device)
    contexts = [context_bytes(config, length, cache_dtype) for config in configs.values()]
    caches = [cache_bytes(entry.cache_gib, device, context=size) for size in contexts]
    is_measured = entry.cache_gib is None and device.type == "cuda"  # half of what is free then
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return LazyModel(
        load=load,
        keep_seconds=parse_duration(entry.keep or DEFAULT_KEEP),
        device=device,
        weight_bytes=sum(loaded_bytes(path, dtype, quantize) for path in paths),
        cache_bytes=0 if is_measured else sum(caches),
    )


@dataclass(kw_only=True)
class ModelInfo:
    """What the server must store about a model, in whichever process it is loaded."""

    path: str
    config: ModelConfig
    methods: dict[str, MethodChoice]
    """Methods that requests may select, by name."""
    method: str
    roles: dict[str, str]
    """Roles of the engine's models, by model name."""
    folders: dict[str, str]
    """Public names of the folders of its models, if it is lazy."""


@dataclass(kw_only=True)
class HostedModel(ModelInfo):
    """A model that clients can select, or an adapter of one, and the client of its engine."""

    name: str
    entry: Entry
    engine: ModelClient
    text: TextCodec
    adapter: str | None = None

    def __post_init__(self) -> None:
        tokenizer = self.text.tokenizer
        longest = None if tokenizer is None else max(map(len, tokenizer.get_vocab()))
        self.max_prompt_characters = longest and longest * self.config.max_length
        """Upper bound for the characters of a prompt that fits; None without a tokenizer."""

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt with its answer: the model's, or what its caches hold."""
        return min([self.config.max_length, *(each.tokens for each in self.engine.cache_usage)])

    def token_bytes(self, token: int, previous: int | None) -> bytes:
        """Return the bytes of a token after another, which may hold part of a character."""
        tokenizer = self.text.tokenizer
        if tokenizer is None or token in self.text.silent_ids:
            return b""
        return tokenizer.token_bytes(token, previous) or b""

    def token_text(self, token: int, previous: int | None) -> str:
        return self.token_bytes(token, previous).decode("utf-8", "replace")

    def with_adapters(self) -> dict[str, HostedModel]:
        """Return the model and each of its adapters, by the names that clients use."""
        names = {adapter: f"{self.name}:{adapter}" for adapter in self.entry.adapters or ()}
        adapted = {name: replace(self, name=name, adapter=each) for each, name in names.items()}
        return {self.name: self, **adapted}

    def find_method_choice(self, name: str | None) -> MethodChoice:
        """Return a method by name, or the default method."""
        name = self.method if name in (None, AUTO_METHOD) else name
        if name not in self.methods:
            raise HttpError(
                400,
                f"outpace.method: must be one of {', '.join(self.methods)} for {self.name}, "
                f"got {name!r}",
                param="outpace.method",
            )
        return self.methods[name]

    def hide_paths(self, message: str) -> str:
        """Replace the paths of models in a message by their public names."""
        further = {path: name for name, path in self.entry.further.items()}
        adapters = {path: name for name, path in (self.entry.adapters or {}).items()}
        names = self.folders | further | adapters
        names |= dict.fromkeys((self.path, self.entry.path), self.name)
        # Longest first, since one path may be a prefix of another.
        for path in sorted(names, key=len, reverse=True):
            message = message.replace(path, names[path])
        return message

    def describe(self, created: int) -> dict[str, Any]:
        config, calls, thoughts = self.config, self.text.call_format, self.text.thought_format
        return {
            "id": self.name,
            "object": "model",
            "created": created,
            "owned_by": "outpace",
            "max_model_len": self.context_length,
            "context_length": self.context_length,
            "outpace": {
                "loaded": self.engine.is_loaded,
                "kind": config.kind.value,
                "family": config.family,
                "max_length": config.max_length,
                "max_tokens": self.entry.max_tokens,
                "adapter": self.adapter,
                "tools": calls and calls.name,
                "thoughts": thoughts and thoughts.name,
                "method": self.method,
                "methods": {
                    name: choice.describe(name == self.method)
                    for name, choice in self.methods.items()
                },
            },
        }


def load_served_model(entry: Entry) -> LLM:
    _, default, methods = available_methods(entry)
    _, method = methods[default].default_method
    llm = LLM(entry.path, method, **entry.load_options())
    for choice in methods.values():
        for _, method in method_variants(choice):
            for adapter in (None, *llm.adapters):
                llm.pair(method, adapter)
    return llm


def load_lazily(name: str, entry: Entry) -> LLM:
    with log_loading(name, entry.path):
        return load_served_model(entry)


def load_all_models(entries: Mapping[str, Entry]) -> dict[str, LLM | LazyModel]:
    """Load all models but lazy ones, after validating all of them."""
    check_all_models(entries)
    loaded: dict[str, LLM | LazyModel] = {}
    for name, entry in entries.items():
        if entry.lazy:
            with name_errors(name):
                loaded[name] = make_lazy_model(entry, partial(load_lazily, name, entry))
    for name, entry in entries.items():
        if not entry.lazy:
            with log_loading(name, entry.path), name_errors(name):
                loaded[name] = load_served_model(entry)
    return loaded


def check_all_models(entries: Mapping[str, Entry]) -> None:
    """Raise `ValueError` for models with unsuitable methods, without loading any."""
    for name, entry in entries.items():
        with name_errors(name):
            check_lazy_options(entry)
            PrefixStore.open(
                entry.prefix_dir,
                entry.prefix_gib,
                prefix_cache=entry.prefix_cache,
                tensor_parallel=entry.tensor_parallel,
            )
            available_methods(entry)


def use_default_draft(name: str, entry: Entry) -> Entry:
    """Return the entry of a model with the draft that decodes it by default, if one does."""
    # As in an `LLM`, for an entry that selects no method. A draft that is found is logged.
    if entry.method not in (None, AUTO_METHOD) or entry.methods or entry.options:
        return entry
    with name_errors(name):
        selector = entry.open_model()
        draft = selector.draft
    if draft is None:
        return entry
    LOG.info("%s", draft.describe(name))
    return entry.with_method(selector.native) if draft.is_default else entry


def describe_models(entries: Mapping[str, Entry]) -> dict[str, ModelInfo]:
    return {name: describe_model(name, entry) for name, entry in entries.items()}


def describe_model(name: str, entry: Entry) -> ModelInfo:
    config, default, methods = available_methods(entry)
    path = model_title(entry.path, entry.adapter)
    roles = {path: "target"}
    for choice in methods.values():
        for _, method in method_variants(choice):
            for role, further in method.model_names().items():
                roles.setdefault(further, role)
    places = {name: entry.path, **entry.further_models()} if entry.lazy else {}
    return ModelInfo(
        path=path,
        config=config,
        methods=methods,
        method=default,
        roles=roles,
        folders={str(resolve_checkpoint(place)): own for own, place in places.items()},
    )


def load_text(name: str, entry: Entry) -> TextCodec:
    """Return the tokenizer of a model, which tokenizes prompts in the server."""
    with name_errors(name):
        return TextCodec(
            model_title(entry.path, entry.adapter), Checkpoint(entry.path).load_tokenizer()
        )


@contextmanager
def name_errors(name: str) -> Iterator[None]:
    """Put the name of a model before the message of an error."""
    try:
        yield
    except ValueError as error:
        raise prefix_error(f"model {name}", error) from error
    except HttpError as error:
        raise ValueError(f"model {name}: {error}") from error


def default_method_name(config: ModelConfig, entry: Entry) -> str:
    """Return the name of the default method: the model's, or the first that the entry allows."""
    if entry.method not in (None, AUTO_METHOD):
        return entry.method
    usual = method_name(type(family_method(config)))
    allowed = entry.methods or [usual]
    return usual if usual in allowed else allowed[0]


def available_methods(entry: Entry) -> tuple[ModelConfig, str, dict[str, MethodChoice]]:
    """Return the configuration, the default method's name and all methods; loads no weights."""
    opened = entry.open_model()
    config = opened.config
    default = default_method_name(config, entry)
    methods = {each.name: each for each in method_choices(config, entry, default)}
    option_names = {name for each in methods.values() for name in each.options}
    if unknown := sorted(set(entry.limits) - option_names):
        raise OptionError(
            f"limits.{unknown[0]}", entry.limits[unknown[0]], "is no option of a method"
        )
    if default not in methods:
        raise OptionError("method", default, f"must be one of {', '.join(methods)}")
    for choice in methods.values():
        for _, method in method_variants(choice):
            opened.open_models(method)
    return config, default, methods

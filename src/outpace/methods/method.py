"""`Method`: frozen options and a generator that yields forwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from outpace.decoding import (
    CAUSAL,
    CAUSAL_KINDS,
    FULL,
    Decoding,
    Forward,
    Kind,
    LengthRange,
    OptionError,
    Pattern,
    Prediction,
    Read,
    Request,
    Target,
    Verify,
)
from outpace.field_types import PositiveInt, check_fields, list_options


def check_default(method: Any, *names: str, reason: str) -> None:
    """Raise `OptionError` for a set option that has no effect together with another."""
    options = list_options(method.__class__)
    for name in names:
        if (value := getattr(method, name)) != options[name].default:
            problem = f"cannot be used with {reason}, got {value!r}: leave it unset"
            raise OptionError(name, value, problem)


def decode_plain(
    request: Request, start: int, read: Read, pattern: Pattern = CAUSAL, window: int | None = 1
) -> Generator[Forward, Prediction, bool]:
    """Run the text from slot `start` on and commit one token; return whether to continue.

    While the controller is paused, the next tokens follow immediately. Each forward then recomputes
    the `window` last tokens, or all of them. Causal rows of tokens that a constraint forces run
    with it.
    """
    while True:
        n, forced = len(request), request.forced_tokens if pattern == CAUSAL else []
        out = yield Forward(
            ids=request.ids[start:] + forced,
            start=start,
            pattern=pattern,
            predict=range(n, n + len(forced) + 1) if forced else None,
            read=read,
        )
        if not request.commit(out.tokens, out.logprobs):
            return False
        if not request.is_paused:
            return True
        start = 0 if window is None else max(len(request) - window, 0)
        pattern = CAUSAL if pattern == CAUSAL else FULL


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A decoding algorithm with its options; the fields of a subclass are its command-line flags.

    Attributes:
        target_kinds: kinds of models that it decodes.
        roles: fields that name further models, such as a draft or a verifier, and their allowed
            kinds.
        tree_option: option with which its target runs trees, unless it is 1.
        default_sampling: sampling options that it uses where a request sets none.
    """

    target_kinds: ClassVar[tuple[Kind, ...]] = CAUSAL_KINDS
    roles: ClassVar[Mapping[str, tuple[Kind, ...]]] = {}
    tree_option: ClassVar[str | None] = None
    default_sampling: ClassVar[Mapping[str, float]] = {}

    def __post_init__(self) -> None:
        """Convert options to plain Python types; raise `OptionError` for other types."""
        check_fields(self)

    @abstractmethod
    def decode(self, request: Request) -> Decoding:
        """Yield forwards, receive their predictions, and commit tokens until `request` ends."""

    def check_request(self, request: Request) -> None:  # noqa: B027
        """Raise `OptionError` for a request that these options do not fit."""

    def slots_needed(self, prompt: int, max_tokens: int) -> int:
        """Return the number of cache slots that a request needs in each of its models."""
        return prompt + max_tokens

    @property
    def is_sequential(self) -> bool:
        """Whether it commits from left to right, each token conditioned on all before it."""
        return True

    @property
    def is_resumable(self) -> bool:
        """Whether `decode` generates the same tokens if it begins again after any of them.

        Then a request takes memory as its text grows, and may lose it to earlier requests: all its
        text is causal, and its noise depends on the slot alone. Otherwise its text depends on
        earlier forwards (a canvas, a pipeline, rejected drafts), and memory is reserved for all.
        """
        return False

    @property
    def sees_ahead(self) -> bool:
        """Whether holes see tokens that follow them."""
        return Kind.DIFFUSION in self.target_kinds or not self.is_sequential

    def length_range(self, target: Target, *, auto: bool) -> LengthRange | None:
        """Return the range of draft lengths that a `Pace` may choose from; None if fixed.

        `auto` is whether it may choose where the options give a fixed number.
        """
        return None

    def fit_target(self, target: Target) -> Method:
        """Return the method with the defaults that depend on its target."""
        return self

    def model_names(self) -> dict[str, str]:
        """Return the name of the model in each further role."""
        return {role: getattr(self, role) for role in self.roles}


@dataclass(frozen=True, slots=True)
class SharesText:
    """Annotation of an option that shares text between requests, which only an operator sets."""


DraftLength = PositiveInt | Literal["auto"]
"""A number of tokens, or "auto" for the measured optimum."""


def check_length(tokens: DraftLength, verify: Verify) -> None:
    """Raise `OptionError` for "auto" where it would change the output."""
    if tokens == "auto" and verify != "match":
        raise OptionError(
            "tokens", tokens, f"must be a number with verify={verify!r}, whose output depends on it"
        )


def check_least(least: int | None, **most: int | None) -> None:
    """Raise `OptionError` for an invalid lower bound of an option that a `Pace` varies."""
    ((name, value),) = most.items()
    if least is not None and (value is None or not 1 <= least <= value):
        raise OptionError("least", least, f"must be between 1 and {name}={value}, with both set")

"""Field types of requests: strict, with bounds for every text and number."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from outpace.api.declared import DeclaredOption

MAX_BODY_BYTES = 2 * 2**20
"""Maximum size of a request body in bytes."""

BoundedText = Annotated[str, Field(max_length=MAX_BODY_BYTES)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
ShortText = Annotated[str, Field(max_length=512)]


class StrictModel(BaseModel):
    """Model with exact types, no unknown fields and finite numbers only."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def requirement(message: str) -> str:
    """Return pydantic's message about a value, worded as a requirement."""
    return re.sub("(Input|String) should", "must", message)


def bounded_type(option: DeclaredOption) -> Any:
    """Return the type of an option with its bounds; optional if it is so in Python."""
    bounds: dict[str, Any] = dict(option.info.bounds or {})
    if option.kind == option.plain:
        return Annotated[option.plain, Field(**bounds)]
    return Annotated[option.plain, Field(**bounds)] | None


MAX_LOGIT_BIASES = 1024
"""Maximum number of tokens in a `logit_bias`."""


def check_biases(biases: object) -> object:
    """Reject too many biases before each is validated, which is slow."""
    if isinstance(biases, dict) and len(biases) > MAX_LOGIT_BIASES:
        raise ValueError(f"must have at most {MAX_LOGIT_BIASES} entries, got {len(biases)}")
    return biases


LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIASES),
    BeforeValidator(check_biases),
    AfterValidator(lambda biases: {int(token): bias for token, bias in biases.items()}),
]

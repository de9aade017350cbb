"""What fields of requests are made of: exact types, and a bound for every text and number."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from outpace.api.declared import Declared

BODY = 2 * 2**20
"""Most bytes of a request's body."""

Text = Annotated[str, Field(max_length=BODY)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Note = Annotated[str, Field(max_length=512)]


class Strict(BaseModel):
    """Exact types, no other fields, no number that is none."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def bounded(option: Declared) -> Any:
    """The type of an option, with its bounds; None is allowed where it is in Python."""
    bounds: dict[str, Any] = dict(option.info.bounds or {})
    if option.kind == option.plain:
        return Annotated[option.plain, Field(**bounds)]
    return Annotated[option.plain, Field(**bounds)] | None


MOST_BIASES = 1024
"""Tokens of a `logit_bias`."""


def check_biases(biases: object) -> object:
    """Refuse too many biases before each of them is checked, which takes long."""
    if isinstance(biases, dict) and len(biases) > MOST_BIASES:
        raise ValueError(f"it has {len(biases)} entries, and at most {MOST_BIASES} are allowed")
    return biases


Bias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MOST_BIASES),
    BeforeValidator(check_biases),
    AfterValidator(lambda biases: {int(token): bias for token, bias in biases.items()}),
]

"""What fields of requests are made of: exact types, and a bound for every text and number."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

BODY = 2 * 2**20
"""Most bytes of a request's body."""

Text = Annotated[str, Field(max_length=BODY)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Note = Annotated[str, Field(max_length=512)]


class Strict(BaseModel):
    """Exact types, no other fields, no number that is none."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

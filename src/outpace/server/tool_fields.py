"""Fields of requests that declare tools, and messages with calls of tools and their results."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from outpace.api.tools import FUNCTION_NAME, MAX_TOOLS
from outpace.errors import OptionError
from outpace.server.bounds import BoundedText, Name, StrictModel

MAX_CALLS = 128
"""Maximum number of calls in a message."""

TOOL_PARAM = re.compile(r"tools|tool_choice|parallel_tool_calls|messages.*tool_call")
"""Options and parts of messages whose names are paths of fields."""


class Function(StrictModel):
    """A function that a model may call. Its schema is always enforced, whatever `strict` is."""

    name: Annotated[str, Field(pattern=f"^{FUNCTION_NAME.pattern}$")]
    description: BoundedText | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool, of which there is one type."""

    type: Literal["function"]
    function: Function


class FunctionReference(StrictModel):
    """The name of a function."""

    name: Name


class NamedChoice(StrictModel):
    """The function to call."""

    type: Literal["function"]
    function: FunctionReference


class CalledFunction(StrictModel):
    """The function of a call, and its arguments as JSON."""

    name: Name
    arguments: BoundedText


class Call(StrictModel):
    """A call in a message of the assistant."""

    id: Name
    type: Literal["function"]
    function: CalledFunction


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice
Calls = Annotated[list[Call], Field(fail_fast=True, max_length=MAX_CALLS)]


def dotted_error(error: OptionError) -> OptionError:
    """Return an error that names a field by its path in a request: `tools.0` for `tools[0]`."""
    param = re.sub(r"\[(\d+)\]", r".\1", error.param)
    return OptionError(param, error.value, str(error).replace(error.param, param, 1))

"""Tools that a model may call: their declarations, and calls and results in a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outpace.api.chat_template import Message
from outpace.constraint.calls import GENERIC_FORMAT, CallFormat
from outpace.constraint.compiler import ConstraintRule
from outpace.constraint.loosened import drop_texts
from outpace.constraint.schema import check_schema_limits
from outpace.errors import OptionError

MAX_TOOLS = 128
"""Maximum number of tools of a request, as OpenAI's."""

MAX_LOOSE_TOOLS = 32
"""Maximum number of tools whose calls may be of a variant; each variant takes as much memory."""

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request that may call one."""

    tools: list[Message]
    """Declarations for the chat template."""
    choice: str
    """`auto` or `required`."""
    is_parallel: bool
    """Whether an answer may have several calls."""
    function: str | None = None
    """Name of the only function that may be called."""
    strict: tuple[str, ...] = ()
    """Names of the functions whose schemas are enforced, or refused where they cannot be."""
    text: ConstraintRule | None = None
    """Constraint on an answer without a call."""

    @property
    def instruction(self) -> str:
        """Text that declares the tools where the chat template does not."""
        functions = (json.dumps(tool["function"], ensure_ascii=False) for tool in self.tools)
        call = GENERIC_FORMAT.write_calls([("function", '{"argument": value}')])
        lines = ["You can call these functions:", *functions]
        return "\n".join([*lines, f"To call a function, answer with nothing but {call}"])

    @property
    def rule(self) -> str:
        """Source of the constraint, see `tools_dfa`."""
        is_named = self.function is not None
        declared = [(place, tool["function"]) for place, tool in enumerate(self.tools)]
        functions = [
            (function["name"], place, drop_texts(function["parameters"]))
            for place, function in declared
            if not is_named or function["name"] == self.function
        ]
        free, single = self.choice == "auto", is_named or not self.is_parallel
        rule = {"functions": functions, "free": free, "single": single, "loose": self.is_loose}
        rule["strict"] = self.strict
        return json.dumps(rule | {"text": self.text if free else None})

    @property
    def is_loose(self) -> bool:
        """Whether calls may be of a variant of the format."""
        is_free = self.choice == "auto" and self.text is None
        return is_free and len(self.tools) <= MAX_LOOSE_TOOLS

    def call_format(self, form: CallFormat | None) -> CallFormat | None:
        """Return the format of the answer's calls: that of the model with the declared names."""
        if form is None or not self.is_loose:
            return form
        return replace(form, names=tuple(tool["function"]["name"] for tool in self.tools))


def read_tool_use(tools: Any, choice: Any, parallel: Any) -> ToolUse | None:
    """Return the tools of a request; None if it has none, or may not call them."""
    if not isinstance(parallel, bool | None):
        raise OptionError("parallel_tool_calls", parallel, "must be true or false")
    listed = [] if tools is None else tools
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        raise OptionError("tools", tools, "must be a list of tools")
    if len(listed) > MAX_TOOLS:
        raise OptionError("tools", tools, f"at most {MAX_TOOLS} are allowed, got {len(listed)}")
    declared = [read_tool(f"tools[{place}]", tool) for place, tool in enumerate(listed)]
    names = [tool["function"]["name"] for tool in declared]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise OptionError(f"tools[{place}].function.name", name, "must not occur twice")
    word, function = read_choice(choice, names)
    if word == "none" or not declared:
        return None
    strict = tuple(
        name
        for name, tool in zip(names, listed, strict=True)
        if tool["function"].get("strict") is True
    )
    return ToolUse(declared, word, parallel is not False, function, strict)


def read_tool(param: str, tool: Any) -> Message:
    """Return the declaration of a tool in the form that chat templates expect."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise OptionError(param, tool, "must be a tool of type 'function'")
    function = tool.get("function")
    param += ".function"
    if not isinstance(function, Mapping):
        raise OptionError(param, function, "must be an object")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise OptionError(f"{param}.name", name, "must have 1 to 64 letters, digits, - and _")
    if not isinstance(parameters, dict | None):
        raise OptionError(f"{param}.parameters", parameters, "must be a JSON schema")
    found: Message = {"name": name}
    if (description := function.get("description")) is not None:
        if not isinstance(description, str):
            raise OptionError(f"{param}.description", description, "must be a string")
        found["description"] = description
    check_depth(f"{param}.parameters", parameters)
    found["parameters"] = parameters or NO_PARAMETERS
    return {"type": "function", "function": found}


def read_choice(choice: Any, names: Sequence[str]) -> tuple[str, str | None]:
    """Return `none`, `auto` or `required`, and the name of the function to call or None."""
    match choice:
        case None:
            return "auto", None
        case "none" | "auto":
            return str(choice), None
        case "required":
            if not names:
                raise OptionError("tool_choice", choice, "needs tools")
            return "required", None
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in names:
                known = ", ".join(names) or "none"
                raise OptionError("tool_choice", name, f"must name a function of tools ({known})")
            return "required", name
    raise OptionError("tool_choice", choice, "must be 'none', 'auto', 'required' or a function")


def check_depth(param: str, value: Any) -> None:
    """Raise `OptionError` for JSON that is nested too deeply, or has numbers that are too long."""
    try:
        check_schema_limits(value)
    except ValueError as error:
        raise OptionError(param, value, str(error)) from error


def link_calls(messages: Sequence[Message]) -> list[Message]:
    """Return messages with arguments of calls as objects, and results with their function."""
    found, names = [], dict[str, str]()
    for number, message in enumerate(messages):
        param = f"messages[{number}]"
        message, calls = {**message}, message.get("tool_calls")
        if not calls:
            message.pop("tool_calls", None)
        elif message["role"] != "assistant" or not isinstance(calls, list):
            raise OptionError(
                f"{param}.tool_calls", calls, "must be a list in a message of the assistant"
            )
        else:
            pairs = [(f"{param}.tool_calls[{place}]", call) for place, call in enumerate(calls)]
            message["tool_calls"] = [read_call(*pair) for pair in pairs]
            names = {}
            for (at, _), call in zip(pairs, message["tool_calls"], strict=True):
                # Results are matched to calls by id, so two calls of a turn cannot share one.
                if "id" in call and call["id"] in names:
                    raise OptionError(f"{at}.id", call["id"], "must not occur twice")
                names |= {call["id"]: call["function"]["name"]} if "id" in call else {}
        if message["role"] == "tool" and "tool_call_id" in message:
            if (key := message["tool_call_id"]) not in names:
                problem = "must be the id of a call without a result, in an earlier message"
                raise OptionError(f"{param}.tool_call_id", key, problem)
            message["name"] = names.pop(key)
        found.append(message)
    return found


def read_call(param: str, call: Any) -> Message:
    """Return a call with its arguments as an object, as chat templates expect it."""
    match call:
        case {"function": {"name": str(name), "arguments": arguments}}:
            pass
        case _:
            raise OptionError(param, call, "must have a function with name and arguments")
    param += ".function.arguments"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments.strip() or "{}")  # empty where there are none
        except (ValueError, RecursionError) as error:
            raise OptionError(param, arguments, f"is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise OptionError(param, arguments, "must be a JSON object")
    check_depth(param, arguments)
    found: Message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return found if call.get("id") is None else {"id": str(call["id"]), **found}

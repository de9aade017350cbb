"""Which fields of a request a method supports: what is refused, documented and listed."""

from __future__ import annotations

from outpace.methods import Method
from outpace.server.constrained import at
from outpace.server.fault import Fault
from outpace.server.schema import Asked

EVERY = (
    *("n", "max_tokens", "max_completion_tokens", "min_tokens"),
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("stop", "stop_token_ids", "ignore_eos", "logit_bias", "logprobs"),
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("chat_template_kwargs", "stream", "stream_options", "outpace.trace"),
)
"""What every method supports."""

SEQUENTIAL = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("structured_outputs.grammar", "guided_grammar"),
)
"""What needs tokens that are chosen from left to right: a penalty and a grammar look at all before
their slot."""

SCATTERED = ("outpace.provisional",)
"""What only methods have that choose tokens out of order."""

AHEAD = ("outpace.fill",)
"""What only methods have whose holes see what stands behind them."""

NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
"""Values with which a field says nothing."""


def fields_of(method: Method) -> tuple[str, ...]:
    """The fields that a method supports, beside those that say what is asked for."""
    ordered = SEQUENTIAL if method.sequential else SCATTERED
    return EVERY + ordered + (AHEAD if method.sees_ahead else ())


def check_fields(asked: Asked, method: Method) -> None:
    """Raise `Fault` that names a field which the method does not support."""
    supported = fields_of(method)
    for name in (*SEQUENTIAL, *SCATTERED, *AHEAD):
        used = at(asked, name) not in (None, NEUTRAL.get(name, False))
        if used and name not in supported:
            raise Fault(400, f"{name}: {type(method).__name__} does not support it", param=name)

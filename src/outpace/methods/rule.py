"""The option `rule`, shared by methods that fill holes by confidence."""

from __future__ import annotations

from typing import Annotated

from outpace.decoding import OptionError
from outpace.decoding.rules import Rule
from outpace.methods.bounds import check_fraction, check_not_negative
from outpace.methods.method import OneOf

FRECHET_MARGIN, KLASS_DIVERGENCE = 0.25, 0.01
"""δ of Fast-dLLM++ and ε of KLASS, as set by their authors."""

RuleOption = Annotated[
    Rule,
    OneOf(("confidence", "frechet", "klass", "credit")),
    "which holes are certain: by confidence; together (Fast-dLLM++); if also stable (KLASS); or "
    "with credit for earlier predictions (CreditDecoding)",
]
FrechetMargin = Annotated[float, "with rule='frechet', instead of threshold, the paper's margin δ"]
KlassDivergence = Annotated[
    float, "with rule='klass', the divergence between predictions that counts as stable"
]


def check_rule(
    rule: Rule,
    margin: float,
    divergence: float,
    threshold: float | None,
    **alternatives: float | None,
) -> None:
    """Raise `OptionError` for options that do not fit the rule.

    `alternatives` are options that replace the threshold, and so the rule.
    """
    check_fraction(frechet_margin=margin)
    check_not_negative(klass_divergence=divergence)
    own = {
        "frechet_margin": ("frechet", margin, FRECHET_MARGIN),
        "klass_divergence": ("klass", divergence, KLASS_DIVERGENCE),
    }
    for name, (needed, value, default) in own.items():
        if value != default and rule != needed:
            message = f"{name} needs rule={needed!r}, got rule={rule!r}"
            raise OptionError(name, value, message)
    if rule == "confidence":
        return
    for name, chosen in alternatives.items():
        if chosen is not None:
            message = f"{name} cannot be used with rule={rule!r}, got {chosen}: leave it unset"
            raise OptionError(name, chosen, message)
    if rule != "frechet" and threshold is None:
        message = f"threshold must be a number with rule={rule!r}, got None: set one, such as 0.9"
        raise OptionError("threshold", threshold, message)

"""Options of methods that fill the holes of which they are certain."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from outpace.decoding import OptionError
from outpace.decoding.rules import HoleHistory, Rule, start_history
from outpace.methods.method import Method, OneOf, check_default, check_fraction, check_not_negative

RULE_OPTIONS = {
    "entropy_limit": "entropy",
    "frechet_margin": "frechet",
    "klass_divergence": "klass",
}
"""Options that only one rule has."""

RULES_WITHOUT_THRESHOLD = ("entropy", "frechet")

THRESHOLD_OPTIONS = ("factor", "budget")
"""Options that some methods have instead of a threshold, without a rule."""


@dataclass(frozen=True, kw_only=True)
class CertainMethod(Method):
    """A method that fills the holes above a threshold, or those certain by another rule."""

    rule: Annotated[
        Rule,
        OneOf(("confidence", "entropy", "frechet", "klass", "credit")),
        "which holes are certain: by confidence; by entropy (dParallel, d3LLM); together "
        "(Fast-dLLM++); if also stable (KLASS); or with credit for earlier predictions "
        "(CreditDecoding)",
    ] = "confidence"
    entropy_limit: Annotated[
        float, "with rule='entropy', instead of threshold: holes of a lower entropy are certain"
    ] = 0.45
    frechet_margin: Annotated[
        float, "with rule='frechet', instead of threshold, the paper's margin δ"
    ] = 0.25
    klass_divergence: Annotated[
        float, "with rule='klass', the divergence between predictions that counts as stable"
    ] = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(entropy_limit=self.entropy_limit, klass_divergence=self.klass_divergence)
        check_fraction(frechet_margin=self.frechet_margin)
        for name, rule in RULE_OPTIONS.items():
            if (value := getattr(self, name)) != getattr(type(self), name) and self.rule != rule:
                message = f"{name} needs rule={rule!r}, got rule={self.rule!r}"
                raise OptionError(name, value, message)
        if self.rule == "confidence":
            return
        unused = [option.name for option in fields(self) if option.name in THRESHOLD_OPTIONS]
        check_default(self, *unused, reason=f"rule={self.rule!r}")
        if self.rule not in RULES_WITHOUT_THRESHOLD and getattr(self, "threshold", 1.0) is None:
            message = f"threshold must be a number with rule={self.rule!r}, got None"
            raise OptionError("threshold", None, message)

    def start_history(self) -> HoleHistory:
        """Return what the rule records of one request."""
        return start_history(self.rule, self.entropy_limit, self.klass_divergence)

"""Objectives by the name that a recipe gives them."""

from outpace.training.objective import Objective
from outpace.training.objectives.mdlm import MDLM
from outpace.training.objectives.sft import SFT
from outpace.training.objectives.wedlm import WeDLM

OBJECTIVES: dict[str, type[Objective]] = {
    "mdlm": MDLM,
    "sft": SFT,
    "wedlm": WeDLM,
}

__all__ = ["MDLM", "OBJECTIVES", "SFT", "WeDLM"]

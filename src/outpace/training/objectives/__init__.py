"""Objectives by the name that a recipe gives them."""

from outpace.training.objective import Objective
from outpace.training.objectives.dflash import DFlash
from outpace.training.objectives.mdlm import MDLM
from outpace.training.objectives.sft import SFT

OBJECTIVES: dict[str, type[Objective]] = {
    "dflash": DFlash,
    "mdlm": MDLM,
    "sft": SFT,
}

__all__ = ["MDLM", "OBJECTIVES", "SFT", "DFlash"]

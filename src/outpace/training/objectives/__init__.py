"""Training objectives, and their names in recipes."""

from outpace.training.objective import Objective
from outpace.training.objectives.block_diffusion import BlockDiffusion
from outpace.training.objectives.d2f import D2F
from outpace.training.objectives.dflash import DFlash
from outpace.training.objectives.eagle3 import Eagle3
from outpace.training.objectives.mdlm import MDLM
from outpace.training.objectives.sft import SFT
from outpace.training.objectives.wedlm import WeDLM

OBJECTIVES: dict[str, type[Objective]] = {
    "block_diffusion": BlockDiffusion,
    "d2f": D2F,
    "dflash": DFlash,
    "eagle3": Eagle3,
    "mdlm": MDLM,
    "sft": SFT,
    "wedlm": WeDLM,
}

__all__ = ["D2F", "MDLM", "OBJECTIVES", "SFT", "BlockDiffusion", "DFlash", "Eagle3", "WeDLM"]

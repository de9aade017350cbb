"""The families that load, by architecture; written by hand."""

from outpace.models.families.dflash import DFLASH
from outpace.models.families.dream import DREAM
from outpace.models.families.family import Family
from outpace.models.families.llada import LLADA
from outpace.models.families.llama import LLAMA
from outpace.models.families.qwen import QWEN2, QWEN3
from outpace.models.families.wedlm import WEDLM

FAMILIES: dict[str, Family] = {
    family.name: family for family in (DFLASH, DREAM, LLADA, LLAMA, QWEN2, QWEN3, WEDLM)
}

__all__ = ["FAMILIES", "Family"]

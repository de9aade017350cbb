"""The families that load, by architecture; written by hand."""

from outpace.models.families.dflash import DFLASH
from outpace.models.families.dream import DREAM
from outpace.models.families.eagle import EAGLE
from outpace.models.families.family import Family
from outpace.models.families.llada import LLADA
from outpace.models.families.llama import LLAMA
from outpace.models.families.mistral import MISTRAL, MIXTRAL
from outpace.models.families.olmo import OLMO2
from outpace.models.families.phi import PHI3
from outpace.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from outpace.models.families.smollm import SMOLLM3
from outpace.models.families.wedlm import WEDLM

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(DFLASH, DREAM, EAGLE, LLADA, LLAMA, MISTRAL, MIXTRAL, OLMO2, PHI3),
        *(QWEN2, QWEN3, QWEN3_MOE, SMOLLM3, WEDLM),
    )
}

__all__ = ["FAMILIES", "Family"]

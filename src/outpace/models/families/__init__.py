"""The families that load, by architecture; written by hand."""

from outpace.models.families.dflash import DFLASH
from outpace.models.families.dream import DREAM
from outpace.models.families.eagle import EAGLE
from outpace.models.families.family import Family
from outpace.models.families.fast_dllm_v2 import FAST_DLLM_V2
from outpace.models.families.gemma import GEMMA3
from outpace.models.families.gpt_oss import GPT_OSS
from outpace.models.families.llada import LLADA
from outpace.models.families.llada2 import LLADA2
from outpace.models.families.llama import LLAMA
from outpace.models.families.mistral import MISTRAL, MIXTRAL
from outpace.models.families.olmo import OLMO2, OLMO3
from outpace.models.families.phi import PHI3
from outpace.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from outpace.models.families.sdar import SDAR, SDAR_MOE
from outpace.models.families.smollm import SMOLLM3
from outpace.models.families.speculators import DFLASH_SPECULATOR, EAGLE_SPECULATOR
from outpace.models.families.wedlm import WEDLM

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(DFLASH, DFLASH_SPECULATOR, DREAM, EAGLE, EAGLE_SPECULATOR, FAST_DLLM_V2, GEMMA3, GPT_OSS),
        *(
            LLADA,
            LLADA2,
            LLAMA,
            MISTRAL,
            MIXTRAL,
            OLMO2,
            OLMO3,
            PHI3,
            QWEN2,
            QWEN3,
            QWEN3_MOE,
            SDAR,
            SDAR_MOE,
            SMOLLM3,
            WEDLM,
        ),
    )
}

__all__ = ["FAMILIES", "Family"]

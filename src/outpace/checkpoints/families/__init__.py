"""The supported model families, by name."""

from outpace.checkpoints.families.a2d import A2D, A2D_BLOCK
from outpace.checkpoints.families.dflash import DFLASH, DFLASH2, DSPARK
from outpace.checkpoints.families.dream import DREAM
from outpace.checkpoints.families.eagle import EAGLE
from outpace.checkpoints.families.family import Family
from outpace.checkpoints.families.gemma import GEMMA3, GEMMA4, GEMMA4_TEXT, GEMMA4_UNIFIED
from outpace.checkpoints.families.gpt_oss import GPT_OSS
from outpace.checkpoints.families.llada import LLADA, LLADA2, LLADA_MOE
from outpace.checkpoints.families.llama import LLAMA, SMOLLM3, STABLE_DIFFCODER
from outpace.checkpoints.families.mistral import MISTRAL, MIXTRAL
from outpace.checkpoints.families.nemotron import EFFICIENT_DLM, NEMOTRON_DIFFUSION
from outpace.checkpoints.families.olmo import OLMO2, OLMO3
from outpace.checkpoints.families.phi import PHI3
from outpace.checkpoints.families.qwen import FAST_DLLM_V2, QWEN2, QWEN3, QWEN3_MOE, SDLM
from outpace.checkpoints.families.qwen3_5 import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
    QWEN3_NEXT,
)
from outpace.checkpoints.families.sdar import SDAR, SDAR_MOE
from outpace.checkpoints.families.speculators import (
    DFLASH_SPECULATOR,
    DSPARK_SPECULATOR,
    EAGLE_SPECULATOR,
)
from outpace.checkpoints.families.wedlm import WEDLM
from outpace.models.config import ModelConfig

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(A2D, A2D_BLOCK, DFLASH, DFLASH2, DFLASH_SPECULATOR, DREAM, DSPARK),
        *(
            DSPARK_SPECULATOR,
            EAGLE,
            EAGLE_SPECULATOR,
            EFFICIENT_DLM,
            FAST_DLLM_V2,
            GEMMA3,
            GEMMA4,
            GEMMA4_TEXT,
        ),
        *(GEMMA4_UNIFIED, GPT_OSS, LLADA, LLADA2, LLADA_MOE, LLAMA),
        *(MISTRAL, MIXTRAL, NEMOTRON_DIFFUSION, OLMO2, OLMO3, PHI3, QWEN2, QWEN3),
        *(QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_MOE, QWEN3_NEXT),
        *(SDAR, SDAR_MOE, SDLM, SMOLLM3, STABLE_DIFFCODER, WEDLM),
    )
}


def config_family(config: ModelConfig) -> Family:
    """Return the family of a model, or the format of a head for multi-token prediction."""
    family = FAMILIES[config.family]
    return family.mtp if family.mtp is not None and config.is_head else family


__all__ = ["FAMILIES", "Family", "config_family"]

"""Random models of published shapes, and the methods that decode them as their papers set them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoints import Config
from gpu_parts.device import Where
from outpace.engine.runner import Runner
from outpace.lab.protocol import find_setting
from outpace.methods import (
    APD,
    Autoregressive,
    DFlash,
    Diffusion,
    Eagle,
    FastDLLM,
    LeftToRight,
    Method,
    Speculative,
    WeDLM,
)
from outpace.training.recipe import load_recipe

PUBLISHED = tomllib.loads(Path(__file__).with_name("shapes.toml").read_text("utf-8"))
TARGETS = {
    name: PUBLISHED[name.lower()] for name in ("Qwen3-8B", "Dream-7B", "LLaDA-8B", "WeDLM-8B")
}
EAGLE = {
    **TARGETS["Qwen3-8B"],
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32_000,
}
RECIPE = load_recipe("qwen3-8b-dflash")
SMALL = PUBLISHED["qwen2.5-0.5b"]
FURTHER: dict[type[Method], tuple[str, Config]] = {
    APD: ("verifier", SMALL),
    Speculative: ("draft", SMALL),
    DFlash: ("draft", dict(RECIPE.model.config)),
    Eagle: ("draft", EAGLE),
}
"""Role and shape of the further model of a method."""

TINY: Config = {
    "vocab_size": 1000,
    "draft_vocab_size": 500,
    "hidden_size": 64,
    "d_model": 64,
    "intermediate_size": 128,
    "mlp_hidden_size": 128,
    "num_hidden_layers": 8,
    "num_target_layers": 8,
    "n_layers": 8,
    "num_attention_heads": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "n_kv_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "max_sequence_length": 512,
    "mask_token_id": 998,
    "dflash_config": {"mask_token_id": 998, "target_layer_ids": [1, 3, 5]},
}
"""Sizes that no model exceeds when the program is tried out."""

IDS = 1000
"""Prompts have ids below, which mean nothing in any shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A method on a target.

    `published` is the point of a paper that says how many tokens a forward of the target brings,
    where one does.
    """

    target: str
    name: str
    method: Method
    published: Mapping[str, Any] | None = None

    @property
    def kept(self) -> float | None:
        """Tokens that a forward of the target brings, as published."""
        point = self.published or {}
        return point.get("acceptance_length", point.get("tokens_per_forward"))


def point(protocol: str, **marks: str) -> Mapping[str, Any]:
    """What a paper publishes of GSM8K and of what the marks say."""
    found = find_setting("gsm8k", protocol).published
    return next(each for each in found if marks.items() <= each.items())


def paper(protocol: str, **changes: Any) -> Method:
    """A method as a paper asks GSM8K with it, but for some options."""
    method = find_setting("gsm8k", protocol).build_method()
    assert method is not None
    return replace(method, **changes)


CASES = (
    Case(target="Qwen3-8B", name="autoregressive", method=Autoregressive()),
    Case(
        target="Qwen3-8B",
        name="DFlash",
        method=paper("dflash:8b"),
        published=point("dflash:8b", method="DFlash(16)"),
    ),
    Case(
        target="Qwen3-8B",
        name="EAGLE-3, 16 nodes",
        method=Eagle(draft="draft", nodes=16),
        published=point("dflash:8b", method="EAGLE-3(16)"),
    ),
    Case(
        target="Qwen3-8B", name="speculative, 8 tokens", method=Speculative(draft="draft", tokens=8)
    ),
    Case(
        target="Dream-7B",
        name="APD",
        # A ratio of 0 costs the same, and lets random weights keep one token of each forward.
        method=paper("apd:ratio-0.7", ratio=0.0),
        published=point("apd:ratio-0.7", place="Table 2"),
    ),
    Case(target="Dream-7B", name="left to right", method=LeftToRight(window=16, lookahead=16)),
    Case(target="Dream-7B", name="D2F", method=paper("d2f:dream")),
    Case(target="Dream-7B", name="Fast-dLLM", method=FastDLLM()),
    Case(target="LLaDA-8B", name="LLaDA's order", method=Diffusion(block=32)),
    Case(target="LLaDA-8B", name="D2F", method=paper("d2f:llada")),
    Case(target="LLaDA-8B", name="Fast-dLLM", method=FastDLLM()),
    Case(target="WeDLM-8B", name="autoregressive", method=Autoregressive()),
    Case(target="WeDLM-8B", name="WeDLM", method=paper("wedlm:speed")),
    Case(target="WeDLM-8B", name="WeDLM, verified", method=WeDLM(entropy=0.6, verify=True)),
)
"""Methods on a target of the shape that their papers have, as these set them where they say it."""


def runners_for(where: Where, target: Runner, method: Method) -> dict[str, Runner]:
    """Return a target and the further model of a method, by role."""
    if type(method) not in FURTHER:
        return {"target": target}
    role, published = FURTHER[type(method)]
    model = where.model(published, target.model)
    return {"target": target, role: where.runner(role, model, len(target.cache))}

"""A causal model of the zoo whose vocabulary has tokens to fill in the middle."""

from functools import cache

from outpace import LLM
from variants import Fields, write_variant

MARKS = {
    "<|im_start|>": "<|fim_prefix|>",
    "<|im_end|>": "<|fim_suffix|>",
    "<|mask|>": "<|fim_middle|>",
}
"""Tokens without a use in the model, and those of Qwen2.5-Coder in their place."""


@cache
def middle_model() -> str:
    def edit(config: Fields, tokenizer: Fields) -> None:
        for token in tokenizer["added_tokens"]:
            token["content"] = MARKS.get(token["content"], token["content"])
            token["special"] = token["special"] and token["content"] not in MARKS.values()
        config.pop("mask_token", None)
        config["additional_special_tokens"] = []

    return write_variant(
        "tiny-ar", "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}", edit
    )


@cache
def middle_llm() -> LLM:
    return LLM(middle_model())

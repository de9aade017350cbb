"""Models of the zoo whose chat template describes thoughts, some opened or closed in the prompt."""

from functools import cache

from outpace import LLM
from outpace.constraint.thoughts import THOUGHT_FORMATS
from variants import Fields, write_variant

THINK, CHANNELS = THOUGHT_FORMATS
CHAT = """{%- for m in messages %}{{- m.content + '\n' }}
{%- if m.reasoning_content is defined %}{{- '(' + m.reasoning_content + ')\n' }}{%- endif %}
{%- endfor %}"""
TEMPLATES = {
    "think": CHAT
    + """{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\n\n</think>\n\n' }}{%- endif %}""",
    "open": CHAT + "{{- '<think>\n' }}{%- if 0 %}{{- '</think>' }}{%- endif %}",
    "channels": CHAT.replace("reasoning_content", "thinking")
    + """{{- 'Reasoning: ' + reasoning_effort | default('medium') + '\n' }}{%- if 0 %}
{{- '<|channel|>analysis<|message|>' }}{{- '<|channel|>final<|message|>' }}{%- endif %}""",
}
"""What templates of Qwen3, DeepSeek-R1 and gpt-oss do. In the last, marks are special tokens."""

MARKS = {
    "think": ("<think>", "</think>", False),
    "open": ("<think>", "</think>", False),
    "channels": ("<|channel|>", "<|message|>", True),
}
"""Added tokens, and whether they are special."""

ENDS = {name: (CHANNELS if name == "channels" else THINK).end for name in TEMPLATES}


@cache
def thinking_model(name: str, form: str) -> str:
    """The folder of a model of the zoo with such a chat template."""
    *marks, special = MARKS[form]

    def edit(config: Fields, tokenizer: Fields) -> None:
        unused = [
            t for t in tokenizer["added_tokens"] if t["content"] in ("<|im_start|>", "<|im_end|>")
        ]
        for token, mark in zip(unused, marks, strict=True):
            token["content"], token["special"] = mark, special
        config["additional_special_tokens"] = list(marks) if special else []

    return write_variant(name, TEMPLATES[form], edit)


@cache
def thinking_llm(name: str, form: str) -> LLM:
    """A model of the zoo with such a template, loaded once."""
    return LLM(thinking_model(name, form))

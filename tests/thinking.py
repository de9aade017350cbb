"""Models of the zoo whose chat template describes thoughts, some opened or closed in the prompt."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from outpace import LLM
from outpace.checkpoints.load import ZOO_FOLDER
from outpace.constraint.thoughts import THOUGHT_FORMATS

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
    folder = Path(mkdtemp(prefix="outpace-")) / name
    folder.mkdir()
    for file in (ZOO_FOLDER / name).iterdir():
        (folder / file.name).symlink_to(file.resolve())
    vocabulary = ZOO_FOLDER / "vocabulary"
    config = json.loads((vocabulary / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATES[form]
    tokenizer = json.loads((vocabulary / "tokenizer.json").read_text())
    *marks, special = MARKS[form]
    unused = [
        t for t in tokenizer["added_tokens"] if t["content"] in ("<|im_start|>", "<|im_end|>")
    ]
    for token, mark in zip(unused, marks, strict=True):
        token["content"], token["special"] = mark, special
    config["additional_special_tokens"] = list(marks) if special else []
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


@cache
def thinking_llm(name: str, form: str) -> LLM:
    """A model of the zoo with such a template, loaded once."""
    return LLM(thinking_model(name, form))

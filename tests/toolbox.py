"""Models of the zoo whose chat template describes tools in a format, and a set of tools."""

from functools import cache
from typing import Any

from outpace import LLM
from variants import Fields, write_variant

TEMPLATES = {
    "tool_call": """{%- if tools %}{{- '<tools>' }}{%- for t in tools %}{{- t.function.name }}
{%- endfor %}{{- '</tools> <tool_call>{"name": ..., "arguments": ...}</tool_call>\n' }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'user' %}{{- m.content + '\n' }}
{%- elif m.role == 'assistant' and m.tool_calls %}{{- m.content }}{%- for c in m.tool_calls %}
{{- '\n<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}{%- endfor %}
{{- eos_token + '\n' }}{%- elif m.role == 'assistant' %}{{- m.content + eos_token + '\n' }}
{%- elif m.role == 'tool' %}{{- m.name + ': ' + m.content + '\n' }}{%- endif %}{%- endfor %}""",
    "array": """{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | length | string) + '\n' }}
{%- endif %}{%- for m in messages %}{%- if m.tool_calls is defined %}{{- '[TOOL_CALLS][' }}
{%- for c in m.tool_calls %}{%- if c.id | length != 9 %}{{- raise_exception('nine characters') }}
{%- endif %}{{- c.function | tojson }}{%- endfor %}{{- ']' + eos_token }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '\n' }}
{%- else %}{{- m.content + '\n' }}{%- endif %}{%- endfor %}""",
    "args": """{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | length | string) + '\n' }}
{%- endif %}{%- for m in messages %}{%- if m.tool_calls is defined %}
{%- for c in m.tool_calls %}{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}
{{- c.function.arguments | tojson }}{%- endfor %}{{- eos_token }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '\n' }}
{%- else %}{{- m.content + '\n' }}{%- endif %}{%- endfor %}""",
    "object": """{%- if tools %}{{- '{"name": function name, "parameters": dictionary}' }}
{%- endif %}{%- for m in messages %}
{%- if m.role == 'tool' %}{{- m.content + '\n' }}{%- elif m.tool_calls %}
{{- '{"name": "' + m.tool_calls[0].function.name + '"}\n' }}
{%- else %}{{- m.content + '\n' }}{%- endif %}{%- endfor %}""",
    "harmony": """{%- if tools %}{{- "Calls to these tools must go to the commentary channel: " }}
{{- "'functions'." }}{%- endif %}{%- for m in messages %}{%- if m.tool_calls is defined %}
{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name }}
{{- '<|channel|>commentary json<|message|>' + m.tool_calls[0].function.arguments | tojson }}
{{- '<|call|>' }}{%- elif m.role == 'tool' %}{{- '<|start|>functions.' + m.name }}
{{- ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
{%- else %}{{- m.content + '\n' }}{%- endif %}{%- endfor %}""",
    "generic": """{%- for m in messages %}{%- if m.role == 'user' %}{{- m.content + '\n' }}
{%- elif m.role == 'assistant' %}{{- m.content + eos_token + '\n' }}{%- endif %}{%- endfor %}""",
}
"""What templates of Hermes and Qwen, Mistral, Llama, gpt-oss, and without tools do, by the name of
the format.

Those of Mistral mark `[TOOL_CALLS]` and `[ARGS]` as special tokens, and that of gpt-oss
`<|channel|>` and `<|message|>`, as their tokenizers do.
"""
MARKS = {
    "array": ("[TOOL_CALLS]", "[ARGS]"),
    "args": ("[TOOL_CALLS]", "[ARGS]"),
    "harmony": ("<|channel|>", "<|message|>"),
}
"""Special tokens of a format."""
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
]
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}


@cache
def tool_model(name: str, form: str, more: str = "") -> str:
    """The folder of a model of the zoo with a chat template that describes tools, and `more`."""

    def edit(config: Fields, tokenizer: Fields) -> None:
        if form in MARKS:  # in place of tokens without a use
            marks = dict(zip(("<|im_start|>", "<|im_end|>"), MARKS[form], strict=True))
            for token in tokenizer["added_tokens"]:
                token["content"] = marks.get(token["content"], token["content"])
            config["additional_special_tokens"] = [*marks.values()]

    return write_variant(name, TEMPLATES[form] + more, edit)


@cache
def tool_llm(name: str, form: str) -> LLM:
    """A model of the zoo with such a template, loaded once."""
    return LLM(tool_model(name, form))

"""Limits on the work of chat templates: whatever a file has in it ends soon, with a reason."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outpace import OptionError
from outpace.api.rendering import render_template
from outpace.api.text import TextCodec
from outpace.checkpoints.checkpoint import load_tokenizer
from refusal import refuses

NAMESPACE = (
    "{%% set n = namespace(x=%s) %%}{%% for i in range(99) %%}{%% set n.x = %s %%}{%% endfor %%}"
)
LARGE = "{% set x = 'a' * 9000000 %}"
TOO_MANY_STEPS = {
    "loops": "{% for i in range(9999) %}" * 3 + "{% endfor %}" * 3,
    "test of a loop": "{% for i in range(9999) %}{% for j in range(9999) if 0 %}"
    + "{% endfor %}" * 2,
    "macro": "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}"
    + "a" * 10**5
    + "{% endmacro %}{{ f(40) }}",
    "text": "{% for i in range(99) %}{% for j in range(9999) %}" + "a" * 10**6 + "{% endfor %}" * 2,
    "comparison": LARGE + "{% for i in range(99999) %}{{ 'b' in x }}{% endfor %}",
    "filter": "{% for i in range(999) %}{{ range(9999)|select('odd')|list|length }}{% endfor %}",
}
TOO_MANY_CHARACTERS = {
    **{f"{x} {y}": NAMESPACE % (x, y) for x, y in {"'a'": "n.x ~ n.x", "'b'": "n.x + n.x"}.items()},
    **{f"list {y}": NAMESPACE % ("[1]", y) for y in ("[n.x, n.x]", "dict(a=n.x, b=n.x)")},
    "set": "{% set x = 'a' * 99 %}" + "{% set x %}{{ x }}{{ x }}{{ x }}{% endset %}" * 20,
    "arguments": "{% macro f() %}{% set n.x = varargs %}{% endmacro %}"
    + NAMESPACE % ("1", "0")
    + "{{ f(n.x, n.x) }}" * 99
    + "{{ n.x }}",
    "sum": "{{ ('a' * 9999)|map('list')|sum(start=[]) }}",
    "output": LARGE + "{% for i in range(9) %}{{ x }}{% endfor %}",
    "sums": LARGE + "{{ (" + " ~ ".join("x" * 20) + ")|length }}",
    **{
        form: f"{{{{ {form} }}}}"
        for form in (
            *(
                "'a' * 10**10",
                "[1] * 10**10",
                "10 ** (10 ** 9)",
                "'%1000000000d' % 1",
                "'%.999999999f' % 1",
            ),
            *(
                "'%999999999d'|format(1)",
                "'{:999999999}'.format(1)",
                "'{a:999999999}'.format_map({'a': 1})",
            ),
            *(
                "'a'|center(10**10)",
                "'a'.ljust(10**10)",
                "'a'.zfill(10**10)",
                "'\\t'.expandtabs(10**10)",
            ),
            *("'a\\nb'|indent(10**10)", "[1]|tojson(indent=10**10)", "[1]|batch(10**10, 1)|list"),
            *(
                "('a' * 9999)|replace('a', 'b' * 9999)",
                "range(9999)|join('a' * 9999)",
                "1|round(10**9)",
            ),
            *("('a' * 9999).join(range(9999)|map('string'))", "(5).to_bytes(10**10, 'big')"),
            *(
                "([0] * 9999)|map('default', 'a' * 9999, true)|join",
                "('a' * 9999).translate({97: 'b' * 9999})",
            ),
        )
    },
}
BROKEN = {
    "brackets": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "conditions": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "blocks": "{% for x in [1] %}" * 30 + "{% endfor %}" * 30,
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "widths": "{{ '%*d' % (10**10, 1) }}{{ '{:{}}'.format(1, 10**10) }}",
    "removed": "{{ lipsum(n=1000000) }}",
    "reason": "{{ raise_exception('a' * 10**6) }}",
}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        *((each, "steps") for each in TOO_MANY_STEPS.values()),
        *((each, "characters") for each in TOO_MANY_CHARACTERS.values()),
        *((each, "") for each in BROKEN.values()),
    ],
    ids=[*TOO_MANY_STEPS, *TOO_MANY_CHARACTERS, *BROKEN],
)
def test_templates_that_take_too_much_are_refused(template: str, reason: str) -> None:
    tokenizer = load_tokenizer("tiny-ar")
    assert tokenizer is not None
    tokenizer.chat_template = template
    with pytest.raises(OptionError, match=reason or None) as refused:
        TextCodec("own", tokenizer).encode("a")
    assert refused.value.param == "messages" and len(str(refused.value)) < 1200


COMMON = """\
{% macro item(x) %}[{{ varargs|join(x) }}{{ caller() if caller }}]{% endmacro %}
{%- for m in messages if m.role != 'x' %}{{ loop.index ~ '/' ~ loop.length }}
{{- m.content.strip()[1:] }}
{%- for n in messages[loop.index:] %}{{ '%02d' % loop.index0 }}{{ n.content|center(12) }}
{%- endfor %}{% set x %}{{ m|tojson(indent=2)|indent }}{% endset %}{{ x }}
{{- item('-', 1, *[2, 3]) }}{% endfor %}
{%- for k, v in messages[0]|dictsort %}{{ k + ':' + v }}{% else %}none{% endfor %}
{%- for b in messages|map(attribute='role')|batch(2, '.') %}{{ b }}{% endfor %}{{ 2 ** 70 % 7 }}
{%- for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}
{%- call item('+', 'a', 'b') %}{{ '{:>4}|{}'.format(1, {'a': [1]}) }}{% endcall %}
{{- (1, 'a') * 2 }}{{ x|replace('a', 'bc') }}{{ undefined }}"""


def test_templates_write_what_jinja_writes_within_the_limits() -> None:
    messages = [{"role": role, "content": f" {role} <b>\n"} for role in ("user", "assistant") * 9]
    usual = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    usual.filters["tojson"] = json.dumps
    want = usual.from_string(COMMON).render(messages=messages)
    assert render_template(COMMON, messages, {}) == want


def test_a_long_conversation_is_within_the_limits() -> None:
    template = """{% for m in messages %}{% set ns = namespace(n=0) %}
{%- for n in messages[loop.index:] %}
{%- if n.content == m.role %}{% set ns.n = ns.n + 1 %}{% endif %}
{%- endfor %}{{ m.role + ns.n|string + (m.content|trim) }}{% endfor %}
{{- tools|tojson(indent=4) }}"""
    messages = [{"role": "user", "content": "word " * 500}] * 300
    tools = [{"name": f"t{n}", "parameters": {"a": [{"b": n}] * 50}} for n in range(24)]
    assert len(render_template(template, messages, {"tools": tools})) > 750_000


def test_messages_nested_too_deep_are_refused_by_name() -> None:
    text = TextCodec("tiny-ar", load_tokenizer("tiny-ar"))
    for depth, allowed in ((100, True), (1000, False), (100_000, False)):
        value: object = "x"
        for _ in range(depth):
            value = [value]
        message = {"role": "user", "content": "a", "more": value}
        with nullcontext() if allowed else refuses("messages[0]"):
            text.encode([message])

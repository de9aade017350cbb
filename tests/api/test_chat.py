"""Conversations to token ids through chat templates, whatever text they contain."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chats import SHAPES, Shape, control, expected, tokenizer
from outpace import LLM
from outpace.api.text import TextCodec
from outpace.server.schema import Message
from refusal import refuses
from variants import write_variant

FRAGMENTS = [
    *("hi", "a<b", ">", "<", "<|", "|>", "im_end|>", " ", "  ", "\n", "\n\n", "\u4e2d"),
    *("\u2581\u2581", "{{ 1 }}", "[", "/INST]", "think>", "\U000f0000", "\ufffd"),
]


def conversations(name: str) -> st.SearchStrategy[list[dict[str, str]]]:
    shape = SHAPES[name]
    marks = [*shape.special, *shape.added]
    halves = [half for mark in marks for half in (mark[: len(mark) // 2], mark[len(mark) // 2 :])]
    word = st.one_of(*map(st.sampled_from, (FRAGMENTS, marks, halves)))
    content = st.lists(word, min_size=1, max_size=6).map("".join)

    def messages(texts: list[str], system: bool) -> list[dict[str, str]]:
        roles = ["user", "assistant"] * len(texts)
        if system and len(texts) > 1:
            roles = ["system", *roles]
        return [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]

    return st.builds(messages, st.lists(content, min_size=1, max_size=6), st.booleans())


def usual(name: str, messages: list[dict[str, str]]) -> list[int]:
    theirs = tokenizer(name).to_transformers()
    return list(theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


def compare(name: str, messages: list[dict[str, str]]) -> None:
    """Compare with the reference, and with transformers if no text contains an added token."""
    text = TextCodec(name, tokenizer(name))
    try:
        want = expected(name, messages)
    except Exception as error:
        with pytest.raises(ValueError, match="chat template"):
            text.encode(messages)
        assert "channel" in str(error)
        return
    found = text.encode(messages)
    assert found == want
    if not any(mark in m["content"] for m in messages for mark in control(name)):
        assert found == usual(name, messages)


@pytest.mark.parametrize("name", SHAPES)
@given(data=st.data())
def test_conversations(name: str, data: st.DataObject) -> None:
    compare(name, data.draw(conversations(name)))


HOISTS = """{%- if messages[0].role == 'system' %}{{- '[' + messages[0].content + ']' }}{%- endif %}
{%- for m in messages if m.role != 'system' %}{{- m.role + ':' + m.content }}{%- endfor %}"""
"""Leaves out all turns of the system but the first message, as some published templates do."""
ALTERNATES = HOISTS.replace(
    "{{- m.role",
    "{%- if m.role != ['user', 'assistant'][loop.index0 % 2] %}{{- raise_exception('order') }}"
    "{%- endif %}{{- m.role",
)
RENAMES = HOISTS.replace("m.role + ':'", "m.get('name', m.role) + ':'")


def turns(text: str) -> list[dict[str, str]]:
    """Messages of a text such as `s:A u:hi a:ho`, in which `_` is an empty line."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    pairs = (each.split(":") for each in text.split(" "))
    return [{"role": roles[role], "content": each.replace("_", "\n\n")} for role, each in pairs]


@pytest.mark.parametrize(
    ("name", "given", "joined"),
    [
        *(
            (name, *pair)
            for name in ("nemo", "hoists", "alternates")
            for pair in (
                ("s:A s:B u:hi", "s:A_B u:hi"),
                ("s:A u:hi a:ho s:B u:so", "s:A_B u:hi a:ho u:so"),
                ("u:hi a:ho s:A s:A u:so", "s:A_A u:hi a:ho u:so"),
            )
        ),
        *((name, "s:A s:B u:hi a:ho s:A", None) for name in ("qwen2.5", "phi3", "llama3.1")),
        ("alternates", "u:hi s:A u:so", "s:A u:hi_so"),
        ("hoists", "u:hi s:A u:so", "s:A u:hi u:so"),
    ],
)
def test_turns_of_the_system(
    name: str, given: str, joined: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each, template in {"hoists": HOISTS, "alternates": ALTERNATES}.items():
        monkeypatch.setitem(SHAPES, each, Shape(template, ("<a>", "<b>")))
    text = TextCodec(name, tokenizer(name))
    assert text.encode(turns(given)) == expected(name, turns(joined or given))
    if name == "alternates":
        with refuses("messages"):
            text.encode(turns("s:A s:B u:hi u:ho"))


def test_names_are_passed_to_templates_that_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "renames", Shape(RENAMES, ("<a>", "<b>")))
    text = TextCodec("renames", tokenizer("renames"))
    given = Message(role="user", content="hi", name="Omar <a>").template_message()
    ids = text.encode([given])
    shown = text.decode(ids, special=True).replace(" ", "")
    assert shown == "Omar\u0120<a>:hi" and text.special_ids["<a>"] not in ids


DECIDES = """{%- for m in messages %}{{- '<a>' }}{%- if '<b>' in m.content %}{{- 'other' }}
{%- endif %}{%- if m.content == '<b>' %}{{- 'else' }}{%- endif %}{{- m.content + '<b>' }}
{%- endfor %}"""
REREADS = """{%- for m in messages %}{%- set c = '<a>' + m.content %}
{{- 'x' + c.split('<a>')[-1] }}{%- endfor %}"""


def test_a_template_that_looks_for_a_special_token_is_followed_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SHAPES, "decides", Shape(DECIDES, ("<a>", "<b>")))
    text = TextCodec("decides", tokenizer("decides"))
    for content in ("hi <a>", "no <b> at all", "<b>, said", "<b>"):
        messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": content}]
        assert text.encode(messages) == expected("decides", messages)
    monkeypatch.setitem(SHAPES, "rereads", Shape(REREADS, ("<a>", "<b>")))
    text = TextCodec("rereads", tokenizer("rereads"))
    messages = [{"role": "user", "content": "1 < 2"}, {"role": "user", "content": "<b>"}]
    assert text.encode(messages[:1]) == expected("rereads", messages[:1])
    with refuses("messages[1]"):
        text.encode(messages)


WRITTEN = ("<a>", "<b>", "<c>")


@pytest.mark.parametrize(
    ("written", "content"),
    [
        ("'<a>' + m.content.split('<a>')[-1]", "drop<a>keep <b>"),
        ("m.content.split('<b>')[0] + '<b>'", "keep<b>drop <a>"),
        ("('<a>' if '<a><b>' in m.content else '') + m.content + '<b>'", "has <a><b> and <b>"),
        ("'<a>' + m.content.replace('<a><b>', '')", "is <a><b><b>"),
        ("'<a>' + m.content.replace(' ', '')", "be< b >come <b>"),
        ("m.content + '<a>' + m.content", "twice<a>"),
    ],
)
def test_tokens_of_the_template_stay_tokens_beside_what_it_drops(
    written: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = f"{{%- for m in messages %}}{{{{- {written} }}}}{{%- endfor %}}"
    name = f"drops {written}"
    monkeypatch.setitem(SHAPES, name, Shape(template, WRITTEN))
    messages = [{"role": "user", "content": content}]
    ids = TextCodec(name, tokenizer(name)).encode(messages)
    assert ids == expected(name, messages)
    own = [each for each in ids if each in TextCodec(name, tokenizer(name)).silent_ids]
    assert own


LITERALS = ["<t>", "</t>", "<s>", "</s>", "<|a|>", "<", "x", "|>", "<t>x", "a<"]
PIECES = [*LITERALS, "<fim>", "y", " ", "\n", "s>", "</", "<|a", "t>"]


def random_expression(draw: Random, depth: int = 0) -> str:
    word = draw.choice(LITERALS)
    if depth > 2 or draw.random() < 0.1:
        return "c"
    inner = random_expression(draw, depth + 1)
    other = random_expression(draw, depth + 1)
    return draw.choice(
        [
            f"{inner}.strip()",
            f"{inner}.split('{word}')[{draw.choice([0, -1])}]",
            f"{inner}.replace('{word}', '{draw.choice(['', 'y', ' '])}')",
            f"(({inner}) if '{word}' in c else ({other}))",
            f"({inner} + '{word}' + {other})",
        ]
    )


def random_template(draw: Random) -> str:
    words = [draw.choice(["'<s>' + ", "'<|a|>' + ", "'<t>' + ", ""]) for _ in range(2)]
    user, answer = (word + random_expression(draw) for word in words)
    return (
        "{%- for m in messages %}{%- set c = m.content %}{%- if m.role == 'user' %}"
        f"{{{{- '<s>' + {user} + '</s>' }}}}{{%- else %}}{{{{- '<|a|>' + {answer} + '</s>' }}}}"
        "{%- endif %}{%- endfor %}{{- '<|a|><t>' }}"
    )


@pytest.mark.nightly
def test_random_templates_never_give_a_wrong_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Random(0)
    special, added = ("<s>", "</s>", "<|a|>"), ("<t>", "</t>", "<fim>")
    monkeypatch.setitem(SHAPES, "any", Shape("<s><t>", special, added))
    right = refused = 0
    for number in range(60):
        name = f"any {number}"
        shape = Shape(random_template(draw), special, added, like="any")
        monkeypatch.setitem(SHAPES, name, shape)
        text = TextCodec(name, tokenizer(name))
        for _ in range(10):
            roles = ["user", "assistant", "user"][: draw.randrange(1, 4)]
            messages = [{"role": r, "content": "".join(draw.choices(PIECES, k=4))} for r in roles]
            try:
                found = text.encode(messages)
            except ValueError as error:
                assert re.match(r"messages\[\d\]", str(error))
                refused += 1
            else:
                assert found == expected(name, messages), (shape.template, messages)
                right += 1
    assert right > 3 * refused > 0


def test_control_tokens_in_variables_and_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    written = "'<a>' + m.role + (extra or '') + m.content"
    template = f"{{%- for m in messages %}}{{{{- {written} }}}}{{%- endfor %}}"
    monkeypatch.setitem(SHAPES, "variable", Shape(template, ("<a>", "<b>")))
    text = TextCodec("variable", tokenizer("variable"))
    ids = text.encode([{"role": "user", "content": "hi"}], template={"extra": "<b>"})
    assert text.tokenizer.backend_tokenizer.token_to_id("<b>") not in ids
    with refuses("messages[0].role"):
        text.encode([{"role": "<a>", "content": "hi"}])


ENDS = {
    "qwen2.5": {"<|im_end|>"},
    "qwen3": {"<|im_end|>"},
    "llama3.1": {"<|eot_id|>"},
    "nemo": {"</s>"},
    "gemma3": {"<end_of_turn>"},
    "phi3": {"<|end|>"},
    "gpt-oss": set(),  # its token also ends thoughts
}
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}END\n{% endfor %}"


@pytest.mark.parametrize("name", ENDS)
def test_the_token_after_an_answer_ends_it(name: str) -> None:
    template = SHAPES[name].template + "{# <|channel|>analysis<|message|> #}"
    found = replace(tokenizer(name), chat_template=template)
    ids = TextCodec(name, found).turn_ends
    assert {*found.convert_ids_to_tokens([*ids])} == ENDS[name]


@pytest.mark.parametrize(
    ("end", "ends"),
    [("<|im_end|>", True), ("[end]", True), ("END", False), ("", False), ("{{ 1 / 0 }}", False)],
)
def test_answers_end_at_the_token_of_the_template(end: str, ends: bool) -> None:
    def edit(config: Any, content: Any) -> None:
        added = {"id": 1024, "content": "[end]", "special": False, "normalized": False}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        content["added_tokens"].append({**added, **flags})

    llm = LLM(write_variant("tiny-ar", TURN.replace("END", end), edit), cache_gib=0.01)
    token = llm.text.tokenizer.backend_tokenizer.token_to_id(end)
    assert llm.eos == frozenset(llm.config.eos) | ({token} if ends else set())
    if end == "<|im_end|>":
        (output,) = llm.generate([5, 6], logit_bias={token: 100.0}, max_tokens=9)
        assert (output.finish_reason, output.text) == ("stop", "")

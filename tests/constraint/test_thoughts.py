"""Automata of answers after thoughts, and their limit, with every method."""

import json
from typing import Any

import pytest

from constrained import CASES
from outpace.api.options import Options
from outpace.constraint.dfa import Dfa, dfa_accepts
from outpace.constraint.thoughts import (
    THOUGHT_FORMATS,
    ThoughtFormat,
    add_thoughts,
    find_thought_format,
    free_text_dfa,
)
from outpace.methods import Method
from refusal import refuses
from thinking import ENDS, MARKS, TEMPLATES, thinking_llm

every = pytest.mark.parametrize("form", THOUGHT_FORMATS, ids=lambda form: form.name)
QUESTION = "Tom has 3 apples."
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@every
def test_answer_follows_thoughts(form: ThoughtFormat) -> None:
    dfa = add_thoughts(Dfa.from_pattern("[0-9]+"), form)
    after = [form.end, form.end + "\n", form.end + "\n\n"]
    thoughts = ["", "a", "é\n\n", form.end[:-1], form.end[:3] * 3, form.begin, "7"]
    for answer in ("7", "42"):
        assert dfa_accepts(dfa, (form.direct + answer).encode())
        assert not dfa_accepts(dfa, (form.direct + "\n" + answer).encode())
        for thought in thoughts:
            for gap in after:
                text = form.begin + thought + gap
                assert dfa_accepts(dfa, (text + answer).encode()), text
                assert not dfa_accepts(dfa, text.encode())
                assert not dfa_accepts(dfa, (text + answer + " ").encode())
        assert not dfa_accepts(dfa, (form.begin + "a" + form.end + "\n\n\n" + answer).encode())
    assert not dfa_accepts(dfa, (form.begin + "7").encode())
    assert dfa_accepts(dfa, b"7") == (not form.direct)


@every
def test_free_text_follows_thoughts(form: ThoughtFormat) -> None:
    dfa = add_thoughts(free_text_dfa(), form)
    texts = ["", "a", "\n\n\n", form.end, "{"]
    for text in texts:
        whole = form.begin + "b" + form.end + text
        assert dfa_accepts(dfa, (form.direct + text).encode())
        assert dfa_accepts(dfa, whole.encode())
        assert dfa.walk(whole.encode()) < dfa.num_open
        assert not dfa_accepts(dfa, (form.begin + text.replace(form.end, "")).encode())


def test_template_describes_format() -> None:
    for name, template in TEMPLATES.items():
        found = find_thought_format(template)
        assert found is not None and found.name == ("channels" if name == "channels" else "think")
        assert find_thought_format({"default": "x", "tool_use": template}) is found
    for template in (None, "", "<think>", "{{ messages }}"):
        assert find_thought_format(template) is None


def check_thoughts(
    model: str, method: Method | None, form: str, most: int | None, **options: Any
) -> None:
    """Assert that thoughts end in time, and that an answer follows that the schema allows."""
    llm = thinking_llm(model, form)
    usual: Options = {"max_tokens": 40, "method": method, "schema": SCHEMA, "seed": 5}
    (output,) = llm.generate(QUESTION, max_reasoning_tokens=most, **{**usual, **options})
    assert json.loads(output.content).keys() == {"n"}
    assert output.finish_reason == "stop"
    before, end, _ = output.text.partition(ENDS[form])
    if end and most is not None:
        assert llm.text.tokenizer is not None
        closed = [llm.text.decode(output.ids[:n], special=True) for n in range(len(output.ids))]
        taken = next(n for n, text in enumerate(closed) if end in text)
        closing = len(llm.text.tokenizer(end, add_special_tokens=False).input_ids)
        assert taken <= most + closing
    assert end or form != "open"
    assert output.reasoning in before


@pytest.mark.parametrize(
    ("model", "form"),
    [
        ("tiny-ar", "think"),
        ("tiny-dream", "open"),
        ("tiny-block", "channels"),
        ("tiny-wedlm", "open"),
    ],
)
def test_thoughts_end_in_time(model: str, form: str) -> None:
    llm = thinking_llm(model, form)
    assert llm.text.tokenizer is not None
    token = llm.text.tokenizer.backend_tokenizer.token_to_id(MARKS[form][0])
    assert isinstance(token, int)
    check_thoughts(model, None, form, 0, temperature=1)
    for most in (5, None):
        check_thoughts(model, None, form, most, temperature=0, logit_bias={token: 8})


ALONE = [
    (model, method) for model, method in CASES if not set(method.roles) & {"draft", "verifier"}
]
"""Further models have the vocabulary of the zoo, without the marks."""


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "method"), ALONE, ids=str)
def test_every_method_ends_thoughts(model: str, method: Method) -> None:
    for form, temperature in (("open", 0), ("channels", 1)):
        check_thoughts(model, method, form, 6, temperature=temperature)


def test_limit_without_constraint() -> None:
    llm = thinking_llm("tiny-ar", "open")
    limits: list[int | None] = [0, 3, 10, None]
    texts = []
    for most in limits:
        (output,) = llm.generate(QUESTION, max_tokens=40, max_reasoning_tokens=most)
        texts.append(output.text)
        assert (output.content != "") == (most is not None)
        assert output.text.startswith(output.reasoning)
    assert texts[0].startswith("</think>") and len(set(texts)) == 4
    (long,) = llm.generate(QUESTION, max_tokens=40, max_reasoning_tokens=10**6)
    assert "</think>" in long.text  # thoughts end before the answer reaches its limit


def test_grammar_cannot_follow_open_thoughts() -> None:
    grammar = 'start: "7" "8"'
    (output,) = thinking_llm("tiny-ar", "think").generate(QUESTION, grammar=grammar)
    assert output.text == output.content == "78"
    for form, most in (("open", None), ("think", 5)):
        llm = thinking_llm("tiny-ar", form)
        with refuses("grammar"):
            llm.generate(QUESTION, grammar=grammar, max_reasoning_tokens=most)

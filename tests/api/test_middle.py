"""Answers between a prompt and a suffix: by a model's own tokens, and by infilling."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from middles import middle_llm
from outpace import LLM, Hole, OptionError
from outpace.api.text import MIDDLE_FORMATS, MiddleFormat, find_middle_tokens
from outpace.methods import Diffusion, LeftToRight, Method, WeDLM

PREFIX, SUFFIX = "Tom has 3+4=<<3+4=", ">>7 apples."
QWEN = MIDDLE_FORMATS[0]


@pytest.mark.parametrize("form", MIDDLE_FORMATS, ids=lambda form: form.prefix)
def test_tokens_are_found_by_name(form: MiddleFormat) -> None:
    names = [form.prefix, form.suffix, form.middle, form.ends[0], "x"]
    vocabulary = {name: 10 + number for number, name in enumerate(names)}
    found = find_middle_tokens(SimpleNamespace(get_vocab=lambda: vocabulary))  # type: ignore[arg-type]
    assert found is not None
    assert found.marks == (10, 11, 12) and found.ends == {10, 11, 12, 13}
    for name in names[:3]:
        less = {key: value for key, value in vocabulary.items() if key != name}
        tokenizer: Any = SimpleNamespace(get_vocab=lambda found=less: found)
        assert find_middle_tokens(tokenizer) is None


def test_prompt_and_ends() -> None:
    llm = middle_llm()
    tokens, plain = llm.text.middle_tokens, llm.text.encode_plain
    assert tokens is not None
    before, after, answer = tokens.marks
    names = llm.text.tokenizer.convert_ids_to_tokens([*tokens.marks])  # type: ignore[union-attr]
    assert names == [QWEN.prefix, QWEN.suffix, QWEN.middle]
    ids = llm.text.encode(PREFIX + QWEN.middle, suffix=SUFFIX)
    assert ids == [before, *plain(PREFIX + QWEN.middle), after, *plain(SUFFIX), answer]
    assert llm.text.encode("", suffix="") == [before, after, answer]
    ids = llm.text.encode(PREFIX, suffix=SUFFIX)
    options: Any = {"max_tokens": 12, "temperature": 0.8, "seed": 4}
    (output,) = llm.generate(PREFIX, suffix=SUFFIX, **options)
    (expected,) = llm.generate([ids], stop_ids=[*tokens.ends], **options)
    assert output.ids == expected.ids and output.text == expected.text
    assert output.prompt_tokens == output.input_tokens == len(ids)
    assert "".join(llm.stream(PREFIX, suffix=SUFFIX, **options)) == output.text
    for end in tokens.ends:
        (output,) = llm.generate(PREFIX, suffix=SUFFIX, logit_bias={end: 1000.0}, max_tokens=5)
        assert output.ids == [] and output.finish_reason == "stop"
    (output,) = llm.generate(PREFIX, suffix=SUFFIX, regex="[0-9]{2}", max_tokens=5)
    assert len(output.text) == 2 and output.text.isdigit()


CASES = [
    ("tiny-dream", Diffusion()),
    ("tiny-dream", LeftToRight()),
    ("tiny-wedlm", WeDLM()),
    ("tiny-block", None),
]


@pytest.mark.parametrize(("name", "method"), CASES, ids=str)
def test_infilled_answer_is_that_of_a_hole(name: str, method: Method | None) -> None:
    llm = LLM(name)
    options: Any = {"method": method, "temperature": 0.7, "seed": 2, "logprobs": True}
    filled = llm.fill([PREFIX, Hole(up_to=6), SUFFIX], **options)
    asked: Any = [
        (PREFIX, {**options, "suffix": SUFFIX, "max_tokens": 6}),
        (PREFIX, {**options, "max_tokens": 6}),
        (PREFIX, {**options, "suffix": SUFFIX, "max_tokens": 6, "stop": "zebra"}),
    ]
    outputs = dict(llm.serve(asked))
    for output in (outputs[0], outputs[2]):
        assert filled.holes == (output.text,) and output.holes is None
        begin = len(llm.text.encode(PREFIX, raw=True))
        length = filled.chosen
        assert output.ids == filled.ids[begin : begin + length] and output.chosen == length
        assert filled.logprobs is not None
        assert output.logprobs == filled.logprobs[begin : begin + length]
        assert output.finish_reason == ("length" if length == 6 else "stop")
        assert output.prompt_tokens == begin
        assert output.input_tokens == filled.prompt_tokens + filled.given
    options |= {"suffix": SUFFIX, "max_tokens": 6}
    assert "".join(llm.stream(PREFIX, **options)) == outputs[0].text
    ids = llm.text.encode(PREFIX, raw=True)
    assert llm.generate([ids], **options)[0].ids == outputs[0].ids


def test_stop_string_ends_an_infilled_answer() -> None:
    llm = LLM("tiny-dream")
    options: Any = {"suffix": SUFFIX, "max_tokens": 6, "temperature": 0.7, "seed": 2}
    (whole,) = llm.generate(PREFIX, **options)
    assert len(whole.text) > 1
    mark = whole.text[-1]
    (output,) = llm.generate(PREFIX, stop=mark, **options)
    assert output.text == whole.text[: whole.text.index(mark)] and output.finish_reason == "stop"
    assert output.stop_string == mark


LONG = {"suffix": SUFFIX, "max_tokens": 10**6}


@pytest.mark.parametrize(
    ("name", "prompt", "param", "options"),
    [
        ("tiny-ar", PREFIX, "suffix", {"suffix": SUFFIX}),
        ("tiny-wedlm", PREFIX, "suffix", {"suffix": SUFFIX, "method": "autoregressive"}),
        ("tiny-dream", PREFIX, "suffix", {"suffix": 5}),
        ("tiny-dream", PREFIX, "suffix", {"suffix": "\ud800"}),
        ("tiny-dream", PREFIX, "max_tokens", LONG),
        ("tiny-dream", "", "prompt", {"suffix": SUFFIX}),
        ("tiny-dream", [{"role": "user", "content": "x"}], "suffix", {"suffix": SUFFIX}),
        ("tiny-dream", PREFIX, "regex", {"suffix": SUFFIX, "regex": "a"}),
        ("tiny-dream", PREFIX, "min_tokens", {"suffix": SUFFIX, "min_tokens": 1}),
        ("tiny-dream", PREFIX, "stop_ids", {"suffix": SUFFIX, "stop_ids": np.array([5, 6])}),
        ("tiny-dream", PREFIX, "cloze", {"suffix": SUFFIX, "cloze": ["a", Hole(2)]}),
        ("tiny-dream", PREFIX, "template", {"suffix": SUFFIX, "template": {"x": 1}}),
    ],
)
def test_invalid_option_is_named(name: str, prompt: Any, param: str, options: Any) -> None:
    with pytest.raises(OptionError) as caught:
        LLM(name).generate([prompt], **options)
    assert caught.value.param == param
    if param == "suffix" and name != "tiny-dream":
        assert name in str(caught.value)

"""Each request option with an invalid value: the error names it, in Python and over HTTP."""

from typing import Any, NamedTuple

import pytest
from starlette.testclient import TestClient

from asking import chat, completion, refused
from outpace import LLM, Hole, OptionError
from outpace.errors import ContextError
from outpace.server.engine_process import portable_error

FAR = 10**6
"""A token id outside the zoo's vocabulary."""


class Case(NamedTuple):
    """An option, an invalid value, the name in the error, and the request body."""

    option: str
    value: Any
    param: str
    body: dict[str, Any] | None
    field: str | None


def case(option: str, value: Any, param: str | None = None, **body: Any) -> Case:
    """Case of an option whose field has the same name; `body` overrides the JSON value."""
    return Case(option, value, param or option, chat(**(body or {option: value})), option)


def named(schema: Any) -> dict[str, Any]:
    """A response format with a schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


SCHEMA, OPTIONS = {"type": "teapot"}, {"tokens": 0}
DRAFTED = ("speculative", {"draft": "tiny-aux", **OPTIONS})
FILLED = {"method": "diffusion", "fill": True}

CASES = [
    Case("method", "nothing", "method", chat(outpace={"method": "nothing"}), "outpace.method"),
    Case(
        *("method", DRAFTED, "tokens"),
        chat(outpace={"method": "speculative", "options": OPTIONS}),
        "outpace.options.tokens",
    ),
    case("max_tokens", 0),
    case("temperature", -1),
    case("top_p", 1.5),
    case("top_k", 0),
    case("min_p", 2),
    case("seed", 1.5),
    case("stop", 5),
    Case("stop_ids", [FAR], "stop_ids", chat(stop_token_ids=[FAR]), "stop_token_ids"),
    case("ignore_eos", 1),
    case("min_tokens", -1),
    case("min_tokens", 9, max_tokens=8, min_tokens=9),
    case("presence_penalty", "1"),
    case("frequency_penalty", "1"),
    case("repetition_penalty", 0),
    case("logit_bias", {FAR: 1}),
    case("logit_bias", 5),
    Case("raw", 1, "raw", None, None),
    Case(
        *("template", {"x": 1}, "template.x"),
        chat(chat_template_kwargs={"x": 1}),
        "chat_template_kwargs",
    ),
    case("reasoning_effort", "much"),
    case("max_reasoning_tokens", -1),
    case("max_reasoning_tokens", 5),
    case("logprobs", "x"),
    case("prompt_logprobs", -1),
    Case("suffix", 5, "suffix", completion("a", suffix=5), "suffix"),
    Case("adapter", "x", "adapter", None, None),
    case("top_logprobs", 2),
    case("top_logprobs", 21, logprobs=True, top_logprobs=21),
    Case("schema", SCHEMA, "schema", chat(guided_json=SCHEMA), "guided_json"),
    Case(
        *("schema", SCHEMA, "schema"),
        chat(response_format=named(SCHEMA)),
        "response_format.json_schema.schema",
    ),
    Case("regex", "(", "regex", chat(guided_regex="("), "guided_regex"),
    Case("choices", [], "choices", chat(guided_choice=[]), "guided_choice"),
    case("tools", 5),
    case("tool_choice", "auto"),
    case("parallel_tool_calls", 1),
    Case("grammar", "start: x", "grammar", chat(guided_grammar="start: x"), "guided_grammar"),
]
"""Cases for the model `tiny-ar`."""

CLOZES: list[tuple[Any, str, str]] = [
    (["a"], "cloze", "a"),
    (["a", Hole(2, regex="[")], "holes[0]", "a{{2:[}}"),
    (["a", Hole(2), "b", Hole(3, regex="x{12}")], "holes[1]", "a{{2}}b{{3:x{12}}}"),
]
"""Templates for `tiny-dream`: parts, the name in the error, and the text of a request."""

PROMPTS: list[tuple[Any, str, dict[str, Any], str]] = [
    ("", "prompt", completion(""), "prompt"),
    ([FAR], "prompt", completion([FAR]), "prompt"),
    ([5, 1.5], "prompt[1]", completion([5, 1.5]), "prompt.1"),
    ([5] * 600, "prompt", completion([5] * 600), "prompt"),
    ("x" * 500_000, "prompt", chat("x" * 500_000), "messages"),
    (
        [{"role": "user", "content": "a"}, {"role": "user", "content": 5}],
        "messages[1].content",
        chat(5),
        "messages.0.content",
    ),
    ([{"role": "user"}], "messages[0].content", chat(None), "messages.0.content"),
    (["a", 5], "messages[0]", completion(["a", 5]), "prompt.1"),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    """A loaded model."""
    return LLM("tiny-ar", cache_gib=0.1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.option}-{case.value!r}")
def test_error_of_an_option_names_it(llm: LLM, client: TestClient, case: Case) -> None:
    more = {"max_tokens": 8} if case.option == "min_tokens" else {}
    with pytest.raises(OptionError) as error:
        llm.generate("hi", **{**more, case.option: case.value})
    assert error.value.param == case.param
    assert str(error.value).startswith(case.param)
    if case.body is not None:
        told = refused(client, case.body)
        assert told["param"] == case.field
        assert told["message"].startswith(f"{case.field}: ")


@pytest.mark.parametrize("cloze", CLOZES, ids=lambda cloze: cloze[1])
def test_error_of_a_hole_names_it(client: TestClient, cloze: tuple[Any, str, str]) -> None:
    parts, param, text = cloze
    dream = LLM("tiny-dream", cache_gib=0.1)
    with pytest.raises(OptionError) as error:
        dream.fill(parts)
    assert error.value.param == param and str(error.value).startswith(param)
    body = completion(text, outpace=FILLED) | {"model": "tiny-dream"}
    assert refused(client, body)["param"] == "prompt"


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: str(prompt[0])[:30])
def test_error_of_a_prompt_names_its_part(
    llm: LLM, client: TestClient, prompt: tuple[Any, str, dict[str, Any], str]
) -> None:
    given, param, body, field = prompt
    with pytest.raises(OptionError) as error:
        llm.prepare(given)
    assert error.value.param == param and str(error.value).startswith(param)
    assert refused(client, body)["param"] == field


def test_context_errors(llm: LLM, client: TestClient) -> None:
    length = llm.config.max_length
    for prompt, max_tokens, param in [(5, length, "max_tokens"), (length, 1, "prompt")]:
        with pytest.raises(ContextError) as error:
            llm.generate([5] * prompt, max_tokens=max_tokens)
        assert error.value.param == param
        told = refused(client, completion([5] * prompt, max_tokens=max_tokens))
        assert (told["param"], told["code"]) == (param, "context_length_exceeded")


def test_errors_of_the_engine_process_keep_param() -> None:
    for kind in (OptionError, ContextError):
        error = portable_error(kind("regex", object(), "regex: it is malformed"))
        assert type(error) is kind and isinstance(error, OptionError)
        assert (error.param, error.value, str(error)) == ("regex", None, "regex: it is malformed")

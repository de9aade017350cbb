"""Options whose fields have other names: an error names the option in Python, the field in HTTP."""

import json
import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import chat, completion, refused
from outpace import LLM, OptionError
from outpace.errors import ContextError
from outpace.server.engine_process import portable_error

FAR = 10**6
"""A token id outside the zoo's vocabulary."""
SCHEMA, X = {"type": "teapot"}, {"x": 1}
SCHEMA_FIELD = "response_format.json_schema.schema"
DRAFTED = ("speculative", {"draft": "tiny-aux", "tokens": 0})
SPECULATIVE = {"method": "speculative", "options": {"tokens": 0}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

OUTPUTS = "structured_outputs"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-ar", cache_gib=0.1)


@pytest.mark.parametrize(
    ("given", "param", "body", "field"),
    [
        ({"method": "x"}, "method", chat(outpace={"method": "x"}), "outpace.method"),
        ({"method": DRAFTED}, "tokens", chat(outpace=SPECULATIVE), "outpace.options.tokens"),
        ({"stop_ids": [FAR]}, "stop_ids", chat(stop_token_ids=[FAR]), "stop_token_ids"),
        ({"template": X}, "template.x", chat(chat_template_kwargs=X), "chat_template_kwargs"),
        ({"suffix": 5}, "suffix", completion("a", suffix=5), "suffix"),
        ({"schema": SCHEMA}, "schema", chat(response_format=FORMAT), SCHEMA_FIELD),
        *(
            ({option: value}, option, chat(structured_outputs={field: value}), f"{OUTPUTS}.{field}")
            for option, field, value in (
                ("schema", "json", SCHEMA),
                ("regex", "regex", "("),
                ("choices", "choice", []),
                ("grammar", "grammar", "start: x"),
            )
        ),
    ],
)
def test_error_of_an_option_names_it(
    llm: LLM, client: TestClient, given: Any, param: str, body: Any, field: str
) -> None:
    with pytest.raises(OptionError) as error:
        llm.generate("hi", **given)
    assert error.value.param == param and str(error.value).startswith(param)
    answer = refused(client, body)
    assert answer["param"] == field and answer["message"].startswith(field)


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("prompt", "param", "body", "field"),
    [
        ("", "prompt", completion(""), "prompt"),
        ([FAR], "prompt", completion([FAR]), "prompt"),
        ([5, 1.5], "prompt[1]", completion([5, 1.5]), "prompt.1"),
        ([5] * 600, "prompt", completion([5] * 600), "prompt"),
        ("x" * 500_000, "prompt", chat("x" * 500_000), "messages"),
        ([USER, USER | {"content": 5}], "messages[1].content", chat(5), "messages.0.content"),
        ([{"role": "user"}], "messages[0].content", chat(None), "messages.0.content"),
        (["a", 5], "messages[0]", completion(["a", 5]), "prompt.1"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_error_of_a_prompt_names_its_part(
    llm: LLM, client: TestClient, prompt: Any, param: str, body: Any, field: str
) -> None:
    with pytest.raises(OptionError) as error:
        llm.prepare(prompt)
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
        assert re.search(AGENT_WORDS[param], str(error.value))


AGENT_WORDS = {
    "prompt": r"prompt is too long: (\d+) tokens > (\d+) maximum context length",
    "max_tokens": r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)",
}
"""Words on which Claude Code, opencode and Cline shorten a conversation."""


def test_agents_recognise_a_full_context(client: TestClient) -> None:
    turn = {"role": "user", "content": "four apples " * 200}
    sent = {"model": "tiny-ar", "messages": [turn], "max_tokens": 9}
    for path in ("/v1/messages", "/v1/chat/completions"):
        refusal = client.post(path, json=sent | {"stream": True})
        words = re.search(AGENT_WORDS["prompt"], refusal.json()["error"]["message"])
        assert refusal.status_code == 400 and words and int(words[1]) > int(words[2]) == 512
    body = {"model": "tiny-ar", "input": [turn]}
    assert client.post("/v1/responses", json=body).status_code == 400
    stream = client.post("/v1/responses", json=body | {"stream": True})
    (event, data), *_ = (each.split("\n") for each in stream.text.split("\n\n"))
    response = json.loads(data.removeprefix("data: "))["response"]
    assert (stream.status_code, event) == (200, "event: response.failed")
    assert response["error"]["code"] == "context_length_exceeded"


def test_errors_of_the_engine_process_keep_param() -> None:
    for kind in (OptionError, ContextError):
        error = portable_error(kind("regex", object(), "it is malformed"))
        assert type(error) is kind and isinstance(error, OptionError)
        assert (error.param, error.value, str(error)) == ("regex", None, "regex: it is malformed")

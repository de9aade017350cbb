"""Errors that name an option: their message, and how they are renamed, prefixed and pickled."""

import pickle

import pytest

from outpace.errors import ContextError, OptionError, prefix_error

ERROR = OptionError("messages[2].content", 5, "5 is no text")


@pytest.mark.parametrize("kind", [OptionError, ContextError])
def test_error_is_pickled_with_its_name(kind: type[OptionError]) -> None:
    error = pickle.loads(pickle.dumps(prefix_error("a:1", kind("top_p", 1.5, "must be at most 1"))))
    assert type(error) is kind and isinstance(error, ValueError)
    assert (error.param, error.value) == ("top_p", 1.5)
    assert str(error) == "a:1: top_p must be at most 1, got 1.5"


@pytest.mark.parametrize("param", ["top_p", "top_p.x", "top_p[3].x", "top_p.x[0]"])
def test_option_is_the_first_part_of_a_name(param: str) -> None:
    assert OptionError(param, None, "").option == "top_p"


@pytest.mark.parametrize(
    ("value", "reason", "message"),
    [
        ("a", "must be b", "x must be b, got 'a'"),
        (None, "must be b", "x must be b"),
        ("a", "needs y: omit one", "x needs y: omit one"),
        ("a", "'a' is unknown", "x: 'a' is unknown"),
    ],
)
def test_message_is_name_reason_and_value(value: object, reason: str, message: str) -> None:
    assert str(OptionError("x", value, reason)) == message


@pytest.mark.parametrize(
    "value",
    [
        "(" * 100_000,
        pytest.param(10**5000, id="int"),
        pytest.param([10**5000] * 9, id="ints"),
        ["a" * 300] * 6,
        {"a": {"b": "c" * 10**6}},
    ],
)
def test_huge_value_is_cut(value: object) -> None:
    error = OptionError("x", value, "must be small")
    assert len(str(error)) < 250 and error.value is value


def test_renamed_error_keeps_its_reason() -> None:
    error = ERROR.with_param("messages")
    assert (error.param, error.value) == ("messages", 5)
    assert str(error) == "messages: messages[2].content: 5 is no text"
    regex = OptionError("regex", "(", "it is malformed")
    assert str(regex.with_param("guided_regex")) == "guided_regex: it is malformed"
    count = OptionError("max_tokens", 0, "must be at least 1")
    assert str(count.with_param("max_new")) == "max_new must be at least 1, got 0"


def test_prefixed_error_keeps_its_name() -> None:
    error = prefix_error("prompts:3", ERROR)
    assert isinstance(error, OptionError) and error.param == ERROR.param
    assert str(error) == f"prompts:3: {ERROR}"
    plain = prefix_error("prompts:3", ValueError("no JSON"))
    assert type(plain) is ValueError and str(plain) == "prompts:3: no JSON"

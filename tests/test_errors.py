"""Errors that name an option: how they are renamed, prefixed and sent to another process."""

import pickle

import pytest

from outpace.errors import ContextError, OptionError, must, prefix_error

ERROR = OptionError("messages[2].content", 5, "messages[2].content: 5 is no text")


@pytest.mark.parametrize("kind", [OptionError, ContextError])
def test_error_is_pickled_with_its_name(kind: type[OptionError]) -> None:
    error = pickle.loads(pickle.dumps(kind("top_p", 1.5, "top_p must be at most 1, not 1.5")))
    assert type(error) is kind and isinstance(error, ValueError)
    assert (error.param, error.value) == ("top_p", 1.5)
    assert str(error) == "top_p must be at most 1, not 1.5"


@pytest.mark.parametrize("param", ["top_p", "top_p.x", "top_p[3].x", "top_p.x[0]"])
def test_option_is_the_first_part_of_a_name(param: str) -> None:
    assert OptionError(param, None, "").option == "top_p"


def test_renamed_error_keeps_what_its_name_does_not_say() -> None:
    error = ERROR.with_param("messages")
    assert (error.param, error.value) == ("messages", 5)
    assert str(error) == "messages: messages[2].content: 5 is no text"
    regex = OptionError("regex", "(", "regex: it is malformed")
    assert str(regex.with_param("guided_regex")) == "guided_regex: it is malformed"
    count = OptionError("max_tokens", 0, "max_tokens must be at least 1")
    assert str(count.with_param("max_tokens")) == "max_tokens: must be at least 1"


def test_prefixed_error_keeps_its_name() -> None:
    error = prefix_error("prompts:3", ERROR)
    assert isinstance(error, OptionError) and error.param == ERROR.param
    assert str(error) == f"prompts:3: {ERROR}"
    plain = prefix_error("prompts:3", ValueError("no JSON"))
    assert type(plain) is ValueError and str(plain) == "prompts:3: no JSON"


def test_unmet_requirement_names_option_and_value() -> None:
    error = must("top_p", 1.5, "be between 0 and 1")
    assert (error.param, error.value) == ("top_p", 1.5)
    assert str(error) == "top_p must be between 0 and 1, got 1.5"

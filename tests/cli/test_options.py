"""Fields of methods as flags."""

import pytest

from outpace.cli.options import named, parse_method
from outpace.methods import APD, LeftToRight


def test_texts_become_the_types_of_the_fields():
    values = {"verifier": "tiny-aux", "ratio": "0.25", "window": "none", "coupling": "argmax"}
    expected = APD(verifier="tiny-aux", ratio=0.25, window=None, coupling="argmax")
    assert parse_method("apd", values) == expected


def test_defaults_are_those_of_the_method():
    assert parse_method("left_to_right", {}) == LeftToRight()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tokens": "many"}, "tokens takes int, not 'many'"),
        ({"tokens": "none"}, "tokens takes int, not 'none'"),
        ({"colour": "red"}, "no option colour"),
        ({"tokens": "0"}, "tokens must be at least 1"),
    ],
)
def test_wrong_values_are_named(values, says):
    with pytest.raises(ValueError, match=says):
        parse_method("left_to_right", values)


def test_the_method_is_found_wherever_it_stands():
    assert named(["generate", "m", "--method", "apd", "p"]) == "apd"
    assert named(["generate", "--method=apd"]) == "apd"
    assert named(["generate", "m", "p"]) is None
    assert named(["generate", "--method"]) is None

"""Fields of methods as flags."""

import pytest

from outpace.cli.app import find_method_name
from outpace.cli.options import parse_method
from outpace.methods import APD, DFlash, Speculative


def test_texts_become_the_types_of_the_fields():
    values = {"verifier": "tiny-aux", "ratio": "0.25", "window": "none", "coupling": "argmax"}
    expected = APD(verifier="tiny-aux", ratio=0.25, window=None, coupling="argmax")
    assert parse_method("apd", values) == expected


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("Auto", "auto"), ("3", 3)])
def test_a_number_or_a_word(text, value):
    method = parse_method("speculative", {"draft": "tiny-aux", "tokens": text})
    assert method == Speculative(draft="tiny-aux", tokens=value)
    values = {"draft": "d", "block": "none", "verify": "rejection", "tokens": "4"}
    expected = DFlash(draft="d", block=None, verify="rejection", tokens=4)
    assert parse_method("dflash", values) == expected


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tokens": "many"}, "tokens must be int, got 'many'"),
        ({"tokens": "none"}, "tokens must be int, got 'none'"),
        ({"colour": "red"}, "no option colour"),
        ({"tokens": "0"}, "tokens must be at least 1"),
    ],
)
def test_wrong_values_are_named(values, says):
    with pytest.raises(ValueError, match=says):
        parse_method("left_to_right", values)


def test_the_method_is_found_wherever_it_stands():
    assert find_method_name(["generate", "m", "--method", "apd", "p"]) == "apd"
    assert find_method_name(["generate", "--method=apd"]) == "apd"
    assert find_method_name(["generate", "m", "p"]) is None
    assert find_method_name(["generate", "--method"]) is None
    assert find_method_name([]) is None

"""Fields of methods as flags."""

import pytest

from outpace import OptionError
from outpace.cli.options import parse_method
from outpace.cli.task_flags import TaskFlags
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


def test_flags_replace_parts_of_a_protocol():
    words = ["enable_thinking=true", "depth=1"]
    flags = TaskFlags(task="math500", protocol="dflash:8b", system="Be brief.", template=words)
    setting = flags.load_setting()
    assert setting.variables == {"enable_thinking": True, "depth": 1}
    assert setting.system == "Be brief." and setting.max_tokens == 2048


@pytest.mark.parametrize(
    ("name", "value"), [("tokens", "many"), ("tokens", "none"), ("colour", "red"), ("tokens", "0")]
)
def test_wrong_values_are_named(name, value):
    with pytest.raises(OptionError) as caught:
        parse_method("left_to_right", {name: value})
    assert caught.value.param == name

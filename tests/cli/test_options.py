"""Fields of methods as flags."""

import pickle
import sys

import pytest

from outpace import OptionError
from outpace.cli.options import format_method, parse_method
from outpace.lab.commands.task_flags import TaskFlags
from outpace.lab.entry import parse_entries
from outpace.methods import APD, DFlash, Speculative
from outpace.methods.options import open_method, resolve_method


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


METHOD = """
from outpace.decoding import Decoding, Request
from outpace.methods import Autoregressive, Method

class Mine(Autoregressive):
    '''Decode as the base.'''
"""


@pytest.fixture
def method_file(tmp_path, monkeypatch):
    """Return a function that writes a file and names a class of it; nothing stays imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    loaded = {*sys.modules}

    def write(source: str, kind: str = "Mine") -> str:
        path = tmp_path / "own.py"
        path.write_text(source)
        return f"{path}:{kind}"

    yield write
    for module in {*sys.modules} - loaded:
        del sys.modules[module]


def test_the_class_of_a_file_is_a_method(method_file, outpace, tmp_path):
    (tmp_path / "beside_it.py").write_text("")
    name = method_file("import beside_it\n" + METHOD)
    plain = outpace("generate", "tiny-ar", "Lily has 4", "--max-tokens", "4")[1].split("\n4 tok")[0]
    status, out, _ = outpace(
        "generate", "tiny-ar", "Lily has 4", "--max-tokens", "4", "--method", name
    )
    assert status == 0 and out.startswith(plain)
    assert format_method(pickle.loads(pickle.dumps(parse_method(name, {})))) == name
    (entry,) = parse_entries(f"tiny-ar {name}")
    assert isinstance(entry.method, open_method(name))


@pytest.mark.parametrize(
    ("source", "kind", "reason"),
    [
        (METHOD, "Method", "no subclass of Method"),
        (METHOD, "Other", "no subclass of Method"),
        (METHOD, "Request", "no subclass of Method"),
        ("def f(:\n", "Mine", "own.py, line 1: SyntaxError"),
        ("\nimport nowhere_at_all\n", "Mine", "own.py, line 2: ModuleNotFoundError"),
        ("\x00", "Mine", "own.py"),
    ],
)
def test_a_file_without_a_method_is_named(method_file, refused, source, kind, reason):
    words = ("generate", "tiny-ar", "-", "--method", method_file(source, kind))
    assert reason in refused(*words) and reason in refused(*words)  # nothing of it stays


def test_a_missing_file_is_named(refused, tmp_path):
    assert "no file" in refused("trace", "tiny-ar", "-", "--method", f"{tmp_path}/own.py:Mine")


def test_a_request_cannot_name_a_file(method_file):
    with pytest.raises(OptionError):
        resolve_method(method_file(METHOD))


def test_the_method_of_a_flag_is_suggested(refused):
    assert "--method" in refused("generate", "tiny-ar", "-", "--draft", "tiny-dflash")
    assert "--method" not in refused("generate", "tiny-ar", "-", "--colour", "red")

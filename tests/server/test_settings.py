"""Configuration of a server, in a file and on the command line."""

from pathlib import Path
from typing import Any

import pytest

from outpace import OptionError
from outpace.methods import Autoregressive, DFlash, Lookup, Method
from outpace.server.models import available_methods, use_default_draft
from outpace.server.service import Service
from outpace.server.settings import Config, Entry, Settings, build_config, read_config
from refusal import refuses

WHOLE = """
[server]
port = 8001
drain_seconds = 5.0

[models.story]
path = "tiny-dream"
method = "apd"
methods = ["apd", "left_to_right"]
options = { verifier = "small", ratio = 0.5 }
further = { small = "tiny-aux" }
limits = { ratio = [0.2, 0.8], coupling = ["argmax"], tokens = [1, 4] }
max_tokens = 64
cache_gib = 0.1
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "serve.toml"
    path.write_text(text)
    return path


def test_file_is_read(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, WHOLE))
    assert config.server.port == 8001
    assert config.models["story"].options == {"verifier": "small", "ratio": 0.5}
    config = build_config(tmp_path / "serve.toml", {}, {"port": 8002})
    assert (config.server.port, config.server.drain_seconds) == (8002, 5.0)


DRAFTING = DFlash(draft="tiny-dflash", lookup=True)


@pytest.mark.parametrize(
    ("values", "method"),
    [
        ({}, DRAFTING),
        ({"method": "auto", "further": {"mine": "tiny-dflash"}}, DRAFTING),
        ({"method": "lookup"}, Lookup()),
        ({"methods": ["autoregressive"]}, Autoregressive()),
        ({"options": {"tokens": 3}}, Lookup(tokens=3)),
        ({"path": "tiny-aux"}, Lookup()),
    ],
)
def test_default_method_is_that_of_generate(values: dict[str, Any], method: Method) -> None:
    entry = use_default_draft("m", Entry(**{"path": "tiny-ar", **values}))
    _, default, methods = available_methods(entry)
    assert methods[default].default_method[1] == method
    assert set(entry.further) >= set(values.get("further", ()))
    if not {"method", "methods", "options"} & set(values):
        assert entry.open_model().native == method


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("colour = 1", "colour"),
        ("[server]\ncolour = 1", "server.colour"),
        ("[models.x]", "models.x.path"),
        ("[models.x]\npath = 'tiny-ar'\ncolour = 1", "models.x.colour"),
        ("[models.x]\npath = 'tiny-ar'\nmax_tokens = 0", "models.x.max_tokens"),
        ("[models.x]\npath = 'tiny-ar'\ncache_gib = -1.0", "models.x.cache_gib"),
        ("[models.x]\npath = 'tiny-ar'\ncache_gib = nan", "models.x.cache_gib"),
        ("[server]\nport = 70000", "server.port"),
        ("[server]\napi_key = ''", "server.api_key"),
        ("[server]\ndrain_seconds = -1.0", "server.drain_seconds"),
        ("[models.x]\npath = 'x'\noptions.a = []", "options.a"),
        ("[models.x]\npath = 'x'\nlimits.a = [1, 'b']", "limits.a"),
        ("", "models"),
        ("models = 5", "models"),
        ("= 5", "TOML"),
    ],
)
def test_unknown_keys_and_bad_values_are_named(tmp_path: Path, line: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_config(written(tmp_path, line))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org", ""])
def test_public_addresses_require_a_key(host: str, tmp_path: Path) -> None:
    with refuses("host"):
        Settings(host=host).check_access()
    Settings(host=host, insecure=True).check_access()
    Settings(host=host, api_key="x").check_access()
    (tmp_path / "key").write_text("x\n")
    Settings(host=host, api_key_file=str(tmp_path / "key")).check_access()


def test_key_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    assert Settings(api_key_file=str(tmp_path / "key")).read_key() == b"secret"
    (tmp_path / "empty").write_text("\n")
    with refuses("api_key_file"):
        Settings(api_key_file=str(tmp_path / "empty")).read_key()
    with refuses("api_key"):
        Settings(api_key="x", api_key_file="y").read_key()
    with refuses("api_key_file"):
        Settings(api_key_file=str(tmp_path / "nowhere")).read_key()


@pytest.mark.parametrize("key", ["se\ncret", "se\0cret", " secret", "secret\t", " ", "s\x7f"])
def test_key_fits_into_a_header(key: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as refused:
        Settings(api_key=key).check_access()
    assert refused.value.param == "api_key" and "cret" not in str(refused.value)
    if key.strip() == key:
        (tmp_path / "key").write_text(f"{key}\n")
        with refuses("api_key_file"):
            Settings(api_key_file=str(tmp_path / "key")).check_access()
    Settings(api_key="a secret \u2713").check_access()


def test_key_is_not_revealed(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as refused:
        read_config(written(tmp_path, "[server]\napi_key = 123456"))
    assert refused.value.param == "server.api_key" and "123456" not in str(refused.value)


@pytest.mark.parametrize(
    ("param", "models"),
    [
        ("adapters", {"a": {"adapters": {"b": "x"}}, "a:b": {}}),
        ("tensor_parallel", {"a": {}, "b": {"tensor_parallel": 2}}),
    ],
)
def test_models_in_conflict_are_refused(param: str, models: dict[str, dict[str, Any]]) -> None:
    entries = {name: Entry(path="tiny-ar", **given) for name, given in models.items()}
    with refuses(param):
        Config(models=entries).check_consistency()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"method": "nothing"}, "nothing"),
        ({"methods": ["nothing"]}, "nothing"),
        ({"method": "wedlm"}, "wedlm"),
        ({"method": "apd"}, "apd"),
        ({"method": "apd", "further": {"x": "nowhere"}}, "nowhere"),
        (
            {"method": "apd", "further": {"x": "tiny-aux"}, "options": {"verifier": "y"}},
            "options.verifier",
        ),
        ({"method": "d2f", "options": {"colour": 1}}, "colour"),
        ({"method": "d2f", "options": {"block": 0}}, "block"),
        ({"options": {"block": 8}}, "block"),
        ({"limits": {"colour": [1, 2]}}, "colour"),
        ({"limits": {"tokens": [1]}}, "tokens"),
        ({"limits": {"tokens": [4, 1]}}, "tokens"),
        ({"limits": {"order": ["colour"]}}, "colour"),
    ],
)
def test_invalid_models_are_rejected_early(given: dict[str, Any], named: str) -> None:
    entry = Entry(path="tiny-dream", cache_gib=0.05, **given)
    with pytest.raises(ValueError, match=f"^model x: .*{named}"):
        Service.load(Config(models={"x": entry}))


def test_operator_limits_requests(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    model = Service.load(read_config(path)).models["story"]
    assert list(model.methods) == ["apd", "left_to_right"]
    choice = model.find_method_choice(None)
    shown, method = choice.create({})
    assert (shown.verifier, method.verifier) == ("small", "tiny-aux")  # type: ignore[attr-defined]
    listed_options = {each["name"]: each for each in choice.describe(True)["options"]}
    assert (listed_options["ratio"]["minimum"], listed_options["ratio"]["maximum"]) == (0.2, 0.8)
    assert listed_options["coupling"]["choices"] == ["argmax"]
    assert listed_options["verifier"]["choices"] == ["small"]
    assert listed_options["ratio"]["default"] == 0.5
    choice.create({"ratio": 0.8, "coupling": "argmax"})
    choice.create({"coupling": "gumbel"})  # its default is always allowed
    for option, value in [("ratio", 0.9), ("verifier", "tiny-aux"), ("window", 10**6)]:
        with pytest.raises(Exception, match=option):
            choice.create({option: value})

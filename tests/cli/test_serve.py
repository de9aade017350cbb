"""The command `serve`: what it refuses before loading, and the settings that it passes on."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outpace.cli.app import open_server
from outpace.cli.main import main
from outpace.server import run as module
from outpace.server.service import Service

Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a command listens that should be refused."""
    monkeypatch.setattr(module, "serve_until_signal", lambda service, own: 9)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nowhere"], "nowhere"),
        (["--model", "=tiny-ar"], "name=path"),
        (["tiny-ar", "--further", "x"], "name=path"),
        (["tiny-ar", "--adapters", "x"], "name=path"),
        (["--adapters", "x=y"], "need a model"),
        (["--method", "d2f"], "need a model"),
        (["--further", "a=tiny-aux"], "need a model"),
        (["--dtype", "float32"], "need a model"),
        (["--config", "x.toml", "--method", "d2f"], "need a model"),
        (["tiny-ar", "--config", "x.toml"], "cannot be given both"),
        (["--config", "x.toml"], "x.toml"),
        (["tiny-ar", "--method", "dflash"], "--draft"),
        (["tiny-ar", "--method", "dflash", "--draft", "nowhere"], "nowhere"),
        (["tiny-ar", "--method", "d2f"], "d2f"),
        (["tiny-dflash"], "tiny-dflash"),
        (["--model", "a=tiny-ar", "--model", "a=tiny-aux"], "the name a is given twice"),
        (["--max-tokens", "5"], "need a model"),
        (["tiny-ar", "--max-tokens", "0"], "max_tokens"),
        (["--host", "0.0.0.0"], "--insecure"),
        (["--host", "not an address"], "not an address"),
        (["--port", "70000"], "port"),
        (["tiny-ar", "--max-replicas", "2"], "--replicas"),
        (["--step-seconds", "0.9"], "step_seconds"),
        (["--api-key", ""], "api_key"),
        (["--api-key-file", "nowhere"], "nowhere"),
        (["--api-key", "x", "--api-key-file", "y"], "cannot be combined"),
    ],
)
def test_invalid_words_are_named_in_one_line(
    refused: Refused, words: list[str], named: str
) -> None:
    assert named in refused("serve", *words, *(["--port", "0"] if "--port" not in words else []))


@pytest.mark.parametrize(
    ("words", "ours", "theirs", "extra"),
    [
        (["--port", "0"], "outpace.server", "fastapi", "serve"),
        (["tiny-ar", "--replicas", "2"], "outpace.ray", "ray", "ray"),
    ],
)
def test_missing_extra_is_one_line(
    outpace: Callable[..., tuple[int, str, str]],
    refused: Refused,
    words: list[str],
    ours: str,
    theirs: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [n for n in sys.modules if n.startswith(ours) or n == "outpace.cli.serve"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, theirs, None)
    assert outpace("serve", "--help")[0] == 0
    assert f"pip install '.[{extra}]'" in refused("serve", *words)


def test_server_listens_until_its_start_ends(refused: Refused) -> None:
    with open_server(["serve", "--port", "0"]) as (listener, engine):
        socket.create_connection(listener.getsockname()).close()
        assert "port" in refused("serve", "nowhere", f"--port={listener.getsockname()[1]}")
    assert engine.process.returncode


@pytest.mark.nightly
def test_flags_reach_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served: list[Service] = []

    def run(service: Service, own: Any) -> int:
        served.append(service)
        own.close()
        return 3

    monkeypatch.setattr(module, "serve_until_signal", run)
    words = "--method apd --verifier tiny-aux --ratio 0.5 --port 0 --max-waiting 5 --max-tokens 50"
    with pytest.raises(SystemExit) as ended:
        main(["serve", "tiny-dream", *words.split(), "--drain-seconds", "1.5", "--api-key", "k"])
    assert ended.value.code == 3
    (service,) = served
    model = service.models["tiny-dream"]
    assert (model.method, model.entry.max_tokens) == ("apd", 50)
    assert model.find_method_choice(None).options["ratio"].default == 0.5
    assert (service.settings.max_waiting, service.settings.drain_seconds) == (5, 1.5)
    assert service.settings.read_key() == b"k"
    service.client.close()

"""What the pages on the server show: requests, the official client, settings."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from outpace.server.settings import build_config
from shown import ROOT, blocks, is_right

PAGE = ROOT / "docs" / "server.md"
SETTINGS = ROOT / "docs" / "operating.md"
REQUESTS = [
    shlex.split(line)
    for block in blocks(PAGE, "sh")
    for line in block.splitlines()
    if line.startswith("curl ")
]


@pytest.mark.parametrize("words", REQUESTS, ids=lambda words: words[1].rpartition("/v1/")[2])
def test_requests_are_answered(words: list[str], client: TestClient) -> None:
    _, address, *rest = words
    route = address.removeprefix("http://127.0.0.1:8000")
    if not rest:
        assert client.get(route).json()["data"]
        return
    assert rest[0] == "-d"
    reply = client.post(route, json=json.loads(rest[1])).json()
    choice = reply["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert text.strip().startswith("12 16 20 24"), text


@pytest.mark.nightly
def test_official_client_example(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    anthropic = pytest.importorskip("anthropic")
    code = "".join(blocks(PAGE, "py"))

    def here(base_url: str, api_key: str) -> openai.OpenAI:
        assert base_url == "http://127.0.0.1:8000/v1"
        inside = f"{client.base_url}/v1"
        return kind(base_url=inside, api_key=api_key, http_client=client, max_retries=0)

    def there(base_url: str, api_key: str) -> Any:
        assert base_url == "http://127.0.0.1:8000"
        inside = str(client.base_url)
        return other(base_url=inside, api_key=api_key, http_client=client, max_retries=0)

    kind, other = openai.OpenAI, anthropic.Anthropic
    monkeypatch.setattr(openai, "OpenAI", here)
    monkeypatch.setattr(anthropic, "Anthropic", there)
    exec(compile(code, PAGE.name, "exec", dont_inherit=True), {"__name__": "shown"})
    assert is_right(code, capsys.readouterr().out)


def test_settings_are_read(tmp_path: Path) -> None:
    (shown,) = blocks(SETTINGS, "toml")
    (tmp_path / "serve.toml").write_text(shown)
    config = build_config(tmp_path / "serve.toml", {}, {"port": 8001})
    assert config.server.port == 8001 and set(config.models) == {"story", "fast", "seldom"}
    assert config.models["seldom"].lazy and config.models["seldom"].keep == "10m"

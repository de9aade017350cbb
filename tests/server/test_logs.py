"""The log of requests, and the files that run a server as a service."""

from __future__ import annotations

import io
import json
import logging
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import chat, completion
from outpace.cli.main import main
from outpace.server.logs import ACCESS_LOG, JsonFormatter, start_log
from outpace.server.metrics import ServerMetrics
from outpace.server.service import Service

DEPLOY = Path(__file__).parent.parent.parent / "deploy"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What is logged in JSON."""
    text, logger = io.StringIO(), logging.getLogger("outpace.server")
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter())
    levels = logger.level, ACCESS_LOG.level
    logger.addHandler(handler)
    ACCESS_LOG.setLevel(logging.INFO)
    yield text
    logger.removeHandler(handler)
    logger.setLevel(levels[0])
    ACCESS_LOG.setLevel(levels[1])


def lines(log: io.StringIO) -> list[dict[str, Any]]:
    """Return the logged objects."""
    return [json.loads(line) for line in log.getvalue().splitlines()]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line(client: TestClient, log: io.StringIO, stream: bool) -> None:
    response = client.post("/v1/chat/completions", json=chat(max_tokens=6, stream=stream))
    (line,) = lines(log)
    assert response.headers["x-request-id"] == line["request_id"]
    assert (line["path"], line["status"]) == ("/v1/chat/completions", 200)
    assert (line["result"], line["level"]) == ("answered", "info")
    assert 0 < line["completion_tokens"] <= 6 and line["prompt_tokens"] > 0
    assert line["seconds"] >= 0 and line["model"] and line["method"]


@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [
        ("a.b-c_9", True),
        ("x" * 64, True),
        ("x" * 65, False),
        ("", False),
        ("a b", False),
        ('"},{"', False),
    ],
)
def test_valid_ids_of_clients_are_kept(
    client: TestClient, log: io.StringIO, sent: str, is_kept: bool
) -> None:
    response = client.get("/health", headers={"x-request-id": sent})
    number = response.headers["x-request-id"]
    assert (number == sent) is is_kept and re.fullmatch(r"[\w.-]{1,64}", number)
    assert lines(log)[-1]["request_id"] == number


def test_refused_requests_and_paths_are_logged_on_one_line(
    client: TestClient, log: io.StringIO
) -> None:
    assert client.post("/v1/completions", json=completion(n=0)).status_code == 400
    client.get("/v1/models/a%0Ab%22?x=1")
    refused, unknown = lines(log)
    assert refused["status"] == 400 and "result" not in refused
    assert unknown["status"] == 404 and unknown["path"] == "/v1/models/a%0Ab%22"


def test_errors_have_a_traceback_and_the_request(log: io.StringIO) -> None:
    try:
        raise RuntimeError("no\nway")
    except RuntimeError:
        logging.getLogger("outpace.server").exception("request %s failed", "x")
    (line,) = lines(log)
    assert line["message"] == "request x failed" and "RuntimeError: no" in line["traceback"]


@pytest.mark.parametrize(
    ("options", "level"),
    [({"verbose": False}, logging.WARNING), ({"verbose": True}, logging.INFO)],
)
def test_text_logs_requests_if_verbose(options: dict[str, bool], level: int) -> None:
    before = logging.getLogger("outpace.server").level, ACCESS_LOG.level
    start_log(**options)
    assert ACCESS_LOG.level == level
    logging.getLogger("outpace.server").setLevel(before[0])
    ACCESS_LOG.setLevel(before[1])


def served_commands() -> list[list[str]]:
    """Return the `serve` commands of the deployment files, without the program."""
    yaml = pytest.importorskip("yaml")
    unit = (DEPLOY / "outpace.service").read_text()
    (started,) = re.findall(r"^ExecStart=\S+ (.*)$", unit, re.MULTILINE)
    (entry,) = re.findall(r"^CMD (\[\"serve.*)$", (DEPLOY / "Containerfile").read_text(), re.M)
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return [shlex.split(started), json.loads(entry), services["outpace"]["command"]]


def test_commands_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    from outpace.server import settings

    seen: list[dict[str, Any]] = []

    def stop(config: Any, entries: Any, server: dict[str, Any]) -> None:
        seen.append(server)
        raise SystemExit

    monkeypatch.setattr(settings, "build_config", stop)
    for command in served_commands():
        with pytest.raises(SystemExit):
            main(command)
    assert [each["log_format"] for each in seen] == ["json"] * 3
    assert all(each["api_key_file"] for each in seen)


def test_the_dashboard_reads_metrics_that_exist(service: Service) -> None:
    known = set(re.findall(r"^# TYPE (\w+)", ServerMetrics(service.models).render().decode(), re.M))
    text = (DEPLOY / "grafana" / "dashboard.json").read_text()
    panels = json.loads(text)["panels"]
    read = set(
        re.findall(r"outpace_\w+", " ".join(t["expr"] for p in panels for t in p["targets"]))
    )
    for name in read:
        assert name in known or re.sub("_(bucket|sum|count)$", "", name) in known, name
    models = tomllib.loads((DEPLOY / "serve.toml").read_text())["models"]
    assert models == {"story": {"path": "tiny-ar"}}

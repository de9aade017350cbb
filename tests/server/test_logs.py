"""The log of requests, and the files that run a server as a service."""

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import chat
from outpace.server.logs import ACCESS_LOG, JsonFormatter, start_log


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
    [("a.b-c_9", True), ("x" * 64, True), ("x" * 65, False), ("", False), ('"},{"', False)],
)
def test_valid_ids_of_clients_are_kept(
    client: TestClient, log: io.StringIO, sent: str, is_kept: bool
) -> None:
    response = client.get("/health", headers={"x-request-id": sent})
    number = response.headers["x-request-id"]
    assert (number == sent) is is_kept and re.fullmatch(r"[\w.-]{1,64}", number)
    assert lines(log)[-1]["request_id"] == number


def test_errors_have_a_traceback_and_the_request(log: io.StringIO) -> None:
    try:
        raise RuntimeError("no\nway")
    except RuntimeError:
        logging.getLogger("outpace.server").exception("request %s failed", "x")
    (line,) = lines(log)
    assert line["message"] == "request x failed" and "RuntimeError: no" in line["traceback"]


@pytest.mark.parametrize(("verbose", "level"), [(False, logging.WARNING), (True, logging.INFO)])
def test_text_logs_requests_if_verbose(log: io.StringIO, verbose: bool, level: int) -> None:
    start_log(verbose=verbose)
    assert ACCESS_LOG.level == level

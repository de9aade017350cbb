"""The log of requests, and metrics."""

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from asking import ask, chat, events, refused
from outpace.server.logs import ACCESS_LOG, JsonFormatter, start_log


@pytest.fixture
def log() -> Iterator[io.StringIO]:
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


def test_a_line_has_the_figures_of_its_answer(client: TestClient, log: io.StringIO) -> None:
    body = chat(max_tokens=40, outpace={"method": "lookup"}, ignore_eos=True)
    first, again = (ask(client, body)["outpace"] for _ in range(2))
    one, two = lines(log)
    assert two["forwards"] == again["forwards"] and one["forwards"] == first["forwards"]
    assert (one["draft_tokens"], one["accepted_tokens"]) == (
        first["draft_tokens"],
        first["accepted_tokens"],
    )
    assert 0 < two["cached_tokens"] < two["prompt_tokens"]
    assert 0 <= two["read_seconds"] + two["write_seconds"] <= two["seconds"]
    for line in (one, two):
        shown = line["message"].partition(": ")[2]
        assert f"{line['prompt_tokens']} tokens read" in shown and "40 written" in shown
    assert f"{two['cached_tokens']} of them cached" in two["message"]


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


Samples = dict[tuple[str, ...], float]


def scrape(client: TestClient) -> Samples:
    response = client.get("/metrics")
    assert response.status_code == 200
    families = list(text_string_to_metric_families(response.text))
    samples = [sample for family in families for sample in family.samples]
    keys = [(s.name, *(v for k, v in sorted(s.labels.items()))) for s in samples]
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, (sample.value for sample in samples), strict=True))


def test_counters_add_up(client: TestClient) -> None:
    body = chat(model="tiny-dream", max_tokens=16, outpace={"method": "apd"})
    ask(client, body)
    before = scrape(client)
    figures = [ask(client, body)["outpace"], ask(client, body)["outpace"]]
    chunks = events(client, body | {"stream_options": {"include_usage": True}})
    figures.append(chunks[-1]["outpace"])
    after = scrape(client)

    def grown(name: str, *more: str) -> float:
        key = (f"outpace_{name}", "apd", "tiny-dream", *more)
        return after[key] - before.get(key, 0)

    assert grown("requests_total", "answered") == 3
    assert grown("output_tokens_total") == 48
    assert grown("prompt_tokens_total") == 3 * chunks[-1]["usage"]["prompt_tokens"]
    assert grown("forwards_total", "target") == sum(each["forwards"] for each in figures)
    assert grown("forwards_total", "verifier") > 0
    for name, field in (("kept", "accepted_tokens"), ("proposed", "draft_tokens")):
        assert grown(f"{name}_tokens_total") == sum(each[field] for each in figures) > 0
    assert grown("accepted_tokens_sum") == grown("kept_tokens_total")
    assert grown("accepted_tokens_count") == sum(each["draft_forwards"] for each in figures)
    for name in ("request_seconds", "tokens_per_forward"):
        assert grown(f"{name}_count") == 3
    assert grown("first_text_seconds_count") == 1  # of the stream
    pieces = sum(bool(chunk["choices"]) for chunk in chunks) - 1
    assert grown("gap_seconds_count") <= pieces
    refused(client, body | {"max_tokens": 513})
    final, tokens = scrape(client), ("outpace_output_tokens_total", "apd", "tiny-dream")
    assert final["outpace_requests_total", "apd", "tiny-dream", "refused"] >= 1
    assert final[tokens] == after[tokens]


def test_prefix_cache_is_counted(client: TestClient) -> None:
    key = ("outpace_prefix_rows_spared_total", "tiny-aux", "target")
    ask(client, chat(model="tiny-aux", max_tokens=2))
    before = scrape(client)[key]
    ask(client, chat(model="tiny-aux", max_tokens=2))
    assert scrape(client)[key] - before == 32

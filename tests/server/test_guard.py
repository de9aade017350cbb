"""API keys, host and origin checks, and limits before every route."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import ask, chat, connect, http_scope
from outpace.server.guard import PUBLIC_PATHS, LimitedBody
from outpace.server.http_error import HttpError
from outpace.server.schema import MAX_BODY_BYTES
from outpace.server.service import Service
from outpace.server.settings import Settings

KEY = "a secret ✓"
RIGHT = f"Bearer {KEY}".encode()


def guarded(service: Service, monkeypatch: pytest.MonkeyPatch, **given: Any) -> TestClient:
    monkeypatch.setattr(service, "settings", Settings(**given))
    return connect(service)


@pytest.fixture
def locked(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    with guarded(service, monkeypatch, api_key=KEY) as client:
        yield client


def test_every_route_requires_the_key(locked: TestClient) -> None:
    document = locked.get("/openapi.json", headers={"authorization": RIGHT}).json()
    paths = [*document["paths"], "/openapi.json", "/docs", "/nothing", "/health/"]
    assert len(paths) > 8
    for path in paths:
        for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE"):
            response = locked.request(method, path.replace("{model}", "tiny-ar"))
            if path in PUBLIC_PATHS:
                assert response.status_code == (200 if method in ("GET", "HEAD") else 405)
            else:
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "header",
    [
        *(b"", b"Bearer", b"Bearer ", KEY.encode(), b"Basic " + KEY.encode(), b"Bearer a secret"),
        *(RIGHT + b"x", RIGHT.replace(b"secret", b"SECRET"), b"Bearer \xff\xfe", b"Bearer " * 999),
    ],
)
def test_wrong_keys_are_rejected(locked: TestClient, header: bytes) -> None:
    response = locked.get("/v1/models", headers={"authorization": header})
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"
    assert KEY not in response.text


def test_large_body_is_rejected(client: TestClient) -> None:
    body = json.dumps(chat("x" * MAX_BODY_BYTES)).encode()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 2**16):
            yield body[start : start + 2**16]

    for content in (body, pieces()):
        response = client.post("/v1/chat/completions", content=content)
        assert response.status_code == 413
        assert response.json()["error"]["type"] == "invalid_request_error"
    padded = json.dumps(chat(max_tokens=2)).encode().ljust(MAX_BODY_BYTES)
    assert client.post("/v1/chat/completions", content=padded).status_code == 200


def test_messages_of_a_body_are_limited_together() -> None:
    pieces = [b" " * (MAX_BODY_BYTES // 2)] * 3

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

    async def read() -> None:
        body = LimitedBody(receive, 60)
        while pieces:
            await body()

    with pytest.raises(HttpError) as refused:
        asyncio.run(read())
    assert refused.value.status == 413


def test_slow_body_times_out(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    app = guarded(service, monkeypatch, read_seconds=0.2).app
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(http_scope("/v1/completions"), receive, send))
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]


class Elements(HTMLParser):
    """Collects the content of scripts and styles, and what is loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.contents: dict[str, list[str]] = {"script": [], "style": []}
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag in self.contents:
            self.contents[tag].append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem in self.contents:
            self.contents[self.cdata_elem][-1] += data


def test_policy_allows_the_code_of_the_page_only(client: TestClient) -> None:
    page = client.get("/", headers={"origin": "http://elsewhere"})
    elements = Elements(page.text)
    assert all(address.startswith("data:") for address in elements.addresses)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and not re.search("unsafe|http|[*]", policy)
    for tag, contents in elements.contents.items():
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in contents]
        (sources,) = re.findall(rf"{tag}-src ([^;]*)", policy)
        assert sources.split() == [f"'sha256-{digest.decode()}'" for digest in digests]
    scripts = [each.name for each in (files("outpace.server") / "playground").iterdir()]
    assert len(elements.contents["script"]) == sum(name.endswith(".js") for name in scripts)
    assert not [name for name in page.headers if name.startswith("access-control")]


def test_internal_errors_reveal_nothing(
    client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("/secret/place")

    with monkeypatch.context() as broken:
        broken.setattr(service, "list_models", fail)
        response = client.get("/v1/models")
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text and "Traceback" not in response.text
    assert ask(client, chat(max_tokens=2))


HERE = ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8000"]
ELSEWHERE = [
    *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", ""),
    *("evil.example:80:127.0.0.1", "[::1].evil.example", "127.0.0.2", "::1", "0.0.0.0", "\u00e9"),
    *("localhost evil.example", "localhost@evil.example", "localhost:x", "[::1", "x" * 5000),
]


@pytest.mark.parametrize("host", [*HERE, *ELSEWHERE])
def test_foreign_hosts_are_rejected(client: TestClient, host: str) -> None:
    headers = {"host": host.encode("latin-1")}
    for method, path in (("GET", "/"), ("GET", "/health"), ("POST", "/v1/completions")):
        response = client.request(method, path, headers=headers, json={})  # type: ignore[arg-type]
        assert (response.status_code == 421) == (host in ELSEWHERE)
        if host in ELSEWHERE:
            assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("host", [*HERE, *ELSEWHERE[:-1], "null"])
def test_foreign_origins_are_rejected(client: TestClient, host: str) -> None:
    origin = b"null" if host == "null" else b"http://" + host.encode("latin-1")
    headers: Any = {"origin": origin}
    for path in ("/v1/completions", "/v1/chat/completions", "/nothing"):
        response = client.post(path, headers=headers, json={})
        assert (response.status_code == 403) == (host not in HERE)
    assert client.get("/v1/models", headers=headers).status_code == 200

"""Coding agents: requests that they sent, and the agents themselves."""

import asyncio
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from agents import AGENTS, ScriptedEngine, run_agent, scripted_service
from asking import post

SENT = [
    pytest.param(sent["path"], sent["body"], id=f"{file.stem}-{number}")
    for file in sorted((Path(__file__).parent / "agents").glob("*.json"))
    for number, sent in enumerate(json.loads(file.read_text()))
]
"""Requests of Codex 0.171 and Claude Code 2.1, cut; the texts are replaced."""


@pytest.mark.parametrize(("path", "body"), SENT)
def test_recorded_request_is_answered(served: TestClient, path: str, body: dict[str, Any]) -> None:
    few = {"max_output_tokens" if "input" in body else "max_tokens": 30}
    reply = post(served, path, body | {"model": "tools"} | few)
    if body.get("stream"):
        *_, last = [line for line in reply.splitlines() if line.startswith("event: ")]
        ends = ("message_stop", "response.completed", "response.incomplete")
        assert last.removeprefix("event: ") in ends, reply


SCRIPTS: dict[str, Any] = {
    "codex": [
        ("exec_command", {"cmd": "cat notes.txt"}),
        ("exec_command", {"cmd": "sed -i s/two/TWO/ notes.txt"}),
        ("view_image", {"path": "dot.png"}),
        ("exec_command", {"cmd": "cp notes.txt copy.txt"}),
        "All done.",
    ],
    "claude": [
        ("Read", {"file_path": "notes.txt"}),
        ("Edit", {"file_path": "notes.txt", "old_string": "two", "new_string": "TWO"}),
        ("Read", {"file_path": "dot.png"}),
        ("Bash", {"command": "cp notes.txt copy.txt"}),
        "All done.",
    ],
}
DOT = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)
"""A picture of one pixel."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", AGENTS)
def test_agent_reads_edits_and_runs(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start, package = AGENTS[name]
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed: npm install --global {package}")
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    (folder / "notes.txt").write_text("one\ntwo\n")
    (folder / "dot.png").write_bytes(DOT)
    script = [
        each
        if isinstance(each, str)
        else (each[0], {k: f"{folder}/{v}" if k == "file_path" else v for k, v in each[1].items()})
        for each in SCRIPTS[name]
    ]
    service = scripted_service(script)
    with caplog.at_level(logging.INFO, "outpace.server.access"):
        printed = asyncio.run(run_agent(start, service, folder, home))
    assert "All done." in printed
    assert (folder / "copy.txt").read_text() == "one\nTWO\n"
    assert isinstance(service.client, ScriptedEngine)
    assert [*service.client.answers] == []
    refused = [each.getMessage() for each in caplog.records if ": 200 in" not in each.getMessage()]
    assert not [each for each in refused if " /" in each], refused

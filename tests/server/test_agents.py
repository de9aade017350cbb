"""Clients: requests that they sent, and coding agents themselves on a scripted model."""

import asyncio
import json
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import post
from outpace.api.engine_client import EngineClient, EngineCommand, SubmitCommand
from outpace.api.output import Event, Output
from outpace.api.parts import AnswerParser
from outpace.server.models import describe_models, load_text
from outpace.server.run import ServerRun
from outpace.server.service import Service
from outpace.server.settings import Config, Entry
from outpace.server.start import Settings, bind_socket
from shown import ROOT, blocks
from toolbox import TEMPLATES
from variants import write_variant

SENT = [
    pytest.param(sent["path"], sent["body"], id=f"{file.stem}-{number}")
    for file in sorted((Path(__file__).parent / "agents").glob("*.json"))
    for number, sent in enumerate(json.loads(file.read_text()))
]
"""Requests of Codex 0.171, Claude Code 2.1 and other clients, cut; the texts are replaced.

The others are LangChain 1.7, `llm` 0.36, Continue's `cn` 1.5 and aider 0.86, in this order.
"""


@pytest.mark.parametrize(("path", "body"), SENT)
def test_recorded_request_is_answered(served: TestClient, path: str, body: dict[str, Any]) -> None:
    few = {"max_output_tokens" if "input" in body else "max_tokens": 60}
    reply = post(served, path, body | {"model": "tools"} | few)
    if body.get("stream"):
        *_, last = [line for line in reply.splitlines() if line and "{" not in line]
        ends = ("event: message_stop", "event: response.completed", "event: response.incomplete")
        assert last in (*ends, "data: [DONE]"), reply


class ScriptedEngine(EngineClient):
    """Answers each request that declares tools with the next of some calls, then with a text."""

    heartbeat, stats = 0.0, {}

    def __init__(self, calls: list[tuple[str, dict[str, Any]]]) -> None:
        super().__init__()
        self.calls = calls

    async def update_stats(self) -> None: ...

    async def start_receiving(self) -> None: ...

    def close(self) -> None: ...

    def send_command(self, command: EngineCommand) -> None:
        if not isinstance(command, SubmitCommand):
            return
        text = "All done."
        if command.options.tools and self.calls:
            name, arguments = self.calls.pop(0)
            call = json.dumps({"name": name, "arguments": arguments})
            text = f"I will do it.\n<tool_call>\n{call}\n</tool_call>"
        common: dict[str, Any] = {"finish_reason": "stop", "steps": [], "seconds": 1.0}
        common |= {"prompt_tokens": len(command.prompt), "format": command.format}
        parser = AnswerParser(command.format)
        parser.feed(text, final=True)
        output = Output(text=text, ids=[5] * len(text), parsed=parser.parts, **common)
        last = Event(number=0, text=text, parts=parser.take(), output=output)
        for event in (Event(number=0), last):
            self.requests[command.number].add_event(event)


def scripted_service(calls: list[tuple[str, dict[str, Any]]]) -> Service:
    """A server of the model `m`, whose context holds the prompts of agents."""
    folder = Path(write_variant("tiny-ar", TEMPLATES["tool_call"], lambda *_: None))
    fields = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 2**18}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(fields))
    entry = Entry(path=str(folder))
    config, infos = (
        Config(models={"m": entry}, server=Settings(port=0)),
        describe_models({"m": entry}),
    )
    texts = {"m": load_text("m", entry)}
    return Service.from_client(config, ScriptedEngine(calls), infos, texts)


TASK = "Change two to TWO in notes.txt."
PAGE = ROOT / "docs" / "agents.md"
SETTINGS = {".codex/config.toml": blocks(PAGE, "toml"), "opencode.json": blocks(PAGE, "json")}
AGENTS: dict[str, Any] = {
    "codex": (
        "@openai/codex",
        ["codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"],
        [
            ("exec_command", {"cmd": "cat notes.txt"}),
            ("exec_command", {"cmd": "sed -i s/two/TWO/ notes.txt"}),
            ("view_image", {"path": "dot.png"}),
            ("exec_command", {"cmd": "cp notes.txt copy.txt"}),
        ],
    ),
    "claude": (
        "@anthropic-ai/claude-code",
        ["claude", "-p", "--model", "m", "--allowedTools=Read,Edit,Bash"],
        [
            ("Read", {"file_path": "notes.txt"}),
            ("Edit", {"file_path": "notes.txt", "old_string": "two", "new_string": "TWO"}),
            ("Read", {"file_path": "dot.png"}),
            ("Bash", {"command": "cp notes.txt copy.txt"}),
        ],
    ),
    "opencode": (
        "opencode-ai",
        ["opencode", "run"],
        [
            ("read", {"filePath": "notes.txt"}),
            ("edit", {"filePath": "notes.txt", "oldString": "two", "newString": "TWO"}),
            ("bash", {"command": "cp notes.txt copy.txt", "description": "Copy"}),
        ],
    ),
}
"""The npm package, command, and calls of the script of each agent."""
PIXEL_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)


async def run_agent(service: Service, words: list[str], folder: Path) -> str:
    """Run an agent in a folder that is its home, too, and return what it prints."""
    listener = bind_socket(service.settings)
    server, url = ServerRun(service, listener), f"http://127.0.0.1:{listener.getsockname()[1]}"
    (folder / ".codex").mkdir()
    for name, (text,) in SETTINGS.items():
        (folder / name).write_text(text.replace("http://127.0.0.1:8000", url))
    variables = {"PATH": os.environ["PATH"], "HOME": str(folder), "ANTHROPIC_BASE_URL": url}
    variables |= {"ANTHROPIC_API_KEY": "none", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    ends = {"stdin": asyncio.subprocess.DEVNULL, "stdout": asyncio.subprocess.PIPE}
    serving = asyncio.ensure_future(server.serve())
    process = await asyncio.create_subprocess_exec(
        *words, TASK, cwd=folder, env=variables, stderr=asyncio.subprocess.STDOUT, **ends
    )
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), 200)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        server.server.should_exit = True
        await serving
    assert process.returncode == 0, printed
    return printed.decode()


@pytest.mark.nightly
@pytest.mark.parametrize("name", AGENTS)
def test_agent_reads_edits_and_runs(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package, words, calls = AGENTS[name]
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed: npm install --global {package}")
    (tmp_path / "notes.txt").write_text("one\ntwo\n")
    (tmp_path / "dot.png").write_bytes(PIXEL_PNG)
    for _, arguments in calls:
        for key in arguments.keys() & {"file_path", "filePath"}:
            arguments[key] = str(tmp_path / arguments[key])
    service = scripted_service(calls)
    with caplog.at_level(logging.INFO, "outpace.server.access"):
        assert "All done." in asyncio.run(run_agent(service, words, tmp_path))
    assert (tmp_path / "copy.txt").read_text() == "one\nTWO\n" and not calls
    lines = [each.getMessage() for each in caplog.records if each.name == "outpace.server.access"]
    assert lines and all(": 200 in" in line for line in lines), lines

"""Coding agents as clients of a server whose model answers by a script."""

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from outpace.api.engine_client import EngineClient, EngineCommand, SubmitCommand
from outpace.api.output import Event, Output
from outpace.server.models import describe_models, load_text
from outpace.server.run import ServerRun, bind_socket
from outpace.server.service import Service
from outpace.server.settings import Config, Entry, Settings
from toolbox import TEMPLATES
from variants import write_variant

Call = tuple[str, dict[str, Any]]
"""Name and arguments of a tool."""

TASK = "Change two to TWO in notes.txt."


class ScriptedEngine(EngineClient):
    """Answers each request that declares tools with the next answer of a script."""

    heartbeat, stats = 0.0, {}

    def __init__(self, answers: Sequence[str | Call]) -> None:
        super().__init__()
        self.answers = iter(answers)
        self.prompts: list[list[int]] = []

    async def update_stats(self) -> None: ...

    async def start_receiving(self) -> None: ...

    def close(self) -> None: ...

    def send_command(self, command: EngineCommand) -> None:
        if not isinstance(command, SubmitCommand):
            return
        answer = next(self.answers) if command.options.tools else "A title"
        if not isinstance(answer, str):
            call = json.dumps({"name": answer[0], "arguments": answer[1]})
            answer = f"I will do it.\n<tool_call>\n{call}\n</tool_call>"
        self.prompts.append(command.prompt)
        output = Output(
            text=answer,
            ids=[5] * len(answer),
            finish_reason="stop",
            steps=[],
            prompt_tokens=len(command.prompt),
            seconds=1.0,
            format=command.format,
        )
        request = self.requests[command.number]
        request.add_event(Event(number=command.number))
        request.add_event(Event(number=command.number, text=answer, output=output))


def scripted_service(answers: Sequence[str | Call]) -> Service:
    """A server of the model `m`, whose context holds the prompts of agents."""
    folder = Path(write_variant("tiny-ar", TEMPLATES["tool_call"], lambda *_: None))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**18}))
    entry = Entry(path=str(folder))
    infos = describe_models({"m": entry})
    settings = Config(models={"m": entry}, server=Settings(port=0))
    return Service.from_client(
        settings, ScriptedEngine(answers), infos, {"m": load_text(entry, infos["m"])}
    )


def codex(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f'model = "m"\nmodel_provider = "here"\n[model_providers.here]\nname = "here"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\n'
    )
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["codex", "exec", *flags, TASK], {}


def claude(url: str, _: Path) -> tuple[list[str], dict[str, str]]:
    flags = ["--model", "m", "--allowedTools", "Read,Edit,Bash"]
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    access = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none"}
    return ["claude", "-p", TASK, *flags], access | quiet


AGENTS = {"codex": (codex, "@openai/codex"), "claude": (claude, "@anthropic-ai/claude-code")}
"""Command and settings of each agent, and its npm package."""


async def run_agent(
    start: Callable[[str, Path], tuple[list[str], dict[str, str]]],
    service: Service,
    folder: Path,
    home: Path,
) -> str:
    """Run an agent in a folder, with a home of its own, and return what it prints."""
    listener = bind_socket(service.settings)
    server = ServerRun(service, listener)
    serving = asyncio.ensure_future(server.serve())
    try:
        words, settings = start(f"http://127.0.0.1:{listener.getsockname()[1]}", home)
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(home), **settings},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            printed, _ = await asyncio.wait_for(process.communicate(), 200)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
        assert process.returncode == 0, printed
        return printed.decode()
    finally:
        server.server.should_exit = True
        await serving

"""`outpace serve` in a process of its own, and requests to it of every method."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from client import Client, RequestBody, RequestRecord, send_in_streams
from curve import Point
from methods import POINTS
from outpace.api.options import Options
from outpace.lab.run import questions_of
from outpace.methods import METHODS

NAMES = {kind: name for name, kind in METHODS.items()}
START, STOP = 120.0, 60.0
"""Seconds that a server may take to start and to end."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs."""

    url: str
    process: subprocess.Popen[bytes]

    def client(self) -> Client:
        """Connections to it."""
        return Client(self.url, timeout=120.0)

    @property
    def engine(self) -> int:
        """The engine process: the only one that the server has started."""
        number = self.process.pid
        (engine,) = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        return int(engine)

    @property
    def memory(self) -> float:
        """Resident memory of both processes in MiB."""
        return sum(map(resident, (self.process.pid, self.engine)))

    @property
    def cpu(self) -> float:
        """CPU seconds that the engine process has used, in all threads."""
        fields = Path(f"/proc/{self.engine}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100  # user and system, in ticks of 10 ms


def resident(number: int) -> float:
    """Resident memory of a process in MiB; what it shares with others counts in each."""
    status = Path(f"/proc/{number}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


@contextmanager
def served(waiting: int = 256, **fields: float | bool) -> Iterator[Served]:
    """A server of the zoo on a free port of this machine, until the end of the block.

    Each model lets so many requests wait, and has further `fields` of the configuration, such as
    `max_sequences`. Raises `SystemExit` with what the server wrote where it does not start.
    """
    with TemporaryDirectory() as folder:
        log, config = Path(folder) / "log", Path(folder) / "serve.toml"
        config.write_text(toml(waiting, fields))
        command = [sys.executable, "-m", "outpace", "serve", "--port", "0", "--config", str(config)]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            yield Served(address(process, log), process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP)
            finally:
                process.kill()


def toml(waiting: int, fields: Mapping[str, float | bool]) -> str:
    """A configuration of the models of all points."""
    further: dict[str, set[str]] = {}
    for point in POINTS:
        further.setdefault(point.model, set()).update(map(str, point.method.model_names().values()))
    lines = ["[server]", f"max_waiting = {waiting}"]
    for model, names in further.items():
        lines += [f"[models.{model}]", f'path = "{model}"']
        lines += [f"{key} = {str(value).lower()}" for key, value in fields.items()]
        lines += [f"[models.{model}.further]", *(f'{name} = "{name}"' for name in sorted(names))]
    return "\n".join(lines) + "\n"


def address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where a server listens, once it does."""
    limit = time.monotonic() + START
    while time.monotonic() < limit and process.poll() is None:
        if found := re.search(r"listening on (http://127\.0\.0\.1:\d+)", log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise SystemExit(f"the server does not start: {log.read_text()}")


@dataclass(frozen=True, slots=True)
class Task:
    """One request, as a server and as an engine in this process take it."""

    point: Point
    prompt: str
    seed: int
    temperature: float
    tokens: int

    def body(self, stream: bool = True) -> RequestBody:
        """As a server takes it."""
        method = self.point.method
        chosen = {"method": NAMES[type(method)], "options": asdict(method)}
        return {
            "model": self.point.model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": stream,
            "outpace": chosen,
        }

    def options(self) -> Options:
        """As an engine takes it."""
        return Options(
            method=self.point.method,
            max_tokens=self.tokens,
            temperature=self.temperature,
            seed=self.seed,
        )


def tasks(
    count: int, points: Sequence[Point] = POINTS, *, tokens: int = 96, sampled: bool = True
) -> list[Task]:
    """Return requests of all points in rotation, each with a different prompt.

    With `sampled`, every other request is sampled, and the others are greedy.
    """
    found = []
    for number, question in enumerate(questions_of("story", count)):
        turn, index = divmod(number, len(points))
        heat = 0.7 if sampled and turn % 2 else 0.0
        found.append(Task(points[index], str(question.prompt), number, heat, tokens))
    return found


async def closed(
    client: Client, bodies: Sequence[RequestBody], concurrency: int
) -> list[RequestRecord]:
    """Exchanges of a closed loop, in the order of the requests."""
    found: dict[int, RequestRecord] = {}

    async def ask(body: RequestBody) -> None:
        found[id(body)] = await client.send_request(body)

    await send_in_streams(bodies, ask, concurrency)
    return [found[id(body)] for body in bodies]


async def metric(client: Client, name: str) -> float:
    """A gauge of the server, summed over its labels."""
    async with client.session.get(f"{client.url}/metrics") as reply:
        text = await reply.text()
    values = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    if not values:
        raise SystemExit(f"the server has no metric {name}")
    return sum(map(float, values))


async def pages(client: Client) -> float:
    """Pages of all caches that requests hold."""
    return await metric(client, "outpace_cache_pages_used")


async def lost(client: Client, seconds: float = 10.0) -> float:
    """Pages that are still held when nothing is in hand, or after so many seconds."""
    limit = time.perf_counter() + seconds
    while held := await pages(client):
        if time.perf_counter() > limit:
            break
        await asyncio.sleep(0.05)
    return held


async def capacity(client: Client, bodies: Sequence[RequestBody], concurrency: int) -> float:
    """Whole answers per second in a closed loop; `SystemExit` where one fails."""
    began = time.perf_counter()
    for exchange in await closed(client, bodies, concurrency):
        expect(exchange)
    return len(bodies) / (time.perf_counter() - began)


def expect(exchange: RequestRecord) -> RequestRecord:
    """A whole answer; `SystemExit` for anything else."""
    if exchange.error is not None:
        raise SystemExit(
            f"a request failed that should not: {exchange.error}: {exchange.error_message}"
        )
    return exchange

"""Models of the hub by `ORG/REPO:QUANT`, pulled, found and removed; drafts for their weights."""

import errno
import fcntl
import io
import json
import re
import shutil
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import huggingface_hub
import pytest
from huggingface_hub import constants

from outpace import LLM, OptionError
from outpace.checkpoints import drafts, hub
from outpace.checkpoints.fingerprint import digest_weights
from outpace.checkpoints.hub import (
    ZOO_FOLDER,
    HubName,
    find_model,
    group_models,
    is_local,
    list_quants,
    resolve_checkpoint,
)
from outpace.cli.main import main
from outpace.cli.pull import pull
from refusal import refuses

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NAME = HubName("Org/Tiny-GGUF", "Q4_K_M")
CONTENT = bytes(range(256)) * 20
WHOLE = "tiny-Q4_K_M.gguf"
PARTS = [f"q8/tiny-Q8_0-0000{part}-of-00002.gguf" for part in (1, 2)]
FILES = dict.fromkeys([WHOLE, *PARTS, "tiny-IQ2_XS.gguf", "mmproj-F16.gguf", "x.txt"], CONTENT)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_CACHE_HOME", "HOME", "LLAMA_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "xdg_cache_home" / "outpace" / "models"


class FakeHub:
    """A hub without sockets: the files of one repository, and its faults."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.cuts: list[int] = []
        self.wrong, self.ranges = b"", True

    def model_info(self, repository: str, **options: object) -> SimpleNamespace:
        def sibling(path: str, content: bytes) -> SimpleNamespace:
            lfs = SimpleNamespace(size=len(content), sha256=sha256(content).hexdigest())
            return SimpleNamespace(rfilename=path, lfs=None if path == "x.txt" else lfs)

        return SimpleNamespace(sha="ab12", siblings=[sibling(*each) for each in FILES.items()])

    def urlopen(self, request: Any, timeout: float) -> Any:
        path = re.sub(r".*/resolve/ab12/", "", request.full_url)
        begin = int(request.get_header("Range")[6:-1])
        self.requests.append(f"{path} {begin}")
        end = self.cuts.pop(0) if self.cuts else len(CONTENT)
        if end <= begin:
            raise URLError("refused")
        response = io.BytesIO((self.wrong or FILES[path])[begin if self.ranges else 0 : end])
        response.status = 206 if begin and self.ranges else 200  # type: ignore[attr-defined]
        return response


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda _, *a, **o: fake.model_info(*a))
    monkeypatch.setattr(hub, "urlopen", fake.urlopen)
    return fake


def files_of(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("Org/Tiny:q4_k_m", HubName("Org/Tiny", "q4_k_m")),
        ("Org/Tiny-GGUF", HubName("Org/Tiny-GGUF")),
        ("org/tiny_gguf", HubName("org/tiny_gguf")),
        *(
            (name, None)
            for name in ("Org/Tiny", "tiny:q4", "a/b/c:q4", "a/x.gguf", "../b:q4", "a/..:q4")
        ),
    ],
)
def test_names_of_files_of_the_hub(name: str, parsed: HubName | None) -> None:
    assert HubName.parse(name) == parsed
    assert parsed is None or str(parsed) == name


def test_quantisations_are_those_of_whole_models() -> None:
    paths = ["a-UD-Q4_K_XL.gguf", "a-qat-Q4_0.gguf", "a-Q4_0.gguf", "a-bf16.gguf", "odd.gguf"]
    broken = ["b-Q8_0-00001-of-00002.gguf", "a.mmproj-Q8_0.gguf", "a.imatrix.gguf", "a.bin"]
    quants = list_quants(group_models([*paths, *broken]))
    assert {*quants} == {"UD-Q4_K_XL", "a-qat-Q4_0", "Q4_0", "bf16", "odd"}
    for quant, model in quants.items():
        assert hub.find_quant([*quants.values()], quant.lower()) == model


@pytest.mark.parametrize("name", ["Org/Tiny-GGUF:q4_k_m", "Org/Tiny-GGUF"])
def test_a_model_is_pulled_once(name: str, fake: FakeHub, folder: Path) -> None:
    path = resolve_checkpoint(name)
    assert path == folder / "Org" / "Tiny-GGUF" / WHOLE and path.read_bytes() == CONTENT
    assert resolve_checkpoint(name) == path and is_local(name) and fake.requests == [f"{WHOLE} 0"]
    assert files_of(folder) == [f"Org/Tiny-GGUF/{WHOLE}", f"Org/Tiny-GGUF/{WHOLE}.sha256"]


def test_interrupted_parts_continue(fake: FakeHub, folder: Path) -> None:
    fake.cuts = [5120, 1000, 3000, 0]
    with refuses("model"):
        resolve_checkpoint("Org/Tiny-GGUF:Q8_0")
    assert not is_local("Org/Tiny-GGUF:Q8_0")
    assert resolve_checkpoint("Org/Tiny-GGUF:Q8_0").read_bytes() == CONTENT
    places = [(PARTS[0], 0), *((PARTS[1], begin) for begin in (0, 1000, 3000, 3000))]
    assert fake.requests == [f"{part} {begin}" for part, begin in places]
    assert [each for each in files_of(folder) if each.endswith("partial")] == []


def test_a_host_without_ranges_gives_the_rest_too(fake: FakeHub) -> None:
    fake.cuts, fake.ranges = [1500], False
    assert resolve_checkpoint(str(NAME)).read_bytes() == CONTENT and len(fake.requests) == 2


def fill_disk(fake: FakeHub, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hub, "disk_usage", lambda path: SimpleNamespace(free=len(CONTENT) - 1))


def stop_writing(fake: FakeHub, patch: pytest.MonkeyPatch) -> None:
    def write(*args: object) -> Iterator[bytes]:
        raise OSError(errno.ENOSPC, "No space left on device")
        yield b""

    patch.setattr(hub, "read_chunks", write)


def change_content(fake: FakeHub, patch: pytest.MonkeyPatch) -> None:
    fake.wrong = bytes(len(CONTENT))


def refuse_connection(fake: FakeHub, patch: pytest.MonkeyPatch) -> None:
    def model_info(*args: object, **options: object) -> None:
        raise ConnectionError("refused")

    patch.setattr(huggingface_hub.HfApi, "model_info", model_info)


@pytest.mark.parametrize(
    ("edit", "quant", "text", "kept"),
    [
        (fill_disk, "Q4_K_M", "make room", 0),
        (stop_writing, "Q4_K_M", "No space left", 1),
        (change_content, "Q4_K_M", "SHA-256", 0),
        (refuse_connection, "Q4_K_M", "cannot be reached", 0),
        (lambda *_: None, "Q5_0", "it has IQ2_XS, Q4_K_M, Q8_0", 0),
    ],
)
def test_failures_leave_no_model(
    edit: Any,
    quant: str,
    text: str,
    kept: int,
    fake: FakeHub,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edit(fake, monkeypatch)
    with pytest.raises(OptionError, match=rf"^draft: .*{text}.*$") as refused:
        resolve_checkpoint(f"Org/Tiny-GGUF:{quant}", param="draft")
    assert refused.value.param == "draft"
    assert len(files_of(folder)) == kept


def test_a_file_that_is_being_pulled_is_left_alone(fake: FakeHub, folder: Path) -> None:
    (file,) = hub.list_remote(NAME)
    file.partial.parent.mkdir(parents=True)
    with file.partial.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with refuses("model"):
            resolve_checkpoint(str(NAME))
        with refuses("model"):
            hub.remove_model(NAME)
    older = file.partial.with_name(f"{WHOLE}.0123456789abcdef.partial")
    older.touch()
    assert fake.requests == [] and resolve_checkpoint(str(NAME)).is_file() and not older.exists()


def test_only_pulled_files_are_removed(fake: FakeHub, folder: Path, tmp_path: Path) -> None:
    pulled = [resolve_checkpoint(f"Org/Tiny-GGUF:{quant}") for quant in ("Q8_0", "Q4_K_M")]
    own = folder / "Org" / "Tiny-GGUF" / "own-F16.gguf"
    own.write_bytes(b"mine")
    with refuses("model"):
        hub.remove_model(HubName("Org/Tiny-GGUF"))
    assert hub.remove_model(HubName("Org/Tiny-GGUF", "q8_0")) == 2 * len(CONTENT)
    with refuses("model"):
        hub.remove_model(HubName("Org/Tiny-GGUF", "F16"))
    assert hub.remove_model(HubName("Org/Tiny-GGUF")) == len(CONTENT)
    assert files_of(folder) == ["Org/Tiny-GGUF/own-F16.gguf"] and not any(map(Path.exists, pulled))


@pytest.mark.parametrize(
    ("place", "listed"),
    [
        ("home/.lmstudio/models/Org/Tiny-GGUF/tiny-Q4_K_M.gguf", "Org/Tiny-GGUF:Q4_K_M"),
        ("llama_cache/Org_Tiny-GGUF_tiny-Q4_K_M.gguf", None),
        ("hub/models--Org--Tiny-GGUF/snapshots/0a/tiny-Q4_K_M.gguf", "Org/Tiny-GGUF:Q4_K_M"),
    ],
)
def test_models_of_other_programs_are_found_and_kept(
    place: str, listed: str | None, tmp_path: Path
) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    path.touch()
    assert find_model(HubName("Org/Tiny-GGUF", "q4_k_m")) == path
    assert find_model(HubName("Org/Tiny-GGUF", "Q8_0")) is None
    names = [name for store in hub.model_stores() for name in store.list_names()]
    assert names == [listed or str(path)]
    with refuses("model"):
        hub.remove_model(NAME)
    assert path.is_file()


def test_a_missing_folder_is_no_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def snapshot(name: str, *, local_files_only: bool, **others: object) -> str:
        asked.append(local_files_only)
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    (tmp_path / "drafts").mkdir()
    with refuses("draft"):
        resolve_checkpoint("drafts/typo", param="draft")
    with refuses("draft"):
        resolve_checkpoint("other/name", param="draft")
    assert asked == [True, False]


def lines_of(file: Path) -> dict[str, Any]:
    """Return the results of a stored figure by line, without the name of the target."""
    return {r["line"].partition(" ")[2]: r for r in json.loads(file.read_text())["results"]}


def test_measured_speeds_are_those_of_the_stored_results() -> None:
    tasks = {"HumanEval": "humaneval", "GSM8K": "gsm8k", "prose": "prose"}
    for name, speeds in drafts.DRAFT_SPEEDS.items():
        for speed in speeds:
            drafting = f"dflash draft={name} lookup=true"
            (lines,) = (
                lines
                for file in RESULTS.glob(f"dflash-table1-small-{tasks[speed.task]}*.json")
                if drafting in (lines := lines_of(file))
            )
            with_draft = lines[drafting]
            found = with_draft["acceptance_length"], with_draft["faster"]["ratio"]
            found += (lines["lookup"]["faster"]["ratio"],)
            assert (speed.accepted, speed.draft, speed.lookup) == tuple(round(x, 2) for x in found)


@pytest.mark.parametrize(("speed", "is_default"), [(1.3, True), (1.1, False)])
def test_a_draft_is_found_by_the_weights_of_its_target(
    speed: float,
    is_default: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = shutil.copytree(ZOO_FOLDER / "tiny-ar", tmp_path / "renamed")
    shutil.copytree(ZOO_FOLDER / "tiny-dflash", tmp_path / "drafts" / "mine")
    monkeypatch.setattr(drafts, "TARGET_DIGESTS", {digest_weights(target): "Org/Target"})
    monkeypatch.setattr(drafts, "KNOWN_DRAFTS", {"dflash": {"Org/Target": ("drafts/mine",)}})
    speeds = (drafts.TaskSpeed("story", 2, speed, 1.2), drafts.TaskSpeed("other", 2, 1.5, 1.2))
    monkeypatch.setattr(drafts, "DRAFT_SPEEDS", {"drafts/mine": speeds})
    llm = LLM(target, cache_gib=0.05)
    assert (type(llm.method).__name__ == "DFlash") is is_default
    assert llm.methods.draft is not None and llm.methods.draft.place == "drafts/mine"
    assert drafts.find_local_draft(target, "dflash") == "drafts/mine"
    pull(str(target))
    *_, last = capsys.readouterr().out.splitlines()
    assert "drafts/mine" in last and f"story {speed:.2f} (1.20)" in last


class Handler(BaseHTTPRequestHandler):
    """The routes of the hub that are used, on loopback; the first download is cut."""

    content, cuts = b"", [1000]

    def log_message(self, *args: object) -> None: ...

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/Org/Tiny-GGUF"):
            lfs = {"sha256": sha256(self.content).hexdigest(), "size": len(self.content)}
            file = {"rfilename": WHOLE, "size": lfs["size"], "lfs": {**lfs, "pointerSize": 9}}
            info = {"id": "Org/Tiny-GGUF", "sha": "ab12", "siblings": [file]}
            self.send(200, json.dumps(info).encode())
        elif self.path == f"/Org/Tiny-GGUF/resolve/ab12/{WHOLE}":
            begin = int(self.headers["Range"][6:-1])
            rest = self.content[begin:]
            self.send(206, rest, self.cuts.pop() if self.cuts else len(rest))
        else:
            self.send(404, b"")

    def send(self, status: int, content: bytes, end: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:end])


@pytest.mark.nightly
def test_the_commands_pull_list_and_remove(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    Handler.content = (RESULTS.parents[1] / "tests/golden/eagle/llama/draft.gguf").read_bytes()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

        def run(*words: str) -> tuple[Any, str, str]:
            with pytest.raises(SystemExit) as ended:
                main(words)
            return ended.value.code or 0, *capsys.readouterr()

        assert run("pull", "Org/Tiny-GGUF:Q5_0")[0] == 2
        assert run("pull", "Org/None-GGUF")[0] == 2
        # A draft alone cannot decode: it is downloaded, and then refused.
        assert run("generate", "Org/Tiny-GGUF:Q4_K_M", "hi")[0] == 2
        assert (folder / "Org/Tiny-GGUF" / WHOLE).read_bytes() == Handler.content
        server.shutdown()
    assert run("pull", "Org/Tiny-GGUF:Q4_K_M")[0] == 0
    assert re.search(r"Org/Tiny-GGUF:Q4_K_M\s+│ eagle\s+│ 0.\d\s+│ outpace", run("models")[1])
    assert run("rm", "Org/Tiny-GGUF:Q4_K_M")[0] == 0 and not files_of(folder)
    assert run("rm", "Org/Tiny-GGUF:Q4_K_M")[0] == 2

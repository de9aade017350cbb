"""The file of measurements: bounded, and ignored where it cannot be used."""

import json
from pathlib import Path

import pytest
import torch

from outpace.kernels import matmul
from outpace.lock import lock_file
from outpace.measurements import MeasurementFile, machine_name


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeasurementFile:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return MeasurementFile.of_user()


def test_entries_are_read_by_later_processes(file: MeasurementFile) -> None:
    assert file.read_entry("a") is None
    file.write_entries({"a": [1.5], "b": {"x": 2}})
    file.write_entries({"a": [2.5]})
    later = MeasurementFile.of_user()
    assert (later.read_entry("a"), later.read_entry("b")) == ([2.5], {"x": 2})
    whole = json.loads(file.path.read_text())
    file.path.write_text(json.dumps({"another machine: a": 3, **whole}))
    file.write_entries({"c": None})
    assert [*file.read_entries()] == [
        "another machine: a",
        *(machine_name() + name for name in ("b", "a", "c")),
    ]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[1]", b"\xff\x00", b"9" * 5000, b"[" * 10**5, b" " * (2**20 + 1)], ids=str
)
def test_a_broken_file_is_ignored_and_replaced(
    file: MeasurementFile, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(text)
    with caplog.at_level("DEBUG", "outpace.measurements"):
        assert file.read_entry("a") is None
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    file.write_entries({"a": 1})
    assert file.read_entry("a") == 1


def test_a_folder_that_cannot_be_used_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "outpace").touch()
    monkeypatch.chdir(tmp_path)
    caplog.set_level("DEBUG", "outpace.measurements")
    for folder in (str(tmp_path), "relative", "//server/share", "\0"):
        file = MeasurementFile(Path(folder) / "outpace" / "measurements.json")
        caplog.clear()
        file.write_entries({"a": 1})
        assert len(caplog.records) == 1 and file.read_entry("a") is None
    assert [path.name for path in tmp_path.iterdir()] == ["outpace"]
    file = MeasurementFile(tmp_path / "measurements.json")
    with (tmp_path / "measurements.lock").open("w") as lock:
        lock_file(lock)
        file.write_entries({"a": 1})
    assert file.read_entry("a") is None
    file.write_entries({"a": 1})
    assert file.read_entry("a") == 1


@pytest.mark.parametrize("entry", ["valid", {}, {"rows": [1.0]}, [1], {"rows": 3, "tiles": None}])
def test_layouts_are_timed_once_per_machine(
    file: MeasurementFile, entry: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts, count = ("rows", "tiles"), len(matmul.TIMED_ROWS)
    found = {name: dict.fromkeys(matmul.TIMED_ROWS, 0.5) for name in layouts}
    calls: list[object] = []
    monkeypatch.setattr(matmul, "measure_layouts", lambda *sizes: calls.append(sizes) or found)

    def time_layouts() -> object:
        matmul.time_layouts.cache_clear()
        return matmul.time_layouts((64, 64), torch.float32, layouts, 1)

    assert time_layouts() == found and len(calls) == 1
    if entry != "valid":
        (name,) = file.read_entries()
        file.write_entries({name.removeprefix(machine_name()): entry})
        assert time_layouts() == found and len(calls) == 2
    (stored,) = file.read_entries().values()
    assert stored == dict.fromkeys(layouts, [0.5] * count)
    assert time_layouts() == found and len(calls) == 1 + (entry != "valid")
    matmul.time_layouts.cache_clear()

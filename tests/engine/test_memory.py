"""Memory that is available, from the files of a system."""

from pathlib import Path

import pytest
import torch

from outpace.engine import stats

CPU = torch.device("cpu")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a computer with 3 MiB of available memory."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 3072 kB\n")
    monkeypatch.setattr(stats, "MEMORY_FILE", tmp_path / "meminfo")
    monkeypatch.setattr(stats, "GROUP_FILE", tmp_path / "cgroup")
    monkeypatch.setattr(stats, "GROUP_FOLDER", tmp_path / "groups")
    return tmp_path


def limit_group(folder: Path, limit: str, used: int, files: int) -> None:
    """Write the files of a control group."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {files}\n")


def test_available_memory_is_the_least(system: Path) -> None:
    assert stats.available_bytes(CPU) == 3 * 2**20
    (system / "cgroup").write_text("1:name=systemd:/other\n0::/a/b\n")
    assert stats.available_bytes(CPU) == 3 * 2**20
    limit_group(system / "groups" / "a" / "b", "max", 10, 0)
    limit_group(system / "groups" / "a", "1000000", 400_000, 150_000)
    assert stats.available_bytes(CPU) == 750_000
    limit_group(system / "groups" / "a" / "b", "500000", 400_000, 0)
    assert stats.available_bytes(CPU) == 100_000


@pytest.mark.nightly
def test_memory_is_released_on_this_system() -> None:
    stats.release_memory()

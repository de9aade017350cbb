"""Names of models: of files and folders, without their paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace.checkpoints.name import distinct_name, name_of, short_title


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("qwen/model-q4_k_m.gguf", "model-q4_k_m"),
        ("MODEL.GGUF", "MODEL"),
        ("v1.5.gguf", "v1.5"),
        ("folder/", "folder"),
        ("folder.gguf/", "folder.gguf"),
        ("a/b/../checkpoint-100/", "checkpoint-100"),
        ("two\nlines/", "two_lines"),
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/0123abc/", "Qwen/Qwen3-0.6B"),
        ("hub/models--Qwen--Qwen3--x/snapshots/0123abc/", "Qwen/Qwen3--x"),
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/0123abc/q8_0.gguf", "q8_0"),
    ],
)
def test_files_and_folders_have_the_name_of_their_last_part(
    path: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / path
    (made if path.endswith("/") else made.parent).mkdir(parents=True, exist_ok=True)
    (tmp_path / "a" / "b").mkdir(parents=True, exist_ok=True)
    if not path.endswith("/"):
        made.touch()
    assert name_of(made) == name_of(str(made)) == name
    monkeypatch.chdir(tmp_path)
    assert name_of(path) == name


def test_current_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "link.gguf").symlink_to(tmp_path / "own" / "blob")
    (tmp_path / "own" / "blob").touch()
    monkeypatch.chdir(tmp_path / "own")
    assert name_of(".") == "own"
    assert name_of("../link.gguf") == "link"
    assert name_of("/") == "model"


@pytest.mark.parametrize("name", ["tiny-ar", "Qwen/Qwen3-0.6B", "nowhere.gguf"])
def test_other_names_are_unchanged(name: str) -> None:
    assert name_of(name) == short_title(name) == name


def test_equal_names_are_numbered() -> None:
    assert distinct_name("x", {}) == "x"
    assert distinct_name("x", {"x"}) == "x-2"
    assert distinct_name("x", {"x", "x-2", "x-4"}) == "x-3"


def test_titles_have_no_absolute_paths(tmp_path: Path) -> None:
    assert short_title(f"{tmp_path}/base + {tmp_path}/lora") == "base + lora"
    assert short_title(f"Qwen/Qwen3-0.6B + {tmp_path}/x.gguf") == "Qwen/Qwen3-0.6B + x"
    assert short_title("runs/base") == "runs/base"

"""Names of models: of files and folders, without their paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace.checkpoints.name import name_of


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

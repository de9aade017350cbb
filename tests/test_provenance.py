"""What a result records about its origin."""

from pathlib import Path

import pytest

from outpace.provenance import redact_argument


@pytest.mark.parametrize(
    ("argument", "recorded"),
    [
        ("/home/me/m.gguf", "m.gguf"),
        (
            "/home/me/m.gguf dflash draft=/home/me/best tokens=3",
            "m.gguf dflash draft=best tokens=3",
        ),
        ("data.path=/home/me/train.jsonl", "data.path=train.jsonl"),
        ("runs/draft/best", "runs/draft/best"),
        ("hub:owner/name", "hub:owner/name"),
    ],
)
def test_commands_have_no_folder(argument: str, recorded: str) -> None:
    assert redact_argument(argument) == recorded


def test_a_path_may_have_spaces(tmp_path: Path) -> None:
    path = tmp_path / "my folder" / "model file"
    path.mkdir(parents=True)
    assert redact_argument(str(path)) == "model file"

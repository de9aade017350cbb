"""Models of the zoo with another chat template and other added tokens."""

import atexit
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from outpace.checkpoints.hub import ZOO_FOLDER

Fields = dict[str, Any]


def write_variant(name: str, template: str, edit: Callable[[Fields, Fields], None]) -> str:
    """Write the folder of a model; `edit` changes the tokenizer's configuration and file."""
    parent = Path(mkdtemp(prefix="outpace-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    folder = parent / name
    folder.mkdir()
    for file in (ZOO_FOLDER / name).iterdir():
        (folder / file.name).symlink_to(file.resolve())
    names = ("tokenizer_config.json", "tokenizer.json")
    config, tokenizer = (json.loads((ZOO_FOLDER / "vocabulary" / n).read_text()) for n in names)
    config["chat_template"] = template
    edit(config, tokenizer)
    for file_name, content in zip(names, (config, tokenizer), strict=True):
        (folder / file_name).write_text(json.dumps(content))
    return str(folder)

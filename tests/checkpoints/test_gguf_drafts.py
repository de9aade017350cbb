"""Drafts in GGUF files of llama.cpp's converter; the golden pairs have one each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outpace import LLM
from outpace.checkpoints.load import load_config, load_draft, load_model

gguf = pytest.importorskip("gguf")

GOLDEN = Path(__file__).parent.parent / "golden"
PAIRS = {"dflash": GOLDEN / "dflash" / "pair_b", "eagle": GOLDEN / "eagle" / "llama"}


@pytest.mark.parametrize("kind", PAIRS)
def test_a_file_equals_its_folder(kind: str) -> None:
    target = load_model(PAIRS[kind] / "target")
    folder = load_draft(PAIRS[kind] / "draft", target)
    file = load_draft(PAIRS[kind] / "draft.gguf", target)
    expected, found = folder.state_dict(), file.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    for field in ("kind", "vocab", "feature_layers", "block", "mask_id", "head_dim", "rope"):
        assert getattr(file.config, field) == getattr(folder.config, field), field


def changed(tmp_path: Path, name: str, edit: Any) -> Path:
    reader, path = gguf.GGUFReader(PAIRS["eagle"] / "draft.gguf"), tmp_path / "draft.gguf"
    writer = gguf.GGUFWriter(path, "eagle3")
    for field in reader.fields.values():
        if field.name not in ("general.architecture",) and not field.name.startswith("GGUF."):
            kind = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], kind)
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    for own, data in {**tensors, name: edit(tensors.get(name))}.items():
        writer.add_tensor(own, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("d2t", lambda ids: ids + 320),
        ("d2t", lambda ids: -ids - 1),
        ("d2t", lambda ids: ids * 0),
        ("d2t", lambda ids: ids.astype(np.float32)),
        ("markov_w1.weight", lambda _: np.ones((4, 4), np.float32)),
    ],
)
def test_invalid_tensors_are_refused(name: str, edit: Any, tmp_path: Path) -> None:
    target = load_model(PAIRS["eagle"] / "target")
    with pytest.raises(ValueError, match=name) as refusal:
        load_draft(changed(tmp_path, name, edit), target)
    assert str(tmp_path) in str(refusal.value)


def test_a_draft_needs_its_target() -> None:
    assert load_config(PAIRS["dflash"] / "draft.gguf").kind.name == "DFLASH"
    with pytest.raises(ValueError, match="draft"):
        LLM(PAIRS["dflash"] / "draft.gguf")

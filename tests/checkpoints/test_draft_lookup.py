"""Published drafts of a target: selected if on this machine, otherwise named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers import loaded_models
from outpace import LLM
from outpace.checkpoints import load
from outpace.methods import DFlash, Speculative
from refusal import refuses


def test_a_draft_of_the_zoo_is_selected() -> None:
    llm = LLM("tiny-ar", DFlash(draft="auto"), cache_gib=0.05)
    texts = [
        llm.generate("Tom has 5 coins.", method=method, max_tokens=12, seed=1)[0]
        for method in (None, DFlash(draft="tiny-dflash"), Speculative(draft="auto"))
    ]
    assert {text.text for text in texts} == {texts[0].text}
    assert texts[0].forwards == texts[1].forwards
    assert set(loaded_models(llm)) == {"tiny-ar", "tiny-dflash", "tiny-aux"}


def test_a_missing_draft_is_named_and_not_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests = []

    def snapshot(name: str, *, local_files_only: bool = False, **others: object) -> str:
        requests.append((name, local_files_only))
        raise FileNotFoundError

    monkeypatch.setattr(load, "snapshot_download", snapshot)
    shutil.copytree(load.ZOO_FOLDER / "tiny-ar", tmp_path / "Qwen3-8B")
    with pytest.raises(ValueError, match="z-lab/Qwen3-8B-DFlash-b16"):
        LLM(tmp_path / "Qwen3-8B", DFlash(draft="auto"), cache_gib=0.05)
    drafts = ("z-lab/Qwen3-8B-DFlash-b16", "deepseek-ai/dspark_qwen3_8b_block7")
    assert requests == [(draft, True) for draft in drafts]
    shutil.copytree(load.ZOO_FOLDER / "tiny-ar", tmp_path / "mine")
    with refuses("draft"):
        LLM(tmp_path / "mine", Speculative(draft="auto"), cache_gib=0.05)


def test_a_draft_in_the_hub_cache_is_selected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(load, "snapshot_download", lambda name, **others: str(tmp_path))
    assert not load.is_local("z-lab/Qwen3-8B-DFlash-b16")
    (tmp_path / "config.json").write_text("{}")
    assert load.is_local("z-lab/Qwen3-8B-DFlash-b16")

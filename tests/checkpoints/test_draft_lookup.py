"""Published drafts of a target: selected if on this machine, otherwise named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from helpers import loaded_models
from outpace import LLM
from outpace.checkpoints import load
from outpace.checkpoints.draft_lookup import known_drafts
from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.families.drafts import KNOWN_DRAFTS
from outpace.cli.lists import is_loadable
from outpace.methods import METHODS, DFlash, Speculative
from outpace.server.settings import make_entry


def test_a_draft_of_the_zoo_is_selected() -> None:
    llm = LLM("tiny-ar", DFlash(draft="auto"), cache_gib=0.05)
    texts = [
        llm.generate("Tom has 5 coins.", method=method, max_tokens=12, seed=1)[0]
        for method in (None, DFlash(draft="tiny-dflash"), Speculative(draft="auto"))
    ]
    assert {text.text for text in texts} == {texts[0].text}
    assert texts[0].forwards == texts[1].forwards
    assert set(loaded_models(llm)) == {"tiny-ar", "tiny-dflash", "tiny-aux"}


def test_a_server_lists_the_selected_draft() -> None:
    found = make_entry("tiny-ar", DFlash(draft="auto"), {}, {})
    assert found.options["draft"] == "tiny-dflash"
    assert found.further == {"tiny-dflash": "tiny-dflash"}


def test_the_folder_of_a_target_has_its_name(tmp_path: Path) -> None:
    shutil.copytree(load.ZOO_FOLDER / "tiny-ar", tmp_path / "Tiny-AR")
    assert known_drafts(tmp_path / "Tiny-AR", "dflash") == ("tiny-dflash",)


def test_a_missing_draft_is_named_and_not_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests = []

    def snapshot(name: str, *, local_files_only: bool = False, **others: object) -> str:
        requests.append((name, local_files_only))
        raise FileNotFoundError

    monkeypatch.setattr(load, "snapshot_download", snapshot)
    shutil.copytree(load.ZOO_FOLDER / "tiny-ar", tmp_path / "Qwen3-8B")
    with pytest.raises(
        ValueError, match=r"no published draft .*z-lab/Qwen3-8B-DFlash-b16.* is on this"
    ):
        LLM(tmp_path / "Qwen3-8B", DFlash(draft="auto"), cache_gib=0.05)
    drafts = ("z-lab/Qwen3-8B-DFlash-b16", "deepseek-ai/dspark_qwen3_8b_block7")
    assert requests == [(draft, True) for draft in drafts]
    shutil.copytree(load.ZOO_FOLDER / "tiny-ar", tmp_path / "mine")
    with pytest.raises(ValueError, match="no published draft of speculative for '.*mine'"):
        LLM(tmp_path / "mine", Speculative(draft="auto"), cache_gib=0.05)


def test_a_draft_in_the_hub_cache_is_selected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(load, "snapshot_download", lambda name, **others: str(tmp_path))
    assert not load.is_local("z-lab/Qwen3-8B-DFlash-b16")
    (tmp_path / "config.json").write_text("{}")
    assert load.is_local("z-lab/Qwen3-8B-DFlash-b16")


def rows(heading: str) -> list[list[str]]:
    """The first table below a heading of the pages on models."""
    pages = (Path(__file__).parent.parent.parent / "docs").glob("models-*.md")
    text = "\n".join(page.read_text() for page in pages)
    table = text.partition(f"## {heading}\n")[2].partition("\n|---")[2].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]


def test_the_page_of_models_lists_published_drafts() -> None:
    found = {
        (method.strip("`"), target.removesuffix(" †")): (draft, target.endswith("†"))
        for method, target, draft in rows("Drafts that auto finds")
    }
    assert found == {
        (method, target): (", ".join(drafts), not is_loadable(target))
        for method, targets in KNOWN_DRAFTS.items()
        for target, drafts in targets.items()
    }


def test_the_page_of_models_lists_the_comparisons() -> None:
    read = json.loads((Path(__file__).parent.parent / "golden" / "configs.json").read_text())
    found = {}
    for name, compared, published in rows("What was compared"):
        found[name.strip("`")] = (compared.partition(",")[0], published.replace(" ✓", ""))
        for each in published.split(", "):
            assert (Path(each.removesuffix(" ✓")).name in read) == each.endswith("✓"), each
    assert found == {
        name: (family.compared, ", ".join(family.checkpoints)) for name, family in FAMILIES.items()
    }


def test_drafts_belong_to_methods_with_a_draft() -> None:
    for method, targets in KNOWN_DRAFTS.items():
        assert "draft" in METHODS[method].roles
        assert all("/" in name or (load.ZOO_FOLDER / name).is_dir() for name in targets)

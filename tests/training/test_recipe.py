"""Tests of recipes, which are checked before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace import recipes
from outpace.training.objectives import SFT
from outpace.training.recipe import load_recipe, train_recipe

RECIPE = """
[model]
init = "some-model"
[objective]
name = "sft"
[data]
path = "story:train"
[train]
steps = 10
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with required keys only."""
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    return path


def test_overrides_are_dotted_or_bare(recipe: Path) -> None:
    changed = load_recipe(recipe, ["optim.lr=0.5", "steps=3", "out=/tmp/x", "prompt_weight=0.2"])
    assert changed.optim.lr == 0.5 and changed.train.steps == 3 and changed.out == "/tmp/x"
    assert changed.objective == SFT(prompt_weight=0.2)
    assert load_recipe(recipe, ["objective.name=mdlm", "suffix=0.5"]).objective.suffix == 0.5
    assert load_recipe(recipe, ["objective.name=mdlm", "canvas=[2, 3]"]).objective.canvas == (2, 3)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "write key=value"),
        ("speed=1", "'speed' is unknown; allowed are out"),
        ("optim.speed=1", r"\[optim\]: unknown speed; allowed are optimizer, lr"),
        (
            "objective.name=grpo",
            "objective 'grpo' is unknown; choose one of block_diffusion, d2f, dflash, eagle3, mdlm",
        ),
        (
            "other.lr=1",
            "other; allowed are model, data, optim, train, adapter, held_out, objective,",
        ),
        ("train.steps.more=1", "is not a section"),
        ("optim.lr=-1", "lr must be a number above 0 and at most 100, got -1"),
    ],
)
def test_unknown_keys_are_refused(recipe: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe, [override])


def test_files_that_are_no_recipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent"):
        load_recipe(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("[model")
    with pytest.raises(ValueError, match="broken.toml"):
        load_recipe(tmp_path / "broken.toml")
    (tmp_path / "other.toml").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="other.toml"):
        load_recipe(tmp_path / "other.toml")
    (tmp_path / "loose.toml").write_text('objective = "sft"')
    with pytest.raises(ValueError, match=r"\[objective\]"):
        load_recipe(tmp_path / "loose.toml")
    (tmp_path / "empty.toml").write_text('[objective]\nname = "sft"\n[data]\npath = "a"\n')
    with pytest.raises(ValueError, match=r"\[model\]"):
        load_recipe(tmp_path / "empty.toml")


@pytest.mark.nightly
def test_a_process_that_fails_ends_all_and_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n{"prompt": 3}\n')
    with pytest.raises(ValueError, match=r"process [01] of 2 exited with status 1"):
        train_recipe(
            "tiny-aux", [f"data.path={path}", "drills=0", f"out={tmp_path / 'run'}"], processes=2
        )
    assert f"outpace: {path}:2 needs prompt and response" in capfd.readouterr().err


@pytest.mark.parametrize(
    "path", sorted(recipes.RECIPES_FOLDER.glob("*.toml")), ids=lambda path: path.stem
)
def test_the_recipes_of_the_project_are_read(path: Path) -> None:
    assert load_recipe(path).out == load_recipe(path.stem).out == f"runs/{path.stem}"
    assert 20 < len(recipes.recipe_summary(path.stem)) < 55  # with its name, a line of 80 columns


def test_a_recipe_of_ones_own_comes_before_one_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-ar").write_text(RECIPE)
    assert load_recipe("tiny-ar").train.steps == 10
    with pytest.raises(ValueError, match="tiny-er"):
        load_recipe("tiny-er")


OBJECTIVES = {"canvas": "mdlm", "divergence": "dflash", "block": "wedlm", "weighting": "wedlm"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=1.5", r"\[train\]: steps must be a whole number from 1 to 2147483647, got 1.5"),
        ("steps=true", "steps must be a whole number from 1 to 2147483647, got True"),
        ("steps=ten", "steps must be a whole number from 1 to 2147483647, got 'ten'"),
        ("recompute=1", "recompute must be true or false, got 1"),
        ("optim.lr=nan", r"\[optim\]: lr must be a number above 0 and at most 100, got nan"),
        ("optim.lr=inf", "lr must be a number above 0 and at most 100, got inf"),
        ("optim.lr=fast", "lr must be a number above 0 and at most 100, got 'fast'"),
        (
            "optim.betas=0.9",
            "betas must be a list of 2, each entry a number at least 0 and b",
        ),
        ("optim.betas=[0.9]", "betas must be a list of 2"),
        ("optim.betas=[0.9, true]", "betas must be a list of 2"),
        ("data.path=[1]", "path must be a text or a list, each entry a text"),
        ("data.turns=[1.0]", "turns must be a list, each entry a whole number"),
        ("data.plain=yes", "plain must be true or false"),
        ("data.longest=1e3", "longest must be a whole number from 2 to 2147483647, got 1000.0"),
        ("model.config=5", "config must be a table, got 5"),
        ("model.init=5", "init must be a text, got 5"),
        ("model.dtype=float16", "dtype must be float32 or bfloat16"),
        ("model.dtype=bfloat16", "dtype bfloat16 needs frozen weights: a target or an adapter"),
        ("adapter.rank=2.0", "rank must be a whole number"),
        ("adapter.targets=q_proj", "targets must be a list, each entry a text"),
        ("prompt_weight=nan", r"\[objective\]: prompt_weight must be a number"),
        ("canvas=[1, 2, 3]", r"canvas must be a list of 2, each entry a whole number"),
        ("divergence=1", "divergence must be true or false"),
        (
            "block=[1.5]",
            r"block must be a whole number from 1 to \d+ or a list, each entry a w",
        ),
        ("weighting=own", "weighting must be normalised or inverse or uniform"),
        ("held_out.every=1", r"\[held_out\] needs path"),
        ("out=5", "out must be the name of a folder, got 5"),
        ("objective.name=[1]", r"objective \[1\] is unknown"),
        ("seed=-1", "seed must be a whole number from 0 to 9223372036854775807, got -1"),
        ("tracker=paper", "tracker 'paper' is unknown; choose tensorboard, trackio, wandb"),
    ],
)
def test_values_of_another_type_are_refused(recipe: Path, override: str, message: str) -> None:
    objective = OBJECTIVES.get(override.partition("=")[0], "sft")
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe, [f"objective.name={objective}", override])

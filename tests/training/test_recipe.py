"""Recipes are checked before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace.training.objectives import SFT
from outpace.training.recipe import load, train

RECIPES = Path(__file__).parents[2] / "recipes"
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
    """A recipe that names no more than it must."""
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    return path


def test_a_recipe_names_everything_else_by_default(recipe: Path) -> None:
    """The folder by the name of its file."""
    read_back = load(recipe)
    assert read_back.objective == SFT() and read_back.out == "runs/mine"
    assert read_back.train.steps == 10 and read_back.train.batch == 32


def test_overrides_are_dotted_or_bare(recipe: Path) -> None:
    """Of the objective that they themselves name."""
    changed = load(recipe, ["optim.lr=0.5", "steps=3", "out=/tmp/x", "prompt_weight=0.2"])
    assert changed.optim.lr == 0.5 and changed.train.steps == 3 and changed.out == "/tmp/x"
    assert changed.objective == SFT(prompt_weight=0.2)
    assert load(recipe, ["objective.name=mdlm", "suffix=0.5"]).objective.suffix == 0.5
    assert load(recipe, ["objective.name=mdlm", "canvas=[2, 3]"]).objective.canvas == (2, 3)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "write key=value"),
        ("speed=1", "'speed' is unknown; known are out"),
        ("optim.speed=1", r"\[optim\]: unknown speed; known are optimizer, lr"),
        ("objective.name=grpo", "objective 'grpo' is unknown; known are d2f, dflash, mdlm, sft"),
        ("other.lr=1", "other; known are model, data, optim, train, adapter, objective, out"),
        ("train.steps.more=1", "is no section"),
        ("optim.lr=-1", "must be positive"),
    ],
)
def test_unknown_keys_are_refused(recipe: Path, override: str, message: str) -> None:
    """Naming those that are known."""
    with pytest.raises(ValueError, match=message):
        load(recipe, [override])


def test_files_that_are_no_recipes_are_refused(tmp_path: Path) -> None:
    """With their path."""
    with pytest.raises(ValueError, match="no recipe at"):
        load(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("[model")
    with pytest.raises(ValueError, match="is not TOML"):
        load(tmp_path / "broken.toml")
    (tmp_path / "other.toml").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"other\.toml is not TOML"):
        load(tmp_path / "other.toml")
    (tmp_path / "loose.toml").write_text('objective = "sft"')
    with pytest.raises(ValueError, match=r"write its keys under \[objective\]"):
        load(tmp_path / "loose.toml")
    (tmp_path / "empty.toml").write_text('[objective]\nname = "sft"\n[data]\npath = "a"\n')
    with pytest.raises(ValueError, match="needs init, or config and one of tokenizer and target"):
        load(tmp_path / "empty.toml")


def test_processes_that_do_not_fit_are_refused(recipe: Path) -> None:
    """Before any is started."""
    with pytest.raises(ValueError, match="at least 1"):
        train(recipe, processes=0)
    with pytest.raises(ValueError, match="does not divide into 3"):
        train(recipe, processes=3)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_recipes_of_the_project_are_read(path: Path) -> None:
    """Every file of the folder."""
    assert load(path).out == f"runs/{path.stem}"

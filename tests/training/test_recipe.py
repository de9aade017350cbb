"""Tests of recipes, and of the types and bounds of their values."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from outpace import recipes
from outpace.field_types import Bounds, list_options
from outpace.training.objectives import OBJECTIVES, SFT
from outpace.training.recipe import SECTIONS, load_recipe, train_recipe

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
    ("override", "name"),
    [
        ("steps", "steps"),
        ("speed=1", "speed"),
        ("optim.speed=1", r"\[optim\]: .*speed"),
        ("objective.name=grpo", "grpo"),
        ("other.lr=1", "other"),
        ("train.steps.more=1", "train.steps"),
    ],
)
def test_unknown_keys_are_refused(recipe: Path, override: str, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        load_recipe(recipe, [override])


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (None, "mine.toml"),
        (b"[model", "mine.toml"),
        (b"\xff", "mine.toml"),
        (b'objective = "sft"', r"\[objective\]"),
        (b'[objective]\nname = "sft"\n[data]\npath = "a"\n', r"\[model\]"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, content: bytes | None, name: str) -> None:
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=name):
        load_recipe(path)


@pytest.mark.nightly
def test_a_failed_process_ends_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n{"prompt": 3}\n')
    with pytest.raises(ValueError, match=r"process [01] of 2"):
        train_recipe(
            "tiny-aux", [f"data.path={path}", "drills=0", f"out={tmp_path / 'run'}"], processes=2
        )
    assert f"{path}:2" in capfd.readouterr().err


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


USERS = {"canvas": "mdlm", "divergence": "dflash", "block": "wedlm", "weighting": "wedlm"}


@pytest.mark.parametrize(
    "override",
    [
        *(
            "[train]: steps=1.5",
            "[train]: steps=true",
            "[train]: steps=ten",
            "[train]: recompute=1",
        ),
        *("[optim]: lr=nan", "[optim]: lr=inf", "[optim]: lr=fast", "[optim]: lr=-1"),
        *("[optim]: betas=0.9", "[optim]: betas=[0.9]", "[optim]: betas=[0.9, true]"),
        *("[data]: path=[1]", "[data]: turns=[1.0]", "[data]: plain=yes", "[data]: longest=1e3"),
        *("[model]: config=5", "[model]: init=5", "[model]: dtype=float16"),
        *("[adapter]: rank=2.0", "[adapter]: targets=q_proj", "[train]: seed=-1"),
        *("[objective]: prompt_weight=nan", "[objective]: canvas=[1, 2, 3]"),
        *("[objective]: divergence=1", "[objective]: block=[1.5]", "[objective]: weighting=own"),
    ],
)
def test_values_of_another_type_are_refused(recipe: Path, override: str) -> None:
    section, _, setting = override.partition(": ")
    name = setting.partition("=")[0]
    words = [f"objective.name={USERS.get(name, 'sft')}", f"{section.strip('[]')}.{setting}"]
    with pytest.raises(ValueError, match=rf"^{re.escape(section)}: {name} "):
        load_recipe(recipe, words)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("model.dtype=bfloat16", "dtype"),
        ("held_out.every=1", "path"),
        ("out=5", "out"),
        ("objective.name=[1]", "objective"),
        ("tracker=paper", "tracker"),
    ],
)
def test_unusable_values_are_refused(recipe: Path, override: str, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        load_recipe(recipe, [override])


def test_only_drafts_have_a_target() -> None:
    with pytest.raises(ValueError, match="target .*Qwen2ForCausalLM"):
        load_recipe("tiny-aux", ["model.target=tiny-ar"]).build_trainer()


KINDS = {**SECTIONS, **OBJECTIVES}
NEEDED = {"held_out": "story:test", "data": "story:train"}
"""Paths that sections require."""


def numbers(hint: Any, length: int = 0) -> Iterator[tuple[Any, int]]:
    """The numbers of an annotation: bounds or a bare type, and how many of them are in a list."""
    parts = get_args(hint)
    if get_origin(hint) is Annotated:
        yield parts[1], length
    elif hint in (int, float):
        yield hint, length
    elif get_origin(hint) is tuple:
        yield from numbers(parts[0], 1 if parts[-1] is Ellipsis else len(parts))
    elif get_origin(hint) is not Literal:
        for part in parts:
            yield from numbers(part)


NUMBERS = [
    (section, name, bounds, length)
    for section, kind in KINDS.items()
    for name, option in list_options(kind).items()
    for bounds, length in numbers(option.hint)
]


def outside(bounds: Bounds) -> list[float]:
    """Numbers out of bounds, slightly and by far."""
    low = bounds.low if bounds.above else bounds.low - 1
    high = bounds.high if bounds.below else bounds.high + 1
    return [low, high, -(10**30), 10**23, 1e30, math.nan, math.inf, -math.inf]


@pytest.mark.sampled
@pytest.mark.parametrize(("section", "name", "bounds", "length"), NUMBERS, ids=str)
def test_every_number_has_bounds_that_hold(
    recipe: Path, section: str, name: str, bounds: Any, length: int
) -> None:
    assert isinstance(bounds, Bounds), f"{section}.{name} has none"
    kind, where = KINDS[section], section if section in SECTIONS else "objective"
    path = NEEDED.get(section)
    others = [f"objective.name={section}"] if where == "objective" else []
    others += [f"{section}.path={path}"] if path else []
    for number in outside(bounds):
        written = [number] * length if length else number
        with pytest.raises(ValueError, match=rf"^\[{where}\]: {name} "):
            load_recipe(recipe, [*others, f"{where}.{name}={written}"])
        made = (number,) * length if length else number
        with pytest.raises(ValueError, match=f"^{name} "):
            kind(**{name: made}, **({"path": path} if path else {}))

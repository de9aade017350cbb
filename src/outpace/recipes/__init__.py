"""Recipes in the package, one TOML file each; its first line is a summary."""

from __future__ import annotations

from pathlib import Path

RECIPES_FOLDER = Path(__file__).parent


def recipe_names() -> list[str]:
    """Return the names of the recipes, sorted."""
    return sorted(path.stem for path in RECIPES_FOLDER.glob("*.toml"))


def find_recipe(name: str | Path) -> Path:
    """Return the file of a recipe, given by path or name; `ValueError` if there is none."""
    if Path(name).is_file():
        return Path(name)
    if str(name) in recipe_names():
        return RECIPES_FOLDER / f"{name}.toml"
    raise ValueError(
        f"no recipe at {str(name)!r}; give the path of a TOML file, or one of "
        f"{', '.join(recipe_names())}"
    )


def recipe_summary(name: str) -> str:
    """Return the summary of a recipe, the first line of its file."""
    first, _, _ = find_recipe(name).read_text(encoding="utf-8").partition("\n")
    return first.removeprefix("# ").removesuffix(".")

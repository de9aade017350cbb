"""Recipes that ship inside the package, a TOML file each; its first line says what it is for."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The recipes by name."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find(name: str | Path) -> Path:
    """The file of a recipe: a path, or a name; `ValueError` where there is none."""
    if Path(name).is_file():
        return Path(name)
    if str(name) in names():
        return FOLDER / f"{name}.toml"
    raise ValueError(
        f"no recipe at {str(name)!r}; give the path of a TOML file, or one of {', '.join(names())}"
    )


def about(name: str) -> str:
    """What a recipe is for: the first line of its comment."""
    first, _, _ = find(name).read_text(encoding="utf-8").partition("\n")
    return first.removeprefix("# ").removesuffix(".")

"""Recipes that ship inside the package, a TOML file each; what one is for stands in its comment."""

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
    """What a recipe is for: the first sentence of its comment."""
    lines = find(name).read_text(encoding="utf-8").splitlines()
    said = [line.removeprefix("#").strip() for line in lines[: lines.index("")]]
    return " ".join(said).partition(". ")[0].removesuffix(".")

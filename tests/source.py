"""The package's own source, for the tests that read it."""

import ast
from pathlib import Path

import outpace

ROOT = Path(outpace.__file__).parent


def modules(root: Path) -> dict[str, ast.Module]:
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    return {path: ast.parse((root / path).read_text(), path) for path in paths}


MODULES = modules(ROOT)


def part(module: str) -> str:
    """Folder or file directly under the package: `engine` of `engine/cache.py`."""
    return module.split("/")[0].removesuffix(".py")


def imported(module: str, tree: ast.Module) -> set[str]:
    """Parts of the package that a module imports, anywhere in it; a relative import is a fault."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively"
            whole = node.module == "outpace"
            names |= {f"outpace.{a.name}" for a in node.names} if whole else {node.module or ""}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    ours = (name.split(".") for name in names)
    return {path[1] if len(path) > 1 else "__init__" for path in ours if path[0] == "outpace"}

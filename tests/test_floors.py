"""What may import what: arrows point down, and the lowest floor knows only itself."""

import ast

from source import MODULES, imported, part

FLOORS = {
    part: set(below.split())
    for part, below in {
        "errors": "",
        "version": "",
        "tokenizer": "",
        "jsonl": "",
        "lock": "",
        "recipes": "",
        "zoo": "",
        "measurements": "lock",
        "field_types": "errors",
        "kernels": "measurements version",
        "provenance": "measurements version",
        "decoding": "errors field_types kernels",
        "constraint": "decoding errors field_types tokenizer",
        "methods": "decoding field_types",
        "pacing": "decoding",
        "models": "decoding errors kernels",
        "checkpoints": "decoding errors field_types kernels lock measurements models tokenizer",
        "attention": "decoding errors kernels models",
        "engine": (
            "attention checkpoints decoding errors field_types kernels measurements methods models "
            "pacing version"
        ),
        "api": (
            "attention checkpoints constraint decoding engine errors field_types jsonl lock "
            "measurements methods models tokenizer"
        ),
        "__init__": "api constraint errors version",
        "data": "api checkpoints decoding errors field_types jsonl lock",
        "training": (
            "api attention checkpoints data decoding errors field_types jsonl lock methods models "
            "provenance recipes tokenizer"
        ),
        "server": (
            "api checkpoints constraint decoding engine errors field_types methods models version"
        ),
        "ray": "api checkpoints engine errors methods models server",
        "cli": (
            "api checkpoints constraint data decoding engine errors field_types jsonl methods "
            "models provenance ray recipes server training version"
        ),
        "lab": (
            "api checkpoints cli data decoding engine errors field_types jsonl methods models "
            "provenance"
        ),
        "__main__": "cli",
    }.items()
}
"""What each part of the package may import, itself aside; a new part needs its own line."""


def upward(module: str, tree: ast.Module) -> set[str]:
    """Parts that a module imports and may not."""
    return imported(module, tree) - FLOORS[part(module)] - {part(module)}


def test_arrows_point_down() -> None:
    assert {part(module) for module in MODULES} == set(FLOORS)
    found = {module: upward(module, tree) for module, tree in MODULES.items()}
    assert not {module: parts for module, parts in found.items() if parts}


def test_there_is_no_cycle() -> None:
    def below(name: str) -> set[str]:
        return FLOORS[name].union(*(below(each) for each in FLOORS[name]))

    assert all(name not in below(name) for name in FLOORS)

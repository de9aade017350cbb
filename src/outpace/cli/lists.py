"""Commands that list: `models` and `methods`."""

from __future__ import annotations

from math import prod

from rich.table import Table
from safetensors import safe_open

from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.families.drafts import DRAFTS
from outpace.checkpoints.load import ZOO, load_config, zoo_names
from outpace.cli.draw import console
from outpace.cli.options import about, flag
from outpace.decoding.target import plural
from outpace.methods import METHODS
from outpace.methods.options import options_of


def models() -> None:
    """List the embedded models, and the checkpoint formats that can be loaded."""
    table = Table(header_style="bold")
    for column in ("embedded model", "family", "parameters", "megabytes"):
        table.add_column(column)
    for name in zoo_names():
        table.add_row(name, *described(name))
    console.print(table)
    for family in FAMILIES.values():
        console.print(family.name, style="bold")
        console.print(f"  {family.about}")
        formats = f"{', '.join(family.architectures)}, verified against {family.compared}"
        console.print(f"  {formats}", style="dim")
        console.print(f"  such as {', '.join(family.checkpoints)}", highlight=False)
    for method, targets in DRAFTS.items():
        console.print(f"drafts of {method}", style="bold")
        for target, drafts in targets.items():
            remark = "" if loads(target) else " (cannot be loaded)"
            console.print(f"  {', '.join(drafts)} for {target}{remark}", highlight=False)


def loads(name: str) -> bool:
    """Return whether a checkpoint is an embedded model, or listed by a family."""
    names = {each for family in FAMILIES.values() for each in family.checkpoints}
    return name in names or name in zoo_names()


def described(name: str) -> tuple[str, str, str]:
    """Return family, number of parameters and size of an embedded model."""
    path = ZOO / name / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        parameters = sum(prod(file.get_slice(tensor).get_shape()) for tensor in file.keys())  # noqa: SIM118
    size = path.stat().st_size
    return load_config(name).family, f"{parameters / 1e6:.2f}M", f"{size / 2**20:.1f}"


def methods() -> None:
    """List the decoding methods and their options."""
    for name, kind in METHODS.items():
        console.print(name, style="bold")
        console.print(f"  {(kind.__doc__ or '').splitlines()[0]}")
        console.print(f"  decodes {plural(kind.decodes)}", style="dim")
        for option in options_of(kind).values():
            console.print(f"  --{flag(option.name):<18} {about(option)}")

"""Commands that list: `models` and `methods`."""

from __future__ import annotations

from math import prod

from rich.table import Table
from safetensors import safe_open

from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.load import ZOO_FOLDER, load_config, zoo_names
from outpace.checkpoints.lookup import KNOWN_DRAFTS
from outpace.cli.draw import console
from outpace.cli.options import describe_option, flag_name
from outpace.decoding.target import plural_noun
from outpace.methods import METHODS
from outpace.methods.options import method_options


def models() -> None:
    """List the embedded models, and the checkpoint formats that can be loaded."""
    table = Table(header_style="bold")
    for column in ("embedded model", "family", "parameters", "megabytes"):
        table.add_column(column)
    for name in zoo_names():
        table.add_row(name, *describe_model(name))
    console.print(table)
    for family in FAMILIES.values():
        console.print(family.name, style="bold")
        console.print(f"  {family.about}")
        names = family.architectures or family.aliases
        formats = f"{', '.join(names)}, verified against {family.compared}"
        console.print(f"  {formats}", style="dim")
        if family.mtp is not None:
            console.print("  has an MTP head, its draft: --method eagle", highlight=False)
        console.print(f"  such as {', '.join(family.checkpoints)}", highlight=False)
    for method, targets in KNOWN_DRAFTS.items():
        console.print(f"drafts of {method}", style="bold")
        for target, drafts in targets.items():
            remark = "" if is_loadable(target) else " (cannot be loaded)"
            console.print(f"  {', '.join(drafts)} for {target}{remark}", highlight=False)


def is_loadable(name: str) -> bool:
    """Return whether a checkpoint is an embedded model, or listed by a family."""
    names = {each for family in FAMILIES.values() for each in family.checkpoints}
    return name in names or name in zoo_names()


def describe_model(name: str) -> tuple[str, str, str]:
    path = ZOO_FOLDER / name / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        parameters = sum(prod(file.get_slice(tensor).get_shape()) for tensor in file.keys())  # noqa: SIM118
    size = path.stat().st_size
    return load_config(name).family, f"{parameters / 1e6:.2f}M", f"{size / 2**20:.1f}"


def methods() -> None:
    """List the decoding methods and their options."""
    for name, kind in METHODS.items():
        console.print(name, style="bold")
        console.print(f"  {(kind.__doc__ or '').splitlines()[0]}")
        console.print(f"  decodes {plural_noun(kind.target_kinds)}", style="dim")
        for option in method_options(kind).values():
            console.print(f"  --{flag_name(option.name):<18} {describe_option(option)}")

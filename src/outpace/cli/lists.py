"""Commands that list: `models` and `methods`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from rich.table import Table
from typer import Option

from outpace.cli.draw import console
from outpace.cli.options import describe_option, flag_name
from outpace.field_types import list_options
from outpace.methods import METHODS


def models(
    formats: Annotated[
        bool, Option("--formats", help="List the formats and published drafts that can be loaded.")
    ] = False,
) -> None:
    """List the models on this machine, and drafts for them; --formats lists what can be loaded."""
    from outpace.checkpoints.drafts import list_own_drafts

    if formats:
        list_formats()
        return
    table = Table(header_style="bold")
    for column in ("model", "family", "megabytes", "place"):
        table.add_column(column, overflow="fold")
    for name, paths, place in list_local_models():
        size = sum(map(os.path.getsize, paths)) / 2**20
        table.add_row(name, read_family(paths[0]), f"{size:.1f}", place)
    console.print(table)
    for target, draft in list_own_drafts():
        console.print(draft.describe(target), highlight=False, soft_wrap=True)


def list_local_models() -> Iterator[tuple[str, list[str], str]]:
    """Yield name, files of weights and place of each model on this machine, pulled ones first."""
    from huggingface_hub import constants

    from outpace.checkpoints.hub import ZOO_FOLDER, model_stores, zoo_names
    from outpace.checkpoints.name import HUB_CACHE_PREFIX, name_of

    shown = set()
    for store in model_stores():
        for name, files in store.list_names().items():
            if name not in shown:
                yield name, [*files], store.program
            shown.add(name)
    for path in sorted(Path(constants.HF_HUB_CACHE).glob(f"{HUB_CACHE_PREFIX}*/snapshots/*")):
        yield from list_folder(path, name_of(path), "the hub's cache")
    for name in zoo_names():
        yield from list_folder(ZOO_FOLDER / name, name, "bundled")


def list_folder(folder: Path, name: str, place: str) -> Iterator[tuple[str, list[str], str]]:
    """Yield the model of a folder, if it has one."""
    from outpace.checkpoints.hub import CONFIG_FILE

    weights = sorted(map(str, folder.glob("*.safetensors")))
    if weights and (folder / CONFIG_FILE).is_file():
        yield name, weights, place


def read_family(weights: str) -> str:
    """Return the family of a model by a file of its weights."""
    from outpace.checkpoints.load import load_config

    path = Path(weights)
    try:
        return load_config(path.parent if path.suffix == ".safetensors" else path).family
    except ValueError:
        return "(cannot be loaded)"


def list_formats() -> None:
    from outpace.checkpoints.drafts import KNOWN_DRAFTS
    from outpace.checkpoints.families import FAMILIES
    from outpace.checkpoints.hub import zoo_names

    loadable = {*zoo_names(), *(n for family in FAMILIES.values() for n in family.checkpoints)}
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
            remark = "" if target in loadable else " (cannot be loaded)"
            console.print(f"  {', '.join(drafts)} for {target}{remark}", highlight=False)


def methods() -> None:
    """List the decoding methods and their options."""
    from outpace.decoding.target import plural_noun

    for name, kind in METHODS.items():
        console.print(name, style="bold")
        console.print(f"  {(kind.__doc__ or '').splitlines()[0]}")
        console.print(f"  decodes {plural_noun(kind.target_kinds)}", style="dim")
        for option in list_options(kind).values():
            console.print(f"  --{flag_name(option.name):<18} {describe_option(option)}")

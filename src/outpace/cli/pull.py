"""Commands for models of the hub, `pull` and `rm`, and the download of those that others name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from outpace.cli.draw import console
from outpace.cli.terminal import ProgressBars, exit_on_sigterm
from outpace.errors import OptionError

if TYPE_CHECKING:
    from outpace.checkpoints.hub import HubName


def pull(
    model: Annotated[str, Argument(help="ORG/REPO:QUANT of a GGUF file, or another hub name.")],
) -> None:
    """Download a model of the hub; an interrupted download continues when repeated.

    The GGUF file of ORG/REPO:QUANT goes to the folder of models, any other repository to the hub's
    cache. Every command and the server take the same names, and download what is missing.
    """
    from outpace.checkpoints.drafts import best_local_draft
    from outpace.checkpoints.hub import HubName, resolve_checkpoint

    hub_name = HubName.parse(model)
    path = resolve_checkpoint(model) if hub_name is None else fetch_gguf(hub_name)
    console.print(f"{model}: {path}", soft_wrap=True)
    if (draft := best_local_draft(path)) is not None:
        console.print(draft.describe(model), style="dim", soft_wrap=True)


def rm(model: Annotated[str, Argument(help="ORG/REPO:QUANT of a pulled model.")]) -> None:
    """Remove a model that was pulled; files of other programs stay."""
    from outpace.checkpoints.hub import REPOSITORY_NAME, HubName, remove_model

    hub_name = HubName.parse(model)
    if hub_name is None:
        if REPOSITORY_NAME.fullmatch(model) is None:
            raise OptionError("model", model, "must be ORG/REPO:QUANT of a pulled model")
        hub_name = HubName(model)
    console.print(f"{model}: {remove_model(hub_name) / 1e6:.1f} MB removed", soft_wrap=True)


def fetch_model(name: str) -> None:
    """Download the GGUF model that a command names, if it is not on this machine."""
    from outpace.checkpoints.gguf.file import import_gguf
    from outpace.checkpoints.hub import HubName, find_model

    hub_name = HubName.parse(name)
    if hub_name is not None and find_model(hub_name) is None:
        import_gguf()  # raises before the download if it is not installed
        fetch_gguf(hub_name)


def fetch_gguf(name: HubName) -> Path:
    """Return the first file of a model, downloaded with progress if it is not on this machine."""
    from outpace.checkpoints.hub import find_model, pull_model

    if (found := find_model(name)) is not None:
        return found
    with exit_on_sigterm(), ProgressBars() as shown:
        bar = shown.add_task(f"pulling {name}, MB", total=None)

        def update_bar(done: int, total: int) -> None:
            shown.update(bar, completed=done / 1e6, total=total / 1e6)

        return pull_model(name, update_bar)

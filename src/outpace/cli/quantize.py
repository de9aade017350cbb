"""The command `quantize`, which writes a checkpoint with fewer bits per weight."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from outpace.cli.draw import console
from outpace.cli.flags import ModelArgument
from outpace.cli.terminal import ProgressBars, exit_on_sigterm


def quantize(
    model: ModelArgument,
    output: Annotated[Path, Option(help="New folder for the checkpoint.")],
    target: Annotated[
        str | None, Option(help="For a draft: the model that it drafts for.", show_default=False)
    ] = None,
) -> None:
    """Write a model with 8-bit weights, in the published compressed-tensors format.

    It loads faster from half the bytes, and generates the same tokens as the original with
    --quantize int8. A GGUF file becomes a folder that includes the tokenizer. A draft needs
    --target.
    """
    from outpace.checkpoints.compress import compress_checkpoint

    with exit_on_sigterm(), ProgressBars() as shown:
        bar = shown.add_task(f"quantizing {model}", total=None)

        def update_bar(done: int, total: int) -> None:
            shown.update(bar, completed=done, total=total)

        folder = compress_checkpoint(model, output, target=target, progress=update_bar)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    console.print(f"{size / 1e6:.1f} MB of weights in {folder}", style="dim", soft_wrap=True)

"""The command `data`, which makes training data from a model's answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from outpace.api.options import Options, check_options
from outpace.cli.draw import console
from outpace.cli.flags import (
    LOAD_FLAGS,
    SAMPLING_FLAGS,
    STOP_FLAGS,
    BatchFlag,
    LoadFlags,
    ModelArgument,
    SamplingFlags,
    StopFlags,
    TemplateFlag,
    parse_variable,
)
from outpace.cli.options import MethodFlag
from outpace.cli.terminal import ProgressBars, exit_on_sigterm

if TYPE_CHECKING:
    from outpace.api.llm import LLM
    from outpace.checkpoints.fingerprint import Fingerprint
    from outpace.data.prompt_set import PromptSet


def data(
    model: ModelArgument,
    prompts: Annotated[
        list[Path], Argument(help="Files of prompts: JSON lines, or .txt with one per line.")
    ],
    output: Annotated[Path, Option(help="Folder of the data.")],
    method: MethodFlag = None,
    held_out: Annotated[float, Option(help="Share of prompts for held.jsonl.")] = 0.02,
    exclude: Annotated[
        list[Path] | None,
        Option(help="File that no prompt may share ten words with; may be repeated."),
    ] = None,
    batch: BatchFlag = 64,
    sampling: SamplingFlags = SAMPLING_FLAGS,
    stops: StopFlags = STOP_FLAGS,
    template: TemplateFlag = None,
    load_flags: LoadFlags = LOAD_FLAGS,
) -> None:
    """Make training data for a draft: the answers of its target to prompts.

    Each JSON line has prompt or messages. Repeated prompts are left out. The answers are in
    train.jsonl and held.jsonl; data.json counts them, and those that share ten words with an
    excluded file. An interrupted run continues when the same command is repeated.
    """
    from outpace.checkpoints.fingerprint import Fingerprint
    from outpace.data.prompt_set import read_prompt_set

    options = sampling.options() | stops.options()
    options |= Options(template=dict(map(parse_variable, template or ())))
    check_options(options)
    chosen = read_prompt_set(prompts, held_out=held_out, exclude=exclude or ())
    with exit_on_sigterm():
        llm = load_flags.open_model(model, method)
        adapter = load_flags.adapter
        fingerprint = Fingerprint.of(model, llm.text.tokenizer, options["template"], adapter)
        card = answer_prompts(llm, fingerprint, chosen, output, batch=batch, **options)
    print_card(card, output)


def answer_prompts(
    llm: LLM, fingerprint: Fingerprint, prompts: PromptSet, folder: Path, **options: Any
) -> dict[str, Any]:
    """Call `make_data` with a progress bar for each file."""
    from outpace.data.prompt_set import make_data

    with ProgressBars() as shown:
        bars = {name: shown.add_task(name, start=False) for name in prompts.by_file}

        def update_bar(name: str, done: int, total: int, tokens: int) -> None:
            shown.update(bars[name], completed=done, total=total)

        return make_data(llm, fingerprint, prompts, folder, progress=update_bar, **options)


def print_card(card: Mapping[str, Any], folder: Path) -> None:
    prompts = card["prompts"]
    left_out = "".join(
        f", {n} share text with {path}" for path, n in prompts["overlapping"].items()
    )
    console.print(
        f"{prompts['read']} prompts: {prompts['repeated']} repeated, {prompts['too_long']} too long"
        f"{left_out}"
    )
    for name, counts in card["files"].items():
        line = f"{folder / name}: {counts['answers']} answers, {counts['tokens']} tokens"
        overlaps = (f", {n} share text with {path}" for path, n in counts["overlapping"].items())
        console.print(line + "".join(overlaps), soft_wrap=True)

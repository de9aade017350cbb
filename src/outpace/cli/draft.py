"""The commands `train` and `train draft`, which makes a draft for a model from prompts alone."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option, Typer
from typer.core import TyperGroup

from outpace.api.options import Options, check_options
from outpace.cli.data import answer_prompts, print_card
from outpace.cli.draw import console
from outpace.cli.flags import LOAD_FLAGS, BatchFlag, ModelArgument, TemplateFlag, parse_variable
from outpace.cli.quantize import quantize
from outpace.cli.terminal import error_console, exit_on_sigterm
from outpace.cli.training import require_train_extra, run_training, train_command
from outpace.errors import OptionError
from outpace.provenance import provenance_record

if TYPE_CHECKING:
    from outpace.data.prompt_set import PromptSet


TRIAL_PROMPTS, TRIAL_STEPS = 16, 4
"""Prompts and steps from which durations are estimated."""

MEASURED_PROMPTS = 16
"""Maximum number of held-out prompts that measure a draft."""


class TrainGroup(TyperGroup):
    """The commands of `train`, of which `recipe` needs no name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments, after inserting the name of the command that they are for."""
        is_named = args[:1] and args[0] in (*self.commands, *ctx.help_option_names)
        return super().parse_args(ctx, args if is_named else ["recipe", *args])


def train_group() -> Typer:
    """Train with a recipe, or make a draft for a model: `train RECIPE`, `train draft TARGET`."""
    app = Typer(cls=TrainGroup, add_completion=False)
    app.callback()(lambda: None)
    app.command("recipe")(train_command)
    app.command("draft")(train_draft)
    return app


def train_draft(
    target: ModelArgument,
    overrides: Annotated[
        list[str] | None, Argument(help="Overrides key=value of the recipe, with dotted keys.")
    ] = None,
    *,
    data: Annotated[
        list[Path],
        Option(help="File of prompts: JSON lines, or .txt with one per line; may be repeated."),
    ],
    output: Annotated[Path, Option(help="Folder of answers, run and draft.")],
    held_out: Annotated[float, Option(help="Share of prompts that are held out.")] = 0.02,
    exclude: Annotated[
        list[Path] | None,
        Option(help="File that no prompt may share ten words with; may be repeated."),
    ] = None,
    max_tokens: Annotated[int, Option(help="Maximum number of tokens of an answer.")] = 256,
    batch: BatchFlag = 32,
    template: TemplateFlag = None,
) -> None:
    """Make a DFlash draft for a model: its answers to prompts, training, 8 bits, measurement.

    First prints the expected durations. The folder then has the answers (data), recipe.toml, the
    run, the draft, and its speed beside plain decoding (draft.json). An interrupted run continues
    when the same command is repeated.
    """
    from outpace.data.prompt_set import read_prompt_set, smallest_share

    prompts = read_prompt_set(data, held_out=held_out, exclude=exclude or ())
    if not prompts.held_out:
        share = smallest_share(prompts)
        remedy = "give more prompts" + (f", or --held-out {share:g}" if share else "")
        raise OptionError(
            "held_out", held_out, f"holds out none of {len(prompts.training)} prompts: {remedy}"
        )
    options = Options(max_tokens=max_tokens, temperature=0.0)
    options["template"] = dict(map(parse_variable, template or ()))
    check_options(options)
    with require_train_extra():
        import accelerate  # noqa: F401
    answer_for_draft(target, prompts, output, overrides or (), batch, options)
    recipe, best, draft = output / "recipe.toml", output / "run" / "best", output / "draft"
    if not recipe.exists():
        write_draft_recipe(target, output, recipe, options)
    run_training(str(recipe), overrides or ())
    if draft.exists() and draft.stat().st_mtime < best.stat().st_mtime:
        shutil.rmtree(draft)  # of an earlier, shorter run
    if not draft.exists():
        quantize(str(best), draft, target)
    measure_draft(target, draft, prompts, options)


MIN_TOKENS_PER_WEIGHT = 0.01
"""Tokens of answers per weight of a draft: the bundled one for Qwen2.5-Coder had 0.024."""


def warn_of_few_tokens(target: str, tokens: int) -> None:
    """Print a warning if answers of at most this many tokens are far too few for a draft."""
    from outpace.checkpoints.load import load_config
    from outpace.training.draft_recipe import count_weights

    weights = count_weights(load_config(target))
    if tokens < (least := int(MIN_TOKENS_PER_WEIGHT * weights)):
        error_console.print(
            f"warning: the prompts give at most {tokens} tokens of answers, and a draft of "
            f"{weights} weights needs at least {least}: it will rarely be accepted",
            soft_wrap=True,
        )


def answer_for_draft(
    target: str,
    prompts: PromptSet,
    folder: Path,
    overrides: Sequence[str],
    batch: int,
    options: Options,
) -> None:
    """Let a target answer prompts, after a trial that estimates the durations."""
    from outpace.checkpoints.fingerprint import Fingerprint
    from outpace.data.prompt_set import CARD_FILE
    from outpace.methods import Autoregressive
    from outpace.training.draft_recipe import accepted_after
    from outpace.training.report import format_duration

    data = folder / "data"
    with exit_on_sigterm():
        llm = LOAD_FLAGS.open_model(target, Autoregressive())
        warn_of_few_tokens(target, (options["max_tokens"] or 0) * len(prompts.training))
        fingerprint = Fingerprint.of(target, llm.text.tokenizer, options["template"])
        if not (data / CARD_FILE).exists():
            first = dict(islice(prompts.training.items(), TRIAL_PROMPTS))
            trial, start = replace(prompts, training=first), time.perf_counter()
            card = answer_prompts(llm, fingerprint, trial, data, batch=batch, **options)
            seconds = time.perf_counter() - start
            done = sum(counts["answers"] for counts in card["files"].values())
            answering = seconds * (len(prompts.training) - len(first)) / max(done, 1)
            count = len(prompts.training)
            seconds, epochs = time_steps(target, folder, overrides, options)
            console.print(
                f"{target}: {count} prompts; about {format_duration(answering)} for their answers "
                f"and at most {format_duration(seconds * count)} for training; after them, a "
                f"draft of Qwen2.5-Coder-0.5B accepted {accepted_after(epochs * count):.1f} tokens "
                "per verification of held-out text",
                soft_wrap=True,
            )
        card = answer_prompts(llm, fingerprint, prompts, data, batch=batch, **options)
    print_card(card, data)


def time_steps(
    target: str, folder: Path, overrides: Sequence[str], options: Options
) -> tuple[float, float]:
    """Return the seconds per prompt of a run, by a few steps on the answers, and its epochs."""
    from outpace.training.recipe import load_recipe
    from outpace.training.report import METRICS_FILE

    with TemporaryDirectory(prefix="trial-", dir=folder) as trial:
        path, out = Path(trial, "recipe.toml"), Path(trial, "run")
        write_draft_recipe(target, folder, path, options)
        recipe = load_recipe(path, overrides)
        short = replace(
            recipe,
            train=replace(recipe.train, epochs=None, steps=TRIAL_STEPS, log_every=1),
            data=replace(recipe.data, features=None),
            held_out=None,
            out=str(out),
        )
        trainer = short.build_trainer()
        trainer.fit()
        trainer.close()
        lines = (out / METRICS_FILE).read_text("utf-8").splitlines()
    first, *_, last = (json.loads(line)["seconds"] for line in lines)
    epochs = recipe.train.epochs or 1
    return epochs * (last - first) / (TRIAL_STEPS - 1) / recipe.train.batch, epochs


def write_draft_recipe(target: str, folder: Path, path: Path, options: Options) -> None:
    """Write the recipe of a draft for the answers in a folder."""
    from outpace.training.draft_recipe import draft_recipe, write_recipe

    sections = draft_recipe(target, folder / "data", folder / "run", options["template"])
    path.write_text(write_recipe(sections), "utf-8")


def measure_draft(target: str, draft: Path, prompts: PromptSet, options: Options) -> None:
    """Answer held-out prompts plainly and with a draft; print and write the speeds of both."""
    from outpace.api.output import DRAFT_COUNTS
    from outpace.methods import Autoregressive, DFlash
    from outpace.methods.options import method_name

    chosen = [*islice(prompts.held_out.values(), MEASURED_PROMPTS)]
    llm = LOAD_FLAGS.open_model(target, Autoregressive(), prefix_cache=False)
    results = []
    for method in (Autoregressive(), DFlash(draft=str(draft))):
        request = options | Options(method=method)
        llm.generate(chosen[:1], **request)  # warms up, not counted
        began = time.perf_counter()
        outputs = [output for prompt in chosen for output in llm.generate([prompt], **request)]
        seconds = time.perf_counter() - began
        tokens = sum(len(output.ids) for output in outputs)
        per_forward, per_second = tokens / sum(each.forwards for each in outputs), tokens / seconds
        console.print(
            f"{method_name(type(method))}: {per_forward:.2f} tokens per forward, "
            f"{per_second:.0f} tokens per second",
            soft_wrap=True,
        )
        counts = {name: sum(getattr(each, name) for each in outputs) for name in DRAFT_COUNTS}
        speeds = {"tokens_per_forward": round(per_forward, 3), "tokens_per_second": per_second}
        results.append({"method": repr(method), "tokens": tokens, **speeds, **counts})
    document = {"provenance": provenance_record(), "problems": len(chosen), "results": results}
    draft.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n")

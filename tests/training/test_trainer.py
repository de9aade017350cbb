"""Tests of the training loop: falling loss, resuming, export, recomputation, prefetching,
trackers, and signals.
"""

import json
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from outpace.checkpoints.checkpoint import load_tokenizer
from outpace.checkpoints.load import load_model
from outpace.decoding import Kind
from outpace.models.device import computes_bfloat16
from outpace.training import HeldOut, Loop, checkpoint, trackers
from outpace.training import trainer as training
from outpace.training.checkpoint import list_checkpoints
from outpace.training.recipe import load_recipe, train_recipe
from outpace.training.trainer import DEFAULT_HANDLERS, Prefetcher, catch_signals, exit_exception
from runs import RECIPE, adapter_trainer, losses, metrics, same_tensors, start, trainer, write_lines


@pytest.mark.parametrize(
    ("architecture", "precision"), [("Qwen2ForCausalLM", "no"), ("DreamModel", "bf16")]
)
def test_twenty_steps_lower_the_loss(tmp_path: Path, architecture: str, precision: str) -> None:
    trainer(tmp_path, architecture, log_every=2, precision=precision).fit(20)
    assert sum(losses(tmp_path)[-3:]) < 0.9 * sum(losses(tmp_path)[:3])


FREED_MEGABYTES = """
import psutil, torch
from outpace.training.run_setup import keep_freed_memory
keep_freed_memory()
memory = psutil.Process().memory_info
large, used = torch.ones(2**24), memory().rss
del large
print((used - memory().rss) / 2**20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have no mallopt")
def test_freed_memory_is_kept() -> None:
    words = [sys.executable, "-c", FREED_MEGABYTES]
    freed = subprocess.run(words, capture_output=True, text=True, check=True)
    assert float(freed.stdout) < 32  # of 64


def test_resumed_run_reaches_the_same_weights(tmp_path: Path) -> None:
    for name in ("whole", "halves"):
        trainer(tmp_path / name, steps=8, log_every=3).fit()
    shutil.rmtree(tmp_path / "halves" / "checkpoints" / "step-00000008")
    trainer(tmp_path / "halves", steps=8, log_every=3, tracker="tensorboard").fit()
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "halves")
    assert [line["step"] for line in metrics(tmp_path / "whole")] == [3, 6, 8]
    for name in (checkpoint.MODEL_FILE, checkpoint.OPTIMIZER_FILE):
        whole, halves = (
            load_file(tmp_path / run / "checkpoints" / "step-00000008" / name)
            for run in ("whole", "halves")
        )
        assert same_tensors(halves, whole)


def test_epochs_are_steps(tmp_path: Path) -> None:
    assert Loop(batch=4, epochs=2.5).with_epochs(10).steps == 7
    assert Loop(steps=9, batch=4).with_epochs(None).steps == 9
    path = write_lines(
        tmp_path / "data.jsonl", *({"prompt": "?", "response": "! " * n} for n in (3, 4))
    )
    trainer(tmp_path / "run", data=path, batch=2, epochs=3, log_every=1).fit()
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]
    with pytest.raises(ValueError, match="epochs"):
        trainer(tmp_path / "story", epochs=1)


def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    one = trainer(tmp_path / "one", steps=1)
    two = trainer(tmp_path / "two", steps=1, accumulation=2)
    for run in (one, two):
        run.fit()
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-5)
    pairs = zip(one.model.parameters(), two.model.parameters(), strict=True)
    assert all(torch.allclose(a, b, atol=2e-4) for a, b in pairs)


def test_an_export_loads_with_its_tokenizer(tmp_path: Path) -> None:
    run = trainer(tmp_path, "DreamModel", steps=1)
    run.export(tmp_path / "export")
    model = load_model(tmp_path / "export")
    assert model.config.mask_id == 1021 and model.config.kind is Kind.DIFFUSION
    for ours, theirs in zip(model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(ours, theirs.detach().bfloat16().float())
    assert load_tokenizer(tmp_path / "export").chat_template


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"batch": 3, "accumulation": 2}, "batch"),
        ({"rate": 1.0}, "rate"),
        ({"steps": 0}, "steps"),
        ({"precision": "fp8"}, "precision"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, options: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        trainer(tmp_path, **options)


def test_tensorboard_shows_what_the_log_has(tmp_path: Path) -> None:
    held = HeldOut(path="story:test", examples=2, every=2)
    run = trainer(tmp_path, steps=4, log_every=2, tracker="tensorboard", held_out=held)
    run.fit()
    run.close()
    events = EventAccumulator(str(tmp_path / trackers.PROJECT)).Reload()
    logged = [(line["step"], pytest.approx(line["loss"])) for line in metrics(tmp_path)]
    assert [(point.step, point.value) for point in events.Scalars("loss")] == logged
    assert [point.step for point in events.Scalars("held_out/loss")] == [0, 2, 4]


@pytest.mark.parametrize("where", ["weight", "loss"])
def test_nan_ends_the_run(tmp_path: Path, where: str) -> None:
    trainer(tmp_path, steps=4, log_every=10, save_every=2).fit(2)
    run = trainer(tmp_path, steps=20, log_every=10, save_every=2)
    update = run.train_step

    def breaking(step: int, steps: int):
        if step == 5 and where == "weight":
            with torch.no_grad():
                run.model.embedding.weight.fill_(float("nan"))
        total, *rest = update(step, steps)
        return (total * float("nan") if step == 5 else total, *rest)

    run.train_step = breaking
    with pytest.raises(ValueError, match="nan"):
        run.fit()
    assert list_checkpoints(tmp_path / "checkpoints")[-1].name == "step-00000004"
    assert [line["step"] for line in metrics(tmp_path)] == [2]


def test_next_step_is_prefetched() -> None:
    made: list[int] = []
    begun = {n: threading.Event() for n in range(12)}

    def make(step: int) -> int:
        assert threading.current_thread() is not threading.main_thread()
        made.append(step)
        begun[step].set()
        return step * 10

    ahead = Prefetcher(make)
    assert ahead(0) == 0 and begun[1].wait(5)
    assert ahead(1) == 10 and begun[2].wait(5)
    assert ahead(7, last=True) == 70
    ahead.close()
    assert made == [0, 1, 2, 7]


def test_error_of_prefetching_is_raised_at_its_step() -> None:
    def make(step: int) -> int:
        if step == 1:
            raise ValueError("step 1 has no data")
        return step

    ahead = Prefetcher(make)
    assert ahead(0) == 0
    with pytest.raises(ValueError, match="step 1"):
        ahead(1)
    ahead.close()


def test_batches_are_those_of_the_step(tmp_path: Path) -> None:
    run = trainer(tmp_path, batch=4)
    for step in (0, 1, 5, 6):
        ours, tokens = run.prefetcher(step)
        theirs, count = run.build_batches(step)
        assert tokens == count
        assert all((a.ids == b.ids).all() for a, b in zip(ours, theirs, strict=True))
    run.close()


SIGNALS = (signal.SIGINT, signal.SIGTERM)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.fixture
def default_handlers() -> Iterator[None]:
    """Python's own handlers, whatever a launcher of processes has left in another test."""
    before = [signal.signal(number, DEFAULT_HANDLERS[number]) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_is_recorded_and_second_ends(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []
    before = handlers()
    with catch_signals(printed.append) as signalled:
        assert signalled() == 0
        signal.raise_signal(number)
        for other in SIGNALS:
            signal.raise_signal(other)
        assert signalled() == number and len(printed) == 1
        monkeypatch.setattr(training, "SAME_SIGNAL_SECONDS", 0.0)
        with pytest.raises(type(exit_exception(number))) as raised:
            signal.raise_signal(number)
    assert handlers() == before
    assert number == signal.SIGINT or raised.value.code == 128 + number


@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize("number", SIGNALS)
def test_ignored_signals_stay_ignored(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with catch_signals() as signalled:
        signal.raise_signal(number)
        assert not signalled()
    assert signal.getsignal(number) is signal.SIG_IGN
    signal.signal(number, DEFAULT_HANDLERS[number])

    def elsewhere() -> int:
        with catch_signals() as signalled:
            return signalled()

    before = handlers()
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(elsewhere).result()
    assert handlers() == before


@pytest.mark.parametrize(
    ("architecture", "precision"), [("Qwen2ForCausalLM", "bf16"), ("DreamModel", "no")]
)
def test_recomputing_changes_no_loss(tmp_path: Path, architecture: str, precision: str) -> None:
    options = {"steps": 4, "log_every": 1, "precision": precision}
    trainer(tmp_path / "kept", architecture, **options).fit()
    trainer(tmp_path / "again", architecture, **options, recompute=True).fit()
    assert metrics(tmp_path / "kept") == metrics(tmp_path / "again")


def test_recomputing_keeps_dropout_and_teacher(tmp_path: Path) -> None:
    for name, again in (("kept", False), ("again", True)):
        adapter_trainer(tmp_path / name, steps=3, recompute=again).fit()
    assert metrics(tmp_path / "kept") == metrics(tmp_path / "again")
    assert len(set(losses(tmp_path / "kept"))) == 3


FROZEN = {
    "--draft": '[model]\ntarget = "tiny-ar"\ninit = "tiny-dflash"\n[objective]\nname = "dflash"\n',
    "--adapter": '[model]\ninit = "tiny-dream"\n[adapter]\nrank = 2\n[objective]\nname = "d2f"\n',
}
COMMON = """
[data]
path = "story:train"
[train]
steps = 2
batch = 2
log_every = 1
precision = "bf16"
recompute = true
[held_out]
path = "story:test"
examples = 2
decode = 1
max_tokens = 16
"""


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("flag", FROZEN)
def test_frozen_weights_may_be_in_bfloat16(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(FROZEN[flag] + COMMON)
    words = [f"out={tmp_path / 'half'}", "dtype=bfloat16"]
    half = load_recipe(recipe, words).build_trainer()
    assert {p.dtype for p in half.model.parameters() if p.requires_grad} == {torch.float32}
    (other,) = half.loss_module.models.others.values()
    assert torch.bfloat16 in {p.dtype for p in other.parameters()}
    train_recipe(recipe, words)
    train_recipe(recipe, [f"out={tmp_path / 'full'}"])
    assert losses(tmp_path / "half") == pytest.approx(losses(tmp_path / "full"), rel=0.05)
    lines = (tmp_path / "half" / "held_out.jsonl").read_text().splitlines()
    assert all(json.loads(line)["tokens_per_forward"] > 0 for line in lines) and len(lines) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert flag in out
    is_slow = not computes_bfloat16(torch.device("cpu"))
    assert ("no instructions for bfloat16; with train.precision=no" in out) is is_slow


@pytest.mark.nightly
def test_a_killed_run_goes_on_to_the_same_metrics(tmp_path: Path) -> None:
    recipe, options = tmp_path / "recipe.toml", ["log_every=3", "save_every=4"]
    recipe.write_text(RECIPE)
    killed = start(recipe, tmp_path / "killed", "steps=400", *options)
    while not list_checkpoints(tmp_path / "killed" / "checkpoints"):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    done = int(list_checkpoints(tmp_path / "killed" / "checkpoints")[-1].name.removeprefix("step-"))
    for out in ("killed", "whole"):
        train_recipe(recipe, [f"out={tmp_path / out}", f"steps={done + 3}", *options])
    assert [line["step"] for line in metrics(tmp_path / "whole")][-1] == done + 3
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "killed")


@pytest.mark.nightly
def test_two_processes_train_like_one(tmp_path: Path) -> None:
    recipe, options = tmp_path / "recipe.toml", ["steps=3", "clip=0"]
    recipe.write_text(RECIPE)
    for name, processes in (("pair", 2), ("one", 1)):
        train_recipe(recipe, [f"out={tmp_path / name}", *options], processes)
    assert losses(tmp_path / "pair") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    assert json.loads((tmp_path / "pair" / "run.json").read_text())["processes"] == 2
    assert (tmp_path / "pair" / "export" / "model.safetensors").is_file()
    pair, one = (moments(tmp_path / name) for name in ("pair", "one"))
    assert pair == pytest.approx(one, rel=0.05) and min(one.values()) > 0


def moments(out: Path) -> dict[str, float]:
    """Sizes of the first moments of the optimizers of a run."""
    tensors = load_file(list_checkpoints(out / "checkpoints")[-1] / checkpoint.OPTIMIZER_FILE)
    kept = ("exp_avg", "momentum_buffer")
    return {name: float(t.norm()) for name, t in tensors.items() if name.endswith(kept)}


def interrupted_run(tmp_path: Path, number: signal.Signals, *more: str) -> tuple[int, str]:
    """Status and output of a training that gets a signal after its third step."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    words = ("train", str(tmp_path / "recipe.toml"), f"out={tmp_path / 'out'}", *more)
    process = subprocess.Popen(
        [sys.executable, "-m", "outpace", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    path = tmp_path / "out" / "metrics.jsonl"
    while not (path.exists() and len(path.read_text().splitlines()) >= 3):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=120)
    return process.returncode, printed


@pytest.mark.nightly
@pytest.mark.parametrize("more", [(), ("--processes", "2")])
@pytest.mark.parametrize(
    ("number", "last"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
)
def test_a_signal_ends_a_run_after_a_checkpoint(
    tmp_path: Path, number: signal.Signals, last: str, more: tuple[str, ...]
) -> None:
    status, printed = interrupted_run(tmp_path, number, "steps=5000", "save_every=5000", *more)
    assert status == 128 + number and printed.endswith(f"outpace: {last}\n")
    assert "Traceback" not in printed
    (kept,) = list_checkpoints(tmp_path / "out" / "checkpoints")
    step = int(kept.name.removeprefix("step-"))
    assert f"step {step}" in printed
    assert len(metrics(tmp_path / "out")) == step >= 3
    train_recipe(
        tmp_path / "recipe.toml", [f"out={tmp_path / 'out'}", f"steps={step + 1}", "save_every=1"]
    )
    assert len(metrics(tmp_path / "out")) == step + 1

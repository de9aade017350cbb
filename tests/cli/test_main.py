"""Commands as typed by a user, with the embedded models."""

import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from outpace.checkpoints.hub import ZOO_FOLDER, ZOO_TOKENIZER
from outpace.cli import app
from outpace.cli.flags import LoadFlags
from outpace.lab.side import Side
from outpace.training.recipe import load_recipe

STORY = "Tom has 5 bags with 7 apples in each bag. He gives 9 apples to Ann. How many are left?"


def test_generate_streams_an_answer_and_one_line_of_statistics(outpace, monkeypatch):
    words = ("generate", "tiny-aux", STORY, "--max-tokens", "96")
    status, out, err = outpace(*words)
    assert status == 0 and out.rstrip().rpartition("#### ")[2].isdigit()
    figures = r"\d+ tokens in \d+ forwards after the prompt's: [\d.]+ tokens per forward, "
    assert re.match(rf"{figures}.*\n$", err)
    assert outpace(*words, "--quiet") == (0, out, "")
    assert outpace("generate", "tiny-ar", STORY, "--max-tokens", 1, "--quiet")[2] == ""  # a draft
    monkeypatch.setattr("outpace.cli.draw.speed_over_plain", lambda output: 1.2)
    assert outpace(*words)[2].endswith(", 1.20 × over one token per forward\n")


def test_generate_takes_the_flags_of_its_method(outpace):
    status, _, err = outpace(
        *("generate", "tiny-dream", STORY, "--max-tokens", "64", "--temperature", "0"),
        *("--method", "apd", "--verifier", "tiny-aux", "--ratio", "0.5", "--window", "none"),
    )
    assert status == 0
    per_forward = float(re.search(r"([\d.]+) tokens per forward", err)[1])
    assert per_forward > 1.5


def test_generate_fills_the_holes_of_a_text(outpace):
    for prompt in ((), (STORY,)):
        args = ("generate", "tiny-dream", *prompt, "--fill", "Tom has {{2}} or {{..9:[0-9]+}}.")
        status, out, _ = outpace(*args)
        assert status == 0 and re.fullmatch(r"(?s)Tom has .* or [0-9]+\.\n", out)


def test_a_program_can_read_the_answers(outpace, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
    )
    for n in (1, 3):
        words = ("generate", "tiny-aux", STORY, "--schema", schema, "--n", n)
        out = outpace(*words)[1]
        assert len([json.loads(line) for line in out.splitlines()]) == n


def test_same_seed_same_text(outpace):
    args = ("generate", "tiny-dream", STORY, "--max-tokens", "24", "--temperature", "4")
    texts = [outpace(*args, "--seed", s)[1] for s in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_generate_answers_a_file_as_training_data(outpace, tmp_path):
    source, target = tmp_path / "prompts.jsonl", tmp_path / "data.jsonl"
    source.write_text(json.dumps({"prompt": STORY}) + "\n")
    args = ("generate", "tiny-aux", "--input", str(source), "--output", str(target))
    for _ in range(2):
        assert outpace(*args)[0] == 0
        (line,) = target.read_text().splitlines()
        assert json.loads(line)["response"].endswith("#### 26")


def test_trace_shows_every_forward_with_its_holes(outpace):
    status, out, _ = outpace(
        *("trace", "tiny-dream", STORY, "--max-tokens", "32"),
        *("--method", "apd", "--verifier", "tiny-aux"),
    )
    assert status == 0
    assert "target" in out and "verifier" in out and "░" in out


def test_a_picture_without_matplotlib_names_the_extra(refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "outpace.cli.plots", raising=False)
    line = refused("trace", "tiny-aux", "x", "--png", tmp_path / "trace.png")
    assert "pip install '.[plot]'" in line


def test_evaluate_writes_headline_metrics_with_provenance(outpace, tmp_path):
    path = tmp_path / "result.json"
    status, out, _ = outpace(
        *("evaluate", "tiny-aux", "--task", "story", "--limit", "8", "--batch", "4"),
        *("--method", "autoregressive", "--json", str(path)),
    )
    assert status == 0 and "95 %" in out
    written = json.loads(path.read_text())
    (result,) = written["results"]
    assert written["provenance"]["torch"]
    assert result["problems"] == 8 and result["accuracy"] >= 0.5
    assert 0.9 < result["tokens_per_forward"] < 1 < result["tokens_per_second"]


def test_evaluate_reads_gsm8k_from_a_file(outpace, tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"question": STORY, "answer": "5*7-9 = 26\n#### 26"}) + "\n")
    status, out, _ = outpace("evaluate", "tiny-aux", "--task", "gsm8k", "--data", str(path))
    assert status == 0 and "100.0%" in out


@pytest.mark.nightly
def test_a_killed_evaluation_goes_on(outpace, refused, tmp_path):
    samples = tmp_path / "samples.jsonl"
    words = ("evaluate", "tiny-aux", "--limit", "3", "--samples", str(samples))
    assert outpace(*words)[0] == 0
    texts = [json.loads(line).get("text") for line in samples.read_text().splitlines()]
    samples.write_text("".join(samples.read_text().splitlines(True)[:2]))
    assert outpace(*words)[0] == 0
    assert [json.loads(line).get("text") for line in samples.read_text().splitlines()] == texts
    assert str(samples) in refused(*words, "--seed", "1")


def test_report_compares_runs(outpace, tmp_path):
    slow, fast, png = (str(tmp_path / name) for name in ("slow.json", "fast.json", "front.png"))
    plain = ("tiny-ar", "--method", "autoregressive")
    outpace("evaluate", *plain, "--limit", "4", "--json", slow)
    outpace(
        *("evaluate", "tiny-dream", "--limit", "4", "--json", fast, "--temperature", "0"),
        *("--method", "left_to_right", "--tokens", "8"),
    )
    status, out, err = outpace("report", slow, fast, "--png", png)
    assert status == 0, err
    assert "1 ★" in out and "against run 1" in out and "tokens_per_forward" in out
    assert "…" not in out.partition("against run 1")[0]
    with open(png, "rb") as file:
        assert file.read(4) == b"\x89PNG"


def test_race_compares_methods_on_the_same_problems(outpace):
    entries = ("tiny-dream left_to_right tokens=4", "tiny-dream apd verifier=tiny-aux ratio=0.5")
    status, out, _ = outpace("race", "--limit", "1", "--entry", entries[0], "--entry", entries[1])
    assert status == 0
    assert "left_to_right tokens=4" in out and "ratio=0.5" in out and "accuracy" in out


def test_race_takes_turns(outpace, tmp_path, monkeypatch):
    order, answer_questions = [], Side.answer_questions
    monkeypatch.setattr(
        Side,
        "answer_questions",
        lambda side, asked: [order.append(side.entry.line), *answer_questions(side, asked)][1:],
    )
    words = ("race", "How many?", "--entry", "tiny-aux", "--max-tokens", 4, "--rounds", 3)
    status, out, err = outpace(*words, "--json", tmp_path / "a.json")
    assert status == 0, err
    plain, usual = "tiny-aux autoregressive", "tiny-aux lookup"
    assert order == [plain, usual, usual, plain, plain, usual]
    written = json.loads((tmp_path / "a.json").read_text())["results"]
    assert [each["problems"] for each in written] == [3, 3] and "accuracy" not in out
    assert "auto" in out and written[1]["faster"]["ratio"] > 0


def test_data_are_answers_of_the_model(outpace, tmp_path):
    prompts, folder = tmp_path / "prompts.txt", tmp_path / "data"
    prompts.write_text(f"{STORY}\n{STORY}\nHow many?\n")
    words = ("data", "tiny-aux", prompts, "--output", folder, "--held-out", "0")
    assert outpace(*words, "--max-tokens", "96")[0] == 0
    lines = map(json.loads, (folder / "train.jsonl").read_text().splitlines())
    answers = {line["prompt"]: line["response"] for line in lines}
    assert set(answers) == {STORY, "How many?"} and "#### " in answers[STORY]


def test_a_model_is_quantized(outpace, tmp_path):
    folder = tmp_path / "small"
    assert outpace("quantize", "tiny-aux", "--output", folder)[0] == 0
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


def test_models_and_methods_are_listed(outpace):
    _, out, _ = outpace("models")
    assert re.search(r"tiny-dflash\s+│ dflash\s+│ 1.8\s+│ bundled", out)
    assert "DreamModel" not in out
    draft = "Qwen/Qwen2.5-Coder-0.5B-Instruct: drafts by .*-0.5b-dflash; --method lookup"
    assert re.search(draft, out)
    _, out, _ = outpace("models", "--formats")
    assert "DreamModel" in out
    drafts = "z-lab/Qwen3-8B-DFlash-b16, deepseek-ai/dspark_qwen3_8b_block7 for Qwen/Qwen3-8B"
    assert drafts in " ".join(out.split())
    assert "z-lab/Kimi-K2.5-DFlash for moonshotai/Kimi-K2.5 (cannot be loaded)" in out
    _, out, _ = outpace("methods")
    assert "autoregressive" in out and "--lookahead" in out


INVALID = [
    ("generate", "Missing argument"),
    ("generat", "Did you mean 'generate'?"),
    ("benchmark", "Missing command"),
    ("benchmark nonsense", "nonsense"),
    ("recipes show no-such", "no-such"),
    ("generate no-such-model x", "no-such-model"),
    ("rm */*", "model"),
    ("rm ../up", "model"),
    ("generate tiny-aux x more", "more"),
    ("generate tiny-aux x --nonsense", "--nonsense"),
    ("generate tiny-aux", "--input"),
    ("generate tiny-aux --input a", "--output"),
    ("generate tiny-aux x --input a --output b", "--input"),
    ("generate tiny-aux --input absent --output b", "absent"),
    ("generate tiny-aux --input a --output b --n 2", "--n"),
    ("generate tiny-aux --input a --output b --system s", "--system"),
    ("generate tiny-dream --fill {{two}}", "{{two}}"),
    ("generate tiny-aux --fill x{{2}}", "method"),
    ("generate tiny-aux x --max-tokens abc", "--max-tokens"),
    ("generate tiny-aux x --max-tokens 100000", "context"),
    ("generate tiny-aux x --min-tokens 9 --max-tokens 8", "min_tokens"),
    ("generate tiny-aux x --temperature nan", "temperature"),
    ("generate tiny-aux x --top-p 0", "top_p"),
    ("generate tiny-aux x --n 0", "n must"),
    ("generate tiny-aux x --n 99999999999999", "65536"),
    ("generate tiny-aux x --stop-id a", "--stop-id"),
    ("generate tiny-aux x --stop-id 9999999", "stop_ids"),
    ("generate tiny-aux x --logit-bias a=3", "logit_bias"),
    ("generate tiny-aux x --logit-bias 3=inf", "logit_bias"),
    ("generate tiny-aux x --template x", "template must"),
    ("generate tiny-aux x --template x=1", "template.x"),
    ("generate tiny-aux x --system s", "system"),
    ("generate tiny-aux x --system s --raw", "--raw"),
    ("generate tiny-aux x --schema absent", "--schema"),
    ("generate tiny-aux x --regex [", "regex"),
    ("generate tiny-aux x --regex a --choices b", "choices"),
    ("generate tiny-aux x --dtype int4", "dtype"),
    ("generate tiny-aux x --device meta", "meta"),
    ("generate tiny-aux x --mask-id 99999", "mask_id"),
    ("generate tiny-aux x --cache-gib 1e-9", "cache_gib"),
    ("generate tiny-aux x --cache-gib 9999", "cache_gib"),
    ("generate tiny-aux x --cache-dtype int4", "cache_dtype"),
    ("generate tiny-aux x --method nonsense", "autoregressive"),
    ("generate tiny-aux x --method apd", "--verifier"),
    ("generate tiny-aux x --method d2f", "D2F"),
    ("generate tiny-dream x --method left_to_right --tokens a", "tokens"),
    ("generate tiny-dream x --method apd --verifier tiny-aux --ratio 1.5", "ratio"),
    ("evaluate tiny-aux --limit", "--limit"),
    ("evaluate tiny-aux --limit 99999999999", "limit"),
    ("evaluate tiny-aux --task nonsense", "story"),
    ("evaluate tiny-aux --task gsm8k", "--data"),
    ("evaluate tiny-aux --chat", "--tasks"),
    ("evaluate tiny-aux --tasks x --min-p 0.1", "min_p"),
    ("evaluate tiny-aux --protocol x", "apd"),
    ("evaluate tiny-aux --num-shots -1", "shots"),
    ("evaluate tiny-aux --judge number", "--data"),
    ("evaluate tiny-aux --data x --judge mood", "mood"),
    ("evaluate tiny-aux --data absent.jsonl", "absent.jsonl"),
    ("report absent.json", "absent.json"),
    ("race x --rounds 0", "rounds"),
    ("chat tiny-aux --temperature nan", "temperature"),
    ("train absent.toml", "absent.toml"),
    ("train tiny-ar steps=1.5", "steps"),
    ("train tiny-ar batch=99999999999", "batch"),
    ("train tiny-aux --processes 0", "processes"),
    ("generate tiny-aux \udcff", "surrogate"),
]
"""Words of a command, and what its error line names: an argument, a flag, an option or a value."""


@pytest.mark.sampled
@pytest.mark.parametrize(("words", "name"), INVALID)
def test_invalid_words_are_named_in_one_line(refused, words, name):
    assert name in refused(*words.split())


def test_invalid_prompts_and_entries_are_one_line(refused):
    assert "context" in refused("generate", "tiny-aux", "x" * 3000)
    assert "empty" in refused("generate", "tiny-aux", "")
    assert "stop" in refused("generate", "tiny-aux", "x", "--stop", "")
    for option in ("size=1", "size"):
        assert "size" in refused("race", "x", "--entry", f"tiny-ar autoregressive {option}")


UNWRITABLE = [".", "/dev/full", "/proc/none/out", "/proc/version/out"]


@pytest.mark.parametrize("name", UNWRITABLE)
@pytest.mark.parametrize(
    "args",
    [
        ("evaluate", "tiny-aux", "--json"),
        ("race", "x", "--json"),
        ("trace", "tiny-aux", "x", "--png"),
    ],
)
def test_where_nothing_can_be_written_nothing_is_computed(
    refused, tmp_path, monkeypatch, args, name
):
    monkeypatch.setattr(LoadFlags, LoadFlags.open_model.__name__, None)
    line = refused(*args, tmp_path / name)
    assert str(tmp_path / name).removesuffix("/.").removesuffix("/out") in line


@pytest.mark.parametrize("held", [None, "as it was"])
def test_a_failed_evaluation_leaves_its_output_as_it_was(outpace, tmp_path, held):
    path = tmp_path / "result.json"
    if held is not None:
        path.write_text(held)
    args = ("evaluate", "tiny-aux", "--limit", "1", "--max-tokens", "99999", "--json", str(path))
    assert outpace(*args)[0] == 2
    assert [each.read_text() for each in tmp_path.iterdir()] == ([] if held is None else [held])


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_an_interrupt_is_one_line_and_status_130(outpace, monkeypatch, place):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    if place == "inside":
        monkeypatch.setattr(LoadFlags, LoadFlags.open_model.__name__, interrupt)
    else:
        monkeypatch.setattr(app, app.load_command.__name__, interrupt)
    assert outpace("generate", "tiny-aux", "x") == (130, "", "outpace: interrupted\n")


def test_a_method_that_fails_is_one_line_and_status_1(outpace, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(ZOO_FOLDER / "tiny-aux", folder)
    shutil.copytree(ZOO_TOKENIZER, folder, dirs_exist_ok=True)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-4] + struct.pack("<f", 3e38))
    status, out, err = outpace("generate", str(folder), "x")
    assert status == 1 and err.count("\n") == 1
    assert err.startswith("outpace: Lookup(tokens='auto', match=1, shared=False) failed at slot ")
    assert "the model's logits are not finite numbers" in err


@contextmanager
def started(folder, code, *args):
    """Start a program that runs `main` after some code, and send it Ctrl-C once it is ready."""
    program = folder / "program.py"
    program.write_text(f"{INTERRUPTIBLE}\n{MAIN}\n{code}\nprint(flush=True)\nmain()\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "program", *args],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "\n"
    yield process
    try:
        assert process.communicate(timeout=60) == ("", "outpace: interrupted\n")
        assert process.returncode == 130
    finally:
        process.kill()


INTERRUPTIBLE = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
MAIN = "from outpace.cli.main import main"


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [0.01, 0.03, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0])
def test_an_interrupt_while_modules_load_is_one_line(seconds, tmp_path):
    words = ("generate", "tiny-aux", STORY, "--ignore-eos", "--max-tokens", "400", "--n", "60")
    with started(tmp_path, "", *words) as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)


@pytest.mark.nightly
def test_a_reader_that_leaves_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "outpace", "methods"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.stderr == b""


def test_a_full_disk_is_one_line_and_status_2():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "outpace", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert subprocess.run(command, stdout=full, stderr=full).returncode == 2
    assert done.returncode == 2
    assert done.stderr == "outpace: standard output: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",), ("generate", "-h")])
def test_no_command_is_a_question_for_help(outpace, words):
    status, out, err = outpace(*words)
    assert status == 0 and "Usage: outpace" in out and not err
    assert "--help" in out


def test_only_the_terminal_wraps_help(outpace, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    _, *about = outpace("generate", "--help")[1].partition("╭")[0].split("\n" + " " * 1000)
    lines = [line.strip() for text in about for line in text.splitlines()]
    assert len(lines) > 3 and all(line.endswith(".") for line in lines if line), lines


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("outpace gen", "generate"),
        ("outpace benchmark met", "methods"),
        ("outpace generate tiny-dre", "tiny-dream"),
        ("outpace generate m --method loo", "lookup"),
        ("outpace generate m --method=apd --verif", "--verifier"),
    ],
)
def test_words_are_completed(outpace, monkeypatch, words, completed):
    monkeypatch.setenv("_OUTPACE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    assert completed in outpace()[1].split()


def test_standard_input_may_be_the_prompt(outpace, refused, monkeypatch):
    args = ("generate", "tiny-aux", "--max-tokens", "96")
    _, typed, _ = outpace(*args, STORY)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{STORY}\n"))
    status, read, _ = outpace(*args, "-")
    assert status == 0 and read == typed
    for held in (io.StringIO(""), io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8")):
        monkeypatch.setattr("sys.stdin", held)
        line = refused(*args, "-")
        assert "empty" in line or "UTF-8" in line


def test_flags_of_a_request_reach_it(outpace):
    args = ("generate", "tiny-aux", STORY, "--max-tokens", "96")
    _, free, err = outpace(*args, "--logprobs")
    tokens = re.findall(r"^ +-?\d+\.\d{4} +(\d+)", free, re.MULTILINE)
    assert "(stop)" in err
    for flags, message in (
        (("--stop-id", tokens[7]), f"{tokens.index(tokens[7])} tokens in"),
        (("--ignore-eos",), "96 tokens in"),
        (("--ignore-eos", "--stop", "a"), "(stop)"),
        (("--min-tokens", "96"), "(length)"),
    ):
        assert message in outpace(*args, *flags)[2]
    for flags in (("--logit-bias", f"{tokens[0]}=-9999"), ("--repetition-penalty", "9")):
        assert outpace(*args, *flags)[1].rstrip() != free.partition("\n ")[0]
    assert re.fullmatch(r"[0-9]{3}!\n", outpace(*args, "--regex", "[0-9]{3}!")[1])
    assert "96 tokens in" in outpace("trace", *args[1:], "--ignore-eos")[1]


def test_a_template_has_its_variables(outpace, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(ZOO_FOLDER / "tiny-aux", folder)
    shutil.copytree(ZOO_TOKENIZER, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
        "{% if flag is false %}{{ number + 1 }}{{ name }}{% endif %}"
    )
    args = ("trace", str(folder), "hi", "--max-tokens", "1", "--system", "be")
    status, out, err = outpace(
        *args, "--template", "flag=False", "--template", "number=2", "--template", "name=x"
    )
    llm = LoadFlags().open_model(str(folder), None)
    assert status == 0, err
    rows = len(llm.text.encode_plain("systembeuserhi3x"))
    assert re.search(rf"target\s+{rows} ", out)


def test_a_model_is_loaded_as_the_flags_say(outpace, monkeypatch):
    found = {}

    class Told:
        def __init__(self, model, method, **options):
            found.update(options)
            raise ValueError("told")

    monkeypatch.setattr("outpace.api.llm.LLM", Told)
    outpace(
        *("generate", "tiny-ar", "x", "--mask-id", "0", "--max-length", "64"),
        *("--cache-gib", "0.5"),
    )
    assert found["mask_id"] == 0 and found["max_length"] == 64 and found["cache_gib"] == 0.5


@pytest.mark.nightly
def test_recipes_are_listed_and_shown(outpace, tmp_path):
    status, out, _ = outpace("recipes")
    assert status == 0 and "tiny-ar" in out and "qwen3-4b-dflash" in out
    status, out, _ = outpace("recipes", "show", "tiny-aux")
    assert status == 0
    (tmp_path / "mine.toml").write_text(out)
    assert load_recipe(tmp_path / "mine.toml") == replace(load_recipe("tiny-aux"), out="runs/mine")

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

import pytest

from outpace.checkpoints.load import ZOO_FOLDER, ZOO_TOKENIZER
from outpace.cli import app
from outpace.cli.flags import LoadFlags
from outpace.cli.main import main

STORY = "Tom has 5 bags with 7 apples in each bag. He gives 9 apples to Ann. How many are left?"


@pytest.fixture
def outpace(capsys):
    """Return a function that runs a command line: exit status, output, errors."""

    def run(*args):
        with pytest.raises(SystemExit) as ended:
            main(args)
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run


def test_generate_streams_an_answer_and_one_line_of_statistics(outpace):
    status, out, _ = outpace("generate", "tiny-aux", STORY, "--max-tokens", "96")
    assert status == 0
    assert "#### " in out
    assert re.search(r"\d+ tokens in \d+ forwards: [\d.]+ tokens per forward", out)


def test_generate_takes_the_flags_of_its_method(outpace):
    status, out, _ = outpace(
        *("generate", "tiny-dream", STORY, "--max-tokens", "64", "--temperature", "0"),
        *("--method", "apd", "--verifier", "tiny-aux", "--ratio", "0.5", "--window", "none"),
    )
    assert status == 0
    per_forward = float(re.search(r"([\d.]+) tokens per forward", out)[1])
    assert per_forward > 1.5


def test_generate_fills_the_holes_of_a_text(outpace):
    for prompt in ((), (STORY,)):
        args = ("generate", "tiny-dream", *prompt, "--fill", "Tom has {{2}} or {{..9:[0-9]+}}.")
        status, out, _ = outpace(*args)
        assert status == 0 and re.match(r"(?s)Tom has .* or [0-9]+\.\n", out)
    status, _, err = outpace("generate", "tiny-dream", "--fill", "Tom has {{two}}")
    assert status == 2 and "'{{two}}' is not a hole: write {{8}}, {{..8}} or {{8:regex}}" in err
    status, _, err = outpace("generate", "tiny-ar", "--fill", "Tom has {{2}}")
    assert status == 2 and "cannot condition on text after a hole" in err


def test_same_seed_same_text(outpace):
    args = ("generate", "tiny-dream", STORY, "--max-tokens", "24", "--temperature", "4")
    texts = [outpace(*args, "--seed", s)[1].partition("24 tokens")[0] for s in ("1", "1", "2")]
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


def test_a_picture_without_matplotlib_names_the_extra(outpace, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "outpace.benchmark.plots", raising=False)
    status, _, err = outpace("trace", "tiny-aux", "x", "--png", str(tmp_path / "trace.png"))
    assert status == 2 and "pip install 'outpace[plot]'" in err


def test_evaluate_writes_headline_metrics_with_provenance(outpace, tmp_path):
    path = tmp_path / "result.json"
    status, out, _ = outpace(
        *("evaluate", "tiny-aux", "--task", "story", "--limit", "8", "--batch", "4"),
        *("--method", "autoregressive", "--json", str(path)),
    )
    assert status == 0 and "95 %" in out and "±" not in out
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


def gsm8k(path, lines=9):
    """Return a file that repeats one problem."""
    line = json.dumps({"question": STORY, "answer": "5*7-9 = 26\n#### 26"})
    path.write_text(f"{line}\n" * lines)
    return str(path)


@pytest.mark.nightly
def test_a_killed_evaluation_goes_on(outpace, tmp_path):
    samples = tmp_path / "samples.jsonl"
    words = ("evaluate", "tiny-aux", "--limit", "3", "--samples", str(samples))
    assert outpace(*words)[0] == 0
    texts = [json.loads(line).get("text") for line in samples.read_text().splitlines()]
    samples.write_text("".join(samples.read_text().splitlines(True)[:2]))
    assert outpace(*words)[0] == 0
    assert [json.loads(line).get("text") for line in samples.read_text().splitlines()] == texts
    status, _, err = outpace(*words, "--seed", "1")
    assert status == 2 and "answers of another run: options is" in err


@pytest.mark.nightly
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
    assert "accuracy under parallelism, story: tiny-ar Autoregressive" in out
    with open(png, "rb") as file:
        assert file.read(4) == b"\x89PNG"


@pytest.mark.nightly
def test_race_compares_methods_on_the_same_problems(outpace):
    entries = ("tiny-dream left_to_right tokens=4", "tiny-dream apd verifier=tiny-aux ratio=0.5")
    status, out, _ = outpace("race", "--limit", "2", "--entry", entries[0], "--entry", entries[1])
    assert status == 0
    assert "left_to_right tokens=4" in out and "ratio=0.5" in out and "accuracy" in out


def test_models_and_methods_are_listed(outpace):
    _, out, _ = outpace("models")
    assert "tiny-dream" in out and "DreamModel" in out
    assert re.search(r"tiny-dflash\s+│ dflash\s+│ 0.94M", out)
    drafts = "z-lab/Qwen3-8B-DFlash-b16, deepseek-ai/dspark_qwen3_8b_block7 for Qwen/Qwen3-8B"
    assert drafts in " ".join(out.split())
    assert "z-lab/Kimi-K2.5-DFlash for moonshotai/Kimi-K2.5 (cannot be loaded)" in out
    _, out, _ = outpace("methods")
    assert "autoregressive" in out and "--lookahead" in out


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "no-such-model", "x"), "no-such-model"),
        (("generate", "tiny-aux", ""), "empty"),
        (("generate", "tiny-aux"), "give either a prompt, or both --input and --output"),
        (
            ("generate", "tiny-aux", "x", "--input", "a", "--output", "b"),
            "give either a prompt, or",
        ),
        (("evaluate", "tiny-aux", "--chat"), "need --tasks"),
        (("evaluate", "tiny-aux", "--task", "x"), "unknown task 'x'; choose from countdown"),
        (("evaluate", "tiny-aux", "--protocol", "x"), "unknown protocol 'x'; choose from apd"),
        (("evaluate", "tiny-aux", "--num-shots", "-1"), "shots=-1"),
        (("report",), "Missing argument"),
        (("report", "no-such-file.json"), "no-such-file.json"),
        (
            ("generate", "tiny-aux", "--input", "a"),
            "give either a prompt, or both --input and --output",
        ),
        (
            ("generate", "tiny-aux", "--input", "none", "--output", "b"),
            "no file of prompts at 'none'",
        ),
        (("generate", "tiny-aux", "x", "--ray"), "need --input"),
        (("generate", "tiny-aux", "--fill", "{{2}}", "--ray"), "need --input"),
        (
            ("generate", "tiny-aux", "--input", "a", "--output", "b", "--replicas", "2"),
            "needs --ray",
        ),
        (("evaluate", "tiny-aux", "--replicas", "2"), "needs --ray"),
        (("generate", "tiny-aux", "x", "--method", "nonsense"), "autoregressive"),
        (("generate", "tiny-aux", "x", "--method", "apd"), "--verifier"),
        (("generate", "tiny-aux", "x", "--method", "apd", "--verifier", "tiny-aux"), "diffusion"),
        (("generate", "tiny-aux", "x", "--max-tokens", "0"), "max_tokens"),
        (("generate", "tiny-aux", "x", "--max-tokens", "100000"), "slots"),
        (("generate", "tiny-aux", "x", "--temperature", "-1"), "temperature"),
        (("generate", "tiny-aux", "x", "--temperature", "nan"), "temperature"),
        (("generate", "tiny-aux", "x", "--top-p", "0"), "top_p"),
        (("generate", "tiny-aux", "x", "--dtype", "int4"), "bfloat16"),
        (("generate", "tiny-aux", "x", "--schema", "none"), "--schema none is not a text file"),
        (("generate", "tiny-aux", "x", "--grammar", "."), "--grammar . is not a text file"),
        (("generate", "tiny-aux", "x", "--regex", "["), "regex: it is malformed"),
        (("generate", "tiny-aux", "x", "--regex", "a", "--choices", "b"), "two constraints"),
        (("generate", "tiny-dream", "x", "--method", "left_to_right", "--window", "0"), "window"),
        (("generate", "tiny-dream", "x", "--method", "left_to_right", "--tokens", "a"), "int"),
        (("generate", "tiny-aux", "x", "--method", "d2f"), "D2F decodes diffusion models"),
        (("generate", "tiny-dream", "x", "--method", "d2f", "--block", "0"), "block"),
        (("generate", "tiny-dream", "x", "--method", "d2f", "--add", "1.5"), "between 0 and 1"),
        (
            (
                *("generate", "tiny-dream", "x", "--method", "apd"),
                *("--verifier", "tiny-aux", "--ratio", "1.5"),
            ),
            "ratio",
        ),
        (
            ("train", "tiny-aux", "--plan", "--processes", "0"),
            "processes must be at least 1, got 0",
        ),
        (("evaluate", "tiny-aux", "--task", "nonsense"), "story"),
        (("evaluate", "tiny-aux", "--limit", "0"), "limit"),
        (("evaluate", "tiny-aux", "--limit", "99999999999"), "limit must be at most 100000"),
        (("evaluate", "tiny-aux", "--judge", "number"), "give --data without --task"),
        (("evaluate", "tiny-aux", "--data", "x", "--judge", "mood"), "judges are exact, number"),
        (("evaluate", "tiny-aux", "--data", "absent.jsonl"), "absent.jsonl"),
        (("evaluate", "tiny-aux", "--task", "gsm8k"), "--data"),
        (("race", "x", "--entry", "tiny-aux"), "MODEL METHOD"),
        (("race", "x", "--entry", "tiny-ar autoregressive x=1"), "no option x; it has none"),
        (("race", "x", "--entry", "tiny-ar autoregressive x"), "'x' is not an option of autoregr"),
        (("generate", "tiny-aux", "x", "--n", "0"), "--n must be at least 1, got 0"),
        (("generate", "tiny-aux", "--n", "2", "--input", "a", "--output", "b"), "--n, --logprobs"),
        (("generate", "tiny-aux", "--system", "s", "--input", "a", "--output", "b"), "--system"),
        (("generate", "tiny-aux", "x", "--stop-id", "a"), "--stop-id"),
        (("generate", "tiny-aux", "x", "--stop-id", "-1"), "stop_ids must hold token ids"),
        (("generate", "tiny-aux", "x", "--stop-id", "9999999"), "stop_ids must hold token ids"),
        (("generate", "tiny-aux", "x", "--min-tokens", "-1"), "min_tokens"),
        (
            ("generate", "tiny-aux", "x", "--min-tokens", "9", "--max-tokens", "8"),
            "min_tokens must be at most max_tokens=8",
        ),
        (("generate", "tiny-aux", "x", "--min-p", "2"), "min_p"),
        (("generate", "tiny-aux", "x", "--top-k", "0"), "top_k"),
        (("generate", "tiny-aux", "x", "--presence-penalty", "nan"), "presence_penalty"),
        (("generate", "tiny-aux", "x", "--frequency-penalty", "1e9"), "frequency_penalty"),
        (("generate", "tiny-aux", "x", "--repetition-penalty", "0"), "repetition_penalty"),
        (("generate", "tiny-aux", "x", "--logit-bias", "3"), "--logit-bias must be TOKEN=NUMBER"),
        (("generate", "tiny-aux", "x", "--logit-bias", "a=3"), "--logit-bias must be TOKEN=NUMBER"),
        (("generate", "tiny-aux", "x", "--logit-bias", "3=inf"), "logit_bias of token 3"),
        (("generate", "tiny-aux", "x", "--logit-bias", "-3=1"), "logit_bias must hold token ids"),
        (("generate", "tiny-aux", "x", "--template", "x"), "--template must be NAME=VALUE"),
        (("generate", "tiny-aux", "x", "--template", "x=1"), "has no variable 'x'"),
        (("generate", "tiny-aux", "x", "--system", "s"), "ignores system prompts"),
        (("generate", "tiny-aux", "x", "--system", "s", "--raw"), "cannot be combined with --raw"),
        (("generate", "tiny-aux", "x", "--mask-id", "-1"), "mask_id must be"),
        (("generate", "tiny-aux", "x", "--mask-id", "99999"), "mask_id 99999 is outside"),
        (("generate", "tiny-aux", "x", "--max-length", "0"), "max_length must be"),
        (("generate", "tiny-aux", "x", "--cache-gib", "0"), "cache_gib must be a positive number"),
        (("generate", "tiny-aux", "x", "--cache-gib", "nan"), "cache_gib must be"),
        (
            ("generate", "tiny-llada", "x", "--method", "diffusion", "--presence-penalty", "1"),
            "presence_penalty needs",
        ),
        (
            ("evaluate", "tiny-aux", "--tasks", "x", "--min-p", "0.1"),
            "min_p cannot be set: tasks of",
        ),
        (("chat", "no-such-model"), "no-such-model"),
        (("chat", "tiny-aux", "--temperature", "nan"), "temperature must be 0 or between"),
        (("chat", "tiny-aux", "--stop", ""), "stop must not contain an empty string"),
        (("generat",), "Did you mean 'generate'?"),
        (("race", "x", "--entry", "tiny-dream apd verifier=tiny-aux size=3"), "size"),
        (("train", "no-such.toml"), "no-such.toml"),
        (
            ("train", "tiny-ar", "--plan", "batch=99999999999"),
            "batch must be a whole number from 1 to 65536",
        ),
        (("train", "tiny-ar", "steps=1.5"), "steps must be a whole number from 1"),
        (("train", "tiny-ar", "--plan", "path=absent.jsonl"), "absent.jsonl"),
        (("recipes", "show", "no-such"), "no-such"),
        (("recipes", "show", sys.executable), "is not a recipe, which must be text"),
        (("recipes", "hide"), "hide"),
        (("generate",), "Missing argument 'model'"),
        (("generate", "tiny-aux", "x", "--nonsense"), "--nonsense"),
        (("generate", "tiny-aux", "x", "--max-tokens", "abc"), "'abc'"),
        (("generate", "tiny-aux", "x", "--max-tokens", "-1"), "max_tokens must be at least 1"),
        (("generate", "tiny-aux", "x", "--temperature", "warm"), "'warm'"),
        (("generate", "tiny-aux", "x", "--device", "meta"), "no device 'meta'"),
        (("generate", "tiny-aux", "x", "--cache-gib", "1e-9"), "give a larger cache_gib"),
        (("generate", "tiny-aux", "x", "--n", "99999999999999"), "from 1 to 65536"),
        (("generate", "tiny-aux", "x", "more"), "more"),
        (("nonsense",), "nonsense"),
        (("benchmark",), "Missing command"),
        (("benchmark", "nonsense"), "nonsense"),
        (("evaluate", "tiny-aux", "--limit"), "--limit"),
        (("generate", "tiny-aux", "\udcff"), "not UTF-8"),
        (("generate", "tiny-aux", "x", "--stop", "\udcff"), "not UTF-8"),
        (("trace", "tiny-aux", "\udcff"), "not UTF-8"),
        (("race", "\udcff", "--entry", "tiny-aux autoregressive"), "not UTF-8"),
        (("generate", "x" * 5000, "x"), "x" * 5000),
        (("generate", "tiny-aux", "x" * 3000), "slots"),
    ],
)
def test_bad_input_is_one_line_and_status_2(outpace, args, message):
    status, _, err = outpace(*args)
    assert status == 2
    assert err.startswith("outpace: ") and err.count("\n") == 1 and message in err


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
    outpace, tmp_path, monkeypatch, args, name
):
    monkeypatch.setattr(LoadFlags, LoadFlags.open_model.__name__, None)
    status, _, err = outpace(*args, str(tmp_path / name))
    assert status == 2 and err.startswith("outpace: ") and err.count("\n") == 1
    assert str(tmp_path / name).removesuffix("/.").removesuffix("/out") in err


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
        monkeypatch.setattr(app, app.build_app.__name__, interrupt)
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
    assert done.returncode == 2
    assert done.stderr == "outpace: standard output: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",), ("generate", "-h")])
def test_no_command_is_a_question_for_help(outpace, words):
    status, out, err = outpace(*words)
    assert status == 0 and "Usage: outpace" in out and not err
    assert "--help" in out and "<bool>" not in out


def test_standard_input_may_be_the_prompt(outpace, monkeypatch):
    args = ("generate", "tiny-aux", "--max-tokens", "96")
    _, typed, _ = outpace(*args, STORY)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{STORY}\n"))
    status, read, _ = outpace(*args, "-")
    assert status == 0 and read.partition("tokens in")[0] == typed.partition("tokens in")[0]
    for held in (io.StringIO(""), io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8")):
        monkeypatch.setattr("sys.stdin", held)
        status, _, err = outpace(*args, "-")
        assert status == 2 and ("empty" in err or "standard input is not UTF-8" in err)


def test_flags_of_a_request_reach_it(outpace):
    args = ("generate", "tiny-aux", STORY, "--max-tokens", "96")
    _, free, _ = outpace(*args, "--logprobs")
    tokens = re.findall(r"^ +-?\d+\.\d{4} +(\d+)", free, re.MULTILINE)
    assert "(stop)" in free
    for flags, message in (
        (("--stop-id", tokens[7]), f"{tokens.index(tokens[7])} tokens in"),
        (("--ignore-eos",), "96 tokens in"),
        (("--ignore-eos", "--stop", "a"), "(stop)"),
        (("--min-tokens", "96"), "(length)"),
    ):
        assert message in outpace(*args, *flags)[1]
    for flags in (("--logit-bias", f"{tokens[0]}=-9999"), ("--repetition-penalty", "9")):
        assert outpace(*args, *flags)[1].partition("tokens in")[0] != free.partition("\n ")[0]
    assert re.match(r"[0-9]{3}!\n", outpace(*args, "--regex", "[0-9]{3}!")[1])
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

    monkeypatch.setattr("outpace.cli.flags.LLM", Told)
    outpace(
        *("generate", "tiny-ar", "x", "--mask-id", "0", "--max-length", "64"),
        *("--cache-gib", "0.5"),
    )
    assert found["mask_id"] == 0 and found["max_length"] == 64 and found["cache_gib"] == 0.5


def flags(text):
    """Return the flags that a help page describes."""
    return set(re.findall(r"^│ \*?\s*(--[a-z-]+)", text, re.MULTILINE))


@pytest.mark.nightly
def test_recipes_are_listed_and_shown(outpace, tmp_path):
    status, out, _ = outpace("recipes")
    assert status == 0 and "tiny-ar" in out and "qwen3-4b-dflash" in out
    status, out, _ = outpace("recipes", "show", "tiny-aux")
    assert status == 0
    (tmp_path / "mine.toml").write_text(out)
    status, mine, _ = outpace("train", str(tmp_path / "mine.toml"), "--plan")
    assert status == 0 and "0.87M trained of 0.87M" in mine and "per device" in mine
    again = outpace("train", "tiny-aux", "--plan")[1]
    measured = re.compile(r"^here .*\n( .*\n)*", re.MULTILINE)  # a rate, which differs each time
    assert measured.sub("", again).splitlines()[1:] == measured.sub("", mine).splitlines()[1:]
    assert not (tmp_path / "runs").exists()

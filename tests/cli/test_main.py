"""Commands as typed by a user, with the embedded models."""

import importlib
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

import outpace as package
from outpace.checkpoints.load import ZOO_FOLDER, ZOO_TOKENIZER
from outpace.cli import app, terminal
from outpace.cli.app import BENCHMARK_COMMANDS, COMMANDS
from outpace.cli.flags import LoadFlags
from outpace.cli.main import main
from outpace.methods import METHODS
from outpace.methods.options import method_options

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


def test_generate_takes_what_the_answer_must_be(outpace, tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "integer", "minimum": 7, "maximum": 9}')
    (tmp_path / "rule.lark").write_text("start: /[pq]/")
    for flags, known in (
        (("--schema", str(tmp_path / "schema.json")), "789"),
        (("--regex", "[xyz]"), "xyz"),
        (("--choices", "v", "--choices", "w"), "vw"),
        (("--grammar", str(tmp_path / "rule.lark")), "pq"),
    ):
        status, out, _ = outpace("generate", "tiny-dream", STORY, "--max-tokens", "4", *flags)
        assert status == 0 and out[0] in known and out[1] == "\n"


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


def test_help_shows_the_flags_of_the_named_method_only(outpace):
    _, out, _ = outpace("generate", "--method", "apd", "--help")
    assert "--ratio" in out and "--verifier" in out
    _, out, _ = outpace("generate", "--method", "left_to_right", "--help")
    assert "--lookahead" in out and "--ratio" not in out


def test_trace_shows_every_forward_with_its_holes(outpace):
    status, out, _ = outpace(
        *("trace", "tiny-dream", STORY, "--max-tokens", "32"),
        *("--method", "apd", "--verifier", "tiny-aux"),
    )
    assert status == 0
    assert "target" in out and "verifier" in out and "░" in out


def test_trace_draws_the_pipeline_of_a_method_with_blocks(outpace, tmp_path):
    path = tmp_path / "new" / "trace.png"
    status, out, _ = outpace(
        *("trace", "tiny-dream", STORY, "--max-tokens", "32", "--method", "d2f"),
        *("--block", "8", "--confidence", "0.5", "--temperature", "0", "--png", str(path)),
    )
    assert status == 0
    assert "│" in out and "░ hole" in out and "cached" in out
    assert path.read_bytes().startswith(b"\x89PNG")


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


def test_evaluate_asks_lines_of_ones_own_and_keeps_each_answer(outpace, tmp_path):
    data, json_path = tmp_path / "mine.jsonl", tmp_path / "result.json"
    data.write_text(json.dumps({"question": STORY, "answer": "26"}) + "\n")
    words = (
        "evaluate",
        "tiny-aux",
        "--method",
        "autoregressive",
        "--data",
        str(data),
        "--judge",
        "number",
    )
    status, out, err = outpace(*words, "--json", str(json_path))
    assert status == 0, err
    assert "100.0%" in out and "20.7%–100.0%" in out
    (line,) = map(json.loads, (tmp_path / "result.answers.jsonl").read_text().splitlines())
    assert line["question"] == STORY and line["reference"] == "26" and line["right"] is True
    assert line["answer"].endswith("#### 26") and line["tokens"] == line["forwards"] - 1
    (result,) = json.loads(json_path.read_text())["results"]
    assert result["task"] == "own-number"


def gsm8k(path, lines=9):
    """Return a file that repeats one problem."""
    line = json.dumps({"question": STORY, "answer": "5*7-9 = 26\n#### 26"})
    path.write_text(f"{line}\n" * lines)
    return str(path)


def test_evaluate_asks_as_a_paper_does(outpace, tmp_path):
    data, out = gsm8k(tmp_path / "test.jsonl"), tmp_path / "result.json"
    status, _, err = outpace(
        *("evaluate", "tiny-dream", "--task", "gsm8k", "--protocol", "d2f:dream", "--data", data),
        *("--num-shots", "0", "--limit", "1", "--max-tokens", "32", "--json", str(out)),
    )
    assert status == 0, err
    (result,) = json.loads(out.read_text())["results"]
    assert result["protocol"] == "d2f:dream"
    assert "block=32, add=0.1, activate=0.95, confidence=0.9" in result["method"]
    status, _, err = outpace(
        *("evaluate", "tiny-dream", "--task", "gsm8k", "--protocol", "d2f:dream", "--data", data),
        *("--num-shots", "1", "--shots", data, "--limit", "1", "--max-tokens", "8"),
        *("--method", "left_to_right"),
    )
    assert status == 0, err


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


def test_cut_answers_are_counted(outpace, tmp_path):
    path, whole = tmp_path / "cut.json", tmp_path / "whole.json"
    status, out, _ = outpace(
        *("evaluate", "tiny-aux", "--limit", "3", "--max-tokens", "8", "--json", str(path))
    )
    warning = (
        "3 of 3 answers were truncated at 8 tokens and scored as they are: increase --max-tokens"
    )
    assert status == 0 and warning in " ".join(out.split())
    (result,) = json.loads(path.read_text())["results"]
    assert (result["unfinished"], result["cut_at"]) == (3, 8)
    status, out, _ = outpace("evaluate", "tiny-aux", "--limit", "3", "--json", str(whole))
    assert status == 0 and "truncated" not in out
    (result,) = json.loads(whole.read_text())["results"]
    assert (result["unfinished"], result["cut_at"]) == (0, None)
    out = " ".join(outpace("report", str(whole), str(path))[1].split())
    assert f"run 2: {warning}" in out and "run 1: " not in out
    path.write_text(path.read_text().replace('"cut_at": 8', '"cut_at": "x"'))
    assert "has cut_at 'x', which must be a number or null" in outpace("report", str(path))[2]
    race = ("race", "--limit", "1", "--entry", "tiny-aux autoregressive", "--max-tokens", "8")
    assert "1 of 1 answers were truncated at 8 tokens and scored" in " ".join(
        outpace(*race)[1].split()
    )


def test_reports_of_another_schema_are_refused(outpace, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"provenance": {}, "results": [{"task": "story"}]}))
    status, _, err = outpace("report", str(path))
    assert status == 2
    assert "old.json has schema None, but this version reads schema 1" in err


def test_evaluate_can_do_without_the_prefix_cache(outpace):
    words = ("evaluate", "tiny-aux", "--limit", "2", "--no-prefix-cache")
    assert outpace(*words)[0] == 0


def test_race_compares_methods_on_the_same_problems(outpace):
    entries = ("tiny-dream left_to_right tokens=4", "tiny-dream apd verifier=tiny-aux ratio=0.5")
    status, out, _ = outpace("race", "--limit", "2", "--entry", entries[0], "--entry", entries[1])
    assert status == 0
    assert "left_to_right tokens=4" in out and "ratio=0.5" in out and "accuracy" in out


def test_race_takes_a_prompt(outpace):
    status, out, _ = outpace("race", STORY, "--entry", "tiny-aux autoregressive")
    assert status == 0 and "accuracy" not in out


def test_models_and_methods_are_listed(outpace):
    _, out, _ = outpace("models")
    assert "tiny-dream" in out and "DreamModel" in out
    assert re.search(r"tiny-dflash\s+│ dflash\s+│ 0.94M", out)
    drafts = "z-lab/Qwen3-8B-DFlash-b16, deepseek-ai/dspark_qwen3_8b_block7 for Qwen/Qwen3-8B"
    assert drafts in " ".join(out.split())
    assert "z-lab/Kimi-K2.5-DFlash for moonshotai/Kimi-K2.5 (cannot be loaded)" in out
    _, out, _ = outpace("methods")
    assert "autoregressive" in out and "--lookahead" in out


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


@pytest.mark.parametrize(
    "args", [("train",), ("serve", "--config"), ("evaluate", "tiny-aux", "--protocol")]
)
def test_a_file_of_too_many_levels_is_refused(outpace, tmp_path, args):
    path = tmp_path / "deep.toml"
    path.write_text("a = " + "[" * 5000)
    status, _, err = outpace(*args, str(path))
    assert status == 2 and err.startswith(f"outpace: {path} is no") and err.count("\n") == 1


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


@pytest.mark.parametrize("name", ["new/result.json", "new/er/result.json", f"new/{'x' * 300}"])
def test_a_failed_evaluation_leaves_no_folder(outpace, tmp_path, name):
    args = ("evaluate", "tiny-aux", "--limit", "1", "--max-tokens", "99999")
    assert outpace(*args, "--json", str(tmp_path / name))[0] == 2
    assert not [*tmp_path.iterdir()]


def test_a_link_stays_one(outpace, tmp_path):
    path, link = tmp_path / "result.json", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    args = ("evaluate", "tiny-aux", "--limit", "1", "--max-tokens", "4", "--json", str(link))
    assert outpace(*args)[0] == 0
    assert link.is_symlink() and json.loads(path.read_text())["results"]


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


@pytest.mark.parametrize(
    "line",
    [
        "exec('raise KeyboardInterrupt')",  # of which Python makes an end by the signal
        "weakref.finalize(set(), interrupt)\n    while True: pass",  # where nothing can be raised
    ],
)
def test_no_interrupt_is_lost(line, tmp_path):
    code = f"""
import weakref
from outpace.cli import app

def interrupt():
    raise KeyboardInterrupt

def build():
    {line}

app.{app.build_app.__name__} = build
"""
    with started(tmp_path, code, "--help"):
        pass


def test_nothing_is_loaded_before_an_interrupt_is_caught():
    code = f"import sys; known = {{*sys.modules}}; {MAIN}; print(*{{*sys.modules}} - known)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = {
        "outpace",
        "outpace.version",
        *(f"outpace.cli{each}" for each in ("", ".exit", ".main")),
    }
    assert set(done.stdout.split()) <= {*ours, "__future__"}


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


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_closed_input_is_named(outpace, monkeypatch, command):
    monkeypatch.setattr("sys.stdin", None)
    status, _, err = outpace(command, "tiny-aux", *(["-"] if command == "generate" else []))
    assert status == 2 and "standard input is closed" in err


def test_an_error_of_several_lines_is_put_on_one(outpace, monkeypatch):
    def refuse(*args, **options):
        raise ValueError("one\n  two\r\nthree \x1b[2J")

    monkeypatch.setattr(LoadFlags, LoadFlags.open_model.__name__, refuse)
    assert outpace("generate", "tiny-aux", "x")[2] == "outpace: one two three \\x1b[2J\n"


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",), ("generate", "-h")])
def test_no_command_is_a_question_for_help(outpace, words):
    status, out, err = outpace(*words)
    assert status == 0 and "Usage: outpace" in out and not err
    assert "--help" in out and "<bool>" not in out


def test_the_help_lists_all_commands_with_their_first_sentence(outpace):
    _, out, _ = outpace("--help")
    for name, place in COMMANDS.items():
        module, _, function = place.partition(":")
        about = getattr(importlib.import_module(module), function).__doc__.split()
        assert re.search(rf"│ {name}\s+{re.escape(about[0])} {re.escape(about[1])}", out)


def test_the_version_is_told(outpace):
    assert outpace("--version") == (0, f"outpace {package.__version__}\n", "")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "known"),
    [
        ("outpace gen", "generate"),
        ("outpace benchmark s", "serve"),
        ("outpace generate --min-", "--min-tokens"),
        ("outpace generate --method ap", "apd"),
        ("outpace generate --method apd --veri", "--verifier"),
        ("outpace generate tiny-dr", "tiny-dream"),
    ],
)
def test_a_shell_completes_words(words, known):
    environment = {
        **os.environ,
        "_OUTPACE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    command = [sys.executable, "-m", "outpace"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert known in done.stdout.split(), done.stderr


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


def test_several_answers_and_what_is_known_of_their_tokens(outpace):
    args = ("generate", "tiny-aux", STORY, "--max-tokens", "4", "--temperature", "1")
    plain = ("--method", "autoregressive")
    status, out, _ = outpace(*args, *plain, "--n", "2", "--seed", "3", "--logprobs")
    assert status == 0 and out.count("tokens in 4 forwards") == 2
    assert out.startswith("seed 3\n") and "\nseed 4\n" in out
    assert len(re.findall(r"^ +-?\d+\.\d{4} +\d+  '", out, re.MULTILINE)) == 8


def test_flags_of_a_request_reach_it(outpace):
    args = ("generate", "tiny-aux", STORY, "--max-tokens", "96")
    _, free, _ = outpace(*args, "--logprobs")
    tokens = re.findall(r"^ +-?\d+\.\d{4} +(\d+)", free, re.MULTILINE)
    assert "(stop)" in free
    for flags, message in (
        (("--stop-id", tokens[7]), f"{tokens.index(tokens[7])} tokens in"),
        (("--ignore-eos",), "96 tokens in"),
        (("--min-tokens", "96"), "(length)"),
    ):
        assert message in outpace(*args, *flags)[1]
    for flags in (("--logit-bias", f"{tokens[0]}=-9999"), ("--repetition-penalty", "9")):
        assert outpace(*args, *flags)[1].partition("tokens in")[0] != free.partition("\n ")[0]


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


def test_a_file_of_prompts_ends_with_count_and_speed(outpace, tmp_path, monkeypatch):
    monkeypatch.setattr(terminal, "REPORT_INTERVAL", 0.0)
    source, target = tmp_path / "prompts.jsonl", tmp_path / "data.jsonl"
    source.write_text(f"{json.dumps({'prompt': STORY})}\n" * 3)
    args = ("generate", "tiny-aux", "--input", str(source), "--output", str(target))
    status, out, err = outpace(*args, "--batch", "1")
    assert status == 0 and re.search(r"answers: 2 of 3, \d:\d\d:\d\d left\n", err)
    assert re.fullmatch(
        rf"3 answers in {re.escape(str(target))}: \d+ tokens in [\d.]+ s, "
        r"\d+ tokens per second\n",
        out,
    )


def test_help_does_not_contradict_itself(outpace):
    for words, message in (
        (("generate",), "rest of the context; 256 for diffusion"),
        (("race",), "[default: 128]"),
        (("evaluate",), "by protocol"),
    ):
        text = " ".join(outpace(*words, "--help")[1].replace("│", " ").split())
        (found,) = re.findall(r"--max-tokens <int> (.*?) --temperature", text)
        assert (
            message in found
            and found.count("default") == 1
            and "256" not in found.replace(message, "")
        )


def test_the_list_of_methods_is_whole_at_any_width(outpace, monkeypatch):
    for columns in ("60", "80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        _, out, _ = outpace("methods")
        assert "…" not in out
        for name, kind in METHODS.items():
            assert re.search(rf"^{name}$", out, re.MULTILINE)
            for option in method_options(kind):
                assert f"--{option.replace('_', '-')} " in out


def test_text_is_shown_as_it_is(outpace):
    args = ("race", "[/b] :smile:", "--entry", "tiny-aux autoregressive", "--max-tokens", "2")
    status, out, _ = outpace(*args)
    assert status == 0 and "[/b] :smile:" in out


def test_the_command_line_is_frozen(outpace):
    assert {name: flags(outpace(name, "--help")[1]) for name in COMMANDS} == {
        "generate": SAMPLING
        | ENDING
        | DRESSING
        | {"--method", "--input", "--output", "--batch", "--raw", "--n", "--logprobs", "--fill"}
        | {"--schema", "--regex", "--choices", "--grammar", "--ray", "--replicas"}
        | {"--reasoning-effort"}
        | LOADING,
        "chat": SAMPLING | ENDING | DRESSING | {"--method", "--reasoning-effort"} | LOADING,
        "race": SAMPLING | ENDING | {"--entry", "--limit", "--template", "--json"} | LOADING,
        "trace": SAMPLING
        | ENDING
        | DRESSING
        | {"--method", "--raw", "--png", "--reasoning-effort"}
        | LOADING,
        "evaluate": SAMPLING
        | ENDING
        | DRESSING
        | {"--method", "--task", "--data", "--limit", "--batch", "--no-prefix-cache"}
        | {"--protocol", "--shots", "--num-shots", "--samples", "--judge"}
        | {"--tasks", "--include", "--chat", "--draws", "--json", "--ray", "--replicas"}
        | LOADING,
        "report": {"--png", "--help"},
        "tune": SAMPLING
        | {"--method", "--max-loss", "--against", "--by", "--trials", "--limit", "--batch"}
        | {"--task", "--protocol", "--data", "--shots", "--num-shots", "--samples", "--png"}
        | {"--json", "--judge", "--max-reasoning-tokens"}
        | LOADING,
        "reproduce": {
            *("--scale", "--out", "--model", "--data", "--shots", "--limit", "--rounds"),
        }
        | LOADING,
        "serve": {
            "--model",
            "--config",
            "--method",
            "--further",
            "--max-tokens",
            "--verbose",
            "--host",
            "--port",
            "--max-waiting",
            "--replicas",
            "--max-replicas",
        }
        | {"--api-key", "--api-key-file", "--insecure", "--drain-seconds", "--step-seconds"}
        | {"--log-format", "--lazy", "--keep", "--adapters"}
        | LOADING,
        "data": SAMPLING
        | ENDING
        | {"--method", "--output", "--held-out", "--exclude", "--batch", "--template"}
        | LOADING,
        "train": {"--processes", "--plan", "--help"},
        "quantize": {"--target", "--to", "--output", "--help"},
        "models": {"--help"},
        "methods": {"--help"},
    }
    assert {
        name: flags(outpace("benchmark", name, "--help")[1]) for name in BENCHMARK_COMMANDS
    } == {
        "methods": {
            *("--batch", "--prompt-length", "--max-tokens", "--ignore-eos", "--temperature"),
            *("--seed", "--rounds", "--limit", "--samples", "--json", "--png", "--help"),
            *("--task", "--protocol", "--data", "--judge", "--shots", "--num-shots"),
        }
        | LOADING,
        "serve": {
            *("--model", "--method", "--endpoint", "--prompts", "--max-tokens", "--temperature"),
            *("--ignore-eos", "--seed", "--concurrency", "--rate", "--requests", "--warmup"),
            *("--api-key", "--timeout", "--goodput", "--output", "--png", "--help"),
        },
    }


SAMPLING = {
    *("--max-tokens", "--temperature", "--top-p", "--top-k", "--min-p", "--seed"),
    *("--presence-penalty", "--frequency-penalty", "--repetition-penalty", "--logit-bias"),
}
ENDING = {"--stop", "--stop-id", "--ignore-eos", "--min-tokens", "--max-reasoning-tokens"}
DRESSING = {"--system", "--template"}
LOADING = {
    *("--adapter", "--dtype", "--quantize", "--device", "--max-length", "--mask-id"),
    *("--cache-gib", "--tensor-parallel", "--attention", "--graphs", "--compile"),
    *("--pace", "--help"),
}


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

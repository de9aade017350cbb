"""`outpace benchmark methods` as typed by a user."""

import json
import signal
import subprocess
import sys
import time

import pytest

PNG = b"\x89PNG"
PAIR = ("tiny-aux autoregressive", "tiny-ar speculative draft=tiny-aux tokens=2,4")


def test_methods_take_turns_and_are_written_with_provenance(outpace, tmp_path):
    path, picture = tmp_path / "new" / "a.json", tmp_path / "a.png"
    status, out, err = outpace(
        *("benchmark", "methods", *PAIR, "--limit", 4, "--rounds", 2, "--max-tokens", 16),
        *("--temperature", 0, "--json", path, "--png", picture),
    )
    assert status == 0, err
    assert "per CPU s" in out and "×" in out and "draft=tiny-aux tokens=4" in out
    written = json.loads(path.read_text())
    assert written["provenance"]["outpace"] and not written["interrupted"]
    assert (written["rounds"], len(written["results"])) == (2, 3)
    first, second, third = written["results"]
    assert first["faster"] is None and second["faster"]["ratio"] > 0
    assert second["line"] == third["line"] and third["setting"] == "tokens=4"
    assert first["accuracy"] is not None and first["max_tokens"] == 16
    assert picture.read_bytes().startswith(PNG)
    status, out, err = outpace("report", path, "--png", picture)
    assert status == 0, err
    assert "against run 1" in out


@pytest.mark.parametrize(
    "name", ["mine.txt", pytest.param("mine.jsonl", marks=pytest.mark.nightly)]
)
def test_prompts_compare_the_default_with_one_token_per_forward(outpace, tmp_path, name):
    prompts, path = tmp_path / name, tmp_path / "a.json"
    texts = ["How many?\n", "\n", "Tom has 5 bags.\n"]
    lines = (json.dumps({"prompt": text.strip()}) + "\n" for text in texts if text.strip())
    prompts.write_text("".join(texts if name.endswith(".txt") else lines))
    status, out, err = outpace(
        *("benchmark", "methods", "tiny-aux", "--prompts", prompts, "--rounds", 3),
        *("--max-tokens", 9, "--ignore-eos", "--temperature", 0, "--json", path),
    )
    assert status == 0, err
    assert "accuracy" not in out and "per CPU s" in out and "× wall" in out and "auto" in out
    plain, usual = json.loads(path.read_text())["results"]
    assert (plain["line"], usual["line"]) == ("tiny-aux autoregressive", "tiny-aux lookup")
    assert plain["accuracy"] is None and plain["problems"] == 4  # each of two prompts as often
    assert usual["faster"]["ratio"] > 0 and usual["faster_wall"]["ratio"] > 0
    assert usual["is_auto"] and not plain["is_auto"]


def test_lengths_are_those_of_the_protocol_within_the_context(outpace, tmp_path):
    protocol, data, path = (tmp_path / name for name in ("mine.toml", "test.jsonl", "a.json"))
    text = "[tasks.gsm8k]\ntemplate = '{question}'\nmax_tokens = 4096\ncanvas = 12\n"
    protocol.write_text(text)
    data.write_text(json.dumps({"question": "What is 1 + 1?", "answer": "#### 2"}))
    status, _, err = outpace(
        *("benchmark", "methods", "tiny-dream left_to_right", "tiny-ar autoregressive", "--task"),
        *("gsm8k", "--protocol", protocol, "--data", data, "--limit", 1, "--rounds", 1),
        *("--json", path),
    )
    assert status == 0, err
    first, second = json.loads(path.read_text())["results"]
    assert first["max_tokens"] == 12 < second["max_tokens"] < 512 and second["faster"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("tiny-ar nothing",), "nothing"),
        (("nowhere autoregressive",), "nowhere"),
        (("tiny-ar autoregressive", "--prompt-length", "8", "--png", "a.png"), "png"),
        (("tiny-ar autoregressive", "--batch", "0"), "batch"),
        (("tiny-ar autoregressive", "--batch", "16"), "160"),
        (("tiny-ar autoregressive", "--max-tokens", "8,-1"), "max_tokens"),
        (("tiny-ar autoregressive", "--prompt-length", "nan"), "prompt_length"),
        (("tiny-ar autoregressive", "--task", "chess"), "chess"),
        (("tiny-ar d2f",), "D2F"),
        (("tiny-block",), "MODEL METHOD"),
        (("tiny-aux", "--prompts", "absent"), "absent"),
        (("tiny-aux", "--prompts", "/dev/null", "--task", "story"), "--task"),
        (("tiny-aux", "--prompts", __file__, "--limit", "0"), "limit"),
        (("tiny-aux", "--prompts", __file__), "test_sides.py:1"),
    ],
)
def test_invalid_words_are_named_in_one_line(refused, words, name, tmp_path):
    assert name in refused("benchmark", "methods", *words, "--json", tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_an_interrupt_keeps_whole_rounds(tmp_path):
    path, samples = tmp_path / "a.json", tmp_path / "samples"
    command = [sys.executable, "-m", "outpace", "benchmark", "methods", *PAIR, "--limit", "60"]
    command += ["--rounds", "20", "--json", str(path), "--samples", str(samples)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while sum(len(p.read_bytes().splitlines()) for p in samples.glob("*")) < 9:
        assert program.poll() is None
        time.sleep(0.05)
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=60)
    assert program.returncode == 130 and err.endswith(b"outpace: interrupted\n")
    cut = json.loads(path.read_text())
    assert cut["interrupted"] and 1 <= cut["rounds"] < 20
    assert {each["problems"] for each in cut["results"]} == {3 * cut["rounds"]}

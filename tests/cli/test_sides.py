"""`outpace benchmark methods` as typed by a user."""

import json
import signal
import subprocess
import sys
import time

import pytest

from outpace.cli.main import main

PNG = b"\x89PNG"
PAIR = ("tiny-aux autoregressive", "tiny-ar speculative draft=tiny-aux tokens=2,4")


@pytest.fixture
def outpace(capsys):
    """Return a function that runs a command line: exit status, output, errors."""

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, words)))
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run


@pytest.mark.nightly
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
    ("words", "says"),
    [
        (("tiny-ar nothing",), "unknown method 'nothing'"),
        (("nowhere autoregressive",), "no model 'nowhere'"),
        (("random:huge autoregressive",), "unknown shape 'huge'; choose one of tiny"),
        (
            ("random:tiny autoregressive", "tiny-ar autoregressive"),
            "only be compared with each other",
        ),
        (("tiny-ar autoregressive", "--batch", "0"), "batch must be at least 1"),
        (
            ("tiny-ar autoregressive", "--batch", "two"),
            "batch must be a list of numbers such as 1,2,4",
        ),
        (("tiny-ar autoregressive", "--max-tokens", "8,-1"), "max_tokens must be at least 1"),
        (
            ("tiny-ar autoregressive", "--prompt-length", "nan"),
            "prompt_length must be a list of numbers",
        ),
        (("tiny-ar autoregressive", "--rounds", "0"), "rounds must be at least 1"),
        (("tiny-ar autoregressive", "--limit", "0"), "limit must be at least 1"),
        (
            ("tiny-ar autoregressive", "--batch", "16"),
            "do not fill a batch of 16; use at least 160",
        ),
        (("tiny-ar autoregressive", "--task", "chess"), "unknown task 'chess'; choose from"),
        (("tiny-ar autoregressive", "--protocol", "chess"), "unknown protocol 'chess'"),
        (("tiny-ar d2f",), "D2F"),
    ],
)
def test_bad_input_is_one_line(outpace, words, says, tmp_path):
    path = tmp_path / "a.json"
    status, _, err = outpace("benchmark", "methods", *words, "--json", path)
    assert status == 2 and says in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_an_interrupt_keeps_whole_rounds_and_the_same_command_goes_on(tmp_path):
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
    subprocess.run(command, check=True, stdout=subprocess.PIPE)
    whole = json.loads(path.read_text())
    assert not whole["interrupted"] and whole["rounds"] == 20
    for before, after in zip(cut["results"], whole["results"], strict=True):
        count = before["problems"]
        assert after["samples"]["seconds"][:count] == before["samples"]["seconds"]

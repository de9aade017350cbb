"""`outpace tune` as typed by a user."""

import json

import pytest

from outpace.cli.main import main

PNG = b"\x89PNG"


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
def test_tune_prints_a_command_line_that_is_one(outpace, tmp_path):
    pytest.importorskip("optuna")
    path, picture, samples = tmp_path / "a.json", tmp_path / "a.png", tmp_path / "a.jsonl"
    words = (
        *("tune", "tiny-dream", "--method", "apd", "--verifier", "tiny-aux", "--window", "8"),
        *("--limit", 4, "--trials", 3, "--max-loss", 100, "--max-tokens", 16),
        *("--temperature", 0, "--samples", samples, "--by", "forwards"),
    )
    status, out, err = outpace(*words, "--json", path, "--png", picture)
    assert status == 0, err
    line = out.strip().splitlines()[-1]
    assert line.startswith("outpace evaluate tiny-dream --method apd --verifier tiny-aux")
    assert "--window 8" in line and line.endswith("--max-tokens 16 --temperature 0.0")
    written = json.loads(path.read_text())
    assert len(written["results"]) == 4 and written["search"]["seed"] == 0
    assert written["results"][0]["line"] == "tiny-dream left_to_right"
    assert [each["faster"] for each in written["finals"]][0] is None
    assert picture.read_bytes().startswith(PNG)
    assert len(samples.read_text().splitlines()) == 1 + 1 + 3
    status, _, err = outpace(*words[:-2])
    assert status == 2 and "by is 'tokens_per_forward', expected 'tokens_per_cpu_second'" in err
    status, _, err = outpace("evaluate", *line.split()[2:], "--limit", 1, "--max-tokens", 8)
    assert status == 0, err


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "--method is required"),
        (("--method", "apd"), "'apd' needs --verifier"),
        (("--method", "autoregressive"), "Autoregressive has no option to tune"),
        (("--method", "left_to_right", "--max-loss", "-1"), "max_loss must be between 0 and 100"),
        (("--method", "left_to_right", "--max-loss", "nan"), "max_loss must be between 0 and 100"),
        (("--method", "left_to_right", "--trials", "0"), "trials must be at least 1"),
        (("--method", "left_to_right", "--by", "luck"), "by must be seconds or forwards"),
        (("--method", "left_to_right", "--batch", "9", "--limit", "4"), "batch must be at most"),
        (("--method", "left_to_right", "--task", "chess"), "unknown task 'chess'"),
        (
            ("--method", "left_to_right", "--against", "left_to_right tokens=1,2"),
            "must be a single setting",
        ),
    ],
)
def test_bad_searches_are_one_line(outpace, words, says):
    pytest.importorskip("optuna")
    status, _, err = outpace("tune", "tiny-dream", *words)
    assert status == 2 and says in err and err.count("\n") == 1

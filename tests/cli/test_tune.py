"""`outpace tune` as typed by a user."""

import json
import shlex

import pytest

PNG = b"\x89PNG"


@pytest.mark.nightly
def test_tune_prints_a_command_line_that_is_one(outpace, refused, tmp_path):
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
    assert "tokens_per_forward" in refused(*words[:-2])
    status, _, err = outpace("evaluate", *line.split()[2:], "--limit", 1, "--max-tokens", 8)
    assert status == 0, err


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", "--method"),
        ("--method apd", "--verifier"),
        ("--method autoregressive", "Autoregressive"),
        ("--method left_to_right --max-loss nan", "max_loss"),
        ("--method left_to_right --trials 0", "trials"),
        ("--method left_to_right --by luck", "seconds"),
        ("--method left_to_right --batch 9 --limit 4", "batch"),
        ("--method left_to_right --task chess", "chess"),
        ("--method left_to_right --against 'left_to_right tokens=1,2'", "against"),
    ],
)
def test_invalid_words_are_named_in_one_line(refused, words, name):
    pytest.importorskip("optuna")
    assert name in refused("tune", "tiny-dream", *shlex.split(words))

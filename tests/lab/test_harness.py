"""Tasks of lm-evaluation-harness with any method."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM, OptionError
from outpace.checkpoints.hub import ZOO_FOLDER
from outpace.cli.main import main
from outpace.data.generated.story import story_problems

STORIES = [problem.question for problem in story_problems("test", 4)]
TASK = """
task: additions
dataset_path: json
dataset_kwargs:
  cache_dir: {folder}/cache
  data_files:
    test: {folder}/test.jsonl
output_type: {kind}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
metadata:
  version: 1.0
"""
GENERATE = """
generation_kwargs:
  until: ["####"]
  max_gen_toks: 16
filter_list:
  - name: last
    filter:
      - function: regex
        regex_pattern: "(-?[0-9]+)"
        group_select: -1
      - function: take_first
metric_list:
  - metric: exact_match
"""
CHOOSE = """
doc_to_choice: ["4", "5"]
metric_list:
  - metric: acc
"""


def test_without_the_harness_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "outpace.lab.harness", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", "tiny-aux", "--tasks", "gsm8k"])
    assert ended.value.code == 2
    assert "pip install '.[evaluate]'" in capsys.readouterr().err


@pytest.fixture
def harness() -> Any:
    """The adapter, if lm-evaluation-harness is installed."""
    pytest.importorskip("lm_eval", reason="pip install '.[evaluate]'")
    from outpace.lab import harness

    return harness


def instances(kind: str, *arguments: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    place = ("stories", None, None)
    return [Instance(kind, {}, args, number, place) for number, args in enumerate(arguments)]


def additions(folder: Path, kind: str, more: str) -> Path:
    """A folder with a custom task that reads a local file."""
    lines = [{"question": f"{story} ", "answer": "1"} for story in STORIES]
    (folder / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "additions.yaml").write_text(TASK.format(folder=folder, kind=kind, more=more))
    return folder


@pytest.mark.nightly
def test_code_is_never_run_by_the_harness(harness: Any, tmp_path: Path) -> None:
    folder = additions(tmp_path, "generate_until", GENERATE + "unsafe_code: true\n")
    with pytest.raises(OptionError, match="sandbox") as raised:
        ours = harness.OutpaceHarness(LLM("tiny-ar"))
        harness.run_tasks(ours, ["additions"], include=str(folder), limit=1)
    assert raised.value.param == "tasks" and not ours.outputs


def test_likelihoods_equal_the_harness(harness: Any) -> None:
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(
        pretrained=str(ZOO_FOLDER / "tiny-ar"),
        tokenizer=str(ZOO_FOLDER / "vocabulary"),
        device="cpu",
        dtype="float32",
        batch_size=2,
    )
    ours = harness.OutpaceHarness(LLM("tiny-ar"), batch_size=2)
    pairs = [(story, f" {number} left.\n#### {number}") for number, story in enumerate(STORIES)]
    pairs += [("", "Tom has 5 bags."), ("ends in a space ", "x"), (STORIES[0] * 40, " 7")]
    for (log, greedy), (expected, as_greedy) in zip(
        ours.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True),
        theirs.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True),
        strict=True,
    ):
        assert log == pytest.approx(expected, abs=1e-3) and greedy == as_greedy
    texts = [(STORIES[0],), (" ".join(STORIES) * 8,), ("",)]
    for total, expected in zip(
        ours.loglikelihood_rolling(instances("loglikelihood_rolling", *texts)),
        theirs.loglikelihood_rolling(instances("loglikelihood_rolling", *texts), disable_tqdm=True),
        strict=True,
    ):
        assert total == pytest.approx(expected, abs=1e-3)


def test_answers_equal_the_method(harness: Any) -> None:
    llm = LLM("tiny-ar")
    ours = harness.OutpaceHarness(llm, batch_size=3, max_tokens=24)
    given: list[dict[str, Any]] = [
        {"until": ["\n"]},
        {"until": [], "max_gen_toks": 5},
        {"do_sample": True, "temperature": 0.8, "until": ["####"]},
        {"until": ["\n"]},
    ]
    chats = [ours.apply_chat_template([{"role": "user", "content": s}]) for s in STORIES]
    texts = ours.generate_until(instances("generate_until", *zip(chats, given, strict=True)))
    limits = [24, 5, 24, 24]
    other = harness.OutpaceHarness(llm, temperature=0.7, top_p=0.9)
    (_, set_options) = other.encode_request(STORIES[0], given[2])
    assert (set_options["temperature"], set_options["top_p"]) == (0.7, 0.9)
    for story, text, options, limit in zip(STORIES, texts, given, limits, strict=True):
        (output,) = llm.generate(
            story,
            max_tokens=limit,
            temperature=options.get("temperature", 0.0),
            stop=options["until"],
        )
        assert text == output.text
    assert len(ours.outputs) == 4 and ours.seconds > 0


def test_long_contexts_are_truncated(harness: Any) -> None:
    ours = harness.OutpaceHarness(LLM("tiny-ar"))
    (text,) = ours.generate_until(
        instances("generate_until", (" ".join(STORIES) * 9, {"max_gen_toks": 4}))
    )
    assert isinstance(text, str) and ours.outputs[0].prompt_tokens == ours.max_length - 4
    with pytest.raises(ValueError, match="max_gen_toks"):
        ours.generate_until(instances("generate_until", ("x", {"max_gen_toks": 9999})))


def test_interrupted_run_resumes(harness: Any, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    asked = instances("generate_until", *((story, {"max_gen_toks": 8}) for story in STORIES * 2))
    scored = instances("loglikelihood", *((story, " 7") for story in STORIES))
    first = harness.OutpaceHarness(LLM("tiny-ar"), samples=path)
    texts, found = first.generate_until(asked), first.loglikelihood(scored, disable_tqdm=True)
    lines = path.read_text().splitlines(True)
    assert len(lines) == 1 + 4 + 4
    path.write_text("".join(lines[:3]))
    for left in (6, 0):
        again = harness.OutpaceHarness(LLM("tiny-ar"), samples=path)
        before = len(path.read_text().splitlines())
        assert again.generate_until(asked) == texts
        assert again.loglikelihood(scored, disable_tqdm=True) == found
        assert len(path.read_text().splitlines()) - before == left
        figures = again.decoding_figures("stories")
        assert figures["tokens_per_forward"] > 0
        assert again.seconds >= json.loads(lines[1])["clock"]
        assert figures["tokens_per_second"] * again.seconds == pytest.approx(4 * 8)
    with pytest.raises(ValueError, match="seed"):
        harness.OutpaceHarness(LLM("tiny-ar"), samples=path, seed=1).generate_until(asked)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "kind", "more", "draws"),
    [
        ("tiny-ar", "generate_until", GENERATE, 4),
        ("tiny-ar", "multiple_choice", CHOOSE, 4),
        ("tiny-dream", "multiple_choice", CHOOSE, 4),
        ("tiny-dream", "multiple_choice", CHOOSE, 0),
    ],
)
def test_custom_task(
    harness: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    kind: str,
    more: str,
    draws: int,
) -> None:
    folder, out = additions(tmp_path, kind, more), tmp_path / "out.json"
    with pytest.raises(SystemExit) as ended:
        main(
            [
                *("evaluate", model, "--tasks", "additions", "--include", str(folder)),
                *("--limit", "3", "--batch", "3", "--json", str(out), "--draws", str(draws)),
            ]
        )
    printed = capsys.readouterr()
    assert not ended.value.code, printed.err
    written = json.loads(out.read_text())
    assert written["harness"]["n-samples"]["additions"]["effective"] == 3
    (result,) = written["results"]
    assert result["accuracy"] is None
    assert result["problems"] == (3 if kind == "generate_until" else 0)
    assert "additions" in printed.out
    assert ("tokens_per_forward" in printed.out) == (kind == "generate_until")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_bad_input_is_one_line(harness: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for words, name in (
        (["--tasks", "gsm8k_cott"], "gsm8k_cott"),
        (["--tasks", "gsm8k", "--task", "gsm8k"], "--tasks"),
        (["--tasks", "gsm8k", "--top-k", "1"], "top_k"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["evaluate", "tiny-aux", *words])
        assert ended.value.code == 2 and name in capsys.readouterr().err

"""Generated stories: correct arithmetic, disjoint splits, problems by index; their vocabulary."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from random import Random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from outpace.evaluation.generated.problems import Problem
from outpace.evaluation.generated.story import STORY_SPLITS, draw_drill, main, story_problems
from outpace.evaluation.generated.vocabulary import (
    SPECIAL_TOKENS,
    build_tokenizer,
    save_tokenizer,
    story_texts,
)

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}
EQUATION = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """The zoo's tokenizer."""
    with as_file(files("outpace.zoo") / "vocabulary") as folder:
        return AutoTokenizer.from_pretrained(folder)


def assert_true_equation(left: str, op: str, right: str, result: str, repeated: str) -> None:
    """Assert a correct equation within the table of small numbers."""
    x, y, z = int(left), int(right), int(result)
    assert result == repeated
    assert OPERATIONS[op](x, y) == z
    assert op != "/" or z * y == x
    assert min(x, y, z) >= 2 and max(x, y, z) <= 100


@pytest.mark.parametrize("split", STORY_SPLITS.names)
def test_steps_are_correct_equations(split: str) -> None:
    for problem in story_problems(split, 500):
        equations = EQUATION.findall(problem.answer)
        assert 2 <= len(equations) <= 4
        assert len(equations) == problem.answer.count("<<")
        for equation in equations:
            assert_true_equation(*equation)
        assert problem.final_result == equations[-1][3]
        assert problem.answer.endswith(f"\n#### {problem.final_result}")


@pytest.mark.parametrize("split", STORY_SPLITS.names)
def test_operands_are_derivable(split: str) -> None:
    for problem in story_problems(split, 500):
        known = set(re.findall(r"\d+", problem.question)) | {"2"}  # for "half", "twice"
        for left, _, right, result, _ in EQUATION.findall(problem.answer):
            assert {left, right} <= known
            known.add(result)


@pytest.mark.parametrize("split", STORY_SPLITS.names)
def test_text_is_filled_and_well_formed(split: str) -> None:
    for problem in story_problems(split, 500):
        assert not re.search(r"[{}]|  |\b[01] ", problem.question + problem.answer)
        assert problem.question.endswith("?")
        assert problem.answer[0].isupper()


def test_equations_are_few_enough_to_learn() -> None:
    equations = {
        found for p in story_problems("train", 5000) for found in EQUATION.findall(p.answer)
    }
    assert len(equations) < 5000


def test_splits_share_no_question() -> None:
    train = {problem.question for problem in story_problems("train", 20_000)}
    test = {problem.question for problem in story_problems("test", 300)}
    unseen = {problem.question for problem in story_problems("unseen", 300)}
    assert not train & test
    assert not (train | test) & unseen


def test_problems_stay_the_same() -> None:
    assert story_problems("train", 1) == [
        Problem(
            question=(
                "It costs 2 dollars to send one of the letters. Nina has 26 dollars and sends "
                "8 letters on Monday and 3 on Tuesday. How many dollars are left?"
            ),
            answer=(
                "Nina sends 8+3=<<8+3=11>>11 letters. She pays 11*2=<<11*2=22>>22 dollars. "
                "So 26-22=<<26-22=4>>4 dollars are left.\n#### 4"
            ),
        )
    ]


def test_drills_are_correct_equations() -> None:
    rng = Random(0)
    for _ in range(100):
        line = draw_drill(rng)
        equations = EQUATION.findall(line)
        assert 6 <= len(equations) <= 8
        assert re.fullmatch(rf"( {EQUATION.pattern})+", line)
        for equation in equations:
            assert_true_equation(*equation)


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="'dev': choose one of train, test, unseen"):
        story_problems("dev", 1)
    with pytest.raises(ValueError, match="negative"):
        story_problems("train", -1)
    with pytest.raises(ValueError, match="negative"):
        story_problems("train", 1, start=-1)


def test_vocabulary_is_full_with_the_special_tokens_last(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert len(tokenizer) == 1024
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [1020, 1021, 1022, 1023]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 1020
    assert tokenizer.mask_token_id == 1021


@pytest.mark.parametrize("split", STORY_SPLITS.names)
def test_prompt_and_answer_tokenize_separately(
    split: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    for problem in story_problems(split, 100):
        prompt, answer = problem.question + "\n", problem.answer + tokenizer.eos_token
        apart = tokenizer(prompt).input_ids + tokenizer(answer).input_ids
        assert apart == tokenizer(prompt + answer).input_ids
        assert tokenizer.decode(apart) == prompt + answer
        assert len(tokenizer(prompt).input_ids) <= 56
        assert 32 <= len(tokenizer(answer).input_ids) <= 96


def test_plain_answers_have_one_wording_and_the_same_result() -> None:
    pairs = list(
        zip(story_problems("train", 200), story_problems("train", 200, plain=True), strict=True)
    )
    assert all((a.question, a.final_result) == (b.question, b.final_result) for a, b in pairs)
    changed = sum(a.answer != b.answer for a, b in pairs)
    assert 100 < changed < 200


def test_digits_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("4096") == list("4096")
    text = "Zoë — 12×3\n\t<x> 日本"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_template_is_the_training_format(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "user", "content": "How many?"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "How many?\n"
    chat += [{"role": "assistant", "content": "#### 2"}, {"role": "user", "content": "Why?"}]
    expected = "How many?\n#### 2<|endoftext|>\nWhy?\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == expected


def test_a_built_vocabulary_is_saved_and_loaded(tmp_path: Path) -> None:
    built = build_tokenizer(story_texts(200), vocab=300)
    save_tokenizer(built, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == 300
    assert loaded("Tom has 12 cups.").input_ids == built.encode("Tom has 12 cups.").ids


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="vocab=1024"):
        build_tokenizer(["too short"])


def test_questions_are_printed_as_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "3"])
    lines = capsys.readouterr().out.splitlines()
    expected = [{"prompt": problem.question} for problem in story_problems("train", 3)]
    assert list(map(json.loads, lines)) == expected
    for words in ([], ["train"], ["train", "many"]):
        with pytest.raises(SystemExit, match="usage"):
            main(words)

"""The models that ship inside the package."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from outpace import LLM, recipes
from outpace.checkpoints.checkpoint import load_tokenizer
from outpace.checkpoints.hub import ZOO_FOLDER, ZOO_TOKENIZER
from outpace.checkpoints.load import load_config
from outpace.decoding import Kind
from outpace.lab.run import evaluate, questions_of
from outpace.methods import (
    Autoregressive,
    BlockDiffusion,
    DFlash,
    Eagle,
    FastDLLM,
    LeftToRight,
    Method,
    WeDLM,
)

ONE = LeftToRight(window=16, lookahead=16)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("tiny-ar", Autoregressive()),
        ("tiny-aux", Autoregressive()),
        ("tiny-dream", ONE),
        ("tiny-llada", ONE),
        ("tiny-llada", FastDLLM(threshold=None, block=8)),
        ("tiny-block", BlockDiffusion()),
    ],
    ids=str,
)
def test_a_model_solves_held_out_problems(name: str, method: Method) -> None:
    questions = questions_of("story", 6)
    report = evaluate(LLM(name), questions, batch=6, method=method, max_tokens=128, temperature=0)
    assert report.correct_count >= 5


def test_drafts_give_the_same_text_in_fewer_passes() -> None:
    stories = [question.prompt for question in questions_of("story", 8)]
    llm = LLM("tiny-ar", max_length=256)
    plain = llm.generate(stories, method=Autoregressive(), max_tokens=100)
    for method, least in (
        (DFlash(draft="tiny-dflash", tokens=15), 8.0),
        (Eagle(draft="tiny-eagle", width=1), 4.0),
        (Eagle(draft="tiny-eagle", nodes=16), 4.0),
    ):
        fast = llm.generate(stories, method=method, max_tokens=100)
        assert [output.ids for output in fast] == [output.ids for output in plain]
        kept = [
            step.committed for output in fast for step in output.steps if step.model == "target"
        ]
        verified = sum(output.forwards - 1 for output in fast)
        assert (sum(kept) - len(fast)) / verified > least


@pytest.mark.parametrize("task", ["story", "table"])
def test_wedlm_solves_problems_in_few_forwards(task: str) -> None:
    llm, method = LLM("tiny-wedlm", max_length=256), WeDLM(entropy=0.2, penalty=0.0)
    options = {"max_tokens": 128, "temperature": 0.0}
    report = evaluate(llm, questions_of(task, 30), task=task, batch=30, method=method, **options)
    assert report.accuracy >= 0.8
    assert report.tokens_per_forward > 5


def test_verified_wedlm_gives_the_text_of_its_next_tokens() -> None:
    llm = LLM("tiny-wedlm", max_length=256)
    stories = [question.prompt for question in questions_of("story", 12)]
    plain = llm.generate(stories, method=Autoregressive(), max_tokens=128)
    fast = llm.generate(stories, method=WeDLM(verify=True), max_tokens=128)
    assert [output.ids for output in fast] == [output.ids for output in plain]
    forwards = [sum(output.forwards for output in outputs) for outputs in (plain, fast)]
    assert forwards[0] > 5 * forwards[1]


def test_sheets_are_planned_in_any_order_and_not_by_the_verifier() -> None:
    questions = questions_of("sudoku-sheet", 12)
    planned, guessed, verifier = (
        evaluate(
            LLM(name), questions, batch=12, method=method, max_tokens=84, temperature=0
        ).correct_count
        for name, method in (
            ("tiny-dream-sudoku", FastDLLM(cache=None, block=84)),
            ("tiny-dream-sudoku", LeftToRight(tokens=4, window=16, lookahead=16)),
            ("tiny-aux-sudoku", Autoregressive()),
        )
    )
    assert planned >= 9 and guessed <= 8 and verifier <= 4


def test_the_model_without_a_shift_is_what_its_recipe_makes() -> None:
    recipe = tomllib.loads((recipes.RECIPES_FOLDER / "tiny-llada.toml").read_text())
    written = json.loads((ZOO_FOLDER / "tiny-llada" / "config.json").read_text())
    assert written == {**recipe["model"]["config"], "torch_dtype": "bfloat16"}
    config = load_config("tiny-llada")
    assert (config.family, config.shift, config.kind) == ("llada", 0, Kind.DIFFUSION)
    assert load_tokenizer("tiny-llada")("<|mask|>").input_ids == [config.mask_id]


def test_all_models_share_one_vocabulary(tmp_path: Path) -> None:
    assert [path.parent.name for path in ZOO_FOLDER.rglob("tokenizer.json")] == ["vocabulary"]
    shared = load_tokenizer(ZOO_TOKENIZER)
    (tmp_path / "link").symlink_to(ZOO_FOLDER / "tiny-ar")
    for name in ("tiny-ar", ZOO_FOLDER / "tiny-llada", tmp_path / "link"):
        tokenizer = load_tokenizer(name)
        assert tokenizer.get_vocab() == shared.get_vocab()
        assert tokenizer.chat_template == shared.chat_template
    copied = shutil.copytree(ZOO_FOLDER / "tiny-ar", tmp_path / "copied")
    assert load_tokenizer(copied) is None
    shutil.copytree(ZOO_TOKENIZER, copied, dirs_exist_ok=True)
    assert LLM(copied).generate("Tom has 5 bags.", max_tokens=2)[0].text

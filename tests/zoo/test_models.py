"""The models that ship inside the package."""

from __future__ import annotations

import json
import tomllib

import pytest

from outpace import LLM, recipes
from outpace.decoding import Kind
from outpace.evaluation.run import evaluate, questions_of
from outpace.methods import Autoregressive, FastDLLM, LeftToRight, Method
from outpace.models.load import ZOO, load_config, load_tokenizer

ONE = LeftToRight(window=16, lookahead=16)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("tiny-ar", Autoregressive()),
        ("tiny-aux", Autoregressive()),
        ("tiny-dream", ONE),
        ("tiny-llada", ONE),
        ("tiny-llada", FastDLLM(threshold=None, block=8)),
    ],
    ids=str,
)
def test_a_model_solves_held_out_problems(name: str, method: Method) -> None:
    """Five of six at least; over hundreds it is more than nine in ten."""
    questions = questions_of("story", 6)
    report = evaluate(LLM(name), questions, batch=6, method=method, max_tokens=128, temperature=0)
    assert report.correct >= 5


def test_the_model_without_a_shift_is_what_its_recipe_makes() -> None:
    """LLaDA's format, the zoo's tokenizer."""
    recipe = tomllib.loads((recipes.FOLDER / "tiny-llada.toml").read_text())
    written = json.loads((ZOO / "tiny-llada" / "config.json").read_text())
    assert written == {**recipe["model"]["config"], "torch_dtype": "bfloat16"}
    config = load_config("tiny-llada")
    assert (config.family, config.shift, config.kind) == ("llada", 0, Kind.DIFFUSION)
    ours, others = (load_tokenizer(name) for name in ("tiny-llada", "tiny-dream"))
    assert ours is not None and others is not None
    assert ours.get_vocab() == others.get_vocab() and ours.mask_token_id == config.mask_id
    assert ours.chat_template == others.chat_template

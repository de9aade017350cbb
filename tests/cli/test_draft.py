"""`outpace train draft` as typed by a user."""

import json
import re

from outpace.data.generated.story import story_problems
from outpace.data.prompt_set import read_prompt_set


def test_a_draft_is_made_from_prompts_and_continued_with_more(outpace, refused, tmp_path):
    out, prompts, more = tmp_path / "out", tmp_path / "a.jsonl", tmp_path / "b.txt"
    questions = [each.question for each in story_problems("train", 40)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions[:30]))
    more.write_text("\n".join(questions))
    words = ("train", "draft", "tiny-ar", "--output", out, "--held-out", 0.2, "--max-tokens", 12)
    small = ("train.batch=2", "train.epochs=0.1", "held_out.every=50", "objective.anchors=4")
    assert "of 1 prompts: give more prompts\n" in refused(*words[:5], "--data", write_one(tmp_path))
    few = refused(*words[:5], "--data", prompts, "--held-out", 1e-9)
    share = float(few.rpartition("--held-out ")[2])
    assert read_prompt_set([prompts], held_out=share).held_out
    assert not read_prompt_set([prompts], held_out=share - 0.002).held_out
    status, printed, err = outpace(*words, *small, "--data", prompts)
    assert status == 0 and re.match(r"warning: .* 252 tokens .* 1400832 weights ", err), err
    assert "for their answers and at most" in printed and "accepted 1.8 tokens" in printed
    assert not [*out.glob("trial*")]
    answers, draft = (out / "data" / "train.jsonl").read_text(), out / "draft" / "config.json"
    recipe, before = (out / "recipe.toml").read_text(), draft.stat().st_mtime
    figures = json.loads((out / "draft.json").read_text())["results"]
    assert [each["method"].partition("(")[0] for each in figures] == ["Autoregressive", "DFlash"]
    assert [each["draft_tokens"] > 0 for each in figures] == [False, True]

    status, _, err = outpace(*words, *small, "train.epochs=0.2", "--data", more)
    assert status == 0, err
    longer = (out / "data" / "train.jsonl").read_text()
    assert longer.startswith(answers) and len(longer) > len(answers)
    assert (out / "recipe.toml").read_text() == recipe and draft.stat().st_mtime > before
    assert "diffusion" in refused(*words[:2], "tiny-dream", *words[3:], "--data", more)


def write_one(folder):
    path = folder / "one.txt"
    path.write_text("How many?\n")
    return path

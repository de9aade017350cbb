"""Tests of examples by number, from generated stories and JSON Lines files."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from outpace.checkpoints.checkpoint import load_tokenizer
from outpace.checkpoints.hub import ZOO_FOLDER
from outpace.training.data import Data, Examples, marked_tokens
from runs import write_lines

TOKENIZER = load_tokenizer(ZOO_FOLDER / "vocabulary")
RESULT = r"(?<==)\d+(?=>>)"
END = TOKENIZER.eos_token_id


def test_marks_are_the_tokens_that_a_regular_expression_touches() -> None:
    offsets = [(0, 2), (2, 3), (3, 5), (5, 7)]
    assert marked_tokens(re.compile(r"\d+"), "a=12>>3", offsets) == [False, True, True, True]
    assert marked_tokens(re.compile(r"(?<==)\d+"), "a=12>>3", offsets) == [False, True, True, False]


def test_a_story_example_is_a_function_of_seed_and_number() -> None:
    data = Data(path="story:train", drills=0.5, mark=RESULT)
    first, again = (Examples(data, TOKENIZER, seed=3) for _ in range(2))
    assert [first[n] for n in (5, 1, 9)] == [again[n] for n in (5, 1, 9)]
    assert Examples(data, TOKENIZER, seed=4)[5] != first[5]


def test_story_answers_end_and_their_results_are_marked() -> None:
    example = Examples(Data(path="story:train", mark=RESULT), TOKENIZER)[0]
    assert example.ended and example.response[-1] == END
    text = TOKENIZER.decode(example.response)
    results = [part.split(">>")[0].split("=")[1] for part in text.split("<<")[1:]]
    pairs = zip(example.response, example.marks, strict=True)
    assert TOKENIZER.decode([token for token, mark in pairs if mark]) == "".join(results)
    assert TOKENIZER.decode(example.prompt).endswith("\n")


def test_each_epoch_has_a_new_order(tmp_path: Path) -> None:
    records = [{"prompt": "p", "response": str(n)} for n in range(8)]
    examples = Examples(Data(path=write_lines(tmp_path / "b", *records)), TOKENIZER)
    epochs = [
        [TOKENIZER.decode(examples[n].response[:-1]) for n in range(e, e + 8)] for e in (0, 8)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [str(n) for n in range(8)]
    assert epochs[0] != epochs[1]


def test_formats_of_public_data_sets_are_read(tmp_path: Path) -> None:
    text, answer = "What is\n\n1+1", "2"
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    records = [
        {"prompt": text, "response": answer},
        {"messages": turns},
        {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": answer}]},
        {"instruction": "What is", "input": "1+1", "output": answer, "text": "What is 1+1 2"},
        {"instruction": text, "input": "", "output": answer},
    ]
    examples = Examples(Data(path=write_lines(tmp_path / "a", *records)), TOKENIZER)
    examples.check_records()
    assert all(examples[n] == examples[0] for n in range(5))
    assert TOKENIZER.decode(examples[0].prompt) == f"{text}\n" and examples[0].response[-1] == END


@pytest.mark.parametrize(
    ("record", "options", "prompt", "response"),
    [
        ({"prompt": "1+1", "response": "2"}, {"end": "<|im_end|>"}, "1+1\n", "2<|im_end|>"),
        ({"text": "1 + 1", "id": 3}, {}, "", "1 + 1<|endoftext|>"),
        ({"prompt": "1+1", "response": "2", "finish_reason": "length"}, {}, "1+1\n", "2"),
        (
            {"question": "1+1", "answer": "2", "more": 5},
            {"fields": ("question", "answer")},
            "1+1\n",
            "2<|endoftext|>",
        ),
    ],
)
def test_records_and_ends_of_other_forms(
    tmp_path: Path, record: object, options: dict[str, Any], prompt: str, response: str
) -> None:
    example = Examples(Data(path=write_lines(tmp_path / "a", record), **options), TOKENIZER)[0]
    assert [*map(TOKENIZER.decode, (example.prompt, example.response))] == [prompt, response]


def test_long_examples_are_cut_and_then_do_not_end(tmp_path: Path) -> None:
    record = {"prompt": "1 2 3", "response": "4 5 6 7 8 9"}
    data = Data(path=write_lines(tmp_path / "a", record), longest=8)
    example = Examples(data, TOKENIZER)[0]
    assert len(example.prompt) + len(example.response) == 8
    assert not example.ended and END not in example.response


def test_several_paths_take_turns_and_each_is_read_in_its_own_order(tmp_path: Path) -> None:
    records = [{"prompt": "p", "response": str(n)} for n in range(4)]
    path = write_lines(tmp_path / "a", *records)
    alone = Examples(Data(path=path), TOKENIZER)
    mixed = Examples(Data(path=("table:train", path), turns=(1, 2)), TOKENIZER)
    tables = Examples(Data(path="table:train"), TOKENIZER)
    assert [mixed[n] for n in (0, 3, 6)] == [tables[n] for n in range(3)]
    assert [mixed[n] for n in (1, 2, 4, 5, 7, 8)] == [alone[n] for n in range(6)]
    equal = Examples(Data(path=("table:train", path)), TOKENIZER)
    assert [equal[n] for n in (0, 1, 2, 3)] == [tables[0], alone[0], tables[1], alone[1]]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n \n", ""])
def test_lines_end_at_newlines_alone(tmp_path: Path, end: str) -> None:
    texts = ["a\u2028b", "a\u2029b", "a\x85b", "a\x7fb"]
    records = [json.dumps({"prompt": "?", "response": x}, ensure_ascii=False) for x in texts]
    newline = "\r\n" if end == "\r\n" else "\n"
    (tmp_path / "a").write_text("\ufeff" + (newline + end).join(records) + end, newline="")
    examples = Examples(Data(path=str(tmp_path / "a")), TOKENIZER)
    assert sorted(TOKENIZER.decode(examples[n].response[:-1]) for n in range(4)) == sorted(texts)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"", "a"),
        (b" \n\n", "a"),
        (b"\xff", "a"),
        (b"[" * 100_000, "a:1"),
        (b'{"prompt": "?"\n"response": "!"}', "a:[12]"),
    ],
)
def test_files_of_another_format_are_named(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=rf"/{name}\b"):
        Examples(Data(path=str(tmp_path / "a")), TOKENIZER)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "no response"},
        {"messages": [{"role": "user", "content": "?"}]},
        {"prompt": "?", "response": ""},
        [1],
        {"text": ""},
        {"text": 7},
        {"conversations": [{"from": "gpt", "value": 7}]},
        {"conversations": ["?", {"from": "gpt", "value": "!"}]},
        {"instruction": "?", "input": 3, "output": None},
        {"question": "?", "answer": "!"},
        {"prompt": "\ud800", "response": "!"},
        {"messages": ["?", {"role": "assistant", "content": "!"}]},
        {"messages": [{"role": "user"}, {"role": "assistant", "content": "!"}]},
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, record: object) -> None:
    with pytest.raises(ValueError, match="a:1"):
        Examples(Data(path=write_lines(tmp_path / "a", record)), TOKENIZER)


def test_data_sets_of_the_hub_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"prompt": "1+1", "response": str(n)} for n in range(4)]
    asked = []

    def load_dataset(*names: str | None, **options: str) -> datasets.Dataset:
        asked.append((*names, options["split"]))
        return datasets.Dataset.from_list(records)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    examples = Examples(Data(path="hub:mine/sums:main:test"), TOKENIZER)
    assert sorted(TOKENIZER.decode(examples[n].response[:-1]) for n in range(4)) == [*"0123"]
    assert examples.epoch_size == 4
    records[2] = {"prompt": None, "response": "2"}
    with pytest.raises(ValueError, match="hub:mine/sums, row 3"):
        Examples(Data(path="hub:mine/sums"), TOKENIZER).check_records()
    assert asked == [("mine/sums", "main", "test"), ("mine/sums", None, "train")]


def test_templates_take_variables_and_refuse_by_place(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ZOO_FOLDER / "vocabulary")
    tokenizer.chat_template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
        "{{ messages[0].content }}{{ style }}"
    )
    turns = [{"role": role, "content": "1"} for role in ("user", "assistant")]
    data = Data(path=write_lines(tmp_path / "a", {"messages": turns}), template={"style": "+2"})
    assert tokenizer.decode(Examples(data, tokenizer)[0].prompt) == "1+2"
    strange = [{"role": "assistant", "content": "1"}, turns[1]]
    path = write_lines(tmp_path / "b", *[{"messages": turns}] * 50, {"messages": strange})
    with pytest.raises(ValueError, match="b:51"):
        Examples(Data(path=path), tokenizer, seed=1).check_records()

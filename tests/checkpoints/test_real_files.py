"""Published GGUF files, from the folder of `--published`, compared with transformers."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import exp
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from gguf_bytes import CONVERSATION, check_variant, variants, view, write_changed
from helpers import close, needs_packed_loops, whole
from optional import ABSENT
from outpace import LLM
from outpace.checkpoints.gguf.file import read_header
from texts import TEXTS

FILES = (
    "smollm2-135m-instruct-q4_1.gguf",
    "gemma-3-270m-q4_k_m.gguf",
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
)
WINDOW, MAX_WORSE = 512, 1.005
LICENSE = Path(__file__).parent.parent.parent / "LICENSE"
"""A text of 2,300 tokens: on a shorter one, chance decides half a percent."""


@dataclass
class Published:
    path: Path

    @cached_property
    def plain(self) -> LLM:
        return LLM(self.path, dtype="float32", cache_gib=0.5)

    @cached_property
    def native(self) -> LLM:
        return LLM(self.path, cache_gib=0.5)

    @cached_property
    def theirs(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            self.path.parent, gguf_file=self.path.name, dtype=torch.float32
        ).eval()

    @cached_property
    def their_tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)

    @cached_property
    def ids(self) -> list[int]:
        return self.plain.text.encode(LICENSE.read_text()[:1500], raw=True)


def published_path(config: pytest.Config, name: str) -> Path:
    folder = config.getoption("--published")
    if folder is None:
        pytest.skip("published models are tested with --published FOLDER")
    path = Path(folder).absolute() / name
    if not path.is_file():
        pytest.skip(f"{folder} has no {name}")
    return path


@pytest.fixture(scope="module", params=FILES)
def published(request: pytest.FixtureRequest) -> Iterator[Published]:
    yield Published(published_path(request.config, request.param))


def perplexity(model: Any, ids: list[int], begin: list[int]) -> float:
    """Return the perplexity of a text, read in windows that begin as a prompt does."""
    losses = []
    for at in range(0, len(ids), WINDOW):
        window = [*begin, *ids[at : at + WINDOW]]
        logits = whole(model, window, causal=True)[:-1]
        losses.append(F.cross_entropy(logits, torch.tensor(window[1:]), reduction="none"))
    return exp(torch.cat(losses).mean().item())


def test_logits_equal_those_of_transformers(published: Published) -> None:
    found = whole(published.plain.model, published.ids, causal=True)
    with torch.inference_mode():
        wanted = published.theirs(torch.tensor([published.ids])).logits[0]
    close(found, wanted)


def test_chat_template_and_end_tokens_equal_those_of_transformers(published: Published) -> None:
    ours, theirs = published.plain, published.their_tokenizer
    assert ours.eos == {theirs.eos_token_id}
    assert ours.text.tokenizer.chat_template == theirs.chat_template
    if theirs.chat_template is not None:
        wanted = theirs.apply_chat_template(
            CONVERSATION, add_generation_prompt=True, tokenize=False
        )
        found = ours.text.encode(CONVERSATION)
        assert ours.text.tokenizer.decode(found) == wanted
        assert found == ours.text.tokenizer(wanted, add_special_tokens=False).input_ids


@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("name", FILES[:2])
def test_metadata_of_other_types_change_nothing_or_are_refused(
    name: str, part: int, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    source = published_path(pytestconfig, name)
    wanted = view(source)
    counts: Counter[str] = Counter()
    for field in [*read_header(source).metadata][part::8]:
        for number, value in enumerate(variants(source, field)):
            path = write_changed(tmp_path / f"{number}.gguf", source, field, value)
            counts[check_variant(path, field, wanted)] += 1
            path.unlink()
    print(name, part, dict(counts))
    assert min(counts["refused"], counts["equal"]) > 2


TOKENIZE = """
import json, os, sys, urllib.request
import xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.n_ctx, parameters.warmup = sys.argv[1], 64, False
server = xllamacpp.Server(parameters)
for text in json.loads(sys.stdin.read()):
    body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
    request = urllib.request.Request(
        f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
    )
    print("ids", json.dumps(json.load(urllib.request.urlopen(request))["tokens"]), flush=True)
os._exit(0)
"""
"""Prints the tokens of texts as llama.cpp finds them."""


@pytest.mark.skipif("xllamacpp" in ABSENT, reason="xllamacpp is not installed")
def test_tokens_equal_those_of_llama_cpp(published: Published) -> None:
    texts = [normalize("NFC", text) for text in [*TEXTS, Path(__file__).read_text()]]
    run = subprocess.run(
        [sys.executable, "-c", TOKENIZE, str(published.path)],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split(" ", 1) for line in run.stdout.splitlines()]
    wanted = [json.loads(ids) for name, ids in lines if name == "ids"]
    assert len(wanted) == len(texts)
    tokenizer = published.plain.text.tokenizer
    for text, ids in zip(texts, wanted, strict=True):
        assert tokenizer(text).input_ids == ids, text[:60]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text or "|" in text


@needs_packed_loops
def test_perplexity_in_native_bits_is_that_of_float32(published: Published) -> None:
    tokenizer = published.plain.text.tokenizer
    begin = tokenizer("").input_ids
    ids = tokenizer(LICENSE.read_text(), add_special_tokens=False).input_ids
    plain, native = (
        perplexity(llm.model, ids, begin) for llm in (published.plain, published.native)
    )
    assert 1 < plain < 100
    assert plain / MAX_WORSE < native < plain * MAX_WORSE

"""Text in, text out."""

from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from helpers import (
    END,
    causal_model,
    diffusion_model,
    feature_draft,
    masked_model,
    save_tokenizer,
    whole,
)
from outpace import LLM, Output
from outpace.api.options import RequestOptions
from outpace.checkpoints.load import load_model, save_model
from outpace.decoding import Decoding, Forward, Request, Sampling
from outpace.engine.job import DecodingError
from outpace.methods import APD, Autoregressive, DFlash, LeftToRight, Lookup, Method, WeDLM
from outpace.pacing.controller import PaceController
from refusal import refuses

ROWS, MASK = 264, END + 1
"""Rows of the embeddings, of which 260 stand for tokens, and the mask token."""

LONG_PROMPT = list(range(5, 45))

Checkpoints = dict[str, str]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Checkpoint folders: two kinds of targets, matching and mismatched verifiers."""
    root = tmp_path_factory.mktemp("models")
    models = {
        "causal": causal_model(seed=1, vocab_size=ROWS, eos_token_id=None),
        "diffusion": diffusion_model(seed=1, vocab_size=ROWS, mask_token_id=MASK),
        "verifier": causal_model(seed=1, vocab_size=ROWS + 8),
        "other-order": causal_model(vocab_size=ROWS),
        "bare": causal_model(vocab_size=ROWS),
        "bare-diffusion": diffusion_model(vocab_size=ROWS, mask_token_id=MASK),
        "bare-masked": masked_model(vocab_size=ROWS, mask_token_id=None),
        "bare-small": causal_model(seed=1, vocab_size=200),
        "bare-large": causal_model(vocab_size=1024),
        "deep": causal_model(seed=1, vocab_size=ROWS, num_hidden_layers=3),
        "wide": causal_model(seed=1, vocab_size=ROWS, hidden_size=64),
    }
    drafts = {
        "bare-draft": {},
        "bare-deep-draft": {"num_target_layers": 3},
        "bare-layer-draft": {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [2]}},
    }
    for name, changes in drafts.items():
        fields = {"vocab_size": ROWS, "dflash_config": {"mask_token_id": MASK}, **changes}
        fields["dflash_config"] = {"target_layer_ids": [0, 1]} | fields["dflash_config"]
        models[name] = feature_draft(models["deep" if changes else "causal"], **fields)
    for name, model in models.items():
        save_model(model, root / name, dtype=torch.float32)
        if not name.startswith("bare"):
            save_tokenizer(root / name, first="z" if name == "other-order" else "")
    return {name: str(root / name) for name in models}


@pytest.fixture(scope="module")
def causal(names: Checkpoints) -> LLM:
    return LLM(names["causal"], cache_gib=0.001)


@pytest.fixture(scope="module")
def diffusion(names: Checkpoints) -> LLM:
    method = APD(verifier=names["verifier"], ratio=0.6, window=4)
    return LLM(names["diffusion"], method, cache_gib=0.001)


@pytest.fixture(params=["causal", "diffusion"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return request.getfixturevalue(request.param)


def one(llm: LLM, prompt, **options) -> Output:
    (output,) = llm.generate(prompt, **{"max_tokens": 24, **options})
    return output


def idle(llm: LLM) -> bool:
    """Return whether no request is left."""
    return llm.driver.stats.is_idle


@dataclass(frozen=True, kw_only=True)
class Failing(Method):
    """A method that fails after a token."""

    def decode(self, seq: Request) -> Decoding:
        """Yield one forward, then raise an error."""
        out = yield Forward(ids=seq.ids, start=0)
        seq.commit(out.tokens)
        raise RuntimeError("out of ideas")


# Generate.


def test_answer_to_token_ids_is_the_model_s_own(causal: LLM) -> None:
    prompt = [5, 6, 7]
    ids = list(prompt)
    for _ in range(6):
        ids.append(int(whole(causal.target.model, ids, causal=True)[-1, : END + 4].argmax()))
    output = one(causal, prompt, max_tokens=6)
    assert output.ids == ids[3:] and output.prompt_tokens == 3
    assert output.text == causal.text.decode(output.ids)


def test_output_says_what_became_of_it(diffusion: LLM) -> None:
    output = one(diffusion, "hi", max_tokens=40)
    target = [step for step in output.steps if step.model == "target"]
    assert output.forwards == len(target)
    assert len(output.steps) > len(target)
    assert sum(step.committed for step in output.steps) == len(output.ids)
    assert output.tokens_per_forward == len(output.ids) / len(target) > 1
    assert output.tokens_per_second == len(output.ids) / output.seconds > 0
    assert output.prompt_tokens == len(diffusion.text.encode("hi"))
    assert output.finish_reason in ("stop", "length")


def test_prompts_of_all_kinds_are_answered_in_order(llm: LLM) -> None:
    prompts = ["hi", [{"role": "user", "content": "you"}], [1, 2, 3], "a longer prompt " * 3]
    together = llm.generate(prompts, max_tokens=16)
    assert [output.ids for output in together] == [
        one(llm, prompt, max_tokens=16).ids for prompt in prompts
    ]
    assert idle(llm)


def test_end_of_sequence_of_the_model_ends_the_answer(names: Checkpoints, tmp_path: Path) -> None:
    plain = LLM(names["bare"], cache_gib=0.001)
    ids = one(plain, [1, 2]).ids
    eos = max(set(ids), key=ids.index)
    model = causal_model(vocab_size=ROWS, eos_token_id=[ROWS - 1, eos])
    save_model(model, tmp_path, dtype=torch.float32)
    output = one(LLM(str(tmp_path), cache_gib=0.001), [1, 2])
    assert output.ids == ids[: ids.index(eos)]
    assert output.finish_reason == "stop"


# Stop strings.


def test_stop_string_ends_the_answer_before_it(llm: LLM) -> None:
    whole_answer = one(llm, [9, 8])
    mark = whole_answer.text[6:8]
    for stop in (mark, ["never said", mark]):
        output = one(llm, [9, 8], stop=stop)
        assert output.text == whole_answer.text[: whole_answer.text.index(mark)]
        assert output.finish_reason == "stop"
        assert output.ids == whole_answer.ids[: len(output.ids)]
        assert len(output.ids) < len(whole_answer.ids)
    assert idle(llm)


# Streams.


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("stop", ["", "mark"])
def test_pieces_are_the_text_of_generate(
    llm: LLM, stop: str, aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.engine, "is_async", aside)
    prompt = [7, 7, 3]
    options = {"stop": one(llm, prompt).text[5:7]} if stop else {}
    expected = one(llm, prompt, **options)
    stream = llm.stream(prompt, max_tokens=24, **options)
    assert stream.output is None
    pieces = list(stream)
    assert "".join(pieces) == expected.text
    assert len(pieces) > 1 and all(pieces)
    assert stream.output is not None
    assert (stream.output.ids, stream.output.finish_reason) == (
        expected.ids,
        expected.finish_reason,
    )
    assert idle(llm) and next(stream, None) is None


def test_streams_run_side_by_side(llm: LLM) -> None:
    prompts = ([1], [2, 3], [4, 5, 6])
    expected = [one(llm, list(prompt), max_tokens=12).text for prompt in prompts]
    streams = [llm.stream(list(prompt), max_tokens=12) for prompt in prompts]
    texts = [""] * 3
    for _ in range(20):
        for index, stream in enumerate(streams):
            texts[index] += next(stream, "")
    assert texts == expected


def test_closing_a_stream_cancels_its_request(llm: LLM) -> None:
    stream = llm.stream([1, 2], max_tokens=100)
    first = next(stream)
    stream.close()
    assert idle(llm)
    rest = list(stream)
    assert stream.output is not None and stream.output.finish_reason == "cancelled"
    assert stream.output.text == first + "".join(rest)


def test_dropping_a_stream_cancels_its_request(llm: LLM) -> None:
    for read in (True, False):
        stream = llm.stream([1, 2], max_tokens=100)
        if read:
            next(stream)
        assert not idle(llm)
        del stream
        llm.driver.step()
        assert idle(llm)


# Errors.


def test_error_of_a_method_is_raised_with_its_name(causal: LLM) -> None:
    with pytest.raises(DecodingError, match=r"^Failing\(\) .* slot 2: "):
        causal.generate([1], method=Failing(), max_tokens=5)
    with pytest.raises(DecodingError):
        list(causal.stream([1], method=Failing(), max_tokens=5))
    assert idle(causal)


def test_bad_prompt_among_many_is_refused_before_any_work(llm: LLM) -> None:
    with refuses("prompt"):
        llm.generate([[1, 2], [1, END + 4]], max_tokens=4)
    assert idle(llm)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1000),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_k", 0),
        ("stop", ""),
    ],
)
def test_invalid_options_are_refused_before_any_work(llm: LLM, param: str, value: Any) -> None:
    with refuses(param):
        llm.generate([1, 2], **{param: value})
    assert idle(llm)


# Models.


def test_default_method_follows_the_model(names: Checkpoints) -> None:
    bare = LLM(names["bare"], Autoregressive(), cache_gib=0.001)
    select = bare.methods.select_method
    assert select(None) == Autoregressive() and select("auto") == Lookup()
    assert LLM(names["bare"], cache_gib=0.001).method == Lookup()
    assert LLM("tiny-ar").method == DFlash(draft="tiny-dflash", lookup=True)
    assert LLM("tiny-aux", "auto").method == Lookup()
    assert LLM(names["bare-diffusion"], cache_gib=0.001).method == LeftToRight()
    masked = LLM(names["bare-masked"], mask_id=MASK, cache_gib=0.001)
    assert masked.method == WeDLM() and masked.config.mask_id == MASK


def test_mask_token_is_needed_by_what_feeds_it(names: Checkpoints) -> None:
    with refuses("method"):
        LLM(names["bare-masked"], cache_gib=0.001)
    llm = LLM(names["bare-masked"], Autoregressive(), cache_gib=0.001)
    with refuses("method"):
        llm.generate([[1, 2]], method=WeDLM(), max_tokens=2)
    assert len(llm.generate([[1, 2]], max_tokens=2)[0].ids) == 2
    with refuses("mask_id"):
        LLM(names["bare-masked"], mask_id=999)


def sampling_of(llm: LLM, method: Method, **options: Any) -> Sampling:
    return RequestOptions.of(options).build_sampling(llm.methods.default_sampling(method))


def test_sampling_is_that_of_the_family_unless_given(causal: LLM, diffusion: LLM) -> None:
    assert sampling_of(causal, Autoregressive()) == Sampling()
    own = sampling_of(diffusion, LeftToRight(), temperature=None)
    assert own == Sampling(temperature=0.2, top_p=0.95)
    given = sampling_of(diffusion, LeftToRight(), seed=3, temperature=0.0, top_p=1.0, top_k=7)
    assert given == Sampling(top_k=7, seed=3)


def test_a_request_may_choose_its_method(diffusion: LLM) -> None:
    plain, tokens = LeftToRight(), 12
    mixed = [
        diffusion.submit([1, 2], max_tokens=tokens),
        diffusion.submit([1, 2], max_tokens=tokens, method=plain),
    ]
    while diffusion.driver.step():
        pass
    parallel, serial = (answer.build_output() for answer in mixed)
    assert serial.forwards == len(serial.ids) >= len(parallel.ids) > parallel.forwards
    assert serial.ids == one(diffusion, [1, 2], max_tokens=tokens, method=plain).ids


def test_verifier_is_never_given_a_token_that_it_does_not_have(names: Checkpoints) -> None:
    llm = LLM(
        names["bare-diffusion"], APD(verifier=names["bare-small"], ratio=0.9), cache_gib=0.001
    )
    outputs = llm.generate([[1], [2], [3]], max_tokens=40, temperature=50.0)
    assert [len(output.ids) for output in outputs] == [40] * 3


@pytest.mark.parametrize(
    ("target", "verifier", "param"),
    [
        ("diffusion", "other-order", "method"),
        ("bare-diffusion", "bare-large", "method"),
        ("diffusion", "bare-large", "method"),
        ("diffusion", "bare-diffusion", "verifier"),
        ("diffusion", "nowhere", "verifier"),
    ],
)
def test_verifier_that_does_not_fit_is_refused(
    names: Checkpoints, target: str, verifier: str, param: str
) -> None:
    with refuses(param):
        LLM(names[target], APD(verifier=names.get(verifier, "./nowhere")), cache_gib=0.001)


@pytest.mark.parametrize(
    ("target", "draft", "param"),
    [
        ("wide", "bare-draft", "draft"),
        ("bare-large", "bare-draft", "draft"),
        ("causal", "bare-deep-draft", "draft"),
        ("causal", "bare-layer-draft", "draft"),
        ("causal", "verifier", "draft"),
        ("diffusion", "bare-draft", "method"),
    ],
)
def test_draft_of_another_target_is_refused(
    names: Checkpoints, target: str, draft: str, param: str
) -> None:
    with refuses(param):
        LLM(names[target], DFlash(draft=names[draft]), cache_gib=0.001)


def test_block_beyond_the_trained_length_warns(names: Checkpoints, causal: LLM) -> None:
    method = DFlash(draft=names["bare-draft"], block=9)
    with pytest.warns(UserWarning, match="block 9 "):
        one(causal, [1, 2], method=method)


@pytest.mark.parametrize(
    ("target", "method"), [("bare", LeftToRight()), ("bare-diffusion", Autoregressive())]
)
def test_method_for_the_other_kind_of_model_is_refused(
    names: Checkpoints, target: str, method: Method
) -> None:
    with refuses("method"):
        LLM(names[target], method, cache_gib=0.001)


def test_prompts_that_begin_alike_are_found_unless_that_is_switched_off(names: Checkpoints) -> None:
    prompt = list(range(1, 40))
    for on, slots in ((True, 32), (False, 0)):
        llm = LLM(names["bare"], cache_gib=0.001, prefix_cache=on)
        first, again = (one(llm, prompt, max_tokens=4) for _ in range(2))
        assert (first.ids, first.forwards) == (again.ids, again.forwards)
        assert llm.engine.prefix_stats.slots == slots


def test_stored_prefixes_are_those_of_equal_weights_and_options(
    names: Checkpoints, tmp_path: Path
) -> None:
    def count_reused(**options: Any) -> int:
        options = {"model": names["bare"], "method": Autoregressive(), **options}
        llm = LLM(cache_gib=0.001, prefix_dir=tmp_path / "prefixes", **options)
        llm.generate([LONG_PROMPT], max_tokens=1)
        llm.finish()
        return llm.engine.prefix_stats.slots

    tuned = tmp_path / "tuned"
    copytree(names["bare"], tuned)
    weights = tuned / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert count_reused() == 0
    assert count_reused() == count_reused() == 32
    for other in (
        {"model": tuned},
        {"max_length": 64},
        {"dtype": "bfloat16"},
        {"cache_dtype": "int8"},
        {"quantize": "int8"},
        {"attention": "dense"},
    ):
        assert count_reused(**other) == 0
        assert count_reused(**other) == 32
    assert count_reused() == 32
    with refuses("prefix_dir"):
        count_reused(model=names["diffusion"], method=LeftToRight())


def test_max_length_limits_prompt_and_answer(names: Checkpoints) -> None:
    short = LLM(names["bare"], max_length=20, cache_gib=0.001)
    assert len(short.generate([1] * 15)[0].ids) == 5
    with refuses("max_tokens"):
        short.generate([1] * 15, max_tokens=6)


def test_adapter_is_merged_into_the_target() -> None:
    golden = Path(__file__).parents[1] / "golden" / "d2f"
    base, adapter = golden / "dream_tiny", golden / "dream_tiny_lora"
    prompt, options = [3, 1, 4, 1, 5], {"max_tokens": 8, "temperature": 0.0}
    plain, adapted = LLM(base), LLM(base, adapter=adapter)
    assert adapted.name == f"{base} + {adapter}"
    one, two = (llm.generate(prompt, **options)[0].ids for llm in (plain, adapted))
    assert len(one) == len(two) == 8 and one != two
    with pytest.raises(ValueError, match="to adapt"):
        LLM(base, adapter=golden / "llada_tiny_lora")


def test_rotary_tables_are_as_long_as_the_cache() -> None:
    whole = load_model("tiny-ar")
    for gib, most in ((0.0005, 300), (0.1, whole.config.max_length)):
        llm = LLM("tiny-ar", cache_gib=gib)
        slots = min(len(llm.target.cache), whole.config.max_length)
        assert len(llm.model.cos) == len(llm.model.sin) == slots <= most
        assert torch.equal(llm.model.cos, whole.cos[:slots])
        assert torch.equal(llm.model.sin, whole.sin[:slots])
        assert one(llm, [1, 2, 3], max_tokens=9).ids


def test_copies_continue_while_drafting_is_paused(
    names: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = cycle([4, 1, 1, 4, 1, 4, 4, 1, 1, 1])
    monkeypatch.setattr(PaceController, "choose_length", lambda *_: next(turns))
    monkeypatch.setattr(PaceController, "skips_drafting", lambda *_: True)
    method = DFlash(draft=names["bare-draft"], lookup=True)
    llms = [LLM(names["causal"], each, cache_gib=0.001) for each in (Autoregressive(), method)]
    steps = []
    for bias in {}, {7: 100.0}:  # a text without, and one with repetitions
        options = {"max_tokens": 80, "ignore_eos": True, "logit_bias": bias}
        plain, copied = (one(llm, LONG_PROMPT * 2, **options) for llm in llms)
        assert plain.ids == copied.ids
        steps.append(copied.steps)
    assert any(step.model == "draft" for step in steps[0])
    assert max(step.committed for step in steps[1]) > 7


def test_reading_a_prompt_has_progress() -> None:
    llm, prompt = LLM("tiny-ar", max_rows=16), [5, 6, 7] * 14
    for cache, processed in (0, [16, 32, 42]), (32, [42]):
        stream = llm.stream(prompt, max_tokens=3)
        read = [each[:3] for each in stream.read_prompt()]
        assert read == [(42, cache, each) for each in processed]
        assert "".join(stream) == llm.generate([prompt], max_tokens=3)[0].text

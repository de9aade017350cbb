"""DFlash 2 and DSpark drafts: their published formats and code, and the tokens that they choose."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers import MASK, VOCAB, causal_model, close, dense, feeds, published, run
from naive_draft import EPS, Finish, Weights, naive_hidden, random_layers
from outpace import LLM
from outpace.checkpoints.checkpoint import translate_config
from outpace.checkpoints.load import load_draft, load_model, save_model
from outpace.decoding import FULL, Forward, Prediction, Sample, Sampling
from outpace.engine.runner import Runner
from outpace.methods import Autoregressive, DFlash
from outpace.models.draft import DFlash2Draft, DFlashDraft, DSparkDraft
from outpace.models.split import ModelShard
from outpace.models.transformer import Transformer
from outpace.training.objectives.dflash import DFlash as Objective
from refusal import refuses
from speculator_configs import SOME, WEIGHTS, dspark, tables, written

DIM, BLOCK = 32, 5
DRAFTED = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [0, 1]}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
DSPARK = {
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
QWEN3 = {
    "attention_bias": False,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_target_layers": 2,
    "rms_norm_eps": EPS,
}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}
LOGITS = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale")


def dflash2_fields(**changes: Any) -> dict[str, Any]:
    """Return a tiny `config.json` like that of Qwen3.8-27B-DFlash2; changes of sizes are nested."""
    nested = DRAFTED | DFLASH2
    nested |= {n: value for n, value in changes.items() if n in nested or n in LOGITS}
    return {
        **published("DFlash2DraftModel"),
        **QWEN3,
        **SLIDING,
        "dtype": "bfloat16",
        "is_causal": False,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "use_sliding_window": True,
        "dflash_config": {name: value for name, value in nested.items() if value is not None},
        **{name: value for name, value in changes.items() if name not in nested},
    }


def dspark_fields(**changes: Any) -> dict[str, Any]:
    """Return a tiny `config.json` as DeepSpec writes it from that of a Qwen3 target."""
    return {
        **published("Qwen3DSparkModel"),
        **QWEN3,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.02,
        "layer_types": ["full_attention", "full_attention"],
        "rope_scaling": None,
        "sliding_window": None,
        "use_cache": True,
        "use_sliding_window": False,
        "num_anchors": 512,
        **DRAFTED,
        **DSPARK,
        **changes,
    }


FIELDS = {"dflash2": dflash2_fields, "dspark": dspark_fields}


def random_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.4

    found = {
        "norm.weight": 1 + matrix(DIM),
        "fc.weight": matrix(DIM, 2 * DIM),
        "hidden_norm.weight": 1 + matrix(DIM),
        **random_layers(matrix),
    }
    if own := config.get("dflash_config"):
        rank, taps = own["selector_rank"], own["conv_kernel_size"]
        found["candidate_selector.hidden_projection.weight"] = matrix(rank, DIM)
        for name in ("predecessor", "successor"):
            found[f"candidate_selector.{name}_codebook"] = 2 * matrix(VOCAB, rank)
        deltas = 2 * taps * DIM // own["conv_group_size"]
        for layer in range(2):
            for name in ("attention", "mlp"):
                prefix = f"layers.{layer}.{name}_conv"
                found[f"{prefix}.base_kernel"] = matrix(2, taps, DIM)
                found[f"{prefix}.kernel_projection.weight"] = matrix(deltas, DIM) / 4
        return found
    found["embed_tokens.weight"] = matrix(VOCAB, DIM)
    found["lm_head.weight"] = matrix(VOCAB, DIM)
    if rank := config["markov_rank"]:
        found["markov_head.markov_w1.weight"] = matrix(VOCAB, rank)
        found["markov_head.markov_w2.weight"] = matrix(VOCAB, rank) * 3
    if config["enable_confidence_head"]:
        size = DIM + rank * config["confidence_head_with_markov"]
        found["confidence_head.proj.weight"] = matrix(1, size)
        found["confidence_head.proj.bias"] = matrix(1)
    return found


def write_draft(folder: Path, kind: str, **changes: Any) -> Path:
    folder.mkdir()
    config = FIELDS[kind](**changes)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config), folder / "model.safetensors")
    return folder


def convolve(part: Weights, name: str, y: Tensor) -> tuple[Tensor, Finish]:
    """Return the rows mixed before attention or MLP, and how its output is mixed, row by row."""
    base = part[f"{name}_conv.base_kernel"]
    deltas = y @ part[f"{name}_conv.kernel_projection.weight"].T
    deltas = deltas.view(len(y), 2, base.shape[1], -1)
    size = DIM // deltas.shape[-1]

    def mix(x: Tensor, side: int) -> Tensor:
        mixed = torch.zeros_like(x)
        for i in range(len(x)):
            for tap in range(min(base.shape[1], i + 1)):
                kernel = base[side, tap] + deltas[i, side, tap].repeat_interleave(size)
                mixed[i] += kernel * x[i - tap]
        return mixed

    return mix(y, 0), lambda out: mix(out, 1)


def select_naively(
    target: Any, weights: Weights, features: Tensor, last: int, chosen: list[int] | None, count: int
) -> tuple[list[int], list[dict[int, float]]]:
    """Return DFlash 2's path through the candidates, and the scores of each step's candidates.

    The path is that of the highest scores, or `chosen`.
    """
    weights = {name: tensor.double() for name, tensor in weights.items()}
    x = target.embedding.weight.double()[[last] + [MASK] * (BLOCK - 1)]
    hidden = naive_hidden(weights, features.double(), x, convolve)
    head = target.unembedding.weight.double()
    first, second = (
        weights[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor")
    )
    path, steps = [], []
    for step in range(1, count + 1):
        logits = head @ hidden[step]
        logits[MASK] = -1e30  # the mask is never drafted
        gate = weights["candidate_selector.hidden_projection.weight"] @ hidden[step]
        scores = {
            int(token): float(logits[token] + (first[last] * gate) @ second[token])
            for token in logits.topk(DFLASH2["selector_top_k"]).indices
        }
        last = max(scores, key=lambda token: scores[token]) if chosen is None else chosen[step - 1]
        path.append(last)
        steps.append(scores)
    return path, steps


def correct_naively(
    weights: Weights,
    features: Tensor,
    last: int,
    count: int,
    chosen: list[int] | None = None,
    rows: int = BLOCK,
    shift: int = 1,
) -> tuple[list[int], Tensor, list[float]]:
    """Return DSpark's greedy tokens of a block, their logits, and how sure the draft is of each.

    With `chosen`, the logits are those after these tokens. Without the shift the row of a mask
    predicts its own slot.
    """
    x = weights["embed_tokens.weight"][[last] + [MASK] * (rows - 1)]
    tokens: list[int] = []
    logits, sure = [], []
    hidden = naive_hidden(weights, features, x)
    for step, state in enumerate(hidden[1 - shift :][:count]):
        row, inputs = state @ weights["lm_head.weight"].T, state
        if "markov_head.markov_w1.weight" in weights:
            before = weights["markov_head.markov_w1.weight"][last]
            row = row + before @ weights["markov_head.markov_w2.weight"].T
            inputs = torch.cat((state, before))
        if "confidence_head.proj.weight" in weights:
            inputs = inputs[: weights["confidence_head.proj.weight"].shape[1]]
            score = inputs @ weights["confidence_head.proj.weight"][0]
            sure.append(float(torch.sigmoid(score + weights["confidence_head.proj.bias"][0])))
        row[MASK] = -1e30  # the mask is never drafted
        last = int(row.argmax()) if chosen is None else chosen[step]
        tokens.append(last)
        logits.append(row)
    return tokens, torch.stack(logits), sure


def write_speculator(
    folder: Path, tokens: list[int], borrows: bool, target: Transformer, **changes: Any
) -> tuple[Path, Weights]:
    """Write a draft as speculators does, whose head covers some tokens, and return its tensors.

    The returned head covers the vocabulary.
    """
    assert target.unembedding is not None
    config = dspark({"rms_norm_eps": EPS}, block_size=BLOCK, mask_token_id=MASK, **changes)
    config |= {"draft_vocab_size": len(tokens), "target_head": borrows}
    tensors = random_tensors(config) | {"embed_tokens.weight": target.embedding.weight.clone()}
    if borrows:
        tensors["lm_head.weight"] = target.unembedding.weight.clone()
    whole = dict(tensors)
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        tensors[name] = whole[name][tokens]
    if borrows:
        del tensors["lm_head.weight"]
    if len(tokens) < VOCAB:
        tensors |= tables(tokens)
    return written(folder, config, tensors), whole


@pytest.mark.parametrize("tokens", [SOME, [*range(VOCAB)]], ids=["some", "all"])
@pytest.mark.parametrize("borrows", [False, True])
@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("changes", [{}, {"enable_confidence_head": False}])
def test_dspark_of_speculators_equals_its_definition(
    tmp_path: Path, changes: dict[str, Any], from_anchor: bool, borrows: bool, tokens: list[int]
) -> None:
    target = causal_model()
    folder, whole = write_speculator(
        tmp_path / "draft", tokens, borrows, target, sample_from_anchor=from_anchor, **changes
    )
    draft = load_draft(folder, target)
    assert isinstance(draft, DSparkDraft) and draft.config.shift == from_anchor
    for features, last, count in random_blocks("dspark" if from_anchor else "dflash2"):
        (ours,) = draft_blocks(draft, [(features, last, count)])
        assert {*ours.tokens} <= {*tokens} and ours.logits is not None
        chosen, shift = list(ours.tokens), int(from_anchor)
        _, logits, sure = correct_naively(whole, features, last, count, chosen, shift=shift)
        found, wanted = torch.as_tensor(ours.logits)[:, tokens], logits[:, tokens]
        close(found, wanted)
        assert chosen == [tokens[at] for at in wanted.argmax(1)]
        if sure:
            close(torch.tensor(ours.scores["acceptance"]), torch.tensor(sure))
    save_model(load_draft(folder, target), tmp_path / "again", dtype=torch.float32)
    assert load_draft(tmp_path / "again", target).config == draft.config
    stored, again = (load_file(each / WEIGHTS) for each in (folder, tmp_path / "again"))
    del stored["embed_tokens.weight"]
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.items())


def block_forward(draft: DFlashDraft, block: tuple[Tensor, int, int], **read: Any) -> Forward:
    """Return the forward of a method for the slots after features and a last token."""
    features, last, count = block
    start, chain = len(features), draft.config.chain
    scores = ("acceptance",) if chain and chain.predicts_acceptance else ()
    return Forward(
        ids=[last] + [MASK] * (BLOCK - 1),
        start=start,
        pattern=FULL,
        context=features,
        predict=range(start + 1, start + 1 + count),
        read=Sample(keep=True, scores=scores, **read),
        model="draft",
    )


def draft_blocks(
    draft: DFlashDraft, blocks: list[tuple[Tensor, int, int]], read_rows: int = 256, **read: Any
) -> list[Prediction]:
    runner = Runner("draft", draft, slots=512, read_rows=read_rows)
    memory = [runner.reserve(64) for _ in blocks]
    forwards = [block_forward(draft, block, **read) for block in blocks]
    return run(runner, forwards, [table for table in memory if table is not None])


def random_blocks(kind: str) -> list[tuple[Tensor, int, int]]:
    """Return features, last tokens and numbers of drafts; those of DFlash 2 may begin with masks.

    The first row of a DFlash 2 block predicts nothing.
    """
    generator, most = torch.Generator().manual_seed(3), BLOCK - (kind == "dflash2")
    lasts = (5, MASK, MASK, 11) if kind == "dflash2" else (5, 2, 9, 11)
    sizes = zip((3, 8, 1, 4), lasts, (most, 3, most, 1), strict=True)
    return [(torch.randn(n, 64, generator=generator), last, count) for n, last, count in sizes]


@pytest.mark.parametrize(
    "changes", [{}, {"conv_kernel_size": 1}, {"conv_kernel_size": 3}, {"conv_group_size": 32}]
)
@pytest.mark.parametrize("read_rows", [256, 6])
def test_dflash2_equals_the_published_code(
    tmp_path: Path, changes: dict[str, Any], read_rows: int
) -> None:
    target, blocks = causal_model(), random_blocks("dflash2")
    draft = load_draft(write_draft(tmp_path / "draft", "dflash2", **changes), target)
    assert isinstance(draft, DFlash2Draft)
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    for block, ours in zip(blocks, draft_blocks(draft, blocks, read_rows), strict=True):
        path, steps = select_naively(target, weights, *block[:2], None, block[2])
        assert ours.tokens == path
        check_scores(ours, steps)


def check_scores(found: Prediction, steps: list[dict[int, float]]) -> None:
    """Compare logits with the scores of candidates; other tokens cannot be drawn."""
    assert found.logits is not None
    for row, scores in zip(torch.as_tensor(found.logits), steps, strict=True):
        close(row[[*scores]], torch.tensor([*scores.values()]))
        others = [token for token in range(VOCAB) if token not in scores]
        assert not row.softmax(-1)[others].any()


VARIANTS = [
    {},
    {"markov_rank": 0, "enable_confidence_head": False},
    {"enable_confidence_head": False},
    {"confidence_head_with_markov": False},
    {"markov_rank": 0, "confidence_head_with_markov": False},
]
"""All combinations of heads; the second is a DFlash draft of the same authors."""


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("read_rows", [256, 6])
def test_dspark_equals_the_published_code(
    tmp_path: Path, changes: dict[str, Any], read_rows: int
) -> None:
    draft = load_draft(write_draft(tmp_path / "draft", "dspark", **changes), causal_model())
    assert isinstance(draft, DSparkDraft) == (draft.config.chain is not None)
    weights, blocks = load_file(tmp_path / "draft" / "model.safetensors"), random_blocks("dspark")
    for block, ours in zip(blocks, draft_blocks(draft, blocks, read_rows), strict=True):
        tokens, logits, sure = correct_naively(weights, *block)
        assert ours.tokens == tokens
        assert ours.logits is not None
        close(ours.logits, logits)
        assert ("acceptance" in ours.scores) == bool(sure)
        if sure:
            close(torch.tensor(ours.scores["acceptance"]), torch.tensor(sure))


@pytest.mark.parametrize("kind", FIELDS)
def test_rejection_draws_from_the_drafted_distribution(tmp_path: Path, kind: str) -> None:
    target, blocks = causal_model(), random_blocks(kind)
    draft = load_draft(write_draft(tmp_path / "draft", kind), target)
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    found = draft_blocks(draft, blocks, sampling=Sampling(temperature=1.0, seed=11), step=1)
    for (features, last, count), ours in zip(blocks, found, strict=True):
        if kind == "dflash2":
            _, steps = select_naively(target, weights, features, last, ours.tokens, count)
            check_scores(ours, steps)
        else:
            assert ours.logits is not None
            close(ours.logits, correct_naively(weights, features, last, count, ours.tokens)[1])
    greedy = draft_blocks(draft, blocks)
    assert [each.tokens for each in found] != [each.tokens for each in greedy]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pair")
    save_model(causal_model(), folder / "target", dtype=torch.float32)
    drafts = {kind: write_draft(folder / kind, kind) for kind in FIELDS}
    drafts["speculators"], _ = write_speculator(folder / "speculators", SOME, True, causal_model())
    return {"target": folder / "target", **drafts}


PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9], [2]]
WARM = {"temperature": 0.8, "seed": 5}
PENALTIES = {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
METHODS = [
    ({}, {}),
    ({"tokens": 3}, WARM),
    ({"block": 3}, PENALTIES),
    ({"block": 1}, {"max_tokens": 3}),
    ({"verify": "rejection", "tokens": 4}, {}),
]
SURE = [
    ({"confidence_threshold": 0.5}, WARM),
    ({"confidence_threshold": 0.5}, PENALTIES),
    ({"verify": "rejection", "tokens": 4, "confidence_threshold": 0.4}, {}),
]


@pytest.mark.parametrize(
    ("kind", "quantize"),
    [
        ("dflash2", None),
        ("dflash2", "int8"),
        ("dspark", None),
        ("speculators", None),
        ("speculators", "int8"),
    ],
)
def test_decoding_equals_plain_decoding(
    folders: dict[str, Path], kind: str, quantize: str | None
) -> None:
    draft = str(folders[kind])
    llm = LLM(folders["target"], DFlash(draft=draft), quantize=quantize)
    for changes, options in METHODS + SURE * (kind != "dflash2"):
        options, method = {"max_tokens": 12, **options}, DFlash(draft=draft, **changes)
        plain = llm.generate(PROMPTS, method=Autoregressive(), **options)
        together = llm.generate(PROMPTS, method=method, **options)
        alone = [llm.generate(each, method=method, **options)[0] for each in PROMPTS]
        assert [each.ids for each in together] == [each.ids for each in plain], changes
        assert [each.ids for each in alone] == [each.ids for each in plain], changes


@torch.inference_mode()
def decode_naively(
    folders: dict[str, Path], prompt: list[int], threshold: float, total: int
) -> tuple[list[int], list[int]]:
    """Return the text and the numbers of drafts of DeepSpec's loop at temperature 0."""
    target = load_model(folders["target"])
    weights = load_file(folders["dspark"] / "model.safetensors")
    ids, counts = [*prompt, int(target_states(target, prompt)[0][-1].argmax())], []
    while len(ids) < len(prompt) + total:
        features = target_states(target, ids)[1][: len(ids) - 1]
        drafted: list[int] = []
        room = len(prompt) + total - len(ids)
        if count := min(BLOCK, room - 1):
            # A block has no rows after the last slot.
            rows = min(BLOCK, room)
            drafted, _, sure = correct_naively(weights, features, ids[-1], count, rows=rows)
            unsure = (place for place, each in enumerate(sure) if each < threshold)
            drafted = drafted[: next(unsure, count)]
            counts.append(len(drafted))
        best = target_states(target, ids + drafted)[0][len(ids) - 1 :].argmax(-1).tolist()
        pairs = enumerate(zip(drafted, best, strict=False))
        accepted = next((n for n, (ours, theirs) in pairs if ours != theirs), len(drafted))
        ids += best[: accepted + 1]
    return ids[len(prompt) :], counts


def target_states(target: Any, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return logits and features of a text, computed from its beginning."""
    rows = torch.arange(len(ids))
    hidden, captured = target.capture_layers(torch.tensor(ids), rows, dense(causal=True), (0, 1))
    return target.compute_logits(hidden), torch.cat([captured[0], captured[1]], -1)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6, 1.0])
def test_length_of_drafts_equals_a_naive_loop(folders: dict[str, Path], threshold: float) -> None:
    draft = str(folders["dspark"])
    method = DFlash(draft=draft, tokens=BLOCK, confidence_threshold=threshold)
    output = LLM(folders["target"], method).generate(PROMPTS[0], max_tokens=16)[0]
    steps = [(step.model, step.rows) for step in output.steps]
    following = zip(steps, steps[1:], strict=False)
    lengths = [rows - 1 for (model, _), (_, rows) in following if model == "draft"]
    assert (output.ids, lengths) == decode_naively(folders, PROMPTS[0], threshold, 16)


def test_constraint_holds_token_by_token(folders: dict[str, Path]) -> None:
    draft = load_draft(folders["dspark"], causal_model())
    seen: list[tuple[list[int], list[int]]] = []

    def ban_repeats(logits: Tensor, slots: Any, text: Any) -> None:
        seen.append((list(slots), list(text)))
        logits[:, [token for token in text[: slots[0]] if token != MASK]] = -1e30

    runner = Runner("draft", draft, slots=512)
    features, last, count = random_blocks("dspark")[1]
    forward, table, n = block_forward(draft, (features, last, count)), runner.reserve(64), 8
    assert table is not None and len(features) == n
    (fed,) = feeds(runner, [forward], [table])
    fed.processors, fed.text = (ban_repeats,), forward.merge_text([1] * n + [last])
    (found,) = runner.run_pass([fed])
    assert len({last, 1, *found.tokens}) == count + 2
    whole = [1] * n + [last] + [MASK] * (BLOCK - 1)
    expected = []
    for step in range(count):
        chosen = [*whole[: n + 1], *found.tokens[:step], *whole[n + 1 + step :]]
        expected.append(([n + 1 + step], chosen))
    assert seen == expected


@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        ("dflash2", {"conv_kernel_size": 0}, "conv_kernel_size"),
        ("dflash2", {"conv_kernel_size": True}, "conv_kernel_size"),
        ("dflash2", {"conv_group_size": 5}, "conv_group_size"),
        ("dflash2", {"selector_rank": -1}, "selector_rank"),
        ("dflash2", {"selector_top_k": "all"}, "selector_top_k"),
        ("dflash2", {"output_multiplier": 2.0}, "output_multiplier"),
        ("dflash2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("dflash2", {"input_embedding_scale": 0.5}, "input_embedding_scale"),
        ("dflash2", {"mask_token_id": VOCAB}, "mask_id"),
        *(("dflash2", {name: None}, f"dflash_config.{name}") for name in DFLASH2),
        ("dspark", {"markov_head_type": "rnn"}, "markov_head_type"),
        ("dspark", {"markov_rank": -1}, "markov_rank"),
        ("dspark", {"markov_rank": None}, "markov_rank"),
        ("dspark", {"markov_rank": 0}, "Markov"),
        ("dspark", {"enable_confidence_head": 1}, "enable_confidence_head"),
        ("dspark", {"confidence_head_with_markov": None}, "confidence_head_with_markov"),
        ("dspark", {"block_size": 0}, "block_size"),
        ("dspark", {"block_size": None}, "block_size"),
        ("dspark", {"mask_token_id": VOCAB}, "mask_id"),
        ("dspark", {"target_layer_ids": [-1, 0]}, "target_layer_ids"),
        ("dspark", {"target_layer_ids": None}, "target_layer_ids"),
        ("dspark", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("dspark", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("dspark", {"log_snr_conditioning": True}, "log_snr_conditioning"),
    ],
)
def test_other_fields_are_refused(kind: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=re.escape(field)):
        translate_config(FIELDS[kind](**changes))


def test_other_targets_and_uses_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="25"):
        load_draft(folders["dspark"], causal_model(vocab_size=25))
    for fields in FIELDS.values():
        with pytest.raises(ValueError, match=fields()["architectures"][0]):
            ModelShard(0, 2).shard_config(translate_config(fields()))
    with pytest.raises(ValueError, match="convolutions"):
        Objective().bind(translate_config(dflash2_fields()))
    unsure = write_draft(tmp_path / "draft", "dspark", enable_confidence_head=False)
    for draft in (unsure, folders["dflash2"]):
        llm = LLM(folders["target"], DFlash(draft=str(draft), confidence_threshold=0.5))
        with refuses("confidence_threshold"):
            llm.generate(PROMPTS[0], max_tokens=4)

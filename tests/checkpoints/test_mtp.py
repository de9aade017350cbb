"""Heads for multi-token prediction: published tensors, a naive head, and text of plain decoding."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from helpers import dense
from outpace import LLM
from outpace.checkpoints.load import load_draft, load_model
from outpace.methods import Autoregressive, Eagle
from outpace.models.extending import MTPDraft
from refusal import refuses

VOCAB, DIM, HEADS, KV, SIZE, MLP = 64, 64, 4, 2, 16, 64
IDS = [3, 61, 27, 52, 14, 9, 40, 8, 61, 1, 33, 12] * 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": MLP,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": SIZE,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
DELTA = {
    **SIZES,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "rope_parameters": PARTIAL,
}
EXPERTS, CHOSEN, WIDTH, SHARED = 6, 2, 32, 32
MANY = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": SHARED,
}
SEES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
IMAGES = {"vision_config": {**SEES, "out_hidden_size": DIM}}
MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "qwen3_5": (
        hf.Qwen3_5ForConditionalGeneration,
        hf.Qwen3_5Config(text_config=DELTA, tie_word_embeddings=False, **IMAGES),
    ),
    "qwen3_5_moe_text": (hf.Qwen3_5MoeForCausalLM, hf.Qwen3_5MoeTextConfig(**DELTA, **MANY)),
    "qwen3_next": (
        hf.Qwen3NextForCausalLM,
        hf.Qwen3NextConfig(**DELTA, **MANY, norm_topk_prob=True),
    ),
}
LAYER = "mtp.layers.0."
PROJECTION = "mtp.fc.weight"
EMBEDDING_NORM, STATE_NORM = "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"
LAST_NORM = "mtp.norm.weight"


def head_shapes(name: str, *, is_fused: bool = False) -> dict[str, tuple[int, ...]]:
    attention, mlp = f"{LAYER}self_attn.", f"{LAYER}mlp."
    shapes: dict[str, tuple[int, ...]] = {PROJECTION: (DIM, 2 * DIM)}
    shapes |= dict.fromkeys((EMBEDDING_NORM, STATE_NORM, LAST_NORM), (DIM,))
    for norm in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{LAYER}{norm}.weight"] = (DIM,)
    for part, rows in (("q", 2 * HEADS), ("k", KV), ("v", KV)):
        shapes[f"{attention}{part}_proj.weight"] = (rows * SIZE, DIM)
    shapes[f"{attention}o_proj.weight"] = (DIM, HEADS * SIZE)
    shapes |= dict.fromkeys([f"{attention}{part}_norm.weight" for part in "qk"], (SIZE,))
    if name == "qwen3_5":
        return shapes | mlp_shapes(mlp, MLP)
    shapes |= {f"{mlp}gate.weight": (EXPERTS, DIM), f"{mlp}shared_expert_gate.weight": (1, DIM)}
    shapes |= mlp_shapes(f"{mlp}shared_expert.", SHARED)
    if is_fused:
        fused = {"gate_up_proj": (EXPERTS, 2 * WIDTH, DIM), "down_proj": (EXPERTS, DIM, WIDTH)}
        return shapes | {f"{mlp}experts.{part}": shape for part, shape in fused.items()}
    for expert in range(EXPERTS):
        shapes |= mlp_shapes(f"{mlp}experts.{expert}.", WIDTH)
    return shapes


def mlp_shapes(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    sizes = {"gate": (width, DIM), "up": (width, DIM), "down": (DIM, width)}
    return {f"{prefix}{part}_proj.weight": size for part, size in sizes.items()}


def write_model(name: str, folder: Path, *, is_fused: bool = False) -> PreTrainedModel:
    """Write a model with the tensors of a head; return that of transformers."""
    kind, config = MODELS[name]
    torch.manual_seed(0)
    theirs = kind(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() >= 2 else 0.5, std=0.2)
    with torch.no_grad():
        theirs.get_input_embeddings().weight *= 50  # the last token decides, so drafts are accepted
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for part, shape in head_shapes(name, is_fused=is_fused).items():
        tensors[part] = torch.randn(shape) * 0.2 + (0.5 if len(shape) == 1 else 0.0)
    tensors[PROJECTION][:, :DIM] += 20 * torch.eye(DIM)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return theirs


@torch.inference_mode()
def target_states(theirs: PreTrainedModel, ids: list[int]) -> Tensor:
    """Return the hidden states `[n, dim]` of transformers after its norm."""
    seen: list[Tensor] = []
    norm = theirs.get_decoder().norm
    hook = norm.register_forward_hook(lambda _, given, out: seen.append(out))
    theirs(torch.tensor([ids]), use_cache=False)
    hook.remove()
    return seen[0][0]


def naive_head(
    tensors: dict[str, Tensor], embedding: Tensor, states: Tensor, ids: list[int]
) -> Tensor:
    """Return the states `[n, dim]` of a head after its norm, for states of slots and next tokens.

    A plain computation from the published tensors, without a cache.
    """

    def norm(x: Tensor, part: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + tensors[part])

    def project(x: Tensor, part: str) -> Tensor:
        return F.linear(x, tensors[f"{part}.weight"])

    def mlp(x: Tensor, prefix: str) -> Tensor:
        gate, up = project(x, f"{prefix}gate_proj"), project(x, f"{prefix}up_proj")
        return project(F.silu(gate) * up, f"{prefix}down_proj")

    def rotate(x: Tensor) -> Tensor:
        turned = SIZE // 2
        speed = 10_000.0 ** -(torch.arange(0, turned, 2) / turned)
        angle = torch.outer(torch.arange(len(x)), speed).repeat(1, 2)[:, None]
        x, rest = x[..., :turned], x[..., turned:]
        half = torch.cat((-x[..., turned // 2 :], x[..., : turned // 2]), -1)
        return torch.cat((x * angle.cos() + half * angle.sin(), rest), -1)

    parts = [norm(embedding[torch.tensor(ids)], EMBEDDING_NORM), norm(states, STATE_NORM)]
    x = torch.cat(parts, -1) @ tensors[PROJECTION].T
    y = norm(x, f"{LAYER}input_layernorm.weight")
    q, k, v = (
        project(y, f"{LAYER}self_attn.{part}_proj").unflatten(-1, (-1, SIZE)) for part in "qkv"
    )
    q, gate = q.reshape(len(x), HEADS, 2 * SIZE).chunk(2, -1)
    q, k = (norm(each, f"{LAYER}self_attn.{p}_norm.weight") for each, p in ((q, "q"), (k, "k")))
    k, v = (each.repeat_interleave(HEADS // KV, 1) for each in (rotate(k), v))
    scores = torch.einsum("qhd,khd->hqk", rotate(q), k) * SIZE**-0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    attended = attended * gate.sigmoid()
    x = x + project(attended.flatten(1), f"{LAYER}self_attn.o_proj")
    y = norm(x, f"{LAYER}post_attention_layernorm.weight")
    module = f"{LAYER}mlp."
    if f"{module}gate.weight" not in tensors:
        return norm(x + mlp(y, module), LAST_NORM)
    weights, best = project(y, f"{module}gate").softmax(-1).topk(CHOSEN)
    shared = mlp(y, f"{module}shared_expert.")
    shared = shared * project(y, f"{module}shared_expert_gate").sigmoid()
    weights = weights / weights.sum(-1, keepdim=True)
    routed = torch.stack([mlp(y, f"{module}experts.{expert}.") for expert in range(EXPERTS)], 1)
    chosen = routed[torch.arange(len(x))[:, None], best] * weights[..., None]
    return norm(x + chosen.sum(1) + shared, LAST_NORM)


@cache
def read_pair(name: str, folder: Path) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    theirs = write_model(name, folder)
    return theirs, load_file(folder / "model.safetensors")


@pytest.fixture(params=MODELS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(name)
    read_pair(name, path)
    return path


def logits_of(theirs: PreTrainedModel, hidden: Tensor) -> Tensor:
    return F.linear(hidden, theirs.get_output_embeddings().weight)


def head_states(head: MTPDraft, states: Tensor, ids: list[int]) -> Tensor:
    rows, places = torch.tensor(ids), torch.arange(len(ids))
    with torch.inference_mode():
        found, captured = head.capture_layers(
            rows, places, dense(causal=True), [0], features=[states]
        )
    assert torch.equal(found, captured[0])
    return found


def load_head(folder: Path) -> MTPDraft:
    head = load_draft(f"{folder}#mtp", load_model(folder))
    assert isinstance(head, MTPDraft)
    return head


@torch.inference_mode()
def test_one_step_equals_a_naive_computation(name: str, folder: Path) -> None:
    theirs, tensors = read_pair(name, folder)
    states, embedding = target_states(theirs, IDS[:-1]), theirs.get_input_embeddings().weight
    wanted = logits_of(theirs, naive_head(tensors, embedding, states, IDS[1:]))
    head = load_head(folder)
    assert head.config.feature_layers == (1,)  # the last, after its norm
    found = head.compute_logits(head_states(head, states, IDS[1:]))
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)


def naive_chain(name: str, folder: Path, ids: list[int], count: int) -> list[int]:
    """Return `count` drafted tokens after a text, each head's state extending the text."""
    theirs, tensors = read_pair(name, folder)
    embedding = theirs.get_input_embeddings().weight
    states, tokens = target_states(theirs, ids[:-1]), [*ids[1:]]
    for _ in range(count):
        own = naive_head(tensors, embedding, states, tokens)
        tokens.append(int(logits_of(theirs, own[-1]).argmax()))
        states = torch.cat((states, own[-1:]))
    return tokens[-count:]


class Recorded(Eagle):
    """Keeps the drafts that are verified, with the text before them."""

    def decode(self, request: Any) -> Any:
        decoding = super().decode(request)
        prediction = None
        while True:
            try:
                forward = decoding.send(prediction)
            except StopIteration:
                return
            if forward.model == "target" and forward.predict is not None:
                count = len(forward.predict) - 1
                if count:
                    DRAFTS.append((list(request.ids), list(forward.ids)[-count:]))
            prediction = yield forward


DRAFTS: list[tuple[list[int], list[int]]] = []


@torch.inference_mode()
def test_chains_equal_a_naive_loop(name: str, folder: Path) -> None:
    """Three tokens after each accepted text, and the text is that of transformers.

    The second time the prompt is in the prefix cache.
    """
    DRAFTS.clear()
    llm = LLM(folder, cache_gib=0.01)
    options: dict[str, Any] = {"method": Recorded(), "max_tokens": 16, "ignore_eos": True}
    (output,), again = (llm.generate([IDS], **options) for _ in range(2))
    assert output.ids == again[0].ids and output.tokens_per_forward > 1.2
    half = len(DRAFTS) // 2
    assert DRAFTS[:half] == DRAFTS[half:] and half > 3
    skipped = [runner.cache_usage.skipped_rows for runner in llm.runners.values()]
    assert skipped == [16, 16]
    del DRAFTS[half:]
    for text, drafted in DRAFTS:
        assert drafted == naive_chain(name, folder, text, len(drafted))
    assert max(len(drafted) for _, drafted in DRAFTS) == 3
    theirs, ids = read_pair(name, folder)[0], torch.tensor([IDS])
    lengths = {"min_new_tokens": 16, "max_new_tokens": 16}
    text = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=-1, **lengths
    )
    assert list(output.ids) == text[0, len(IDS) :].tolist()


OPTIONS = (Eagle(), Eagle(depth=1), Eagle(depth=5, lookup=True), Eagle(verify="rejection"))


@pytest.mark.nightly
def test_requests_together_equal_each_alone_and_plain(name: str, folder: Path) -> None:
    llm = LLM(folder, cache_gib=0.01, max_rows=40)
    text = [(7 * slot * slot + 3 * slot + slot // 5) % (VOCAB - 1) for slot in range(140)]
    requests: list[tuple[list[int], dict[str, Any]]] = []
    for number in range(20):
        begin, length = 5 * (number % 3), (1, 3, 17, 50, 9)[number % 5]
        options = {"temperature": 0.8 * (number % 2), "seed": number, "max_tokens": 9}
        options |= {"method": OPTIONS[number % 4], "ignore_eos": True}
        requests.append((text[begin : begin + length], options))
    together = {number: list(output.ids) for number, output in llm.serve(requests)}
    for number, (ids, options) in enumerate(requests):
        if options["method"].verify == "match" or not options["temperature"]:
            options = {**options, "method": Autoregressive()}
        assert together[number] == list(llm.generate([ids], **options)[0].ids), number


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_head_is_quantized_as_its_target(quantize: str, tmp_path: Path) -> None:
    write_model("qwen3_5", tmp_path)
    llm = LLM(tmp_path, quantize=quantize, cache_gib=0.01)
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    plain = llm.generate([IDS, IDS[:5]], method=Autoregressive(), **options)
    drafted = llm.generate([IDS, IDS[:5]], method=Eagle(), **options)
    assert [each.ids for each in drafted] == [each.ids for each in plain]


def edit(folder: Path, heads: int, drop: str = "-") -> None:
    file, weights = folder / "config.json", folder / "model.safetensors"
    config = {**json.loads(file.read_text()), "num_nextn_predict_layers": heads}
    file.write_text(json.dumps(config))
    tensors = {key: value for key, value in load_file(weights).items() if not key.startswith(drop)}
    save_file(tensors, weights, metadata={"format": "pt"})


def test_checkpoints_without_a_head_are_refused(tmp_path: Path) -> None:
    for draft in ("auto", "tiny-aux#mtp"):
        with refuses("draft"):
            LLM("tiny-aux", Eagle(draft=draft))
    write_model("qwen3_5_moe_text", tmp_path)
    edit(tmp_path, 0, drop="mtp.")
    assert load_model(tmp_path).config.mtp_heads == 0
    for heads in range(3):
        edit(tmp_path, heads)
        with refuses("draft"):
            LLM(tmp_path, "eagle")
    LLM(tmp_path, cache_gib=0.01)


def test_wrong_tensors_of_a_head_are_refused(tmp_path: Path) -> None:
    write_model("qwen3_5", tmp_path)
    file = tmp_path / "model.safetensors"
    sound = load_file(file)
    for part, value in (
        ("other.weight", torch.ones(3)),
        ("fc.weight", torch.ones(DIM, DIM)),
        ("pre_fc_norm_hidden.weight", torch.full((DIM,), torch.nan)),
        ("embed_tokens.weight", torch.ones(VOCAB, DIM)),
    ):
        name = f"mtp.{part}"
        save_file({**sound, name: value}, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=name):
            load_head(tmp_path)
        load_model(tmp_path)

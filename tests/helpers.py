"""Tiny models, tokenizers and small tools of the tests."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from torch.nn import functional as F

from outpace import LLM
from outpace.attention.batch import RowSpan
from outpace.checkpoints.checkpoint import translate_config
from outpace.checkpoints.load import load_draft, load_model
from outpace.decoding import Decoding, Forward, Prediction, Request, Target
from outpace.engine.cache import PageTable
from outpace.engine.engine import Engine
from outpace.engine.job import Job, Listener
from outpace.engine.pack import ScheduledForward
from outpace.engine.pairing import Pairing, check_kinds
from outpace.engine.recurrent import RecurrentPass
from outpace.engine.runner import Runner
from outpace.engine.stats import Stats
from outpace.kernels.packed import find_packed_loop
from outpace.methods import Method
from outpace.models.attention import Attend
from outpace.models.config import AttentionWindow
from outpace.models.draft import DFlash2Draft, DFlashDraft, DFlashFusedDraft, DSparkDraft
from outpace.models.extending import EagleDraft
from outpace.models.gated_delta import GatedDelta
from outpace.models.transformer import Transformer
from outpace.pacing.controller import PaceController

VOCAB, MASK = 24, 23
"""Vocabulary of the tiny models, and the mask of those that have one."""

needs_packed_loops = pytest.mark.skipif(
    not find_packed_loop(), reason="this machine has no loops for packed matrices"
)


def published(architecture: str = "Qwen2ForCausalLM", **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 160,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        **changes,
    }


def published_llada(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LLaDAModelLM"],
        "block_type": "llama",
        "block_group_size": 1,
        "activation_type": "silu",
        "rope": True,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "weight_tying": False,
        "vocab_size": VOCAB,
        "embedding_size": VOCAB,
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "mlp_hidden_size": 48,
        "max_sequence_length": 160,
        "mask_token_id": MASK,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "eos_token_id": 1,
        "rope_full_precision": True,
        **changes,
    }


def random_model(config: dict[str, Any], *, seed: int = 0, std: float = 0.5) -> Transformer:
    """A model of random weights, large enough that its outputs vary."""
    torch.manual_seed(seed)
    model = Transformer(translate_config(config))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() == 2 else 1.0, std=std)
    return model.eval().requires_grad_(False)


def causal_model(*, seed: int = 0, **changes: Any) -> Transformer:
    return random_model(published(**changes), seed=seed)


def published_hybrid(**changes: Any) -> dict[str, Any]:
    sizes = {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 8,
        "partial_rotary_factor": 0.5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    }
    return published("Qwen3_5ForCausalLM", **{**sizes, **changes})


def hybrid_model(*, seed: int = 0, **changes: Any) -> Transformer:
    """A tiny model with gated delta layers, whose states last for several rows."""
    model = random_model(published_hybrid(**changes), seed=seed)
    for block in model.blocks:
        if isinstance(mixer := block.attention, GatedDelta):
            mixer.log_decay.copy_(torch.linspace(-5, -1, len(mixer.log_decay)))
    return model


def diffusion_model(*, seed: int = 0, **changes: Any) -> Transformer:
    fields = {"mask_token_id": MASK, **changes}
    return random_model(published("DreamModel", **fields), seed=seed)


def masked_model(*, seed: int = 0, **changes: Any) -> Transformer:
    fields = {"mask_token_id": MASK, **changes}
    return random_model(published("WeDLMForCausalLM", **fields), seed=seed)


def block_model(*, seed: int = 0, shift: int = 0, **changes: Any) -> Transformer:
    """A tiny block diffusion model, in the format of SDAR, or with a shift of Fast-dLLM v2."""
    fields = {"mask_token_id": MASK, **changes}
    if shift:
        return random_model(published("Fast_dLLM_QwenForCausalLM", bd_size=8, **fields), seed=seed)
    fields = {"block_size": 4, "head_dim": 8, **fields}
    return random_model(published("SDARForCausalLM", **fields), seed=seed)


def unshifted_model(*, seed: int = 0) -> Transformer:
    """A tiny bidirectional model whose rows predict their own slots, trained for guidance."""
    model = diffusion_model(seed=seed)
    model.config = replace(
        model.config,
        family="llada",
        shift=0,
        order="confidence",
        eps=0.0,
        drawn=False,
        block=32,
        null_prompt=True,
    )
    return model


def published_draft(**changes: Any) -> dict[str, Any]:
    return {
        **published("DFlashDraftModel"),
        "head_dim": 8,
        "block_size": 5,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
        **changes,
    }


def feature_draft(target: Transformer, *, seed: int = 0, **changes: Any) -> DFlashDraft:
    torch.manual_seed(seed)
    draft = DFlashDraft(translate_config(published_draft(**changes)), target)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() == 2 else 1.0, std=0.5)
    return draft.eval().requires_grad_(False)


def adding_draft(other: DFlashDraft) -> DFlashFusedDraft:
    """A draft that adds features, with the weights of one that reads them."""
    source = dict(other.config.source)
    source["dflash_config"] = {**source.get("dflash_config", {}), "input_fusion": True}
    draft = DFlashFusedDraft(translate_config(source), *other.lender)
    weights = other.state_dict()
    weights["feature_norm.weight"] = weights.pop("fusion_norm.weight")
    draft.load_state_dict(weights)
    return draft.eval().requires_grad_(False)


def corrected_draft(other: DFlashDraft, *, seed: int = 0) -> DSparkDraft:
    """A draft with random heads for the token before and for acceptance, and the layers of one."""
    source = {**other.config.source, "architectures": ["Qwen3DSparkModel"]}
    source |= source.pop("dflash_config")
    source.pop("auto_map", None)
    source |= {"markov_rank": 4, "enable_confidence_head": True}
    source["confidence_head_with_markov"] = True
    torch.manual_seed(seed)
    (target,) = other.lender
    draft = DSparkDraft(translate_config(source), target)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    borrowed = {"embedding.weight": target.embedding.weight}
    borrowed["unembedding.weight"] = (target.unembedding or target.embedding).weight
    draft.load_state_dict({**other.state_dict(), **borrowed}, strict=False)
    return draft.eval().requires_grad_(False)


def convolved_draft(other: DFlashDraft, *, seed: int = 0) -> DFlash2Draft:
    """A draft with random convolutions and a random selector, and the layers of one."""
    source = {**other.config.source, "architectures": ["DFlash2DraftModel"]}
    source.pop("auto_map", None)
    sizes = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4}
    source["dflash_config"] = {**source["dflash_config"], **sizes}
    torch.manual_seed(seed)
    draft = DFlash2Draft(translate_config(source), *other.lender)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    draft.load_state_dict(other.state_dict(), strict=False)
    return draft.eval().requires_grad_(False)


GOLDEN = Path(__file__).parent / "golden"


def close(ours: Tensor, official: Tensor, tolerance: float = 2e-4) -> None:
    torch.testing.assert_close(ours, official, atol=tolerance, rtol=0)


def same_weights(ours: Path, theirs: Path) -> None:
    ours_by_name, theirs_by_name = (load_file(f / "model.safetensors") for f in (ours, theirs))
    assert ours_by_name.keys() == theirs_by_name.keys()
    for name, official in theirs_by_name.items():
        assert torch.equal(ours_by_name[name], official), name


@cache
def trained_pair(name: str = "pair_b") -> tuple[Transformer, DFlashDraft]:
    target = load_model(GOLDEN / "dflash" / name / "target")
    draft = load_draft(GOLDEN / "dflash" / name / "draft", target)
    assert isinstance(draft, DFlashDraft)
    return target, draft


def dense(*, causal: bool, windows: Sequence[AttentionWindow] = ()) -> Attend:
    """Attention of all rows to one another, without a cache."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        if not k.shape[1]:  # those of another layer
            k, v = kept[layer]
        kept[layer] = k, v
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        if sinks is not None:
            return beside(q, k, v, sinks, windows[layer].window or len(q[0])).transpose(0, 1)
        shown: dict[str, Any] = {"is_causal": causal}
        if windows and (window := windows[layer].window) is not None:
            before = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
            shown = {"attn_mask": (before >= 0) & (before < window)}
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], **shown, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


def beside(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int) -> Tensor:
    """Causal attention of rows `[H, n, D]`, each beside a sink: a key of its own, without value."""
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    before = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    hidden = (before < 0) | (before >= window)
    scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    share = torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks[:, None, None])
    return scores.softmax(-1) @ v * share


@cache
def extended_pair(name: str = "llama") -> tuple[Transformer, EagleDraft]:
    target = load_model(GOLDEN / "eagle" / name / "target")
    draft = load_draft(GOLDEN / "eagle" / name / "draft", target)
    assert isinstance(draft, EagleDraft)
    return target, draft


def published_eagle(**changes: Any) -> dict[str, Any]:
    return {
        **published("LlamaForCausalLMEagle3"),
        "num_hidden_layers": 1,
        "head_dim": 8,
        "draft_vocab_size": VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
        **changes,
    }


def extending_draft(
    target: Transformer, *, seed: int = 0, layers: tuple[int, ...] = (0, 1), **changes: Any
) -> EagleDraft:
    """A tiny draft of random weights that extends the features of some `layers` of `target`."""
    torch.manual_seed(seed)
    config = replace(translate_config(published_eagle(**changes)), feature_layers=layers)
    draft = EagleDraft(config, target)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() == 2 else 1.0, std=0.5)
    return draft.eval().requires_grad_(False)


def whole(model: Transformer, ids: list[int], *, causal: bool) -> Tensor:
    """Logits `[n, vocab]` of all rows of a canvas, by attention without a cache."""
    attend = dense(causal=causal, windows=model.config.windows)
    if model.config.delta is not None:
        table = PageTable(pages=[0], size=len(ids))
        attend = RecurrentPass(attend, [RowSpan(slice(0, len(ids)), 0, len(ids), None, table)])
    with torch.inference_mode():
        return model.compute_logits(
            model(torch.tensor(ids), torch.arange(len(ids)), attend)
        ).float()


def engine_of(*models: tuple[str, Transformer], slots: int = 2048, **limits: int) -> Engine:
    engine = Engine(**limits)
    for name, model in models:
        engine.add_runner(Runner(name, model, slots=slots))
    return engine


def runner(engine: Engine, name: str) -> Runner:
    return next(runner for runner in engine.runners if runner.name == name)


def record_rows(runner: Runner) -> list[int]:
    """Return a list that will hold the rows of each further pass."""
    rows: list[int] = []
    launch = runner.launch_pass

    def counted(forwards: Sequence[ScheduledForward]) -> Any:
        rows.append(sum(len(forward.ids) for forward in forwards))
        return launch(forwards)

    runner.launch_pass = counted  # type: ignore[method-assign]
    return rows


def finish(engine: Engine) -> None:
    """Step until nothing is left to do."""
    for _ in range(10_000):
        if not engine.step():
            return
    raise AssertionError("a request never ends")


def tokens(job: Job) -> list[int]:
    """Output of a request; raises what its method raised."""
    if job.error is not None:
        raise job.error
    return job.tokens


def pages_in_use(engine: Engine) -> int:
    return Stats.from_engine(engine).held_pages


def is_idle(engine: Engine) -> bool:
    return Stats.from_engine(engine).is_idle


def loaded_models(llm: LLM) -> list[str]:
    return [usage.name for usage in llm.driver.stats.models]


def run(
    runner: Runner,
    forwards: Sequence[Forward],
    tables: Sequence[PageTable],
    layers: Sequence[tuple[int, ...]] | None = None,
) -> list[Prediction]:
    """One pass of a model over forwards; `layers[i]` are those whose outputs forward i wants."""
    fed = feeds(runner, forwards, tables)
    for feed, wanted in zip(fed, layers or [()] * len(fed), strict=True):
        feed.layers = wanted
    return runner.run_pass(fed)


TARGET_FIELDS = {field.name for field in fields(Target)}


def request_of(**given: Any) -> Request:
    """A request; what is said of its target goes there."""
    target = {name: given.pop(name) for name in list(given) if name in TARGET_FIELDS}
    return Request(target=Target(**target), **given)


def enter(
    engine: Engine,
    method: Method,
    prompt: Sequence[int],
    *,
    runners: Mapping[str, Runner],
    listener: Listener | None = None,
    **options: Any,
) -> Job:
    """Pair a method with its models and queue a request."""
    kinds = {role: (each.name, each.config.kind) for role, each in runners.items()}
    check_kinds(type(method.method if isinstance(method, Recorded) else method), kinds)
    pairing = Pairing.from_runners(runners)
    options.setdefault("eos", frozenset(runners["target"].config.eos))
    job = Job(method=method, pairing=pairing, prompt=list(prompt), listener=listener, **options)
    return engine.enqueue(engine.prepare_job(job))


def feeds(
    runner: Runner, forwards: Sequence[Forward], tables: Sequence[PageTable]
) -> list[ScheduledForward]:
    for forward, table in zip(forwards, tables, strict=True):
        runner.cache.extend(table, min(forward.end, table.size))
    pairs = zip(forwards, tables, strict=True)
    return [
        ScheduledForward.from_forward(forward, table, runner.config) for forward, table in pairs
    ]


def script(method: Method, seq: Request, answers: list[Prediction | list[int]]) -> list[Forward]:
    """Drive a method by hand: the forwards that it asks for, one after each answer.

    An answer is a prediction, or its tokens alone. The method must end with the last one.
    """
    decoding = method.decode(seq)
    *earlier, last = [Prediction(tokens=a) if isinstance(a, list) else a for a in answers]
    forwards = [as_it_stands(next(decoding))]
    forwards += [as_it_stands(decoding.send(answer)) for answer in earlier]
    assert ends(decoding, last)
    return forwards


@dataclass(frozen=True, kw_only=True)
class Recorded(Method):
    """A method whose forwards and predictions are recorded; `change` replaces forwards first."""

    method: Method
    change: Callable[[Forward], Forward] = staticmethod(lambda forward: forward)
    turns: list[tuple[Forward, Prediction]] = field(default_factory=list)

    @property
    def forwards(self) -> list[Forward]:
        return [forward for forward, _ in self.turns]

    def slots_needed(self, prompt: int, max_tokens: int) -> int:
        return self.method.slots_needed(prompt, max_tokens)

    def decode(self, request: Request) -> Decoding:
        decoding, out = self.method.decode(request), None
        while True:
            try:
                forward = next(decoding) if out is None else decoding.send(out)
            except StopIteration:
                return
            forward = self.change(forward)
            kept = as_it_stands(forward)
            out = yield forward
            self.turns.append((kept, out))


def as_it_stands(forward: Forward) -> Forward:
    """A copy, since a method may feed the growing list of its sequence."""
    return replace(forward, ids=list(forward.ids))


def ends(decoding: Decoding, answer: Prediction) -> bool:
    try:
        decoding.send(answer)
    except StopIteration:
        return True
    return False


def one_hot(tokens: list[int], vocab: int = VOCAB) -> Tensor:
    return 10 * F.one_hot(torch.tensor(tokens), vocab).float()


def chi_square(drawn: Tensor, law: Tensor) -> float:
    """Probability that draws from `law [V]` deviate from it at least as far as `drawn [n]`.

    Tokens that are expected fewer than five times are counted as one.
    """
    counts = torch.bincount(drawn, minlength=len(law)).double()
    if bool(counts[law == 0].any()):
        return 0.0
    expected = law.double() * len(drawn)
    rare = expected < 5
    if bool(rare.any()):
        counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
        expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    counts, expected = counts[expected > 0], expected[expected > 0]
    distance = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, distance / 2))


SPECIALS = ("<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>")
END = 256
"""Id of the end-of-sequence of `save_tokenizer`; the mask follows."""

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(
    folder: Path, *, first: str = "", specials: tuple[str, ...] = SPECIALS, chat: str | None = CHAT
) -> None:
    """Write a tokenizer of the 256 bytes and four special tokens; `first` is token 0."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(ByteLevel.alphabet(), key=lambda byte: (byte != first, byte))
    tokenizer = Tokenizer(BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": specials[0],
        "clean_up_tokenization_spaces": False,
    }
    if chat is not None:
        config["chat_template"] = chat
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class Turned(PaceController):
    now = 1

    def choose_length(
        self, request: object = None, behind: int = 0, left: float = inf, lost: int = 0
    ) -> int:
        return self.now

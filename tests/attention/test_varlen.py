"""Calls of `varlen_attn` against the reference back end; one written by hand stands in for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import make_dataclass

import pytest
import torch
from torch import Tensor

from helpers import finish, tokens
from outpace import LLM
from outpace.attention import choice, varlen
from outpace.attention.dense import Dense
from outpace.attention.varlen import Varlen
from outpace.engine.cache import PAGE
from outpace.engine.engine import Engine
from outpace.engine.runner import Runner
from outpace.methods import APD, Autoregressive, BlockDiffusion, DFlash, Method
from outpace.models.config import Sight
from spans import TREE, attend, random, spans_of
from workload import KINDS, MODELS, Request

MIXED = [(60, 1, "causal"), (9, 16, "full"), (0, 5, (2, 3)), (3, 4, 40), (130, 3, "causal")]
GPU = torch.device("cuda")


class ByHand:
    """What `varlen_attn` says that it does, sequence by sequence and row by row."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, int]] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        block_table: Tensor,
    ) -> Tensor:
        """The last row of a sequence stands at its last key, whatever is behind that."""
        assert {x.dtype for x in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
        assert cu_seq_k is None and enable_gqa == (query.shape[1] != key.shape[2])
        assert max_q == int(cu_seq_q.diff().max()) and max_k == int(seqused_k.max())
        assert cu_seq_q[0] == 0 and cu_seq_q[-1] == len(query)
        self.windows.append(window_size)
        before, behind = (10**6 if size < 0 else size for size in window_size)
        out = torch.empty_like(query)
        for n, (begin, end) in enumerate(zip(cu_seq_q, cu_seq_q[1:], strict=False)):
            used = int(seqused_k[n])
            pages = block_table[n, : -(-used // key.shape[1])].long()
            keys, values = (x[pages].flatten(0, 1)[:used].float() for x in (key, value))
            at = torch.arange(used - int(end - begin), used)[:, None]
            slots = torch.arange(used)
            seen = (slots >= at - before) & (slots <= at + behind)
            q, k, v = (x.transpose(0, 1) for x in (query[begin:end].float(), keys, values))
            got = torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=seen, enable_gqa=enable_gqa
            )
            out[begin:end] = got[0].transpose(0, 1).to(out.dtype)
        return out


def pair(
    shape: tuple[int, int, int], dtype: torch.dtype, slots: int, sights: Sequence[Sight] = ()
) -> tuple[Dense, Dense, Varlen, ByHand]:
    """The reference, the same in float32, and the calls, over the same memory."""
    heads, kv_heads, dim = shape
    memory = random(2, kv_heads, slots, dim).to(dtype).transpose(1, 2)
    dense = Dense([memory[0]] * 2, [memory[1]] * 2, heads, sights)
    exact = Dense([memory[0].float()] * 2, [memory[1].float()] * 2, heads, sights)
    call = ByHand()
    return dense, exact, Varlen(dense, call, page=PAGE), call


def compare(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    asked: Sequence[tuple[int, int, object]],
    sights: Sequence[Sight] = (),
) -> list[tuple[int, int]]:
    """Both agree in two layers; the windows of the calls."""
    spans = spans_of(asked, 144)
    _, exact, ours, call = pair(shape, dtype, len(asked) * 144, sights)
    q = random(spans[-1].rows.stop, shape[0] + 4, shape[2], seed=1).to(dtype)[:, : shape[0]]
    assert ours.numbers(spans)
    for layer in range(2):
        wanted = attend(exact, spans, q.float(), layer)
        got = attend(ours, spans, q, layer)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), wanted, atol=1e-5, rtol=2**-8)
    return call.windows


@pytest.mark.parametrize("shape", [(8, 2, 64), (14, 2, 64), (28, 4, 128), (4, 4, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_calls_equal_dense(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """All patterns in one pass: two calls per layer, or one where it is enough."""
    assert sorted(compare(shape, dtype, MIXED)) == [(-1, -1)] * 2 + [(-1, 0)] * 2
    assert compare(shape, dtype, MIXED[::4]) == [(-1, 0)] * 2
    assert compare(shape, dtype, MIXED[1:4]) == [(-1, -1)] * 2


@pytest.mark.parametrize("window", [1, 2, 5, 70, 1000])
def test_causal_rows_may_slide(window: int) -> None:
    """In one layer and not in the next, beside a prefill from the first slot."""
    asked = [*MIXED[::4], (0, 20, "causal")]
    sights = [Sight(window=window), Sight()]
    assert compare((4, 2, 16), torch.float32, asked, sights) == [(window - 1, 0), (-1, 0)]


@pytest.mark.parametrize("window", [None, 3, 70])
def test_a_layer_that_is_causal_makes_all_rows_causal(window: int | None) -> None:
    """Whatever else they would see, and however far it slides."""
    sights = [Sight(window=window, causal=True)] * 2
    found = compare((4, 2, 16), torch.float32, MIXED, sights)
    assert found == [(-1 if window is None else window - 1, 0)] * 2


@pytest.mark.parametrize(
    ("asked", "sight", "why"),
    [
        ((68, 10, TREE), Sight(), "tree"),
        ((9, 16, "full"), Sight(window=5), "stops in layers that slide"),
        ((0, 5, (2, 3)), Sight(window=100), "stops in layers that slide"),
    ],
)
def test_what_calls_cannot_say_is_left_to_dense(
    asked: tuple[int, int, object], sight: Sight, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A line of the log says so once."""
    spans = spans_of([MIXED[0], asked], 144)
    dense, _, ours, call = pair((4, 2, 16), torch.float32, 288, [sight] * 2)
    q = random(spans[-1].rows.stop, 4, 16)
    for _ in range(2):
        assert torch.equal(attend(ours, spans, q), attend(dense, spans, q))
    assert not call.windows and [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"dense for forwards with {why}, unknown" in caplog.text
    assert ours.numbers(spans[:1])


FIRST = (Autoregressive, APD, BlockDiffusion, DFlash)


@pytest.mark.parametrize(
    "method",
    [next(method for method in KINDS if isinstance(method, kind)) for kind in FIRST],
    ids=lambda method: type(method).__name__,
)
def test_tokens_of_methods_are_those_of_dense(method: Method) -> None:
    """With drafts, verifiers, context and blocks, two requests side by side."""
    found, call = [], ByHand()
    for calls in (False, True):
        engine = Engine()
        for role, model in MODELS.items():
            runner = Runner(role, model, slots=32 * PAGE, attention="dense")
            assert isinstance(runner.backend, Dense)
            if calls:
                runner.backend = Varlen(runner.backend, call, page=PAGE)
            engine.add(runner)
        prompts = ((3, 1, 4, 1, 5), tuple(range(1, 20)))
        jobs = [Request(method=method, prompt=p).submit(engine) for p in prompts]
        finish(engine)
        found.append([tokens(job) for job in jobs])
    assert found[0] == found[1] and call.windows


def old(query: Tensor, key: Tensor, value: Tensor, *, window_size: tuple[int, int]) -> None:
    """What 2.11 has."""


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU that has all that is needed."""
    monkeypatch.setattr(varlen, "found", lambda: ByHand())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(varlen, "find_spec", lambda name: name == "flash_attn_interface")
    return monkeypatch


def test_what_a_device_lacks_is_named(there: pytest.MonkeyPatch) -> None:
    """Before a model is loaded."""
    assert varlen.missing(GPU) is None
    with pytest.raises(ValueError, match="'varlen' cannot be: it runs on a GPU, not on cpu; choos"):
        LLM("tiny-ar", attention="varlen")
    there.setattr(varlen, "find_spec", lambda name: None)
    assert "flash_attn_interface (FlashAttention 3) is missing" in str(varlen.missing(GPU))
    there.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert varlen.missing(GPU) == "FlashAttention 3 needs compute capability 9.0, not 8.6"
    there.setattr(varlen, "found", lambda: None)
    assert "has no varlen_attn over pages, which comes with 2.12" in str(varlen.missing(GPU))
    with pytest.raises(ValueError, match=r"pages, which comes with 2\.12; choose 'dense' or"):
        choice.check("varlen", GPU)


def test_a_varlen_without_pages_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of 2.11; before 2.10 there is none at all."""
    module = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(module, "varlen_attn", ByHand())
    assert isinstance(varlen.found(), ByHand)
    monkeypatch.setattr(module, "varlen_attn", old)
    assert varlen.found() is None
    monkeypatch.delattr(module, "varlen_attn")
    assert varlen.found() is None


def test_what_a_cache_may_not_be_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dtype, its heads, its layers."""
    keys = torch.empty(16, 1, 64, dtype=torch.bfloat16)
    assert varlen.unfit(keys, [Sight(window=3, causal=True)], False) is None
    assert varlen.unfit(keys, [], True) == "layers have sinks"
    assert "not torch.float32" in str(varlen.unfit(keys.float(), [], False))
    for size in (20, 264):
        other = torch.empty(16, 1, size, dtype=torch.float16)
        assert f"heads of {size} are no multiple of 8" in str(varlen.unfit(other, [], False))
    later = make_dataclass("Sight", [("dilation", int, 1)], bases=(Sight,), frozen=True)
    monkeypatch.setattr(varlen, "Sight", later)
    assert "the dilation of a layer" in str(varlen.unfit(keys, [later(dilation=2)], False))


def test_it_is_chosen_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FlashAttention 3 is then activated; other caches are refused, and so are graphs."""
    active: list[str] = []
    monkeypatch.setattr(varlen, "missing", lambda device: None)
    monkeypatch.setattr(varlen, "found", lambda: ByHand())
    monkeypatch.setattr(choice.flash, "activate_flash_attention_impl", active.append)

    def choose(name: str, dtype: torch.dtype, *, sinks: bool = False, filled: bool = False):
        keys = [torch.zeros(64, 2, 64, dtype=dtype)]
        return choice.backend(
            name, keys, keys, 4, (), sinks=sinks, page=PAGE, double=False, filled=filled
        )

    with caplog.at_level(logging.INFO):
        assert isinstance(choose("varlen", torch.bfloat16), Varlen)
    assert caplog.messages == ["attention on cpu in bfloat16: varlen"] and active == ["FA3"]
    assert not isinstance(choose("auto", torch.bfloat16), Varlen)
    with pytest.raises(ValueError, match="not torch.float32; choose 'dense' or 'auto'"):
        choose("varlen", torch.float32)
    with pytest.raises(ValueError, match="'varlen' cannot be: layers have sinks"):
        choose("varlen", torch.bfloat16, sinks=True)
    with pytest.raises(ValueError, match="graphs want attention='triton', not 'varlen'"):
        choose("varlen", torch.bfloat16, filled=True)

"""Kernels against the reference back end: first whether they agree, then how long they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gpu_parts.device import Found, Setup, timed
from harness import Bar, Row
from outpace.attention.batch import AttentionBatch, Backend, RowSpan
from outpace.attention.choice import select_backend, triton_missing_reason
from outpace.decoding import Sampling
from outpace.decoding.accept import Rejection, stack_drafts
from outpace.decoding.sampling import GroupReader, NoisyChooser, Sample, Score, token_scores
from outpace.decoding.tree import Tree
from outpace.engine.cache import PAGE_SIZE, PageTable
from outpace.kernels.fused import read_rows

SCORES: set[Score] = {"confidence", "margin", "entropy"}
SAMPLING = Sampling(temperature=0.8, top_p=0.9, seed=1)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference of outputs near 1 from the reference in float32."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Sequences that are decoded side by side: so many rows each, behind so many keys.

    `shape` has the heads, key heads, and head size. In a tree two rows hang on each.
    """

    shape: tuple[int, int, int]
    batch: int
    rows: int
    keys: int
    pattern: str = "full"
    sinks: bool = False

    @property
    def name(self) -> str:
        """Its numbers."""
        more = ", sinks" if self.sinks else ""
        return f"{self.batch} x {self.rows} rows, {self.keys} keys, {self.pattern}{more}"

    def spans(self) -> list[RowSpan]:
        """Rows at the end of sequences whose pages lie anywhere."""
        end, each = self.keys + self.rows, -(-(self.keys + self.rows) // PAGE_SIZE)
        order = np.random.default_rng(0).permutation(self.batch * each).reshape(self.batch, each)
        stops, tree = [end] * self.rows if self.pattern == "full" else None, None
        if self.pattern == "tree":
            tree = Tree.from_parents(self.keys, [(row - 1) // 2 for row in range(self.rows)])
            stops = tree.visible_ends(self.keys)
        return [
            RowSpan(
                slice(n * self.rows, (n + 1) * self.rows),
                self.keys,
                end,
                stops,
                PageTable(pages=order[n].tolist(), size=end),
                tree,
            )
            for n in range(self.batch)
        ]

    def tensors(self, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[T, H, D]`, keys and values `[S, K, D]`."""
        heads, kv_heads, size = self.shape
        slots = self.batch * -(-(self.keys + self.rows) // PAGE_SIZE) * PAGE_SIZE
        drawn = torch.Generator(device).manual_seed(0)
        memory = torch.randn(2, kv_heads, slots, size, generator=drawn, device=device)
        q = torch.randn(self.batch * self.rows, heads, size, generator=drawn, device=device)
        keys, values = memory.to(dtype).transpose(1, 2)
        return q.to(dtype), keys, values


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is compared: loads that must agree, loads and (rows, vocabulary) that are timed.

    Of the last of the reads some rows, `alike` at most, must be as the reference reads them. Those
    of `judged` loads have to read as much of what a copy moves. `copied` bytes are moved to see how
    fast the memory is, and matrices of `multiplied` rows and columns for the products.
    """

    agree: tuple[Load, ...]
    loads: tuple[Load, ...]
    judged: tuple[Load, ...]
    reads: tuple[tuple[int, int], ...]
    alike: int


SHARE = 0.75
"""Of the speed of a copy, at which the keys of a judged load are read."""

SAME, CLOSE = 0.95, 1e-4
"""Share of tokens that are the reference's, as logarithms may differ by a rounding; of these the
largest difference of a score."""


WIDE = (32, 8, 128)
FULL_SIZES = Sizes(
    agree=tuple(
        Load(shape=shape, batch=3, rows=rows, keys=keys, pattern=pattern, sinks=sinks)
        for shape in ((8, 2, 64), (14, 2, 64), (28, 4, 128), WIDE)
        for rows, keys, pattern, sinks in (
            *((1, 900, "causal", False), (16, 4000, "full", False), (300, 0, "causal", False)),
            *((60, 900, "tree", False), (4, 900, "causal", True)),
        )
    ),
    loads=(
        *(
            Load(shape=WIDE, batch=batch, rows=rows, keys=keys)
            for batch, keys in ((1, 4096), (8, 4096), (32, 4096), (64, 1024))
            for rows in (1, 16, 32)
        ),
        Load(shape=WIDE, batch=1, rows=4096, keys=0, pattern="causal"),
    ),
    judged=tuple(Load(shape=WIDE, batch=32, rows=rows, keys=4096) for rows in (1, 16)),
    reads=((1, 151_936), (64, 151_936), (256, 151_936)),
    alike=64,
)
SMALL = Load(shape=(8, 2, 64), batch=2, rows=3, keys=40)
TINY_SIZES = Sizes(
    agree=(SMALL, replace(SMALL, pattern="tree"), replace(SMALL, sinks=True)),
    loads=(SMALL,),
    judged=(SMALL,),
    reads=((2, 5000),),
    alike=2,
)


def measure(setup: Setup, sizes: Sizes) -> Found:
    """Tables of times, and bars of agreement."""
    device, dtype, card = setup.where.device, setup.where.dtype, setup.card
    if reason := triton_missing_reason(torch.device(device)):
        print(f"no kernels: {reason}")
        return {}, []
    bars = [
        Bar(what=f"kernel as the reference: {where}", value=difference, limit=limit)
        for where, difference, limit in agreement(sizes.agree, device)
    ]
    rows, vocab = sizes.reads[-1]
    bars += reads_alike(min(rows, sizes.alike), vocab, device, dtype)
    layers: list[Row] = []
    for load in setup.budget.spend(sizes.loads):
        row = attention(load, device, dtype)
        share = row["kernel GB/s"] * 1e9 / card.copied
        layers.append(row | {"share of a copy": share})
        if load in sizes.judged:
            what = f"attention, {load.name}: share of a copy"
            bars.append(Bar(what=what, value=share, limit=SHARE, at_least=True))
    reads = [reading(rows, vocab, device, dtype) for rows, vocab in setup.budget.spend(sizes.reads)]
    return {"attention": layers, "reads": reads}, bars


def attending(
    load: Load, name: str, q: Tensor, keys: Tensor, values: Tensor
) -> Callable[[], Tensor]:
    """One layer's attention by a back end, planned."""
    one: Backend = select_backend(
        *(name, [keys], [values], q.shape[1], ()), page=PAGE_SIZE, dtype=q.dtype, double=False
    )
    spans, nothing = load.spans(), q.new_zeros(0, *keys.shape[1:])
    numbers = [torch.from_numpy(each).to(q.device) for each in one.plan_arrays(spans)]
    none = torch.zeros(0, dtype=torch.int64, device=q.device)
    attend = one.plan_pass(AttentionBatch(none, none, none, None, spans, plan_arrays=numbers))
    sinks = torch.linspace(-2, 4, q.shape[1], device=q.device) if load.sinks else None
    return lambda: attend(0, q, nothing, nothing, sinks)


def agreement(loads: Sequence[Load], device: str) -> Iterator[tuple[str, float, float]]:
    """For each load and dtype its name, the largest difference from float32, and its limit."""
    for load in loads:
        for dtype, limit in TOLERANCES.items():
            given = load.tensors(device, dtype)
            exact = attending(load, "dense", *(each.float() for each in given))()
            found = attending(load, "triton", *given)().float()
            where = f"{load.shape}, {str(dtype).removeprefix('torch.')}, {load.name}"
            yield where, float((found - exact).abs().max()), limit


def attention(load: Load, device: str, dtype: torch.dtype) -> Row:
    """Milliseconds of a layer by either back end, and what the kernel reads per second."""
    q, keys, values = load.tensors(device, dtype)
    dense, kernel = (timed(attending(load, name, q, keys, values)) for name in ("dense", "triton"))
    heads, kv_heads, size = load.shape
    read = 2 * load.batch * (load.keys + load.rows) * kv_heads * size * dtype.itemsize
    return {
        "heads": str(load.shape),
        "load": load.name,
        "dense ms": dense * 1e3,
        "kernel ms": kernel * 1e3,
        "kernel GB/s": read / 1e9 / kernel,
    }


def reading(rows: int, vocab: int, device: str, dtype: torch.dtype) -> Row:
    """Milliseconds in which rows of logits become tokens and scores, in one pass and in several."""
    drawn = torch.Generator(device).manual_seed(0)
    logits = torch.randn(rows, vocab, generator=drawn, device=device).to(dtype)
    each = NoisyChooser.from_requests([SAMPLING], [0], [range(rows)], torch.device(device))
    whole = slice(0, rows)
    readers = readers_of(logits[1:].float(), device, fused=True)

    def several() -> Tensor:
        tokens = logits.argmax(-1)
        token_scores(logits, tokens, SCORES)
        return tokens

    def once() -> Tensor:
        return read_rows(logits, each.truncation.settings_of(whole), each.keys)[0]

    return {
        "rows": rows,
        "vocabulary": vocab,
        "greedy and scores, PyTorch ms": timed(several) * 1e3,
        "drawn and scores, kernel ms": timed(once) * 1e3,
        **{
            f"{name}, kernel ms": timed(partial(reader, logits, whole)) * 1e3
            for name, reader in readers.items()
        },
    }


def readers_of(guess: Tensor, device: str, *, fused: bool) -> dict[str, GroupReader]:
    """Readers of one row more than a draft's `guess [k, V]` has, by what they do."""
    guess = guess.to(device)
    where, slots, wanted = torch.device(device), [range(len(guess) + 1)], tuple(sorted(SCORES))
    drawn = [Sample(sampling=SAMPLING, score_as_drawn=True, scores=wanted)]
    drafted = tuple(guess.argmax(-1).tolist())
    checked = [Rejection(sampling=SAMPLING, drafted=drafted, guess=guess, scores=wanted)]
    if not fused:
        return {
            "scores of what is drawn": Sample.make_reader(drawn, slots, where),
            "rejection": Rejection.make_reader(checked, slots, where),
        }
    noisy = NoisyChooser.from_requests([SAMPLING], [0], slots, where)
    return {
        "scores of what is drawn": Sample.make_fused_reader(drawn, slots, where),
        "rejection": Rejection.make_fused_verifier(
            checked, noisy, stack_drafts(checked, slots, where)
        ),
    }


def reads_alike(rows: int, vocab: int, device: str, dtype: torch.dtype) -> Iterator[Bar]:
    """Tokens and scores that the kernels read, beside those of PyTorch on a CPU."""
    generator, whole = torch.Generator().manual_seed(0), slice(0, rows)
    logits = (torch.randn(rows, vocab, generator=generator) * 3).to(dtype)
    guess = logits[1:].float() + torch.randn(rows - 1, vocab, generator=generator)
    exact = readers_of(guess, "cpu", fused=False)
    for name, reader in readers_of(guess, device, fused=True).items():
        wanted, found = exact[name](logits.float(), whole), reader(logits.to(device), whole)
        same = found.tokens.cpu() == wanted.tokens
        what = f"{name} as the reference: share of equal tokens"
        yield Bar(what=what, value=float(same.float().mean()), limit=SAME, at_least=True)
        gaps = [(found.scores[score].cpu() - wanted.scores[score])[same].abs() for score in SCORES]
        what = f"{name} as the reference: scores"
        yield Bar(what=what, value=float(torch.cat(gaps).max()), limit=CLOSE)

"""`Runner`: a model with its cache, which runs packed passes and reads the wanted logits."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.attention.by_shape import backend_by_shape
from outpace.attention.choice import select_backend
from outpace.decoding import Kind, Prediction
from outpace.decoding.processor import BANNED_LOGIT, find_top_tokens
from outpace.decoding.sampling import GroupReader
from outpace.engine.adapters import PassAdapters
from outpace.engine.cache import PAGE_SIZE, PagedCache, PageTable, count_pages
from outpace.engine.cpu import has_compiled_products, pack_model
from outpace.engine.fuse import compile_layers
from outpace.engine.graphs import SCRATCH_SLOTS, GraphCache, PassRecorder
from outpace.engine.pack import PackedPass, ReadGroup, ScheduledForward, TransferBuffer, pack_pass
from outpace.engine.prefix import PrefixCache, token_pairs
from outpace.engine.prefix_store import PrefixStore
from outpace.engine.readout import (
    BlockPass,
    ChunkReader,
    HostTransfer,
    LaunchedPass,
    ReadChunk,
    apply_processors,
    chain_reader,
)
from outpace.engine.recurrent import RecurrentPass, blank_states
from outpace.kernels.loader import library_digest, spare_openmp
from outpace.measurements import cpu_model
from outpace.models.adapted import ModelUpdates
from outpace.models.attention import Attend
from outpace.models.draft import ChainedDraft
from outpace.models.int8 import is_quantized
from outpace.models.transformer import Stack
from outpace.version import __version__

LAYER_PAIRS = 2**24
"""Pairs of rows and the slots that they may see in a layer of ordinary size."""

MAX_REREAD_ROWS = 2 * PAGE_SIZE
"""Cached rows that run again at most, for hidden states that a draft lacks."""

LayerReport = Callable[[float], None]
"""Receives the size of a pass, in layers of ordinary size and at least 1, as its layers end."""


class CacheUsage(NamedTuple):
    """Pages and bytes of a model's cache, and rows skipped by its prefix cache, if any."""

    name: str
    held_pages: int
    total_pages: int
    total_bytes: int
    skipped_rows: int | None

    @property
    def tokens(self) -> int:
        """Number of tokens that fit."""
        return self.total_pages * PAGE_SIZE


def describe_caches(caches: Collection[CacheUsage]) -> str:
    """Return the tokens that fit into the caches of all models, and their memory."""
    size = sum(cache.total_bytes for cache in caches) / 2**30
    return f"cache of {min(cache.tokens for cache in caches):,} tokens ({size:.2f} GiB)"


class Runner:
    """Runs one model for all sequences that wait for it.

    Args:
        name: name of the model.
        model: the model.
        slots: size of the cache.
        sequences: most sequences that the cache holds at a time; None for any number.
        cache_dtype: data type of keys and values; by default that of the model.
        vocab: number of tokens; excludes padding rows of the embedding.
        read_rows: most rows whose logits are in memory at a time.
        prefix_cache: whether a causal model reuses the prefixes of earlier prompts.
        store: where its prefixes are kept that leave memory.
        weights: digest of the weights and of the options by which they are loaded.
        attention: attention back end (`attention/choice.py`).
        record: records passes as graphs (`graphs.py`); None runs them directly.
        compile: whether layers are compiled (`fuse.py`).
        adapters: updates of the adapters that sequences may use, by name.
    """

    def __init__(
        self,
        name: str,
        model: Stack,
        *,
        slots: int,
        sequences: int | None = None,
        cache_dtype: torch.dtype | None = None,
        vocab: int | None = None,
        read_rows: int = 256,
        prefix_cache: bool = True,
        store: PrefixStore | None = None,
        weights: str = "",
        attention: str = "auto",
        record: PassRecorder | None = None,
        compile: bool = False,
        adapters: Mapping[str, ModelUpdates] | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.config = model.config
        self.vocab = min(vocab or model.config.vocab, model.config.vocab)
        self.read_rows = read_rows
        weight = model.norm.weight
        self.device = weight.device
        self.uses_float32 = self.device.type == "cpu"
        """Whether all logits are converted to float32, which is fastest on a CPU."""
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        pack_model(model)
        self.has_compiled_products = has_compiled_products(model)
        if compile:
            compile_layers(model)
        self.cache = PagedCache(
            *(model.config, slots),
            dtype=cache_dtype or weight.dtype,
            device=self.device,
            scratch=SCRATCH_SLOTS if record else 0,
            sequences=sequences,
        )
        model.extend_rotary_tables(len(self.cache))
        # 8-bit activations: rounding that depends on the batch may change a whole code.
        double = is_quantized(model)
        self.backend = backend_by_shape(
            self.cache.keys,
            self.cache.values,
            self.config.windows,
            lambda keys, values, windows: select_backend(
                *(attention, keys, values, self.config.heads, windows),
                page=PAGE_SIZE,
                dtype=weight.dtype,
                double=double,
                pad_work=record is not None,
            ),
        )
        self.adapters = PassAdapters(model, adapters) if adapters else None
        self.graphs: GraphCache | None = None
        if record is not None and self.cache.scratch is not None:
            self.graphs = GraphCache(model, self.backend, self.cache.scratch, record)
        self.buffer = TransferBuffer(self.device, len(self.cache))
        self.prefix_cache = self.build_prefix_cache(store, weights) if prefix_cache else None
        self.seconds = 0.0
        """Time spent in the model, its head and its reads."""
        self.report: LayerReport | None = None
        """Called as each layer of a pass, or a chunk of its reads, begins."""
        self.pass_size = 1.0

    def build_prefix_cache(self, store: PrefixStore | None, weights: str) -> PrefixCache | None:
        """Create a prefix cache; None if the model cannot have one."""
        if self.config.kind is Kind.DIFFUSION:
            return None
        blank = partial(blank_states, self.config, self.model.norm.weight.dtype, self.device)
        return PrefixCache(
            self.cache,
            mask_id=self.config.mask_id,
            is_paired=self.config.kind is Kind.EAGLE,
            blank_states=None if self.config.delta is None else blank,
            store=store,
            identity="" if store is None else f"{weights} {self.numerics}",
        )

    @property
    def numerics(self) -> str:
        """What the bits of a page depend on, apart from its text and the weights."""
        is_gpu = self.device.type == "cuda"
        device = torch.cuda.get_device_name(self.device) if is_gpu else cpu_model()
        versions = __version__, library_digest(), torch.__version__
        machine = device, torch.get_num_threads()
        layouts = [(tuple(each.shape), each.layout) for each in self.model.parameters()]
        pages = [(tuple(each.shape), each.dtype) for each in self.cache.views(0)]
        return repr((versions, machine, self.config, layouts, pages))

    @property
    def cache_usage(self) -> CacheUsage:
        """Pages held and skipped rows of its cache."""
        skipped = None if self.prefix_cache is None else self.prefix_cache.stats.slots
        pages = self.cache.held_pages, self.cache.num_pages
        size = sum(memory.numel() * memory.itemsize for memory in self.cache.memories)
        return CacheUsage(self.name, *pages, size, skipped)

    def reserve(
        self, slots: int, adapter: str | None = None, text: Sequence[int] | None = None
    ) -> PageTable | None:
        """Return memory for a sequence, with its adapter; None where it is short.

        With its `text`, pages are reserved for that and the next token, apart from those that
        others hold. Without, all are.
        """
        if text is None:
            return self.cache.reserve(slots, adapter)
        needed = count_pages(min(len(text) + 1, slots))
        lacking = needed - self.cache.available
        if self.prefix_cache is not None and 0 < lacking <= self.cache.held_pages:
            needed -= self.prefix_cache.count_held(text, adapter)  # hashes the whole text
        return self.cache.reserve(slots, adapter, pages=needed)

    def release(self, table: PageTable, *, zero: bool = False) -> None:
        """Free the memory of a sequence; `zero` erases it where it may hold NaNs."""
        if zero:
            self.cache.zero_pages(table)
        self.cache.release(table)
        if self.prefix_cache is not None:
            self.prefix_cache.keep_pages(table)

    def apply_prefix_cache(
        self, forward: ScheduledForward, draft: tuple[Runner, PageTable] | None = None
    ) -> ScheduledForward:
        """Return a forward without the rows that the prefix cache holds.

        Where hidden states are wanted that the cache of the `draft` lacks for a few rows, these run
        again. Where it lacks more, only those before them are returned.

        Raises:
            CacheFullError: no page is free.
        """
        if self.prefix_cache is None:
            return forward
        forward = self.prefix_cache.trim_computed(forward)
        if splittable := forward.splittable_rows:
            cached, shared = self.reuse_cached_rows(forward, splittable, draft)
            if cached:
                missing, has_gap = forward.missing + shared, forward.has_gap or cached > shared
                forward = forward.split_at(cached)[1]
                forward.missing, forward.has_gap = missing, has_gap
        return forward

    def prepare_write(self, forward: ScheduledForward) -> None:
        """Take the pages that a forward writes; raise `CacheFullError` where none is free."""
        if self.prefix_cache is None:
            self.cache.extend(forward.table, forward.end)
            return
        rewrites = forward.first_slot < len(forward.table.cached_text)
        text = self.prefix_cache.cacheable_text(forward) if rewrites else ()
        self.prefix_cache.prepare_write(forward.table, forward.first_slot, forward.end, text)

    def reuse_cached_rows(
        self, forward: ScheduledForward, max_rows: int, draft: tuple[Runner, PageTable] | None
    ) -> tuple[int, int]:
        """Attach cached pages for up to `max_rows` leading rows.

        Returns their number, and that of those which the draft has too.
        """
        assert self.prefix_cache is not None
        own, start = forward.table, forward.start
        text = self.prefix_cache.cacheable_text(forward)
        if draft is None or forward.has_gap:
            return self.prefix_cache.reuse_rows(own, start, text, max_rows), 0
        draft_cache, table = draft[0].prefix_cache, draft[1]
        if draft_cache is None:
            return 0, 0
        draft_text = token_pairs(text) if draft_cache.is_paired else text
        shared = min(max_rows, draft_cache.count_cached(table, start, draft_text))
        found = shared
        # A prompt may have a gap at its beginning. A recurrent model cannot read it again.
        if not start and self.prefix_cache.blank_states is None:
            found = min(max_rows, self.prefix_cache.count_cached(own, start, text))
        rows = found if found - shared > MAX_REREAD_ROWS else shared
        cached = self.prefix_cache.reuse_rows(own, start, text, rows)
        if shared := min(cached, max(shared, 0)):
            draft_cache.reuse_rows(table, start, draft_text, shared)
            table.skipped_slots = start + shared
        return cached, shared

    @torch.inference_mode()
    def launch_pass(self, forwards: Sequence[ScheduledForward]) -> LaunchedPass:
        """Start one ragged pass over the forwards, without waiting for the device."""
        requested, began = forwards, time.perf_counter()
        pairs = sum(len(forward.ids) * forward.end for forward in forwards)
        self.pass_size = max(1.0, pairs / LAYER_PAIRS)
        if self.graphs is not None:
            forwards = self.graphs.pad_pass(forwards)
        packed = pack_pass(forwards, self.buffer, self.backend)
        computing = time.perf_counter()
        wanted = {layer for forward in forwards for layer in forward.layers}
        with (
            spare_openmp() if self.has_compiled_products else nullcontext(),
            nullcontext() if self.adapters is None else self.adapters.apply_to(forwards),
        ):
            hidden, captured = self.run_model(packed, wanted)
            for forward in forwards:
                forward.table.written = max(forward.table.written, forward.end)
            parts = self.read_chunks(hidden, forwards, packed)
        sent = HostTransfer(parts)
        features = self.collect_features(forwards, captured) if wanted else {}
        self.seconds += time.perf_counter() - computing
        return LaunchedPass(requested, packed.groups, parts, sent, features, began)

    def run_pass(self, forwards: Sequence[ScheduledForward]) -> list[Prediction]:
        """Return the predictions of a pass, in the order of the forwards.

        Raises:
            ArithmeticError: logits that are read are not finite.
        """
        return self.launch_pass(forwards).collect_predictions()

    def run_model(
        self, packed: PackedPass, layers: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return hidden states of the wanted rows, and those of some layers for all rows."""
        batch = packed.batch
        if self.graphs is not None and (states := self.graphs.run_pass(batch, layers)) is not None:
            hidden, captured = states
            return hidden if packed.wanted is None else hidden[packed.wanted], captured
        # On a CPU the last block skips rows without wanted logits, unless adapters count all rows.
        skips = self.device.type == "cpu" and not (self.adapters and self.adapters.is_active)
        within = packed.wanted if skips else None
        attend = self.report_layers(self.backend.plan_pass(batch))
        if self.config.delta is not None:
            copies = self.prefix_cache is not None and self.cache.has_state_room
            attend = RecurrentPass(attend, batch.spans, copies=copies)
        if self.config.convolution is not None:
            attend = BlockPass(attend, batch.spans, self.device)
        hidden, captured = self.model.capture_layers(
            batch.ids, batch.positions, attend, layers, within, batch.context, batch.features
        )
        if packed.wanted is not None and within is None:
            hidden = hidden[packed.wanted]
        return hidden, captured

    def report_layers(self, attend: Attend) -> Attend:
        """Return attention that reports each of its layers, where a report is wanted."""
        if (report := self.report) is None:
            return attend

        def attend_and_report(
            layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
        ) -> Tensor:
            report(self.pass_size)
            return attend(layer, q, k, v, sinks)

        return attend_and_report

    def read_chunks(
        self, hidden: Tensor, forwards: Sequence[ScheduledForward], packed: PackedPass
    ) -> list[ReadChunk]:
        """Run each type of read over its rows, in chunks whose logits fit into memory."""
        parts: list[ReadChunk] = []
        if self.adapters is not None:
            self.adapters.select_wanted(forwards, packed)
        first = 0
        draft = self.model if isinstance(self.model, ChainedDraft) else None
        for group in packed.groups:
            read: ChunkReader
            if draft is None:
                reader = group.kind.make_reader(group.reads, group.slots, self.device)
                read = partial(read_rows, group, forwards, reader)
            else:
                read = chain_reader(draft, group, forwards)
            exact = self.uses_float32 or group.keep or group.needs_all_rows or group.has_processors
            counts, whole = list(map(len, group.slots)), group.needs_all_rows or draft is not None
            for rows in split_chunks(counts, self.read_rows, whole=whole):
                if self.report is not None:
                    self.report(self.pass_size)
                own = slice(first + rows.start, first + rows.stop)
                logits = self.compute_logits(hidden, own, exact)
                parts.append(read(hidden[own], logits, rows))
            first += sum(counts)
        return parts

    def apply_head(self, hidden: Tensor, rows: slice) -> Tensor:
        """Return the logits `[r, V]` of some of the hidden states of a pass."""
        if self.adapters is not None:
            self.adapters.rows.begin = rows.start
        return self.model.compute_logits(hidden[rows])

    def compute_logits(self, hidden: Tensor, rows: slice, exact: bool) -> Tensor:
        """Return the logits of the first `vocab` tokens, the mask banned; float32 if `exact`."""
        logits = self.apply_head(hidden, rows)[:, : self.vocab]
        if exact:
            logits = logits.float()
        if self.config.mask_id is not None and self.config.mask_id < self.vocab:
            logits[:, self.config.mask_id] = max(BANNED_LOGIT, torch.finfo(logits.dtype).min)
        return logits

    def collect_features(
        self, forwards: Sequence[ScheduledForward], captured: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Return the wanted hidden states by index of the forward; zeros for skipped rows.

        They are copies, since those of a recorded pass are overwritten by the next one.
        """
        kinds = {forward.layers for forward in forwards if forward.layers}
        joined = {layers: torch.cat([captured[at] for at in layers], -1) for layers in kinds}
        sizes = [len(forward.ids) for forward in forwards]
        parts = {layers: states.split(sizes) for layers, states in joined.items()}
        found = {}
        for at, forward in enumerate(forwards):
            if forward.layers:
                rows = parts[forward.layers][at][: 0 if forward.has_gap else None]
                blank = rows.new_zeros(forward.missing, rows.shape[1]) if forward.missing else None
                found[at] = rows if blank is None else torch.cat((blank, rows))
        return found

    def register_prefix(self, written: Iterable[tuple[ScheduledForward, Sequence[int]]]) -> None:
        """Register what a pass has written in the prefix cache; ids are those of the request."""
        if self.prefix_cache is None:
            return
        for forward, ids in written:
            text, features = self.prefix_cache.cacheable_text(forward), forward.features
            if forward.context is not None:
                text = list(ids[forward.first_slot : forward.start])
            elif self.prefix_cache.is_paired and features is not None:
                is_target = features.shape[1] == self.config.feature_size
                text = token_pairs(ids[forward.start : forward.end + 1]) if is_target else []
            self.prefix_cache.register_text(forward.table, forward.first_slot, text)


def read_rows(
    group: ReadGroup,
    forwards: Sequence[ScheduledForward],
    reader: GroupReader,
    hidden: Tensor,
    logits: Tensor,
    rows: slice,
) -> ReadChunk:
    """Read a slice of a group's rows, each independently of the others, from their logits."""
    if group.has_processors:
        apply_processors(logits, rows, [forwards[index] for index in group.members])
    count = group.top_logprobs  # before a read, which may change the logits
    top = find_top_tokens(logits, count) if count else None
    return ReadChunk.from_readout(reader(logits, rows), logits, keep=group.keep, top=top)


def split_chunks(counts: Sequence[int], most: int, *, whole: bool) -> list[slice]:
    """Split consecutive reads into slices of at most `most` rows; `whole` reads are not cut."""
    total = sum(counts)
    if total <= most:
        return [slice(0, total)] if total else []
    if not whole:
        return [slice(begin, min(begin + most, total)) for begin in range(0, total, most)]
    found: list[slice] = []
    begin = end = 0
    for count in counts:
        if begin < end and end + count > begin + most:
            found.append(slice(begin, end))
            begin = end
        end += count
    return [*found, slice(begin, end)] if begin < end else found

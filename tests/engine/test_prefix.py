"""The prefix cache changes no token, leaks no page, and never shares a page for writing."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from helpers import (
    MASK,
    VOCAB,
    block_model,
    engine_of,
    enter,
    finish,
    pages_in_use,
    published,
    record_rows,
    runner,
    tokens,
)
from outpace.checkpoints.checkpoint import translate_config
from outpace.decoding import CAUSAL, FULL, Decoding, Forward, Sampling
from outpace.decoding import Request as Tokens
from outpace.engine import prefix_store
from outpace.engine.cache import PAGE_SIZE, CacheFullError, PagedCache, PageTable
from outpace.engine.engine import Engine
from outpace.engine.job import Job
from outpace.engine.prefix import TOKEN_BITS, PrefixCache
from outpace.engine.prefix_store import KEY_FILE, PrefixStore, list_files, open_key
from outpace.methods import (
    APD,
    D2F,
    Autoregressive,
    BlockDiffusion,
    DFlash,
    Eagle,
    Method,
    Speculative,
    WeDLM,
)
from refusal import refuses
from workload import Request, new_engine, serve

KINDS = [
    Autoregressive(),
    WeDLM(window=6, entropy=2.0),
    WeDLM(window=6, entropy=2.0, verify=True),
    BlockDiffusion(threshold=0.4),
    BlockDiffusion(verify=True, threshold=0.3),
    APD(verifier="causal", ratio=0.6, window=4, lookahead=9),
    Speculative(draft="near", tokens=3),
    DFlash(draft="features", tokens=3),
    Eagle(draft="states", width=2, depth=2, nodes=6),
    Eagle(draft="states", width=1, depth=2),
    DFlash(draft="added", tokens=3),
]
LONG = tuple(range(1, 22)) * 3
each_kind = pytest.mark.parametrize("method", KINDS, ids=lambda method: type(method).__name__)


def engine_with(*, on: bool = True, **limits: int) -> Engine:
    """Return an engine whose causal models reuse prefixes, or recompute everything."""
    engine = new_engine(**limits)
    for each in engine.runners:
        if each.prefix_cache is not None:
            paired = each.prefix_cache.is_paired
            fresh = PrefixCache(each.cache, mask_id=MASK, is_paired=paired)
            each.prefix_cache = fresh if on else None
    return engine


def rows_of(engine: Engine, name: str = "causal") -> list[int]:
    """Return a list that will hold the rows of each pass of a model."""
    return record_rows(runner(engine, name))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method", [*KINDS, D2F(confidence=0.6)], ids=lambda method: type(method).__name__
)
def test_200_prompts_with_common_prefixes(method: Method) -> None:
    rng = Random(7)
    stems = [tuple(rng.randint(1, VOCAB - 2) for _ in range(size)) for size in (20, 33, 48, 70)]
    batch = [
        Request(
            method=method,
            prompt=stem[: rng.randint(1, len(stem))] + tuple(rng.choices(range(1, 22), k=tail)),
            max_tokens=rng.randint(1, 12),
            sampling=Sampling(temperature=rng.choice([0.0, 1.0]), seed=rng.randint(0, 3)),
            arrives=rng.randint(0, 150),
        )
        for stem, tail in ((rng.choice(stems), rng.randint(0, 9)) for _ in range(200))
    ]
    plain, cached = (engine_with(on=on, slots=4096) for on in (False, True))
    assert serve(cached, batch) == serve(plain, batch)
    assert plain.prefix_stats == (0, 0)
    assert cached.prefix_stats.hits > 50
    assert cached.prefix_stats.slots >= PAGE_SIZE * cached.prefix_stats.hits
    assert pages_in_use(cached) == 0


@each_kind
def test_a_second_identical_prompt_computes_less_than_a_page(method: Method) -> None:
    for length in (15, 16, 17, 63):
        engine = engine_with()
        request = Request(method=method, prompt=LONG[:length], max_tokens=8)
        passes = rows_of(engine, "causal" if isinstance(method, APD) else request.roles["target"])
        before = serve(engine, [request])
        whole = passes[0]
        passes.clear()
        assert serve(engine, [request]) == before
        # What a draft stores of a slot may depend on the next token.
        known = length - isinstance(method, Eagle)
        assert whole - passes[0] > known - PAGE_SIZE
        assert engine.prefix_stats.hits >= (known >= PAGE_SIZE)


def stored_engine(folder: Path, weights: str = "", limit: int = 2**30) -> Engine:
    """Return an engine as after a restart, whose models keep their prefixes in a folder."""
    engine, store = new_engine(), PrefixStore(folder, limit)
    for each in engine.runners:
        if each.prefix_cache is not None:
            each.prefix_cache = each.build_prefix_cache(store, weights + each.name)
    return engine


def close_store(engine: Engine) -> None:
    store = runner(engine, "causal").prefix_cache.store
    assert store is not None
    store.close()


@each_kind
def test_prefixes_outlive_the_process(method: Method, tmp_path: Path) -> None:
    request = Request(method=method, prompt=LONG, max_tokens=8)
    name = "causal" if isinstance(method, APD) else request.roles["target"]
    first, second = stored_engine(tmp_path), stored_engine(tmp_path)  # two share the folder
    before = serve(first, [request])
    close_store(first)
    in_memory, stored = rows_of(first, name), rows_of(second, name)
    assert serve(first, [request]) == serve(second, [request]) == before
    assert stored == in_memory and second.prefix_stats == first.prefix_stats
    close_store(second)
    other = stored_engine(tmp_path, "other weights")
    assert serve(other, [request]) == before and other.prefix_stats.hits == 0
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("elsewhere")))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def exchange(path: Path) -> None:
    other = next(each for each in path.parent.glob("*.page") if each != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [cut, change, link, pipe, exchange])
def test_damaged_files_are_ignored_and_written_again(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request = Request(method=Autoregressive(), prompt=LONG, max_tokens=8)
    found = []
    for number in range(3):
        engine = stored_engine(tmp_path)
        before = serve(engine, [request])
        close_store(engine)
        found.append(engine.prefix_stats.slots)
        if number == 0:
            expected_ = before
            *_, (_, _, newest) = sorted(list_files(tmp_path))  # the first page of the text
            damage(newest)
        assert before == expected_
    assert found == [0, 0, 48]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    (tmp_path / KEY_FILE).write_bytes(bytes(32))
    assert serve(stored_engine(tmp_path), [request]) == expected_
    assert len(caplog.records) == 1


def test_a_full_disk_ends_the_writing_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls = stored_engine(tmp_path), []

    def fail(*_: object, **__: object) -> None:
        calls.append(1)
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    monkeypatch.setattr(prefix_store, "mkstemp", fail)
    request = Request(method=Autoregressive(), prompt=LONG, max_tokens=8)
    before = serve(engine, [request])
    close_store(engine)
    other = replace(request, prompt=LONG[::-1])
    assert serve(engine, [request, other]) == serve(engine_with(), [request, other])
    assert serve(engine, [request]) == before
    assert len(calls) == len(caplog.records) == 1 and not [*list_files(tmp_path)]


def test_a_folder_stays_below_its_limit(tmp_path: Path) -> None:
    engine = stored_engine(tmp_path)
    requests = [
        Request(method=Autoregressive(), prompt=(number, *LONG), max_tokens=4)
        for number in range(1, 5)
    ]
    serve(engine, requests[:1])
    close_store(engine)
    size = sum(size for _, size, _ in list_files(tmp_path))
    for request in requests:
        engine = stored_engine(tmp_path, limit=size * 2)
        serve(engine, [request])
        close_store(engine)
        assert sum(size for _, size, _ in list_files(tmp_path)) <= 2 * size
    engine = stored_engine(tmp_path)
    serve(engine, [requests[3], requests[0]])
    assert engine.prefix_stats.slots == 63  # the oldest is deleted, the newest is whole


@pytest.mark.parametrize("case", ["no folder", "public key", "short key", "linked key"])
def test_a_folder_that_cannot_be_used_is_refused(case: str, tmp_path: Path) -> None:
    key = tmp_path / KEY_FILE
    open_key(tmp_path)
    if case == "linked key":
        link(key)
    elif case == "short key":
        cut(key)
    elif case == "public key":
        key.chmod(0o644)
    with refuses("prefix_dir"):
        open_key(key / "below" if case == "no folder" else tmp_path)


@pytest.mark.parametrize(
    "method",
    [method for method in KINDS if isinstance(method, DFlash | Eagle)],
    ids=lambda method: type(method).__name__,
)
def test_prefix_of_a_target_whose_draft_lacks_it(method: Method) -> None:
    # A draft that lacks little reads it at once, and else the target first answers without it.
    for prompt, known, rows in (
        (LONG, 0, [15, 64]),
        (LONG * 2, 33, [14, 95]),
        (LONG[:20], 0, [20]),
    ):
        engine, plain = (engine_with(on=on) for on in (True, False))
        request = Request(method=method, prompt=prompt, max_tokens=8)
        name = request.roles["target"]
        rich = runner(engine, name)
        if known:
            serve(engine, [replace(request, prompt=prompt[:known])])
        enter(engine, Autoregressive(), prompt, runners={"target": rich}, max_tokens=4)
        finish(engine)
        passes, (expected_,) = rows_of(engine, name), serve(plain, [request])
        assert serve(engine, [request])[0][0] == expected_[0]
        assert passes[: len(rows)] == rows
        passes.clear()
        assert serve(engine, [request]) == [expected_]
        assert passes[0] == 1 + (len(prompt) - 1) % PAGE_SIZE


def test_answers_are_found_by_the_next_turn() -> None:
    engine = engine_with()
    method = Autoregressive()
    (answer, *_), *_ = serve(engine, [Request(method=method, prompt=LONG[:20], max_tokens=40)])
    talk = Request(method=method, prompt=(*LONG[:20], *answer, 3, 4), max_tokens=4)
    passes = rows_of(engine)
    assert serve(engine, [talk]) == serve(engine_with(on=False), [talk])
    assert passes[0] == (20 + len(answer) + 2) % PAGE_SIZE


CONVERSATIONS = {"alone": ([1], 152), "in turn": ([1, 2], 72), "with a short one": ([1, 2], 64)}
"""First tokens of some conversations, and the slots of a cache of 160 that each grows to."""


@pytest.mark.parametrize("kind", CONVERSATIONS)
@each_kind
def test_conversations_reuse_all_but_their_new_tokens(method: Method, kind: str) -> None:
    engine, plain = (engine_with(slots=160, on=on) for on in (True, False))
    begins, end = CONVERSATIONS[kind]
    texts = {begin: (begin, *LONG[:16]) for begin in begins}
    known = dict.fromkeys(texts, 0)
    while any(len(text) < end for text in texts.values()):
        for begin, text in texts.items():
            room = 160 - method.slots_needed(len(text), 0)  # the longest answer that is allowed
            on = "blocks" if isinstance(method, BlockDiffusion) else None
            request = Request(method=method, prompt=text, max_tokens=max(room, 1), on=on)
            answer, job = answer_of(engine, request)
            assert answer == answer_of(plain, request)[0]
            role = "verifier" if isinstance(method, APD) else "target"
            step = next(step for step in job.trace if step.model == role)
            assert step.cached > known[begin] - PAGE_SIZE
            known[begin] = len(text) - isinstance(method, Eagle)
            texts[begin] = (*text, *answer, 7, 8, 9, 10)
            if kind == "with a short one":
                answer_of(engine, replace(request, prompt=(3, 1, 4), max_tokens=4))


def answer_of(engine: Engine, request: Request) -> tuple[list[int], Job]:
    """Return the answer of a client that stops it after about four tokens."""
    job = request.submit(engine)
    while len(job.tokens) < 4 and not job.has_ended:
        assert engine.step()
    engine.cancel(job)
    return job.tokens, job


def test_a_page_that_its_owner_writes_again_is_not_found() -> None:
    class Again(Method):
        def decode(self, seq: Tokens) -> Decoding:
            yield Forward(ids=seq.ids, start=0)
            out = yield Forward(ids=[9, *seq.ids[1:]], start=0)
            while seq.commit(out.tokens):
                out = yield Forward(ids=seq.ids[-1:], start=len(seq) - 1)

    engine, plain = (engine_with(on=on) for on in (True, False))
    same = Request(method=Autoregressive(), prompt=LONG, arrives=4)
    other = Request(method=Autoregressive(), prompt=(9, *LONG[1:]), arrives=6)
    batch = [Request(method=Again(), prompt=LONG), same, other]
    assert serve(engine, batch) == serve(plain, batch)
    assert engine.prefix_stats.hits == 1


def test_shared_page_is_copied_on_write() -> None:
    cache = small_cache(4)
    prefix = PrefixCache(cache)
    ids = list(range(1, 20))
    first, second = (reserved(cache, 20) for _ in range(2))
    run(prefix, first, Forward(ids=ids, start=0))
    assert prefix.reuse_rows(second, 0, ids, rows=18) == PAGE_SIZE
    assert second.pages[0] == first.pages[0] and len(cache.free) == 2
    run(prefix, second, Forward(ids=[5], start=3))
    assert second.pages[0] != first.pages[0] and len(cache.free) == 1
    assert contents(cache, first, 19) == expected(ids)
    assert contents(cache, second, 4) == expected([*ids[:3], 5])


def test_a_failed_pass_leaves_nothing_to_be_found() -> None:
    engine = engine_with()
    each = runner(engine, "causal")
    capture = each.model.capture_layers
    each.model.capture_layers = lambda *_: 1 / 0
    job = Request(method=Autoregressive(), prompt=LONG).submit(engine)
    finish(engine)
    each.model.capture_layers = capture
    assert job.error is not None and not each.cache.pages_by_name
    assert pages_in_use(engine) == 0


def test_text_ends_at_masks_and_moved_rows_and_has_whole_blocks() -> None:
    prefix = PrefixCache(small_cache(1), mask_id=MASK)
    far = 1 << TOKEN_BITS
    first = [1 + 2 * far, 2 + far, 3]
    assert prefix.cacheable_text(Forward(ids=[1, 2, 3], start=4, pattern=(3,))) == first
    blocks = Forward(ids=[1, 2, 3, 4, 5], start=0, pattern=(3, 2))
    assert prefix.cacheable_text(blocks) == [*first, 4 + far, 5]
    assert prefix.cacheable_text(replace(blocks, ids=[1, 2, 3, MASK, 5])) == first
    assert prefix.cacheable_text(replace(blocks, ids=[1, 2, 3, 4, MASK])) == first
    assert prefix.cacheable_text(replace(blocks, ids=[1, MASK, 3, 4, 5])) == []
    assert prefix.cacheable_text(replace(blocks, visible_end=9)) == first
    assert prefix.cacheable_text(replace(blocks, positions=[0, 1, 2, 3, 7])) == first
    assert prefix.cacheable_text(Forward(ids=[1, 2, 3], start=0)) == [1, 2, 3]
    assert prefix.cacheable_text(Forward(ids=[1, MASK, 3], start=0)) == [1]
    assert prefix.cacheable_text(Forward(ids=[1, 2, 3], start=4, positions=[4, 5, 7])) == [1, 2]


def test_a_block_longer_than_a_page_is_found_by_all_of_it() -> None:
    models = {"wide": block_model(seed=3, block_size=32)}

    def served(prompt: tuple[int, ...], engine: Engine) -> tuple[list[int], int]:
        target = {"target": runner(engine, "wide")}
        job = enter(engine, BlockDiffusion(threshold=0.3), prompt, runners=target, max_tokens=12)
        finish(engine)
        return tokens(job), job.trace[0].rows

    def fresh(*, on: bool) -> Engine:
        engine = engine_of(*models.items())
        each = engine.runners[0]
        each.prefix_cache = PrefixCache(each.cache, mask_id=MASK) if on else None
        return engine

    first = LONG[:40]
    other = (*first[:20], 22, *first[21:])
    engine = fresh(on=True)
    passes = rows_of(engine, "wide")
    for prompt, saved in ((first, 0), (other, 0), (first, 32), (other, 64), (first[:35], 96)):
        assert served(prompt, engine) == served(prompt, fresh(on=False))
        assert engine.prefix_stats.slots == saved
    assert passes[0] == 52 and 52 - 32 in passes


def test_rows_that_saw_changed_tokens_are_dropped() -> None:
    prefix = PrefixCache(small_cache(4))
    table = reserved(prefix.cache, 40)
    whole = Forward(ids=list(range(1, 33)), start=0, pattern=(24, 8))
    prefix.prepare_write(table, 0, 32)
    prefix.register_text(table, 0, prefix.cacheable_text(whole))
    assert len(table.page_names) == 2
    prefix.prepare_write(table, 26, 32)
    assert (len(table.cached_text), len(table.page_names)) == (24, 1)
    prefix.prepare_write(table, 20, 24)
    assert not table.cached_text and not table.page_names
    assert len(prefix.cache.pages_by_name) == 1  # the first page is unchanged


CONFIG = translate_config(
    published(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
)


def small_cache(pages: int) -> PagedCache:
    cache = PagedCache(CONFIG, pages * PAGE_SIZE, dtype=torch.float64, device=torch.device("cpu"))
    cache.memories[0].fill_(-1)
    return cache


def reserved(cache: PagedCache, slots: int) -> PageTable:
    table = cache.reserve(slots)
    assert table is not None
    return table


def expected(ids: list[int], before: float = 0.0) -> list[float]:
    """Return the values that causal rows of these tokens write: one number per prefix."""
    values = []
    for token in ids:
        before = (before * 31 + token + 1) % 1_000_003
        values.append(before)
    return values


def contents(cache: PagedCache, table: PageTable, end: int) -> list[float]:
    return cache.memories[0][0, 0, torch.from_numpy(table.slots[:end]), 0, 0].tolist()


def run(prefix: PrefixCache, table: PageTable, forward: Forward) -> None:
    """Simulate a pass of one forward, without a model."""
    prefix.prepare_write(table, forward.start, forward.end, prefix.cacheable_text(forward))
    before = contents(prefix.cache, table, forward.start)[-1] if forward.start else 0.0
    values = expected(list(forward.ids), before)
    if forward.pattern != CAUSAL or forward.positions is not None:
        values = [-2.0] * len(values)
    slots = torch.from_numpy(table.slots[forward.start : forward.end])
    prefix.cache.memories[0][:, :, slots] = torch.tensor(values, dtype=torch.float64)[:, None, None]
    table.written = max(table.written, forward.end)
    prefix.register_text(table, forward.start, prefix.cacheable_text(forward))


class Prefixes(RuleBasedStateMachine):
    """Sequences of two tokens that are reserved, run, overwritten and released."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = small_cache(12)
        self.prefix = PrefixCache(self.cache, mask_id=MASK)
        self.tables: list[PageTable] = []

    @rule(slots=st.integers(1, 5 * PAGE_SIZE))
    def reserve(self, slots: int) -> None:
        available = self.cache.available
        table = self.cache.reserve(slots)
        assert (table is None) == (available < -(-slots // PAGE_SIZE))
        self.tables += [table] if table else []

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), bits=st.integers(0, 15), rows=st.integers(1, 60))
    def go_on(self, which: int, bits: int, rows: int) -> None:
        """Append text of a few kinds; cached rows do not run."""
        table = self.tables[which % len(self.tables)]
        start = len(table.cached_text)
        text = [
            1 + (bits >> (slot // 13) & 1) for slot in range(start, min(start + rows, table.size))
        ]
        if not text:
            return
        cut = self.prefix.reuse_rows(table, start, text, rows=len(text) - 1)
        assert 0 <= cut < len(text)
        self.write(table, Forward(ids=text[cut:], start=start + cut))

    @precondition(lambda self: self.tables)
    @rule(
        which=st.integers(0, 99),
        start=st.integers(0, 60),
        rows=st.integers(1, 20),
        kind=st.sampled_from(["text", "full", "moved", "masked"]),
    )
    def write_again(self, which: int, start: int, rows: int, kind: str) -> None:
        """Overwrite any written slots, causal or not."""
        table = self.tables[which % len(self.tables)]
        start = min(start, table.written)
        ids = [3 if kind != "masked" else MASK] * min(rows, table.size - start)
        if not ids:
            return
        moved = [start + 1 + i for i in range(len(ids))] if kind == "moved" else None
        pattern = FULL if kind == "full" else CAUSAL
        self.write(table, Forward(ids=ids, start=start, pattern=pattern, positions=moved))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), start=st.integers(0, 60))
    def feed_again(self, which: int, start: int) -> None:
        """Run recorded text again, with one more token: it stays recorded and shared."""
        table = self.tables[which % len(self.tables)]
        text, names = list(table.cached_text[start:]), list(table.page_names)
        if not text or len(table.cached_text) == table.size:
            return
        pages = table.pages[: len(table.cached_text) // PAGE_SIZE]
        shared = [self.cache.reference_counts[page] for page in pages]
        self.write(table, Forward(ids=[*text, 1], start=start))
        if table in self.tables:
            assert table.page_names[: len(names)] == names
            pages = table.pages[: len(shared)]
            assert [self.cache.reference_counts[page] for page in pages] == shared

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        self.cache.release(self.tables.pop(which % len(self.tables)))

    def write(self, table: PageTable, forward: Forward) -> None:
        """Run, unless memory is short."""
        try:
            run(self.prefix, table, forward)
        except CacheFullError:
            assert not self.cache.available  # a shared page would be copied
            self.tables.remove(table)
            self.cache.release(table)

    @invariant()
    def every_page_is_counted(self) -> None:
        counts = [0] * self.cache.num_pages
        for table in self.tables:
            for page in table.pages:
                counts[page] += 1
        assert self.cache.reference_counts == counts
        assert sorted(self.cache.free) == [page for page, count in enumerate(counts) if not count]
        assert self.cache.promised == sum(table.promised for table in self.tables)
        assert self.cache.available >= 0

    @invariant()
    def what_is_known_is_there(self) -> None:
        for table in self.tables:
            text = table.cached_text
            assert contents(self.cache, table, len(text)) == expected(text)
            assert len(table.page_names) == len(table.cached_text) // PAGE_SIZE
            assert len(table.cached_text) <= table.written

    @invariant()
    def names_and_pages_belong_together(self) -> None:
        names = {page: name for name, page in self.cache.pages_by_name.items()}
        assert names == self.cache.names_by_page
        named = [page in self.cache.names_by_page for page in self.cache.free]
        assert named == sorted(named)


Prefixes.TestCase.settings = settings(stateful_step_count=30)
TestPrefixes = Prefixes.TestCase

"""Allocation and release of pages, and the memory available to them."""

import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import published
from outpace.checkpoints.checkpoint import translate_config
from outpace.engine import memory as host
from outpace.engine.cache import (
    PAGE_SIZE,
    USUAL_BYTES,
    PagedCache,
    PageTable,
    cache_bytes,
    check_memory,
    slot_bytes,
)
from refusal import refuses

CONFIG, CPU = translate_config(published()), torch.device("cpu")


def cache(pages: int = 8) -> PagedCache:
    return PagedCache(CONFIG, pages * PAGE_SIZE, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unwritten_memory_is_zero(dtype: torch.dtype) -> None:
    memory = PagedCache(CONFIG, 4 * PAGE_SIZE, dtype=dtype, device=CPU).memories[0]
    assert memory.dtype == dtype and not memory.any()


def test_nan_pages_are_erased() -> None:
    memory = cache(4)
    first, second = memory.reserve(2 * PAGE_SIZE), memory.reserve(PAGE_SIZE)
    assert first and second
    memory.extend(first, first.size)
    memory.extend(second, second.size)
    memory.memories[0].fill_(torch.nan)
    memory.name_page(first.pages[0], b"name")
    memory.reference_counts[first.pages[1]] += 1
    memory.zero_pages(first)
    assert not memory.pages_by_name
    kept = [bool(memory.keys[0][page * PAGE_SIZE].isnan().any()) for page in range(3)]
    assert kept == [False, True, True]


@given(st.lists(st.one_of(st.integers(1, 5 * PAGE_SIZE), st.integers(-9, -1)), max_size=40))
def test_no_page_is_held_twice(turns: list[int]) -> None:
    memory = cache(8)
    held: list[PageTable] = []
    for turn in turns:
        if turn > 0:
            available = memory.available
            table = memory.reserve(turn)
            assert (table is None) == (-(-turn // PAGE_SIZE) > available)
            held += [table] if table else []
        elif held:
            table = held.pop(turn % len(held))
            memory.extend(table, table.size)  # its pages are promised
            if turn % 2:
                memory.release(table)
            else:
                held.append(table)
        pages = [page for table in held for page in table.pages]
        assert len(pages) == len(set(pages)) == memory.held_pages


def test_oldest_pages_are_reused_first() -> None:
    for order, expected in (((4, 5, 6, 0, 1, 2, 3), [4, 5]), ((4, 6, 0, 2), [4, 6])):
        memory = cache(7)
        tables = [memory.reserve(PAGE_SIZE) for _ in range(7)]
        for table in tables:
            assert table is not None
            memory.extend(table, PAGE_SIZE)
        for index in order:
            tables[index].page_names.append(bytes([index]))
            memory.release(tables[index])
        table = memory.reserve(2 * PAGE_SIZE)
        assert table is not None
        memory.extend(table, table.size)
        assert table.pages == expected


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_taken_as_it_is_written() -> None:
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if huge_pages.exists() and "[always]" in huge_pages.read_text():
        pytest.skip("this system maps huge pages everywhere")
    slots = 2**22 // (CONFIG.head_dim * 4)
    large = PagedCache(CONFIG, slots, dtype=torch.float32, device=CPU)
    before = resident_bytes()
    large.memories[0][:, :, :1] = 1.0
    parts = 2 * CONFIG.layers * CONFIG.kv_heads
    assert resident_bytes() - before < parts * 2**16 + 2**20 < parts * 2**21


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# Memory that a system has.


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a computer with 3 MiB of available memory."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 3072 kB\n")
    monkeypatch.setattr(host, "MEMORY_FILE", tmp_path / "meminfo")
    monkeypatch.setattr(host, "GROUP_FILE", tmp_path / "cgroup")
    monkeypatch.setattr(host, "GROUP_FOLDER", tmp_path / "groups")
    return tmp_path


def limit_group(folder: Path, limit: str, used: int, files: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {files}\n")


def test_default_caches_take_at_most_a_quarter_of_the_usable_memory(system: Path) -> None:
    config = replace(CONFIG, max_length=2**20)
    wanted = config.max_length * slot_bytes(config, torch.float16)
    assert host.usable_bytes(CPU) == 9000 * 1024
    assert cache_bytes(None, CPU, context=wanted) == 9000 * 1024 // 4
    assert cache_bytes(None, CPU, context=wanted, share=0.5) == 9000 * 1024 // 8
    (system / "cgroup").write_text("0::/a\n")
    limit_group(system / "groups" / "a", "1000000", 400_000, 0)
    assert cache_bytes(None, CPU, context=wanted) == 250_000
    (system / "meminfo").write_text(f"MemTotal: {2**30} kB\n")
    (system / "cgroup").write_text("")
    assert cache_bytes(None, CPU, context=1) == USUAL_BYTES
    assert cache_bytes(None, CPU, context=wanted * 2**10) == wanted * 2**10
    assert cache_bytes(0.5, CPU, context=wanted) == 2**29
    for gib, length, option in ((600.0, None, "cache_gib"), (None, 2**38, "max_length")):
        with refuses(option):
            check_memory(gib, length, [4, 4], CPU)
    check_memory(500.0, 2**37, [4, 4], CPU)


def test_available_memory_is_the_least(system: Path) -> None:
    assert host.available_bytes(CPU) == 3 * 2**20
    (system / "cgroup").write_text("1:name=systemd:/other\n0::/a/b\n")
    assert host.available_bytes(CPU) == 3 * 2**20
    limit_group(system / "groups" / "a" / "b", "max", 10, 0)
    limit_group(system / "groups" / "a", "1000000", 400_000, 150_000)
    assert host.available_bytes(CPU) == 750_000
    limit_group(system / "groups" / "a" / "b", "500000", 400_000, 0)
    assert host.available_bytes(CPU) == 100_000

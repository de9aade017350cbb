"""Drafts of published models, and which of them are on this machine."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from outpace.checkpoints.fingerprint import digest_weights
from outpace.checkpoints.hub import CONFIG_FILE, find_checkpoint, is_local, own_store
from outpace.errors import OptionError

AUTO_DRAFT = "auto"
"""Value of the option `draft` that selects a published draft of the target."""

KNOWN_DRAFTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "dflash": {
        "tiny-ar": ("tiny-dflash",),
        "Qwen/Qwen2.5-Coder-0.5B-Instruct": ("drafts/qwen2.5-coder-0.5b-dflash",),
        "HuggingFaceTB/SmolLM2-135M-Instruct": ("drafts/smollm2-135m-dflash",),
        "Qwen/Qwen3-4B": ("z-lab/Qwen3-4B-DFlash-b16", "deepseek-ai/dspark_qwen3_4b_block7"),
        "Qwen/Qwen3-8B": ("z-lab/Qwen3-8B-DFlash-b16", "deepseek-ai/dspark_qwen3_8b_block7"),
        "Qwen/Qwen3-14B": ("deepseek-ai/dspark_qwen3_14b_block7",),
        "Qwen/Qwen3-Coder-30B-A3B-Instruct": ("z-lab/Qwen3-Coder-30B-A3B-DFlash",),
        "Qwen/Qwen3-Coder-Next": ("z-lab/Qwen3-Coder-Next-DFlash",),
        "Qwen/Qwen3.5-4B": ("z-lab/Qwen3.5-4B-DFlash",),
        "Qwen/Qwen3.5-9B": ("z-lab/Qwen3.5-9B-DFlash",),
        "Qwen/Qwen3.5-27B": ("z-lab/Qwen3.5-27B-DFlash",),
        "Qwen/Qwen3.5-35B-A3B": ("z-lab/Qwen3.5-35B-A3B-DFlash",),
        "Qwen/Qwen3.5-122B-A10B": ("z-lab/Qwen3.5-122B-A10B-DFlash",),
        "Qwen/Qwen3.6-27B": ("z-lab/Qwen3.6-27B-DFlash",),
        "Qwen/Qwen3.6-35B-A3B": ("z-lab/Qwen3.6-35B-A3B-DFlash",),
        "Qwen/Qwen3.8-27B": ("z-lab/Qwen3.8-27B-DFlash2",),
        "meta-llama/Llama-3.1-8B-Instruct": ("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",),
        "moonshotai/Kimi-K2.5": ("z-lab/Kimi-K2.5-DFlash",),
        "openai/gpt-oss-20b": ("z-lab/gpt-oss-20b-DFlash",),
        "openai/gpt-oss-120b": ("z-lab/gpt-oss-120b-DFlash",),
    },
    "eagle": {"tiny-ar": ("tiny-eagle",)},
    "speculative": {
        "tiny-ar": ("tiny-aux",),
        "Qwen/Qwen2.5-7B-Instruct": ("Qwen/Qwen2.5-0.5B-Instruct",),
        "Qwen/Qwen3-8B": ("Qwen/Qwen3-0.6B",),
        "meta-llama/Llama-3.1-8B-Instruct": ("meta-llama/Llama-3.2-1B-Instruct",),
    },
}
"""Drafts of each method by the name of their target; those in `drafts/` are of this project."""

TARGET_DIGESTS: Mapping[str, str] = {
    "f8daf834e5225ad3": "Qwen/Qwen2.5-Coder-0.5B-Instruct",  # its Q4_K_M by Qwen
    "12c759be79707eda": "HuggingFaceTB/SmolLM2-135M-Instruct",  # in Q4_1
}
"""Names of targets by the digest of their weights, so that a file may have any name."""


@dataclass(frozen=True)
class TaskSpeed:
    """What a draft gains at a task."""

    task: str
    accepted: float
    """Acceptance length of the draft with `lookup=true`."""
    draft: float
    """Speed of the draft with `lookup=true`, of plain decoding."""
    lookup: float
    """Speed of `lookup` alone, of plain decoding."""


DRAFT_SPEEDS: Mapping[str, tuple[TaskSpeed, ...]] = {
    "drafts/qwen2.5-coder-0.5b-dflash": (
        TaskSpeed("HumanEval", 5.14, 2.71, 2.13),
        TaskSpeed("GSM8K", 2.85, 1.9, 1.33),
        TaskSpeed("prose", 2.26, 1.55, 1.4),
    ),
    "drafts/smollm2-135m-dflash": (
        TaskSpeed("HumanEval", 2.43, 1.44, 1.4),
        TaskSpeed("GSM8K", 2.39, 1.58, 1.55),
        TaskSpeed("prose", 1.92, 1.76, 1.8),
    ),
}
"""Measured drafts: a thread with AVX512, Q4_K_M, the second in 8 bits
(benchmarks/results/dflash-table1-small-*.json)."""

MIN_GAIN = 1.05
"""Least speed over `lookup` of a default draft: it also takes memory, and reads long prompts."""


@dataclass(frozen=True)
class LocalDraft:
    """A draft on this machine."""

    method: str
    name: str
    """Name in `KNOWN_DRAFTS`."""
    place: str
    """Name or path that loads it."""

    @property
    def speeds(self) -> tuple[TaskSpeed, ...]:
        """What was measured, empty if nothing was."""
        return DRAFT_SPEEDS.get(self.name, ())

    @property
    def is_default(self) -> bool:
        """Whether it decodes by default: it clearly exceeds `lookup` at every task of `speeds`."""
        return all(speed.draft >= MIN_GAIN * speed.lookup for speed in self.speeds)

    @property
    def flags(self) -> str:
        """Flags that select the draft."""
        return f"--method {self.method} --draft {self.place} --lookup true"

    def describe(self, target: str) -> str:
        """Describe in one line that it decodes a target or how to select it, and what it gains."""
        if self.is_default:
            line = f"{target}: drafts by {self.place}; --method lookup decodes without it"
        else:
            line = f"{target}: has a draft, not used by default: {self.flags}"
        if not self.speeds:
            return line
        speeds = ", ".join(f"{s.task} {s.draft:.2f} ({s.lookup:.2f})" for s in self.speeds)
        return f"{line}; speed over plain decoding (with lookup alone): {speeds}"


def target_names(target: str | Path) -> set[str]:
    """Return the names of a target in lower case: its own, and that of its weights if listed."""
    names = {Path(target).name.lower()}
    found = find_checkpoint(target)
    if found is not None and (found.is_dir() or found.is_file()):
        listed = TARGET_DIGESTS.get(digest_weights(found))
        names |= {Path(listed).name.lower()} if listed else set()
    return names


def known_drafts(names: Container[str], method: str) -> tuple[str, ...]:
    """Return the published drafts of a method for a target, by its names."""
    targets = KNOWN_DRAFTS.get(method, {}).items()
    return tuple(
        draft for known, drafts in targets for draft in drafts if Path(known).name.lower() in names
    )


def is_own_draft(name: str) -> bool:
    """Return whether a known draft is one of this project, a folder and no hub name."""
    return name.startswith("drafts/")


def draft_places(name: str) -> Iterator[str]:
    """Yield where a draft of this project may be: here, in the clone, in the folder of models."""
    clone = Path(__file__).parents[3]
    for folder in (Path(), clone, own_store().root):
        yield str(folder / name)


def place_of(draft: str) -> str | None:
    """Return the name or path that loads a known draft without a download, if any does."""
    if is_own_draft(draft):
        places = draft_places(draft)
        return next((p for p in places if os.path.isfile(Path(p) / CONFIG_FILE)), None)
    return draft if is_local(draft) else None


LOSSLESS_DRAFTING = ("dflash", "eagle", "speculative")
"""Methods with a draft, by how much they usually gain."""


def local_drafts(
    target: str | Path, methods: Iterable[str] = LOSSLESS_DRAFTING
) -> Iterator[LocalDraft]:
    """Yield the drafts for a target on this machine, in the order of methods."""
    names = target_names(target)
    for method in methods:
        for name in known_drafts(names, method):
            if (place := place_of(name)) is not None:
                yield LocalDraft(method, name, place)


def best_local_draft(target: str | Path) -> LocalDraft | None:
    """Return the first draft on this machine that decodes a target by default, or else the first.

    None if there is none.
    """
    return min(local_drafts(target), key=lambda each: not each.is_default, default=None)


def list_own_drafts() -> Iterator[tuple[str, LocalDraft]]:
    """Yield the drafts of this project that are on this machine, with their targets."""
    for method, targets in KNOWN_DRAFTS.items():
        for target, drafts in targets.items():
            for name in filter(is_own_draft, drafts):
                if (place := place_of(name)) is not None:
                    yield target, LocalDraft(method, name, place)


def find_local_draft(target: str | Path, method: str) -> str:
    """Return the first published draft for a target that is on this machine, without a download."""
    if (found := next(local_drafts(target, [method]), None)) is not None:
        return found.place
    if not (known := known_drafts(target_names(target), method)):
        raise OptionError(
            "draft", AUTO_DRAFT, f"no draft of {method} for {str(target)!r} is published: give one"
        )
    raise OptionError(
        "draft",
        AUTO_DRAFT,
        f"{AUTO_DRAFT!r} downloads nothing, and no published draft of {method} for {str(target)!r}"
        f" ({', '.join(known)}) is on this machine: give draft={known[0]!r} to download it",
    )

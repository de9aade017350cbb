"""Vocabulary of a new draft: the tokens that its head covers, and the head's initial weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch

from outpace.models.draft import Draft
from outpace.training.data import Examples
from outpace.training.folder import write_atomically
from outpace.training.weights import head_rows

COUNTED_EXAMPLES = 20_000
"""Examples whose tokens are counted."""

TOKENS_FILE = "draft_tokens.json"
"""File of the covered tokens in the folder of a run, so that a resumed run has the same."""


def choose_vocabulary(draft: Draft, examples: Examples, out: Path) -> None:
    """Let the head of a new draft cover the most frequent tokens of responses.

    The head starts with the target's rows of these tokens.
    """
    path = out / TOKENS_FILE
    if path.exists():
        tokens = read_tokens(path, draft)
    else:
        tokens = frequent_tokens(examples, draft.config.draft_vocab, draft.config.vocab)
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(tokens) + "\n")
    draft.set_head_tokens(torch.tensor(tokens))
    assert draft.unembedding is not None
    with torch.no_grad():
        draft.unembedding.weight.copy_(head_rows(draft.lender[0], torch.tensor(tokens)))


def frequent_tokens(examples: Examples, count: int, vocab: int) -> list[int]:
    """Return the most frequent tokens of responses, in ascending order; then the first others."""
    total = examples.epoch_size or COUNTED_EXAMPLES
    counts = Counter[int]()
    for number in range(min(total, COUNTED_EXAMPLES)):
        counts.update(examples[number].response)
    return sorted(sorted(range(vocab), key=lambda token: (-counts[token], token))[:count])


def read_tokens(path: Path, draft: Draft) -> list[int]:
    """Read the covered tokens of a run; `ValueError` if they are not those of such a draft."""
    try:
        tokens = [int(token) for token in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged; delete this run") from error
    in_range = all(0 <= token < draft.config.vocab for token in tokens)
    if not in_range or len({*tokens}) != draft.config.draft_vocab:
        raise ValueError(
            f"{path} has {len({*tokens})} tokens, but draft_vocab_size is "
            f"{draft.config.draft_vocab}; give another out, or delete that run"
        )
    return tokens

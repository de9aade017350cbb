"""Train the zoo's small vocabulary: byte-level BPE on stories, split as Qwen2 does.

python benchmarks/vocabulary.py FOLDER
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from outpace.data.generated.story import draw_drill, story_problems

END_TOKEN, MASK_TOKEN = "<|endoftext|>", "<|mask|>"
SPECIAL_TOKENS = (END_TOKEN, MASK_TOKEN, "<|im_start|>", "<|im_end|>")

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{{ message.content + '\\n' }}"
    "{% elif message.role == 'assistant' %}{{ message.content + eos_token + '\\n' }}"
    "{% endif %}{% endfor %}"
)


def build_tokenizer(texts: Iterable[str], vocab: int = 1024) -> Tokenizer:
    """Train a tokenizer of exactly `vocab` tokens, the special ones last."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = Sequence(
        [
            Split(Regex(QWEN2_WORDS), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab - len(SPECIAL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    if (size := tokenizer.get_vocab_size()) != vocab:
        raise ValueError(f"vocab={vocab}, but the texts give {size} tokens: reduce it, or add text")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that `transformers.AutoTokenizer` loads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "pad_token": END_TOKEN,
        "mask_token": MASK_TOKEN,
        "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def story_texts(count: int = 20_000) -> Iterator[str]:
    """Yield the text from which the vocabulary is trained: training problems and drills."""
    for problem in story_problems("train", count):
        yield f"{problem.question}\n{problem.answer}"
    rng = Random(0)
    for _ in range(count // 10):
        yield draw_drill(rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the tokenizer")
    save_tokenizer(build_tokenizer(story_texts()), parser.parse_args().folder)


if __name__ == "__main__":
    main()

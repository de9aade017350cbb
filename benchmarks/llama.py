"""llama.cpp beside us: a checkpoint in its format, and a step of its decoder.

Needs the extra `llama`: `gguf` to write, and `llama-cpp-python` to run.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

FORMATS = {"f32": "F32", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
"""What all matrices are kept in."""

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Their names of the tensors of a Qwen2 model."""

CONTEXT = 512
"""Slots of a sequence."""


def available() -> str | None:
    """Why llama.cpp cannot be measured here; None where it can."""
    try:
        import gguf  # noqa: F401
        import llama_cpp  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        return str(error)
    return None


def named(name: str) -> str:
    """A published tensor as they call it."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a checkpoint in float32, by their names."""
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - a safetensors file is no mapping
            yield named(name), opened.get_tensor(name).float().numpy()


def write(folder: Path, kind: str, path: Path) -> Path:
    """A Qwen2 checkpoint with tied embeddings as a GGUF file, whose tokens have made-up names."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    tokens = ["t0", "t", "0", *(f"t{index}" for index in range(3, config["vocab_size"]))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["t 0"])
    matrix = gguf.GGMLQuantizationType[FORMATS[kind]]
    for name, tensor in tensors(folder):
        if tensor.ndim == 1 or kind == "f32":
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, matrix), raw_dtype=matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def built() -> dict[str, str]:
    """Which llama.cpp this is, and what of the processor it was built for."""
    import llama_cpp

    system = llama_cpp.llama_print_system_info().decode()
    return {"llama-cpp-python": llama_cpp.__version__, "system": system}


def stepper(path: Path, prompt: Sequence[int], most: int) -> Callable[[Sequence[int]], list[int]]:
    """What feeds rows behind a prompt, at most so many, and says the likeliest token after each."""
    feed = decoder(path, most=max(most, len(prompt)))
    feed([prompt], 0)
    return lambda rows: feed([rows], len(prompt))


def together(
    path: Path, prompts: Sequence[Sequence[int]], length: int
) -> Callable[[Sequence[int]], list[int]]:
    """The same with a row of each of several sequences, whose prompts have one length."""
    feed = decoder(path, most=max(len(prompts), length), sequences=len(prompts))
    for number, prompt in enumerate(prompts):
        feed([[]] * number + [prompt], 0)
    return lambda rows: feed([[row] for row in rows], length)


def decoder(
    path: Path, *, most: int, sequences: int = 1, slots: int = CONTEXT
) -> Callable[..., list[int]]:
    """What feeds rows of some sequences from a slot on, `most` in all; the likeliest tokens.

    With `last`, only those after the last row of each sequence.

    Logits are read where they lie: `Llama.eval` would copy them.
    """
    import llama_cpp
    from llama_cpp._logger import set_verbose

    set_verbose(False)
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = slots * sequences, sequences
    settings.n_batch = settings.n_ubatch = most
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise RuntimeError(f"llama.cpp cannot decode {path} for {sequences} sequences")
    memory = llama_cpp.llama_get_memory(context)
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(most, 0, 1)

    def feed(given: Sequence[Sequence[int]], start: int, *, last: bool = False) -> list[int]:
        threads = torch.get_num_threads()
        llama_cpp.llama_set_n_threads(context, threads, threads)
        batch.n_tokens = sum(map(len, given))
        place = 0
        for number, rows in enumerate(given):
            if rows:
                llama_cpp.llama_memory_seq_rm(memory, number, start, -1)
            for slot, token in enumerate(rows, start):
                batch.token[place], batch.pos[place] = token, slot
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, number
                batch.logits[place] = not last or slot == start + len(rows) - 1
                place += 1
        if code := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama.cpp gave up a pass of {place} rows with code {code}")
        logits = llama_cpp.llama_get_logits(context)
        read = len(given) if last else place
        tokens: list[int] = np.ctypeslib.as_array(logits, (read, size)).argmax(-1).tolist()
        return tokens

    def close() -> None:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)

    weakref.finalize(feed, close)
    return feed

"""Commands of full scale through to the table: published configurations, small random weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from outpace.checkpoints.checkpoint import translate_config
from outpace.checkpoints.hub import ZOO_TOKENIZER
from outpace.checkpoints.load import save_model
from outpace.decoding.target import DRAFT_KINDS
from outpace.lab.reproduce.figure import find
from outpace.models.extending import build_draft_model
from outpace.models.transformer import Transformer

GOLDEN = Path(__file__).parents[1] / "golden"
PUBLISHED = json.loads((GOLDEN / "configs.json").read_text())
OTHERS = {
    "Dream-v0-Base-7B": "Dream-v0-Instruct-7B",
    "Qwen2.5-0.5B": "Qwen2-0.5B",
    "Qwen2.5-7B": "Qwen2.5-7B-Instruct",
    "Qwen3-4B": "Qwen3-8B",
    "Meta-Llama-3-8B-Instruct": "Meta-Llama-3-8B",
    "WeDLM-8B-Instruct": "WeDLM-8B",
    "Qwen3-8B_eagle3": "Kimi-K25-eagle3",
    "Llama-3.1-8B-Instruct-speculator.eagle3": "Kimi-K25-eagle3",
    "Qwen3-4B-DFlash-b16": "Qwen3-8B-DFlash-b16",
    "LLaMA3.1-8B-Instruct-DFlash-UltraChat": "Qwen3-8B-DFlash-b16",
}
"""Published configurations that differ in sizes or tokens alone."""
ADAPTERS = {
    "D2F_Dream_Base_7B_Lora": GOLDEN / "d2f" / "dream_tiny_lora",
    "D2F_LLaDA_Instruct_8B_Lora": GOLDEN / "d2f" / "llada_tiny_lora",
}
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "intermediate_size", "mlp_hidden_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_target_layers", "max_window_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("vocab_size", "embedding_size", "draft_vocab_size"), 1024),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1020),
    "head_dim": 16,
    "mask_token_id": 1021,
    "layer_types": ["full_attention"] * 3,
    "dflash_config": {"mask_token_id": 1021, "target_layer_ids": [0, 1, 2]},
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}
LINES = {
    "gsm8k": {"question": "1?", "answer": "#### 2"},
    "mbpp": {"text": "1?", "code": "def f(): ...", "test_list": ["assert not f()"]},
    "math500": {"problem": "1?", "solution": "2", "answer": "2"},
    "mtbench": {"turns": ["1?"]},
}
TEMPLATE = "{{ messages[-1]['content'] }}{% if not enable_thinking %}<think>{% endif %}"
FIGURES = (
    *("apd:table1", "apd:figure3", "apd:figure5", "d2f:tables", "d2f:llada", "d2f:tradeoff"),
    *("apd:math", "apd:prose", "d2f:tables-mbpp", "d2f:tradeoff-mbpp"),
    *("d2f:table3", "dflash:table1", "dflash:llama-sampled", "dflash:thinking", "dflash:block"),
    "wedlm:figure1",
)


def small_config(name: str) -> Any:
    fields = PUBLISHED[OTHERS.get(name, name)]
    small = {key: SMALL.get(key, value) for key, value in fields.items()}
    if "num_hidden_layers" in fields:
        small["num_hidden_layers"] = min(3, fields["num_hidden_layers"])
    if name.startswith("WeDLM"):
        small["mask_token_id"] = 1021  # that of the family is outside this vocabulary
    return translate_config(small)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes a checkpoint with published fields, except for sizes."""
    root = tmp_path_factory.mktemp("hub")

    def download(repository: str, **_: Any) -> str:
        name = repository.partition("/")[2]
        if name in ADAPTERS:
            return str(ADAPTERS[name])
        if not (root / name).exists():
            config, target = small_config(name), Transformer(small_config("Qwen3-8B"))
            is_draft = config.kind in DRAFT_KINDS
            model = build_draft_model(config, target) if is_draft else Transformer(config)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
            save_model(model, root / name, dtype=torch.float32)
            shutil.copytree(ZOO_TOKENIZER, root / name, dirs_exist_ok=True)
            if "Qwen3" in name:
                (root / name / "chat_template.jinja").write_text(TEMPLATE)
        return str(root / name)

    return download


@pytest.mark.nightly
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_of_full_scale_ends_in_its_table(outpace, hub, tmp_path, monkeypatch, name):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    monkeypatch.setattr("outpace.engine.memory.available_bytes", lambda device: 2**40)
    (figure,) = find(name)
    (plan,) = figure.scales["full"]
    file = tmp_path / "test.jsonl"
    file.write_text((json.dumps(LINES[plan.task]) + "\n") * 8)
    words = ["reproduce", name, "--scale", "full", "--limit", 1, "--data", file, "--out", tmp_path]
    is_short = figure.paper == "apd" and figure.name != "math"
    length = 96 if is_short else 448 if plan.task == "mbpp" else 192
    words += ["--cache-gib", 0.1, "--max-length", length]
    words += ["--shots", file] if plan.setting().shots else []
    status, out, err = outpace(*words)
    assert status == 0, err
    written = json.loads((tmp_path / f"{figure.file('full', plan)}.json").read_text())
    assert [each["problems"] for each in written["results"]] == [1] * len(plan.every)
    assert len(written["claims"]) == len(figure.claims_at("full"))

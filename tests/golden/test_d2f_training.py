"""Schedules, masks, losses, gradients and optimizer steps of the D2F authors' training."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outpace.attention.ranges import RangesAttention, dense_mask, document_ranges
from outpace.checkpoints.adapter import Adapter
from outpace.checkpoints.load import load_model
from outpace.models.transformer import Transformer
from outpace.training import lora
from outpace.training.lora import LoRA
from outpace.training.objective import Models
from outpace.training.objectives import D2F
from outpace.training.optim import Optim
from outpace.training.rows import UNSCORED, Rows, pack_documents
from runs import plain_response

FOLDER = Path(__file__).parent / "d2f"
GOLDEN = json.loads((FOLDER / "train_cases.json").read_text())
EXPECTED = load_file(FOLDER / "train_cases.safetensors")
CASES = [pytest.param(case, id=case["id"]) for case in GOLDEN["cases"]]
ADAPTER = LoRA(rank=4, alpha=8)


def tensors(case: dict[str, Any]) -> dict[str, Tensor]:
    """What was recorded of a case, by name."""
    prefix = f"{case['tensors_prefix']}."
    return {k.removeprefix(prefix): v for k, v in EXPECTED.items() if k.startswith(prefix)}


def models_of(case: dict[str, Any]) -> Models:
    """Student and teacher: the model with the recorded adapter beside it, and the model alone."""
    teacher = load_model(FOLDER / case["model"])
    student = lora.attach_adapter(deepcopy(teacher), ADAPTER)
    recorded = Adapter(FOLDER / case["adapter"]).updates
    for name, update in lora.collect_updates(student).items():
        for ours, theirs in ((update.down, recorded[name].down), (update.up, recorded[name].up)):
            ours.data.copy_(theirs)
    return Models(student.eval(), {"teacher": teacher})


def batch(case: dict[str, Any], student: Transformer, **options: Any) -> tuple[D2F, list[Rows]]:
    """The objective and each sample's rows, made from the recorded draws."""
    given = tensors(case)
    objective = D2F(block=case["block_size"], **options).bind(student.config)
    parts = []
    for sample, prompt in enumerate(case["prompt_lengths"]):
        ids = given["input_ids"][sample].numpy().astype(np.int64)
        first = float(given["draw_u0"][sample])
        shares = objective.block_fractions(first, given["draw_u_inc"][sample].double().numpy())
        answer = plain_response(ids[prompt:])
        draws = given["draw_tokens"][sample, prompt:].double().numpy()
        parts.append(objective.noisy_rows(ids[:prompt].tolist(), answer, shares, draws))
    return objective, parts


@pytest.mark.parametrize("case", GOLDEN["schedule"])
def test_schedule(case: dict[str, Any]) -> None:
    for (first,), rises, expected in zip(case["u0"], case["u_inc"], case["p"], strict=True):
        np.testing.assert_allclose(
            D2F().block_fractions(first, np.array(rises)), expected, atol=1e-6
        )


@pytest.mark.parametrize("case", CASES)
def test_noise_and_ranges(case: dict[str, Any]) -> None:
    given = tensors(case)
    _, parts = batch(case, load_model(FOLDER / case["model"]))
    for sample, rows in enumerate(parts):
        masked = given["masked"][sample].bool()
        assert torch.equal(rows.ids, given["noisy_ids"][sample].long())
        assert torch.equal(dense_mask(rows.ranges, len(rows)), given["attend"][sample].bool())
        shift = 1 if case["family"] == "dream" else 0
        slots = torch.nonzero(rows.labels != UNSCORED).squeeze(1) + shift
        assert torch.equal(slots, torch.nonzero(masked).squeeze(1))
        assert torch.equal(rows.labels[slots - shift], given["input_ids"][sample, slots].long())
        weights = 1 / given["p_mask"][sample, slots]
        torch.testing.assert_close(rows.weights[slots - shift], weights, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_logits_of_student_and_teacher(case: dict[str, Any]) -> None:
    given, models = tensors(case), models_of(case)
    if "student_logits" not in given:
        pytest.skip("its logits were not recorded")
    _, parts = batch(case, models.trained)
    for sample, rows in enumerate(parts):
        for name, model, ranges in (
            ("student", models.trained, rows.ranges),
            ("teacher", models.others["teacher"], document_ranges(rows.ranges)),
        ):
            with torch.no_grad():
                hidden = model(rows.ids, rows.positions, RangesAttention(ranges))
            expected = given[f"{name}_logits"][sample]
            torch.testing.assert_close(model.compute_logits(hidden), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients(case: dict[str, Any]) -> None:
    models = models_of(case)
    objective, parts = batch(case, models.trained)
    rows = pack_documents(parts)
    assert rows.normaliser == case["n_masked"]
    loss = objective.loss(models, rows).total / rows.normaliser
    loss.backward()
    assert loss.item() == pytest.approx(case["loss_distill"], abs=1e-3, rel=1e-4)
    gradients = gradients_of(models.trained)
    for name, expected in tensors(case).items():
        if name.startswith("grad."):
            ours = gradients[name.removeprefix("grad.base_model.model.").replace(".default", "")]
            torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert norm.item() == pytest.approx(case["lora_grad_norm"], rel=1e-3)
    hard, _ = batch(case, models.trained, hard=1.0)
    loss = hard.loss(Models(models.trained), rows).total / rows.normaliser
    assert loss.item() == pytest.approx(case["loss_ce"], abs=1e-3, rel=1e-4)


def gradients_of(student: Transformer) -> dict[str, Tensor]:
    """Gradients of the updates under their names in a PEFT folder."""
    gradients = {}
    for name, update in lora.collect_updates(student).items():
        module = name.removesuffix(".weight")
        for half, parameter in (("A", update.down), ("B", update.up)):
            assert parameter.grad is not None
            gradients[f"{module}.lora_{half}.weight"] = parameter.grad
    return gradients


@pytest.mark.parametrize("case", CASES)
def test_optimizer_steps(case: dict[str, Any]) -> None:
    models = models_of(case)
    objective, parts = batch(case, models.trained)
    rows = pack_documents(parts)
    options = Optim(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.05)
    (optimizer,) = options.build_optimizers(models.trained)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = objective.loss(models, rows).total / rows.normaliser
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(models.trained.parameters(), options.clip)
        optimizer.step()
    assert losses == pytest.approx(case["adamw_losses"], abs=1e-3, rel=1e-4)


def test_every_case_is_here() -> None:
    assert (len(GOLDEN["cases"]), len(GOLDEN["schedule"])) == (8, 4)

"""The contract answered literally: one sequence, no pages, no batch. What the engine must equal."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from outpace.decoding import Forward, Prediction, Sequence
from outpace.methods import Method
from outpace.models.transformer import Transformer


class Memory:
    """Keys and values of one sequence in one model: a list of slots a layer."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.keys: list[list[Tensor]] = [[] for _ in range(model.config.layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(model.config.layers)]

    @torch.inference_mode()
    def run(self, forward: Forward) -> Tensor:
        """Write the rows of a forward, read the slots below each row's stop: hidden states."""
        stops = torch.from_numpy(forward.stops())
        positions = forward.positions or range(forward.start, forward.end)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[forward.start : forward.end] = k
            values[forward.start : forward.end] = v
            share = q.shape[1] // k.shape[1]
            seen = torch.stack(keys[: forward.seen]).repeat_interleave(share, 1)
            held = torch.stack(values[: forward.seen]).repeat_interleave(share, 1)
            weights = torch.einsum("thd,shd->hts", q, seen) * q.shape[-1] ** -0.5
            hidden = torch.arange(forward.seen) >= stops[:, None]
            weights = weights.masked_fill(hidden, -torch.inf).softmax(-1)
            return torch.einsum("hts,shd->thd", weights, held)

        ids, places = torch.tensor(forward.ids), torch.tensor(list(positions))
        hidden: Tensor = self.model(ids, places, attend)
        return hidden


def decode(method: Method, seq: Sequence, models: Mapping[str, Transformer]) -> list[Forward]:
    """Run one request to its end on the model of each role; the forwards that it took."""
    memories = {role: Memory(model) for role, model in models.items()}
    decoding = method.decode(seq)
    forwards: list[Forward] = []
    with suppress(StopIteration):
        forward = next(decoding)
        while seq.finish_reason is None:
            forwards.append(forward)
            forward = decoding.send(answer(forward, memories[forward.model]))
    return forwards


def answer(forward: Forward, memory: Memory) -> Prediction:
    """Run one forward and read what it asks for."""
    config = memory.model.config
    hidden = memory.run(forward)
    logits = memory.model.head(hidden[forward.predicted_rows(config.shift)]).float()
    if config.mask_id is not None:
        logits[:, config.mask_id] = -1e30
    slots = forward.predicted_slots()
    reader = type(forward.read).group([forward.read], [slots], logits.device)
    readout = reader(logits, slice(0, len(slots)))
    scores = {name: value.numpy() for name, value in readout.scores.items()}
    return Prediction(tokens=readout.tokens.tolist(), logits=logits, **scores)

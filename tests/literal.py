"""A literal implementation of forwards, which the engine must equal: no pages, no batch."""

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from outpace.decoding import Forward, Prediction, Request, Tree
from outpace.methods import Method
from outpace.models.config import AttentionWindow
from outpace.models.transformer import Stack

Layers = tuple[int, ...]


class Memory:
    """Keys and values of one sequence in one model: a list of slots per layer."""

    def __init__(self, model: Stack) -> None:
        self.model = model
        self.keys: list[list[Tensor]] = [[] for _ in range(model.config.layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(model.config.layers)]

    @torch.inference_mode()
    def run(self, forward: Forward, layers: Layers = ()) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Write the rows of a forward, read the slots visible to each row; return hidden states."""
        positions = forward.positions or range(forward.start, forward.end)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[forward.first_slot : forward.end] = k
            values[forward.first_slot : forward.end] = v
            share = q.shape[1] // k.shape[1]
            seen = torch.stack(keys[: forward.num_visible]).repeat_interleave(share, 1)
            held = torch.stack(values[: forward.num_visible]).repeat_interleave(share, 1)
            weights = torch.einsum("thd,shd->hts", q, seen) * q.shape[-1] ** -0.5
            weights = weights.masked_fill(~self.visible(forward, layer), -torch.inf).softmax(-1)
            return torch.einsum("hts,shd->thd", weights, held)

        ids, places = torch.tensor(forward.ids), torch.tensor(list(positions))
        context = None
        if forward.context is not None:
            context = forward.context, torch.arange(forward.first_slot, forward.start)
        features = [] if forward.features is None else [forward.features]
        return self.model.capture_layers(
            ids, places, attend, layers, context=context, features=features
        )

    def visible(self, forward: Forward, layer: int) -> Tensor:
        """Return the slots that each row of a forward sees in a layer, `bool[n, seen]`."""
        windows = self.model.config.windows
        layer_window = windows[layer] if windows else AttentionWindow()
        window = forward.num_visible if layer_window.window is None else layer_window.window
        if isinstance(forward.pattern, Tree):
            return in_tree(forward.pattern, forward.start, forward.num_visible, window)
        return torch.tensor(
            [
                [
                    slot < stop and slot > own - window and (slot <= own or not layer_window.causal)
                    for slot in range(forward.num_visible)
                ]
                for own, stop in enumerate(forward.visible_ends(), forward.start)
            ]
        )


def in_tree(tree: Tree, start: int, seen: int, window: int) -> Tensor:
    """Return the slots that each row of a tree sees; a window is the last of these."""
    rows = []
    for own in range(start, seen):
        bits = tree.ancestor_masks[own - max(start, tree.root_slot)] if own >= tree.root_slot else 0
        stop = min(own, tree.root_slot)
        shown = [
            slot < stop
            or slot == own
            or (slot >= tree.root_slot and bits >> (slot - tree.root_slot) & 1)
            for slot in range(seen)
        ]
        last = [slot for slot in range(seen) if shown[slot]][-window:]
        rows.append([slot in last for slot in range(seen)])
    return torch.tensor(rows)


def decode(method: Method, seq: Request, models: Mapping[str, Stack]) -> list[Forward]:
    memories = {role: Memory(model) for role, model in models.items()}
    decoding = method.decode(seq)
    forwards: list[Forward] = []
    with suppress(StopIteration):
        forward = next(decoding)
        while seq.finish_reason is None:
            forwards.append(forward)
            layers = feature_layers(forward, models)
            forward = decoding.send(answer(forward, memories[forward.model], layers))
    return forwards


def feature_layers(forward: Forward, models: Mapping[str, Stack]) -> Layers:
    if forward.features_for is None:
        return ()
    return (0,) if forward.model == "draft" else models[forward.features_for].config.feature_layers


def answer(forward: Forward, memory: Memory, layers: Layers = ()) -> Prediction:
    """Run one forward and read what it requests."""
    config = memory.model.config
    hidden, captured = memory.run(forward, layers)
    logits = memory.model.compute_logits(hidden[forward.predicted_rows(config.shift)]).float()
    if config.mask_id is not None:
        logits[:, config.mask_id] = -1e30
    slots = forward.predicted_slots()
    reader = type(forward.read).make_reader([forward.read], [slots], logits.device)
    readout = reader(logits, slice(0, len(slots)))
    return Prediction(
        tokens=readout.tokens.tolist(),
        logits=logits,
        features=torch.cat([captured[layer] for layer in layers], -1) if layers else None,
        scores={name: value.numpy() for name, value in readout.scores.items()},
    )

"""Synchronisation: the host waits once per pass, for its result. Tested on a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import finish, tokens
from outpace.decoding import Sampling, accept, sampling
from outpace.engine.readout import LaunchedPass
from outpace.engine.runner import Runner
from outpace.kernels.fused import SCORES, DraftRows, SamplingTensors
from outpace.methods import Method, apd
from workload import KINDS, Request, new_engine

aten = torch.ops.aten
COUNTED = {
    aten._local_scalar_dense.default,  # item, bool, int, float
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.equal.default,
}
"""Operations whose result, or whose size, the host needs."""


class Waits(TorchDispatchMode):
    """Records where the host would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A mask used as an index has an unknown size.
        masks = func in (aten.index.Tensor, aten.index_put_.default) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func in COUNTED or masks:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Counts copies to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func in (Tensor.tolist, Tensor.cpu)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int]]:
    """Return the waits and the number of copies of each pass, as if on a device.

    Kernels are excluded, since Triton's interpreter reads all of its inputs.
    """
    told: list[tuple[list[str], int]] = []

    def watched(function: Callable[..., Any], most: int) -> Callable[..., Any]:
        def watching(*given: Any) -> Any:
            with Waits() as waits, Copies() as copies:
                found = function(*given)
            told.append((waits.found, copies.count))
            assert copies.count <= most
            return found

        return watching

    def read_rows(logits: Tensor, settings: SamplingTensors, *rest: Any) -> Any:
        assert len(settings.temperature) == len(logits)
        scores = logits.new_zeros(len(SCORES), len(logits)).float()
        return logits.argmax(-1), dict(zip(SCORES, scores, strict=True))

    def verify_rows(
        logits: Tensor, guess: Tensor, drafts: DraftRows, settings: SamplingTensors, keys: Tensor
    ) -> Any:
        assert {len(each) for each in (*drafts, keys)} == {len(logits)}
        return read_rows(logits, settings)

    monkeypatch.setattr(Runner, "launch_pass", watched(Runner.launch_pass, 0))
    collect = watched(LaunchedPass.collect_predictions, 1)
    monkeypatch.setattr(LaunchedPass, "collect_predictions", collect)
    monkeypatch.setattr(sampling, "read_rows", read_rows)
    monkeypatch.setattr(accept, "verify_rows", verify_rows)
    for module in (sampling, apd, accept):
        monkeypatch.setattr(module, "runs_triton", lambda device: True)
    monkeypatch.setattr(sampling, "reads_are_free", lambda logits: False)
    return told


SETTINGS = [Sampling(), Sampling(temperature=0.8, top_p=0.9, top_k=9, min_p=0.01, seed=1)]


@pytest.mark.sampled
@pytest.mark.parametrize("sampled", SETTINGS, ids=["greedy", "drawn"])
@pytest.mark.parametrize("method", KINDS, ids=lambda method: type(method).__name__)
def test_a_pass_waits_only_for_its_result(
    method: Method, sampled: Sampling, passes: list[tuple[list[str], int]]
) -> None:
    engine = new_engine()
    jobs = [Request(method=method, sampling=each).submit(engine) for each in (sampled, Sampling())]
    finish(engine)
    assert all(tokens(job) for job in jobs)
    assert {tuple(found) for found, _ in passes} == {()}
    assert max(count for _, count in passes) == 1

"""Models of the zoo, with methods of all kinds that a constraint holds."""

from __future__ import annotations

from outpace import LLM
from outpace.methods import (
    APD,
    D2F,
    Autoregressive,
    BlockDiffusion,
    DFlash,
    Diffusion,
    Eagle,
    FastDLLM,
    LeftToRight,
    Method,
    Speculative,
    WeDLM,
)
from workload import Case, further

CAUSAL: list[Method] = [
    Autoregressive(),
    Speculative(draft="tiny-aux", tokens=3),
    Speculative(draft="tiny-aux", tokens=3, verify="rejection"),
    DFlash(draft="tiny-dflash", tokens=4),
    Eagle(draft="tiny-eagle", width=3, depth=2, nodes=8),
]
DIFFUSION: list[Method] = [
    LeftToRight(tokens=3),
    LeftToRight(tokens=2, window=8, lookahead=8),
    APD(verifier="tiny-aux"),
    APD(verifier="tiny-aux", ratio=1.0),
    APD(verifier="tiny-aux", ratio=0.0, coupling="argmax"),
    Diffusion(),
    Diffusion(block=16, steps=12, canvas=True),
    Diffusion(block=12, steps=12, order="random"),
    Diffusion(ends="last"),
    FastDLLM(block=16),
    FastDLLM(block=12, cache="prefix", factor=1.0),
    FastDLLM(block=24, cache=None, budget=0.5, canvas=True),
    D2F(),
    D2F(block=8, canvas=True),
]
FILLING: list[Method] = [
    WeDLM(),
    WeDLM(eager=False, clip=True),
    WeDLM(block=True, window=8),
    WeDLM(verify=True),
]
CASES: list[Case] = [
    *(("tiny-ar", method) for method in CAUSAL),
    *(("tiny-dream", method) for method in DIFFUSION),
    *(("tiny-llada", method) for method in DIFFUSION if not isinstance(method, APD)),
    *(("tiny-wedlm", method) for method in FILLING),
    ("tiny-d2f", D2F()),
    ("tiny-block", BlockDiffusion()),
    ("tiny-block", BlockDiffusion(budget=1.0, part=3, canvas=True)),
    ("tiny-block", BlockDiffusion(verify=True)),
    ("tiny-block", BlockDiffusion(rule="credit")),
    ("tiny-llada", Diffusion(guidance=0.5)),
]
CASES += further(CASES)
"""Every registered method, some with several options."""
FIRST = [*{type(method): (name, method) for name, method in reversed(CASES)}.values()]
"""The first case of each method."""

_loaded: dict[str, LLM] = {}


def llm(name: str) -> LLM:
    """A model of the zoo, loaded once."""
    if name not in _loaded:
        _loaded[name] = LLM(name)
    return _loaded[name]

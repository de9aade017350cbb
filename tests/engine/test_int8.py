"""Models of 8 and 4 bits in the engine: the same tokens batched and alone, lossless methods."""

from functools import cache
from random import Random

import pytest
import torch

from helpers import engine_of, finish, pages_in_use
from outpace.decoding import Sampling
from outpace.engine.engine import Engine
from outpace.kernels.packed import find_packed_loop, pack_blocks, quantize_blocks
from outpace.methods import METHODS, Autoregressive, DFlash, Eagle, Method, Speculative, WeDLM
from outpace.models.int8 import QUANTIZABLE_MODULES, has_int8_products, quantize_module
from outpace.models.packed import pack_module
from outpace.models.transformer import Stack
from workload import KINDS, Request, Result, new_models, random_request, result, serve

pytestmark = pytest.mark.skipif(
    not has_int8_products(), reason="this machine has no products of 8 bits"
)

PROMPT = tuple(range(1, 22))
no_loops = pytest.mark.skipif(not find_packed_loop(), reason="this machine has no loops of 4 bits")
BITS = [8, pytest.param(4, marks=no_loops)]


@cache
def small(bits: int = 8) -> dict[str, Stack]:
    """Return the models of the workload with quantized matrices.

    Matrices whose inputs do not fill blocks of 4 bits have 8.
    """
    models = new_models()
    for model in models.values():
        for name, module in list(model.named_modules()):
            if type(module) not in QUANTIZABLE_MODULES:
                continue
            weight = module.get_parameter("weight")
            if bits == 8 or weight.shape[1] % 32:
                model.set_submodule(name, quantize_module(module, torch.float32))
                continue
            packed = pack_blocks([quantize_blocks(weight, "INT4")], "INT4")
            assert packed is not None
            model.set_submodule(name, pack_module(module, packed, torch.float32))
    return models


def small_engine(bits: int = 8, **limits: int) -> Engine:
    return engine_of(*small(bits).items(), **limits)


@cache
def alone(request: Request, bits: int = 8) -> Result:
    engine = small_engine(bits)
    job = request.submit(engine)
    finish(engine)
    return result(job)


@pytest.mark.nightly
@pytest.mark.parametrize("bits", BITS)
def test_mixed_requests_equal_each_alone(bits: int) -> None:
    rng = Random(0)
    batch = [random_request(rng) for _ in range(1000)]
    engine = small_engine(bits, slots=4000, max_rows=250)
    assert serve(engine, batch) == [alone(request, bits) for request in batch]
    assert pages_in_use(engine) == 0
    assert {type(request.method) for request in batch} == set(METHODS.values())


@pytest.mark.sampled
@pytest.mark.parametrize("method", KINDS, ids=lambda method: type(method).__name__)
def test_pages_and_cuts_change_nothing(method: Method) -> None:
    sampling = Sampling(temperature=1.5, top_p=0.9, seed=3)
    request = Request(method=method, prompt=PROMPT * 3, sampling=sampling)
    other = Request(method=Autoregressive(), max_tokens=20)
    assert serve(small_engine(max_rows=5), [request, other]) == [alone(request), alone(other)]


@pytest.mark.sampled
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("begin", range(0, 18, 3))
def test_verified_text_is_that_of_the_quantised_model(begin: int, bits: int) -> None:
    prompt = PROMPT[begin : begin + 4]
    for target, methods in (
        ("causal", [Speculative(draft="near", tokens=3), WeDLM(entropy=2.0, verify=True)]),
        ("rich", [DFlash(draft="features", tokens=4), DFlash(draft="added", tokens=4)]),
        ("deep", [Eagle(draft="states", width=3, depth=2, nodes=9)]),
    ):
        texts = []
        for method in (Autoregressive(), *methods):
            engine = small_engine(bits)
            request = Request(method=method, prompt=prompt, max_tokens=24, on=target)
            job = request.submit(engine)
            finish(engine)
            texts.append(result(job)[0])
        assert texts == [texts[0]] * len(texts) and texts[0]

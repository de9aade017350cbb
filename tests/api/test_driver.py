"""Many threads, one model: each gets the answers that it would get alone."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from random import Random
from threading import Event, Thread
from typing import Any

import pytest
import torch

from helpers import MASK
from outpace import LLM
from outpace.api.pending_answer import Stream
from outpace.checkpoints.load import save_model
from outpace.decoding import Decoding, Forward, Request
from outpace.engine.job import DecodingError
from outpace.methods import Autoregressive, Method
from workload import KINDS, MODELS
from workload import Request as Workload

LIMIT = 120
"""Seconds after which threads are thought to wait for each other."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    for name, model in MODELS.items():
        save_model(model, root / name, dtype=torch.float32)
    return {name: str(root / name) for name in MODELS}


@pytest.fixture(scope="module")
def methods(folders: dict[str, str]) -> dict[str, list[Method]]:
    found: dict[str, list[Method]] = {}
    for method in KINDS:
        further = {role: folders[name] for role, name in method.model_names().items()}
        target = Workload(method=method).target
        found.setdefault(target, []).append(replace(method, **further))
    return found


def llm_of(folders: dict[str, str], name: str, **options: Any) -> LLM:
    """Return a model with cache for about ten requests."""
    return LLM(folders[name], cache_gib=2**-11, **options)


def asked(number: int, methods: list[Method]) -> tuple[list[int], dict[str, Any]]:
    rng = Random(number)
    prompt = [rng.randint(1, MASK - 1) for _ in range(rng.randint(1, 30))]
    return prompt, {
        "method": rng.choice(methods),
        "max_tokens": rng.randint(4, 12),
        "temperature": rng.choice([0.0, 0.8, 1.5]),
        "top_p": rng.choice([1.0, 0.9]),
        "seed": rng.randrange(99),
    }


def together(*work: Callable[[], Any]) -> list[Any]:
    """Return the results of several threads; a deadlock raises an error."""
    with ThreadPoolExecutor(len(work)) as pool:
        futures = [pool.submit(each) for each in work]
        return [future.result(timeout=LIMIT) for future in futures]


def idle(llm: LLM) -> bool:
    """Return whether no request is left."""
    llm.driver.step()
    return llm.driver.stats.is_idle and llm.driver.driving_thread is None


def answers(llm: LLM, numbers: list[int], methods: list[Method], *, odd: bool = False) -> list:
    """Answer in three ways: generated in fours, streamed, or in a loop over `serve`.

    If `odd`, closed, dropped and cancelled streams come in between.
    """
    found: dict[int, list[int]] = {}
    rng = Random(numbers[0])
    queue = list(numbers)
    while queue:
        batch = [queue.pop(0) for _ in range(min(rng.randint(1, 4), len(queue)))]
        if odd:
            prompt, options = asked(rng.randrange(10**6), methods)
            stream = llm.stream(prompt, **options)
            stray(stream, rng)
        if rng.random() < 0.4:
            for number in batch:
                prompt, options = asked(number, methods)
                stream = llm.stream(prompt, **options)
                assert not list(stream)  # there is no tokenizer, and so no text
                assert stream.output is not None
                found[number] = stream.output.ids
        else:
            requests = [asked(number, methods) for number in batch]
            for index, output in llm.serve(requests, batch=rng.choice([None, 2])):
                found[batch[index]] = output.ids
    return [found[number] for number in numbers]


def stray(stream: Stream, rng: Random) -> None:
    """Close a stream, cancel its request or garbage-collect it, in this or another thread."""
    match rng.randrange(4):
        case 0:
            stream.close()
        case 1:
            stream.driver.cancel(stream.answer)
        case 2:
            ring: list[Any] = [stream]
            ring.append(ring)
        case _:
            thread = Thread(target=ring_of, args=(stream,))
            del stream
            thread.start()
            thread.join()


def ring_of(stream: Stream) -> None:
    """Leave a stream to the garbage collector, and run the collector in this thread."""
    ring: list[Any] = [stream]
    ring.append(ring)
    del stream, ring
    gc.collect()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["causal", "rich", "deep", "diffusion", "blocks"])
@pytest.mark.parametrize(("threads", "odd"), [(2, False), (4, True)])
def test_threads_get_the_tokens_of_one(
    folders: dict[str, str], methods: dict, name: str, threads: int, odd: bool
) -> None:
    each = 400 // threads
    numbers = [list(range(each * n, each * n + each)) for n in range(threads)]
    llm = llm_of(folders, name)
    found = together(
        *(lambda own=own: answers(llm, own, methods[name], odd=odd) for own in numbers)
    )
    gc.collect()
    assert idle(llm)
    plain = llm_of(folders, name)
    expected = [
        [out.ids for _, out in sorted(plain.serve(asked(n, methods[name]) for n in own))]
        for own in numbers
    ]
    assert found == expected


@dataclass(frozen=True, kw_only=True)
class Own(Method):
    """A method that calls a function after a few tokens."""

    does: Callable[[Request], None] = field(hash=False)
    after: int = 2

    def decode(self, request: Request) -> Decoding:
        """Decode as `Autoregressive` does, with the call in between."""
        out = yield Forward(ids=request.ids, start=0, read=request.sample())
        while request.commit(out.tokens):
            if len(request.tokens) == self.after:
                self.does(request)
            out = yield Forward(ids=request.ids[-1:], start=len(request) - 1, read=request.sample())


def fail(error: BaseException) -> Callable[[Request], None]:
    def does(request: Request) -> None:
        raise error

    return does


@pytest.mark.nightly
@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), SystemExit()])
def test_a_thread_that_fails_stops_no_other(
    folders: dict[str, str], methods: dict, error: BaseException
) -> None:
    llm = llm_of(folders, "causal")
    numbers = list(range(40))
    expected = answers(llm_of(folders, "causal"), numbers, methods["causal"])
    begun = Event()

    def failing() -> int:
        seen = 0
        for _ in range(20):
            begun.set()
            try:
                llm.generate([1, 2, 3], method=Own(does=fail(error)), max_tokens=9)
            except (DecodingError, KeyboardInterrupt, SystemExit):
                seen += 1
        return seen

    def steady() -> list[list[int]]:
        begun.wait(LIMIT)
        found = []
        for number in numbers:
            prompt, options = asked(number, methods["causal"])
            while True:
                try:
                    found.append(llm.generate([prompt], **options)[0].ids)
                    break
                except (KeyboardInterrupt, SystemExit):
                    continue
        return found

    seen, found = together(failing, steady)
    assert seen == 20 and found == expected
    assert idle(llm)


@pytest.mark.nightly
def test_a_method_that_waits_for_other_answers_is_told_so(folders: dict[str, str]) -> None:
    llm = llm_of(folders, "causal")
    expected = llm.generate([4, 5], method=Autoregressive(), max_tokens=12)[0].ids
    inner = [
        lambda request: llm.generate([1, 2], max_tokens=2, method=Autoregressive()),
        lambda request: next(llm.stream([1, 2], max_tokens=2, method=Autoregressive()), None),
        lambda request: llm.driver.step(),
    ]
    for does in inner:
        beside = llm.submit([4, 5], method=Autoregressive(), max_tokens=12)
        with pytest.raises(DecodingError, match="wait"):
            llm.generate([1, 2, 3], method=Own(does=does), max_tokens=9)
        while not beside.is_finished:
            llm.driver.step()
        assert beside.build_output().ids == expected
        gc.collect()
        assert idle(llm)


def test_a_loop_left_to_the_collector_cancels_all_that_is_left_of_it(
    folders: dict[str, str],
) -> None:
    llm = llm_of(folders, "causal")
    options = {"max_tokens": 60, "method": Autoregressive()}
    short = {"max_tokens": 1, "method": Autoregressive()}
    loop = llm.serve([([1], short), ([2], options), ([3], options), ([4], options)])
    next(loop)
    ring: list[Any] = [loop]
    ring.append(ring)
    gone = weakref.ref(loop)
    del loop, ring

    def does(request: Request) -> None:
        gc.collect()
        assert gone() is None

    (output,) = llm.generate([1, 2, 3], method=Own(does=does), max_tokens=9)
    assert len(output.ids) == 9 and idle(llm)


def test_ctrl_c_behind_a_step_leaves_the_driver_free(folders: dict[str, str]) -> None:
    llm = llm_of(folders, "causal")
    expected = llm.generate([4, 5], method=Autoregressive(), max_tokens=12)[0].ids
    answer = llm.submit([4, 5], method=Autoregressive(), max_tokens=12)
    notify = llm.driver.step_finished.notify_all

    def interrupted() -> None:
        llm.driver.step_finished.notify_all = notify
        raise KeyboardInterrupt

    llm.driver.step_finished.notify_all = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.driver.step()
    assert llm.driver.driving_thread is None

    def wait() -> list[int]:
        while not answer.is_finished:
            llm.driver.step()
        return answer.build_output().ids

    assert together(wait, wait) == [expected, expected]

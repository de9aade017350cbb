"""Code of the library that one further token runs: few calls, in few files."""

import subprocess
import sys

import pytest
import torch

from outpace.kernels import tiles

MAX_CALLS = 260
TOKENS = 8

PROGRAM = f"""
import sys
from pathlib import Path

import torch

import outpace
from outpace import LLM
from outpace.methods import Autoregressive

torch.set_num_threads(1)
root = str(Path(outpace.__file__).parent)
calls = []


def count(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(root):
        calls.append(frame.f_code.co_filename)


llm = LLM("tiny-ar", method=Autoregressive())
answer = llm.submit("Count from 10 by 5 up to 99.", max_tokens=40, temperature=0.0)
while len(answer.tokens) < 8:
    llm.driver.step()
before = len(answer.tokens)
sys.setprofile(count)
while len(answer.tokens) < before + {TOKENS}:
    llm.driver.step()
sys.setprofile(None)
assert len(answer.tokens) == before + {TOKENS} and not answer.has_ended
print(len(calls) / {TOKENS}, len(set(calls)))
"""


@pytest.mark.nightly
@pytest.mark.skipif(
    not tiles.has_tile_loop(torch.float32), reason="other processors run more of PyTorch's kernels"
)
def test_a_further_token_takes_few_calls_and_files() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls, files = (float(each) for each in done.stdout.split())
    print(f"{calls:g} calls and {files:g} files per further token")
    assert 0 < calls <= MAX_CALLS

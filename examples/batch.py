"""Requests of different methods share the forward passes of one model."""

from outpace import LLM
from outpace.methods import APD, LeftToRight

STORY = (
    "Lily reads 2 pages of a comic every day. After 8 days she still has 30 pages to read. "
    "How many pages does the comic have?"
)
METHODS = [LeftToRight(), LeftToRight(tokens=4), APD(verifier="tiny-aux", ratio=0.3)]

llm = LLM("tiny-dream")
answers = [llm.submit(STORY, method=m, max_tokens=128, temperature=0.0) for m in METHODS]
while llm.engine.step():
    pass
for method, output in zip(METHODS, (answer.output() for answer in answers), strict=True):
    print(f"{method}\n  {output.tokens_per_forward:.2f} tokens a forward: {output.text!r}")

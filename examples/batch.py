"""Requests of different methods share the forward passes of one model."""

from outpace import LLM
from outpace.methods import APD, FastDLLM, LeftToRight

STORY = (
    "Lily reads 2 pages of a comic every day. After 8 days she still has 30 pages to read. "
    "How many pages does the comic have?"
)
METHODS = [LeftToRight(), FastDLLM(block=8, threshold=0.99), APD(verifier="tiny-aux")]

llm = LLM("tiny-dream")
requests = [(STORY, {"method": m, "max_tokens": 128, "temperature": 0.0}) for m in METHODS]
for number, output in llm.serve(requests):
    print(
        f"{METHODS[number]}\n  {output.tokens_per_forward:.2f} tokens per forward: {output.text!r}"
    )

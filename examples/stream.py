"""Print an answer as it comes: a piece for each forward that brought text."""

from outpace import LLM
from outpace.methods import APD

STORY = (
    "Lily reads 2 pages of a comic every day. After 8 days she still has 30 pages to read. "
    "How many pages does the comic have?"
)

llm = LLM("tiny-dream", method=APD(verifier="tiny-aux"))
stream = llm.stream(STORY, max_tokens=128, temperature=0.0)
for piece in stream:
    print(piece, end="|", flush=True)
print(f"\n{stream.output.finish_reason} after {stream.output.forwards} forwards")

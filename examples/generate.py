"""Answer one prompt with APD, and say what it cost."""

from outpace import LLM
from outpace.methods import APD

STORY = (
    "Tom picks 4 baskets of apples with 6 apples in each basket. "
    "He gives 5 apples to Amy. How many apples does Tom have left?"
)

llm = LLM("tiny-dream", method=APD(verifier="tiny-aux"))
(output,) = llm.generate(STORY, max_tokens=128, temperature=0.0)
print(output.text)
print(f"{len(output.ids)} tokens, {output.tokens_per_forward:.2f} per forward")

"""A decoding method for diffusion models: fill the leftmost hole, and all that are sure."""

from dataclasses import dataclass

import numpy as np

from outpace import LLM
from outpace.decoding import FULL, Canvas, Decoding, Forward, Kind, OptionError, Request
from outpace.decoding.order import above_threshold
from outpace.methods import LeftToRight, Method


@dataclass(frozen=True, kw_only=True)
class Sure(Method):
    """Show a few holes; fill the leftmost one, and all others of more than some confidence."""

    target_kinds = (Kind.DIFFUSION,)

    holes: int = 8
    confidence: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.holes < 1:
            raise OptionError("holes", self.holes, "must be at least 1")

    def decode(self, request: Request) -> Decoding:
        """Run the text and holes after it, fill some, and commit what has no hole before it."""
        canvas, step, alive = Canvas.from_request(request), 0, True
        while alive:
            end = min(canvas.prefix_length + self.holes, request.limit)
            canvas.append_slots(max(end - len(canvas), 0))
            out = yield Forward(
                ids=canvas.ids,
                start=0,
                pattern=FULL,
                predict=canvas.holes,
                read=request.sample(step, scores=("confidence",)),
            )
            sure = above_threshold(out.scores["confidence"], self.confidence)
            slots = canvas.fill_chosen(canvas.holes, np.union1d(0, sure), out)
            alive = canvas.commit_prefix(request, slots)
            step += 1


def main() -> None:
    """The same answer in fewer forwards."""
    story = (
        "Omar counts 60 people on the boat. Then 39 of them get off and 43 others get on. "
        "How many people are there now?"
    )
    llm = LLM("tiny-dream")
    for method in (LeftToRight(lookahead=8), Sure()):
        (output,) = llm.generate(story, method=method, max_tokens=128, temperature=0.0)
        print(f"{method}: {output.forwards} forwards\n{output.text}")


if __name__ == "__main__":
    main()

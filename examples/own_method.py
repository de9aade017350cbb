"""A decoding method in a file of one's own: draft by copying, verify in one pass."""

from dataclasses import dataclass
from typing import Annotated

from outpace import LLM
from outpace.decoding import Decoding, Forward, OptionError, Request, agreement
from outpace.methods import Autoregressive, Method


@dataclass(frozen=True, kw_only=True)
class PromptLookup(Method):
    """Guess that what followed the last few tokens before follows them again (Saxena, 2023)."""

    tokens: Annotated[int, "most tokens copied at a time"] = 6
    match: Annotated[int, "last tokens that an earlier place must have as well"] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tokens", "match"):
            if (value := getattr(self, name)) < 1:
                raise OptionError(name, value, "must be at least 1")

    def decode(self, request: Request) -> Decoding:
        """Run the last token and a draft; accept what the model predicts, and one more token."""
        read, drafted = request.sample(), []
        out = yield Forward(ids=request.ids, start=0, read=read)
        while request.commit(out.tokens[: agreement(drafted, out.tokens) + 1], out.logprobs):
            n = len(request)
            drafted = self.draft(request.ids, request.limit - n - 1)
            out = yield Forward(
                ids=[request.ids[-1], *drafted],
                start=n - 1,
                predict=range(n, n + len(drafted) + 1),
                read=read,
            )

    def draft(self, ids: list[int], room: int) -> list[int]:
        """Return what followed the most recent earlier copy of the last tokens."""
        tail = ids[-self.match :]
        for end in range(len(ids) - 1, self.match - 1, -1):
            if ids[end - self.match : end] == tail:
                return ids[end : end + min(self.tokens, room)]
        return []


def main() -> None:
    """The same text in fewer forwards."""
    story = (
        "Omar counts 60 people on the boat. Then 39 of them get off and 43 others get on. "
        "How many people are there now?"
    )
    llm = LLM("tiny-ar")
    for method in (Autoregressive(), PromptLookup(match=1)):
        (output,) = llm.generate(story, method=method, max_tokens=128)
        print(f"{method}: {output.forwards} forwards\n{output.text}")


if __name__ == "__main__":
    main()

"""What each option of a method means, in a line: how docs/methods.md begins to say it."""

from __future__ import annotations

FLY = {
    "fly_window": "under verify='fly', the drafts behind a loose one that the target must say",
    "fly_entropy": "under verify='fly', how much in doubt the target must be, in nats",
}
"""Of the methods that can verify loosely."""

MEANINGS: dict[str, dict[str, str]] = {
    "apd": {
        "verifier": "name or folder of the verifier",
        "ratio": "R: weight of the target against the verifier, 0 to 1",
        "window": "W: feed again the last group and window − 1 tokens before it",
        "lookahead": "M: masks shown, and so the most tokens per forward",
        "coupling": "how the verifier's y is drawn",
        "least": "with pace=auto, the lookahead may be as short as this, at 1 to no mask on Dream; "
        "None: it stays",
    },
    "autoregressive": {},
    "block_diffusion": {
        "threshold": "holes of a higher confidence are filled; None: as many as steps says",
        "budget": "instead of threshold, the entropy that the holes of a forward may share",
        "steps": "forwards that fill a block at the latest; one per token by default",
        "order": "which holes are best where too few are sure",
        "part": "tokens of a block that must be filled before those behind them",
        "block": "tokens of a block; as the model was trained by default",
        "canvas": "fill all of the block in which the answer ends",
    },
    "d2f": {
        "block": "slots of a block; those of a block diffusion model by default, or 16",
        "add": "share of the last block that is filled when the next one is appended",
        "activate": "share of a block that is filled when the next one takes a token in every "
        "forward",
        "confidence": "tokens of a higher probability are taken; 1: one token per forward",
        "order": "which token is best where none is sure",
        "canvas": "fill everything that was appended, and whole blocks only",
        "least": "1: with pace=auto, tokens may be said one by one, without a mask, on Dream; "
        "None: they are not",
    },
    "dflash": {
        "draft": "name or folder of a draft for this target",
        "block": "the last token and the masks behind it; the trained length by default",
        "tokens": "how many of the proposals are verified: a number, or as many as pay",
        "verify": "how a draft is kept, as in Speculative",
        **FLY,
    },
    "diffusion": {
        "order": "which holes are filled next",
        "steps": "forwards in which all of max_tokens would be filled",
        "block": "tokens that must all be filled before those behind them",
        "eps": "last time of Dream's schedule; 0 for the even one of LLaDA",
        "order_temperature": "above 0, holes are drawn by their scores",
        "guidance": "weight of classifier-free guidance, at the cost of a second forward per step",
        "ends": "last fills what would end the answer after all else, never forbids the padding "
        "token",
        "canvas": "fill all holes in steps forwards",
    },
    "eagle": {
        "draft": "name or folder of a draft for this target",
        "width": "nodes of each level that are extended, and tokens by which; 1 is a chain",
        "depth": "how often a level is extended, so that depth + 1 tokens are drafted in a row",
        "nodes": "rows that are verified, the last token among them",
        "verify": "how a draft is kept, as in Speculative",
        **FLY,
    },
    "fast_dllm": {
        "threshold": "holes whose confidence reaches it are filled; None: one hole per forward",
        "factor": "instead of threshold, the paper's rule: the n best holes while the n-th is "
        "surer than 1 − factor / (n + 1)",
        "budget": "instead of threshold, the entropy that the holes of a forward may share",
        "cache": "prefix, dual, or None, which feeds everything each time",
        "block": "tokens of a block",
        "canvas": "fill all holes",
    },
    "left_to_right": {
        "tokens": "k, holes taken from each forward",
        "window": "feed again the last group and window − 1 tokens before it",
        "lookahead": "masks shown, at least tokens",
    },
    "lookup": {
        "tokens": "tokens copied at a time: a number, or as many (12 at most) as pay",
        "match": "tokens at the end of the text that must stand before too",
    },
    "speculative": {
        "draft": "name or folder of the draft",
        "tokens": "tokens drafted at a time: a number, or as many (8 at most) as pay",
        "verify": "how a draft is kept",
        **FLY,
    },
    "wedlm": {
        "window": "W: slots opened behind the leading run",
        "entropy": "τ: masks below it are filled; None fills one per forward, the least doubtful",
        "penalty": "λ: added for each slot of distance from the first mask",
        "confidence": "instead of entropy and penalty: fill the masks whose token has this "
        "probability",
        "block": "stop and wait: the next window opens once the last one is full",
        "clip": "open no slot behind max_tokens",
        "eager": "emit a token once all before it are filled",
        "verify": "emit only what Autoregressive would say",
        "least": "with pace=auto, the window may shrink to this, at 1 to none; None: it stays",
    },
}
"""By the name of the method, and of the option."""

"""Reads: how logits become tokens and scores, for the rows of many sequences at once.

Shapes: R rows of one read group, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.decoding.sampling_params import PLAIN_SAMPLING, Sampling
from outpace.field_types import MAX_COUNT
from outpace.kernels.fused import SamplingTensors, read_rows, runs_triton, to_device

NoiseKeys = NDArray[np.uint64]

WORD_MASK = 0xFFFFFFFF


def splitmix64(x: NoiseKeys) -> NoiseKeys:
    """Apply the splitmix64 finalizer (Steele et al., 2014) to 64-bit words."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def noise_keys(seeds: NoiseKeys, steps: NoiseKeys, slots: NoiseKeys) -> NoiseKeys:
    """Return one key of 62 bits for each seed, step and slot, elementwise."""
    with np.errstate(over="ignore"):
        keys = splitmix64(seeds + np.uint64(0x9E3779B97F4A7C15))
        return splitmix64(splitmix64(keys + steps) + slots) >> np.uint64(2)


def mix_32bit(x: Tensor) -> Tensor:
    """Apply a bijection of 32-bit words (lowbias32, Wellons, 2018), in place on int64."""
    x.bitwise_xor_(x >> 16).mul_(0x7FEB352D).bitwise_and_(WORD_MASK)
    x.bitwise_xor_(x >> 15).mul_(0x846CA68B).bitwise_and_(WORD_MASK)
    return x.bitwise_xor_(x >> 16)


def uniform_from_keys(keys: Tensor, vocab: int) -> Tensor:
    """Return numbers `f32[R, vocab]` in (0, 1), a function of key and column only."""
    columns = torch.arange(vocab, device=keys.device) * 0x9E3779B1 & WORD_MASK
    low, high = keys[:, None] & WORD_MASK, keys[:, None] >> 32
    words = mix_32bit(mix_32bit(columns ^ low).bitwise_xor_(high)).float()
    # Rounding may have produced exactly 1.
    return words.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


def gumbel_from_keys(keys: Tensor, vocab: int) -> Tensor:
    """Return standard Gumbel noise `f32[R, vocab]`, a function of key and column only."""
    # Adding it to log-probabilities and taking the arg-max samples from them. The same noise added
    # to two distributions couples their samples.
    # -log(1 - u) keeps full precision for small exponentials, from which the arg-max is taken.
    return uniform_from_keys(keys, vocab).neg_().log1p_().neg_().log_().neg_()


MIN_STRIDED_COLUMNS = 2**14
"""Columns from which strided rows are read one by one instead of copied first."""


def argmax_tokens(logits: Tensor) -> Tensor:
    """Return `logits.argmax(-1)` of `logits [R, V]`, ten times as fast as PyTorch's on a CPU."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return logits.argmax(-1)
    rows = logits.numpy()
    if logits.is_contiguous() or logits.shape[-1] < MIN_STRIDED_COLUMNS:
        return torch.from_numpy(np.asarray(rows.argmax(-1)))
    return torch.tensor([int(row.argmax()) for row in rows], dtype=torch.int64)


NUCLEUS_CANDIDATES = 16
"""Tokens that contain most nuclei."""


def keep_top_k(logits: Tensor, top_k: Tensor, max_k: int) -> Tensor:
    """Return logits `[R, V]` with everything below the k-th largest at minus infinity.

    Ties survive. `max_k` is the largest k, or V where that is less.
    """
    ranked = logits.topk(max_k, -1).values
    threshold = ranked.gather(-1, (top_k.clamp(max=max_k) - 1)[:, None])
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Return logits `[R, V]` with everything outside the nucleus at minus infinity."""
    # Most nuclei are within the few most probable tokens; only rows where they are not are sorted.
    # On a GPU all rows are sorted, since finding out which rows need it would synchronise.
    few = min(NUCLEUS_CANDIDATES, logits.shape[-1]) if reads_are_free(logits) else logits.shape[-1]
    threshold, is_full = nucleus_thresholds(logits, top_p, few)
    if few < logits.shape[-1] and len(open_rows := is_full.nonzero().squeeze(-1)):
        threshold[open_rows] = nucleus_thresholds(
            logits[open_rows], top_p[open_rows], logits.shape[-1]
        )[0]
    return logits.masked_fill(logits < threshold, -torch.inf)


def reads_are_free(logits: Tensor) -> bool:
    """Return whether the host can read these numbers without synchronising."""
    return logits.device.type == "cpu"


def nucleus_thresholds(logits: Tensor, top_p: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the lowest nucleus logit `[R, 1]` among the `count` best, and if all are inside."""
    ranked, columns = logits.topk(count, -1)
    mass = logits.softmax(-1).gather(-1, columns)
    inside = (mass.cumsum(-1) - mass <= top_p[:, None]).sum(-1)
    return ranked.gather(-1, inside.clamp(min=1)[:, None] - 1), inside == count


def nucleus_argmax(logits: Tensor, noised: Tensor, top_p: Tensor) -> Tensor:
    """Return the arg-max `[R]` of `noised [R, V]` over the nucleus of `logits`."""
    # A token is in the nucleus (Holtzman et al., 2020) unless the more probable tokens hold more
    # than `top_p`. Nothing is sorted: the best candidate is tried first and is nearly always
    # inside. Where it is not, all tokens that are no more probable are outside too.
    tokens = argmax_tokens(noised)
    open_rows = (top_p < 1).nonzero().squeeze(-1)
    probabilities = logits.softmax(-1) if len(open_rows) else logits
    while len(open_rows):
        level = logits[open_rows].gather(-1, tokens[open_rows, None])
        above = torch.where(logits[open_rows] > level, probabilities[open_rows], 0).sum(-1)
        outside = above > top_p[open_rows]
        open_rows, level = open_rows[outside], level[outside]
        remaining = noised[open_rows].masked_fill(logits[open_rows] <= level, -torch.inf)
        noised = noised.index_copy(0, open_rows, remaining)
        tokens[open_rows] = argmax_tokens(remaining)
    return tokens


@dataclass(slots=True, kw_only=True)
class LogitTruncation:
    """Sampling settings of a group's rows; `host_settings f64[4, R]` are the same on the host."""

    # The host decides what needs no work, so it never waits for a device.

    settings: SamplingTensors
    host_settings: NDArray[np.float64]

    @classmethod
    def from_requests(
        cls, samplings: Sequence[Sampling], slots: Sequence[Sequence[int]], device: torch.device
    ) -> Self:
        """Build the settings of each row from those of its request."""
        table = [(s.temperature, s.top_p, s.top_k or MAX_COUNT, s.min_p) for s in samplings]
        repeated = np.repeat(np.array(table, dtype=np.float64).T, list(map(len, slots)), 1)
        real = to_device(repeated.astype(np.float32), device)
        top_k = to_device(repeated[2].astype(np.int64), device)
        return cls(
            settings=SamplingTensors(real[0], real[1], top_k, real[3]), host_settings=repeated
        )

    def settings_of(self, rows: slice | Tensor) -> SamplingTensors:
        """Return the settings of some rows of the group."""
        return SamplingTensors(*(setting[rows] for setting in self.settings))

    def __call__(self, logits: Tensor, rows: slice) -> Tensor:
        """Return the truncated logits `[r, V]` of the rows `rows` of the group."""
        settings, host_rows, logits = (
            self.settings_of(rows),
            self.host_settings[:, rows],
            logits.float(),
        )
        if (host_rows[0] > 0).any():
            divisor = torch.where(settings.temperature > 0, settings.temperature, 1)
            logits = logits / divisor[:, None]
        if (host_rows[1] < 1).any():
            # Rounding may take the mass of a row above one.
            top_p = torch.where(settings.top_p < 1, settings.top_p, torch.inf)
            logits = keep_top_p(logits, top_p)
        return apply_top_k_min_p(logits, settings, host_rows)


def apply_top_k_min_p(
    logits: Tensor, settings: SamplingTensors, host_settings: NDArray[np.float64]
) -> Tensor:
    """Apply min-p and top-k to logits `[R, V]`; `host_settings f64[4, R]` as above."""
    _, _, top_k, min_p = host_settings
    if (min_p > 0).any():
        threshold = logits.amax(-1, keepdim=True) + settings.min_p[:, None].log()
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if (top_k < logits.shape[-1]).any():
        logits = keep_top_k(logits, settings.top_k, int(min(top_k.max(), logits.shape[-1])))
    return logits


Score = Literal["confidence", "entropy", "logprob", "margin", "rank", "acceptance"]
"""Scores of a token. `token_scores` computes the first four, and reads of `GivenTokens` the rank.

`acceptance` is that of a draft's own head, and of no read.
"""


@dataclass(slots=True)
class Readout:
    """Result of a read of `R` rows; everything `[R]` on the device."""

    tokens: Tensor
    scores: dict[Score, Tensor]


TokenScorer = Callable[[Tensor, Tensor, slice], dict[Score, Tensor]]
"""Scores the tokens `[r]` of logits `[r, V]`, which are a slice of a group's rows."""

GroupReader = Callable[[Tensor, slice], Readout]
"""Turns logits `[r, V]` of a slice of a group's rows into a readout."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """How the logits of a forward become tokens. Reads of one type are run together."""

    keep: bool = False
    """Whether the raw logits stay on the device as `Prediction.logits`."""
    scores: tuple[Score, ...] = ()
    """Further scores, each of which costs another pass over the vocabulary."""
    top_logprobs: int | None = None
    """Number of most probable tokens to return; None for that of the request."""
    is_given: bool = False
    """Whether the tokens are given, so that the processors of a request do not apply."""

    @property
    def needs_all_rows(self) -> bool:
        """Whether all of its rows must be read at once."""
        return False

    @classmethod
    def make_reader(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> GroupReader:
        """Return a reader of all rows of `reads`, where read i wants the slots `slots[i]`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Sample(Read):
    """Greedy or sampled tokens. Noise is a function of (seed, slot, step), never of the batch.

    Scores use the raw logits, or with `score_as_drawn` the sampling distribution: divided by the
    temperature (unless it is 0), then truncated. A `logprob` always uses the raw logits. With
    `joint`, the tokens of all slots satisfy the constraint together.
    """

    sampling: Sampling = PLAIN_SAMPLING
    step: int = 0
    score_as_drawn: bool = False
    joint: Joint | None = None

    @property
    def needs_all_rows(self) -> bool:
        return self.joint is not None

    @classmethod
    def make_reader(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> GroupReader:
        for read in reads:
            if read.sampling.temperature != 0 or read.scores or read.joint is not None:
                break
        else:
            return lambda logits, rows: Readout(argmax_tokens(logits), {})
        # One kernel launch reads tokens and scores row by row; a joint choice needs all rows.
        is_fusible = any(each.scores for each in reads) and not any(
            each.needs_all_rows for each in reads
        )
        if runs_triton(device) and is_fusible:
            return cls.make_fused_reader(reads, slots, device)
        choose = cls.make_chooser(reads, slots, device)
        judge = cls.make_scorer(reads, slots, device)

        def choose_and_score(logits: Tensor, rows: slice) -> Readout:
            tokens = choose(logits, rows)
            return Readout(tokens, judge(logits, tokens, rows))

        return choose_and_score

    @property
    def has_raw_scores(self) -> bool:
        """Whether all scores use the raw logits."""
        return self.sampling.is_plain or not (self.score_as_drawn and self.scores)

    @classmethod
    def make_fused_reader(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> GroupReader:
        wanted = {score for read in reads for score in read.scores}
        noisy = NoisyChooser.from_requests(
            [r.sampling for r in reads], [r.step for r in reads], slots, device
        )
        is_drawn = np.repeat(
            [not read.has_raw_scores for read in reads], [len(each) for each in slots]
        )
        drawn_flags = to_device(is_drawn, device) if is_drawn.any() else None

        def read_chunk(logits: Tensor, rows: slice) -> Readout:
            own_flags = None if drawn_flags is None else drawn_flags[rows]
            tokens, scores = noisy.read_fused(logits, rows, drawn=own_flags)
            return Readout(tokens, {score: scores[score] for score in wanted})

        return read_chunk

    @classmethod
    def make_chooser(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> Chooser:
        """Return how `reads` choose the tokens of their rows."""
        choose_rows = row_chooser(
            [r.sampling for r in reads], [r.step for r in reads], slots, device
        )
        return (
            JointChooser(choose_rows, reads, slots)
            if any(r.needs_all_rows for r in reads)
            else choose_rows
        )

    @classmethod
    def make_scorer(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> TokenScorer:
        """Return how `reads` score the tokens of their rows."""
        wanted = {score for read in reads for score in read.scores}
        if not wanted:
            return lambda logits, tokens, rows: {}
        samplings = [read.sampling if read.score_as_drawn else PLAIN_SAMPLING for read in reads]
        if all(each.is_plain for each in samplings):
            return lambda logits, tokens, rows: token_scores(logits, tokens, wanted)
        truncation = LogitTruncation.from_requests(samplings, slots, device)
        raw = wanted & {"logprob"}

        def score_chunk(logits: Tensor, tokens: Tensor, rows: slice) -> dict[Score, Tensor]:
            as_drawn = token_scores(truncation(logits, rows), tokens, wanted - raw)
            return as_drawn | token_scores(logits, tokens, raw)

        return score_chunk


GREEDY = Sample()


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """A constraint, and the text with holes from slot 0 on."""

    constraint: Any
    text: Sequence[int]


class JointRows(NamedTuple):
    """Slots of one read whose tokens must fit together, and their rows.

    `read.joint` is the text that they complete.
    """

    constraint: Any
    rows: Sequence[int]
    slots: Sequence[int]
    read: Sample


@dataclass(slots=True)
class JointChooser:
    """Token chooser with a joint choice for each read that has `joint`.

    `choose_rows` chooses each row independently; read i of `reads` wants the slots `slots[i]`.
    """

    choose_rows: Callable[[Tensor, slice], Tensor]
    reads: Sequence[Sample]
    slots: Sequence[Sequence[int]]

    def __call__(self, logits: Tensor, rows: slice) -> Tensor:
        """Return the token of each row of `logits [r, V]`, the rows `rows` of the group."""
        tokens = self.choose_rows(logits, rows)
        begins = accumulate(map(len, self.slots), initial=-rows.start)
        joint_reads: dict[type[Any], list[JointRows]] = {}
        for read, slots, begin in zip(self.reads, self.slots, begins, strict=False):
            if read.joint is not None and len(slots) > 1 and 0 <= begin < len(tokens):
                own_rows = range(begin, begin + len(slots))
                fit = JointRows(read.joint.constraint, own_rows, slots, read)
                joint_reads.setdefault(type(read.joint.constraint), []).append(fit)
        for kind, fits in joint_reads.items():  # in one call, since they share work
            kind.choose_jointly(fits, logits, tokens)
        return tokens


Chooser = Callable[[Tensor, slice], Tensor]
"""Chooses a token `[r]` from each row of logits `[r, V]`, a slice of a group's rows."""


def row_chooser(
    samplings: Sequence[Sampling],
    steps: Sequence[int],
    slots: Sequence[Sequence[int]],
    device: torch.device,
) -> Chooser:
    """Return a chooser with each request's settings and noise, for the slots that it wants."""
    if all(sampling.temperature == 0 for sampling in samplings):
        return lambda logits, rows: argmax_tokens(logits)
    return NoisyChooser.from_requests(samplings, steps, slots, device)


def slot_noise_keys(
    samplings: Sequence[Sampling], steps: Sequence[int], slots: Sequence[Sequence[int]]
) -> Tensor:
    """Return the noise keys `i64[R]` of all slots that the requests want."""
    counts = [len(wanted) for wanted in slots]
    seeds = np.array([int(sampling.seed) % 2**64 for sampling in samplings], dtype=np.uint64)
    slot_ids = np.fromiter((slot for wanted in slots for slot in wanted), np.uint64, sum(counts))
    step_ids = np.array([step % 2**64 for step in steps], dtype=np.uint64)
    keys = noise_keys(np.repeat(seeds, counts), np.repeat(step_ids, counts), slot_ids)
    return torch.from_numpy(keys.astype(np.int64))


@dataclass(slots=True, kw_only=True)
class NoisyChooser:
    """Token chooser with settings and noise per row."""

    truncation: LogitTruncation
    keys: Tensor

    @classmethod
    def from_requests(
        cls,
        samplings: Sequence[Sampling],
        steps: Sequence[int],
        slots: Sequence[Sequence[int]],
        device: torch.device,
    ) -> Self:
        """Build a chooser with each request's settings and a noise key for each of its slots."""
        keys = slot_noise_keys(samplings, steps, slots).numpy()
        return cls(
            truncation=LogitTruncation.from_requests(samplings, slots, device),
            keys=to_device(keys, device),
        )

    def read_fused(
        self,
        logits: Tensor,
        rows: slice,
        guess: Tensor | None = None,
        ratio: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return tokens and all scores of the rows `rows`, computed by the kernel `read_rows`."""
        return read_rows(
            logits, self.truncation.settings_of(rows), self.keys[rows], guess, ratio, drawn
        )

    def __call__(self, logits: Tensor, rows: slice) -> Tensor:
        """Return the token of each row of `logits [r, V]`, the rows `rows` of the group."""
        if runs_triton(logits.device):
            return self.read_fused(logits, rows)[0]
        settings, host_rows = (
            self.truncation.settings_of(rows),
            self.truncation.host_settings[:, rows],
        )
        tokens = argmax_tokens(logits)
        # Rows are selected by index, so greedy rows cost nothing and do not change the others.
        if len(sampled := host_rows[0].nonzero()[0]):
            sampled_rows = to_device(sampled, logits.device)
            row_settings = SamplingTensors(*(setting[sampled_rows] for setting in settings))
            scaled = logits[sampled_rows].float() / row_settings.temperature[:, None]
            noised = apply_top_k_min_p(scaled, row_settings, host_rows[:, sampled])
            noised = noised + gumbel_from_keys(self.keys[rows][sampled_rows], scaled.shape[-1])
            tokens[sampled_rows] = nucleus_argmax(scaled, noised, row_settings.top_p)
        return tokens

    def choice_probabilities(self, logits: Tensor, rows: slice) -> Tensor:
        """Return the probabilities `f32[r, V]` with which tokens of `logits [r, V]` are chosen."""
        probabilities = torch.zeros_like(logits, dtype=torch.float32)
        probabilities.scatter_(-1, argmax_tokens(logits)[:, None], 1.0)
        if len(sampled := self.truncation.host_settings[0, rows].nonzero()[0]):
            sampled_rows = to_device(sampled, logits.device)
            probabilities[sampled_rows] = self.truncation(logits, rows)[sampled_rows].softmax(-1)
        return probabilities

    def draw_tokens(self, weights: Tensor, rows: slice) -> Tensor:
        """Draw a token `[r]` from each row of `weights [r, V]`, which need not be normalised."""
        return argmax_tokens(weights.log() + gumbel_from_keys(self.keys[rows], weights.shape[-1]))


def token_scores(logits: Tensor, tokens: Tensor, wanted: AbstractSet[Score]) -> dict[Score, Tensor]:
    """Return scores `f32[R]` of `tokens [R]` under raw `logits [R, V]`."""
    if not wanted:
        return {}
    log_probabilities = logits.float().log_softmax(-1)
    result: dict[Score, Tensor] = {}
    if "confidence" in wanted:
        result["confidence"] = log_probabilities.gather(-1, tokens[:, None]).squeeze(-1).exp()
    if "logprob" in wanted:
        result["logprob"] = log_probabilities.gather(-1, tokens[:, None]).squeeze(-1)
    if "margin" in wanted:
        best = log_probabilities.topk(2, -1).values.exp()
        result["margin"] = best[:, 0] - best[:, 1]
    if "entropy" in wanted:
        # In place, since these are the largest tensors of a read. Clamped logarithms are finite.
        terms = log_probabilities.exp().mul_(log_probabilities.clamp_(min=-1e4))
        result["entropy"] = -terms.sum(-1)
    return result

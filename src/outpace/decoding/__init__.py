"""Building blocks of methods: forwards, requests, canvases, reads, hole orders, acceptance."""

from outpace.decoding.accept import Verify, agreement, draft_read, verify_read
from outpace.decoding.canvas import Canvas
from outpace.decoding.draft_length import LengthRange, Pace
from outpace.decoding.forward import CAUSAL, FULL, Decoding, Forward, Pattern, Prediction
from outpace.decoding.processor import Processor
from outpace.decoding.request import Constraint, Request, Step
from outpace.decoding.sampling import GREEDY, Read, Sample
from outpace.decoding.sampling_params import Sampling
from outpace.decoding.target import CAUSAL_KINDS, DRAFT_KINDS, MASKED_DRAFT_KINDS, Kind, Target
from outpace.decoding.tree import Tree
from outpace.errors import OptionError
from outpace.kernels.fused import runs_triton, to_device

__all__ = [
    "CAUSAL",
    "CAUSAL_KINDS",
    "DRAFT_KINDS",
    "FULL",
    "GREEDY",
    "MASKED_DRAFT_KINDS",
    "Canvas",
    "Constraint",
    "Decoding",
    "Forward",
    "Kind",
    "LengthRange",
    "OptionError",
    "Pace",
    "Pattern",
    "Prediction",
    "Processor",
    "Read",
    "Request",
    "Sample",
    "Sampling",
    "Step",
    "Target",
    "Tree",
    "Verify",
    "agreement",
    "draft_read",
    "runs_triton",
    "to_device",
    "verify_read",
]

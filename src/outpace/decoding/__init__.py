"""What methods are made of: forwards, sequences, canvases, reads, orders, acceptance."""

from outpace.decoding.accept import Verify, agreement, draft_read, verify_read
from outpace.decoding.canvas import Canvas
from outpace.decoding.forward import CAUSAL, FULL, Decoding, Forward, Mask, Prediction
from outpace.decoding.pace import Pace
from outpace.decoding.sampling import GREEDY, Read, Sample, Sampling
from outpace.decoding.sequence import Native, Sequence, Step

__all__ = [
    "CAUSAL",
    "FULL",
    "GREEDY",
    "Canvas",
    "Decoding",
    "Forward",
    "Mask",
    "Native",
    "Pace",
    "Prediction",
    "Read",
    "Sample",
    "Sampling",
    "Sequence",
    "Step",
    "Verify",
    "agreement",
    "draft_read",
    "verify_read",
]

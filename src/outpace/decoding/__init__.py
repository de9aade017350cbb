"""What methods are made of: forwards, sequences, reads, acceptance."""

from outpace.decoding.accept import Verify, agreement, draft_read, verify_read
from outpace.decoding.forward import CAUSAL, FULL, Decoding, Forward, Mask, Prediction
from outpace.decoding.pace import Pace
from outpace.decoding.sampling import GREEDY, Read, Sample, Sampling
from outpace.decoding.sequence import Sequence, Step

__all__ = [
    "CAUSAL",
    "FULL",
    "GREEDY",
    "Decoding",
    "Forward",
    "Mask",
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

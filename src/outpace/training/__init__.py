"""Training: an objective makes rows of examples, the trainer does the rest."""

from outpace.training import objectives
from outpace.training.data import Data
from outpace.training.objective import Objective
from outpace.training.optim import Optim
from outpace.training.trainer import Loop, Trainer

__all__ = ["Data", "Loop", "Objective", "Optim", "Trainer", "objectives"]

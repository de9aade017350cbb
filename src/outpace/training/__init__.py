"""Training: objectives that turn examples into rows, and the trainer that optimizes them."""

from outpace.training import objectives
from outpace.training.data import Data
from outpace.training.held_out import HeldOut
from outpace.training.loop import Loop
from outpace.training.objective import Objective
from outpace.training.optim import Optim
from outpace.training.trainer import Trainer

__all__ = ["Data", "HeldOut", "Loop", "Objective", "Optim", "Trainer", "objectives"]

"""What all tests share: one thread, and properties that are the same on every run."""

import os

import torch
from hypothesis import settings

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of programs that tests start

settings.register_profile("outpace", deadline=None, derandomize=True, database=None)
settings.load_profile("outpace")

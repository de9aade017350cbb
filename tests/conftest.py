"""What all tests share: one thread, and properties that are the same on every run."""

import torch
from hypothesis import settings

torch.set_num_threads(1)

settings.register_profile("outpace", deadline=None, derandomize=True, database=None)
settings.load_profile("outpace")

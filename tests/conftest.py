"""What all tests share: one thread, kernels on the CPU, properties that are the same every run."""

import os

import torch
from hypothesis import settings

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything loads a kernel
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of programs that tests start

settings.register_profile("outpace", deadline=None, derandomize=True, database=None)
settings.load_profile("outpace")

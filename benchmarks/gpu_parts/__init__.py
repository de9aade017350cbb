"""Parts of the measurement on a GPU, which `benchmarks/gpu.py` runs."""

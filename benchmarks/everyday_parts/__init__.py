"""Tasks and sides of `benchmarks/everyday.py`."""

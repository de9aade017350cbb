"""Compiled loops in C and Triton, with what starts and chooses them."""

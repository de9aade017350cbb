"""Compiled kernels in C and Triton, and their launchers."""

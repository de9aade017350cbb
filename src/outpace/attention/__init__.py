"""Attention back ends of inference and training."""

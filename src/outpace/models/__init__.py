"""Transformers, drafts and their layers."""

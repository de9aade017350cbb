"""Figures of the papers, measured again."""

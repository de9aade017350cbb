"""Figures of the papers, measured again: the command `outpace reproduce` of a clone."""

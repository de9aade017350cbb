"""Constraints on answers: regular expressions, JSON schemas, grammars and infill templates."""

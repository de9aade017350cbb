"""Measurements of speed: load tests of servers, and comparisons of methods."""

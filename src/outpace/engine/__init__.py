"""The engine: caches, packed passes, and the scheduling of requests."""

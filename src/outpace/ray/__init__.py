"""Several replicas of a server on Ray."""

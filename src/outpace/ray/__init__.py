"""Several replicas of a server or model on Ray."""

"""The Python API: models, requests, prompts, outputs and streams."""

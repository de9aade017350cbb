"""What users import: models, requests, prompts, outputs and streams."""

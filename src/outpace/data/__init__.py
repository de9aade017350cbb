"""Training data: answers to prompts, and generated problems."""

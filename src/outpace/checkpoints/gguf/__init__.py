"""GGUF files of llama.cpp: configuration, weights and tokenizer in one file."""

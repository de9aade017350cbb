"""Published formats: what is read, translated, quantized and saved."""

"""Published checkpoint formats: reading, translating, quantizing and saving."""

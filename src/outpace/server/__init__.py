"""HTTP server compatible with OpenAI's API."""

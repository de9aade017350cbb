"""The small trained models inside the package."""

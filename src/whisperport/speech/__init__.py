"""Audio, text, and the speech and model that are part of the package."""

"""Data of the package: the embedded model, and speech."""

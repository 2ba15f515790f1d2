"""Hailo-8, 8L and 10H: what their compiler takes, their compiled files, and their runtime."""

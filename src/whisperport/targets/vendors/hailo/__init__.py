"""Targets for Hailo-8, Hailo-8L and Hailo-10H: limits, compiler, compiled files, and runtime."""

# Words that no file outside of this folder contains, besides the folder's name; a test checks it.
VENDOR_WORDS = ("hef", "hefs", "alls")

"""Targets for Arm's Ethos-U NPUs: lowering, compiler, compiled files, and emulation."""

# Words that no file outside of this folder contains, besides the folder's name; a test checks it.
VENDOR_WORDS = ("ethos", "ethosu", "vela", "tosa")

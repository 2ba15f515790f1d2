"""Targets for MediaTek Genio boards: limits, lowering, compiler, and runtime."""

# Words that no file outside of this folder contains, besides the folder's name; a test checks it.
VENDOR_WORDS = ("genio", "mdla", "ncc-tflite", "neuronrt", "neuropilot")

"""Targets for Qualcomm chips with a Hexagon Tensor Processor (HTP): lowering, compiler, and runtime."""

# Words that no file outside of this folder contains, besides the folder's name; a test checks it.
VENDOR_WORDS = ("qnn", "htp", "hexagon", "snapdragon", "qairt")

"""Targets for Rockchip chips with an NPU: lowering, compiler with its simulator, and runtime."""

# Words that no file outside of this folder contains, besides the folder's name; a test checks it.
VENDOR_WORDS = ("rknn", "rknnlite", "rknpu")

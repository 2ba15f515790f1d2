"""The target `openvino`: OpenVINO on the CPU, or on another of its devices."""

# Words that no file outside of this folder may contain, besides the folder's name; a test checks it.
VENDOR_WORDS = ("xml",)

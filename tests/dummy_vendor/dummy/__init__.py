"""The dummy accelerator: two chips, their compiler, and their compiled files."""

# Words that no file outside of this folder may contain, besides the folder's name; a test checks it.
VENDOR_WORDS = ("dmy",)

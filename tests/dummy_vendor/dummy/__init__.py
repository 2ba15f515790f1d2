"""The dummy accelerator: two chips, their compiler, and their compiled files."""

# Besides the folder's name: no other file of the package may contain these words.
VENDOR_WORDS = ("dmy",)

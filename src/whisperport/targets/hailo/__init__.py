"""Hailo-8, 8L and 10H: what their compiler supports, their compiled files, and their runtime."""

# Besides the folder's name: no other file of the package contains these. A test checks it.
VENDOR_WORDS = ("hef", "hefs", "alls")

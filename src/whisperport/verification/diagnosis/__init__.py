"""Diagnose the output of a device: which of many causes explains that it differs from the expected output.

    files ─► readings ─► layouts ─► references ─► fit ─► simplest explanation, or a coarse quantization
             (bytes)     (axes)     (inputs)     (scale, frames, tail)

`diagnose` is the entry. Every family of causes is one file. A correction is accepted only if it lowers the
error by much more than chance would (`explaining.py`). A coarse quantization is recognized by how its
values change over time (`coarse.py`).
"""

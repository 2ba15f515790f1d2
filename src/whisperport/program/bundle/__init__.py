"""Read and write bundles: folders with lowered programs and everything needed to run and verify them.

    NAME/
    ├── manifest.json     description of the bundle, with the hash of every other file
    ├── tokenizer.json    tokenizer in the format of Hugging Face's `tokenizers`
    ├── embedding.npy     (V, d) float16 or float32: one row per token
    ├── positions.npy     (N, d) float16 or float32: one row per decoder position
    ├── reference.npz     reference inputs and outputs, to verify on a board without torch
    └── …                 the lowered programs that the manifest lists

`Bundle.open` reads one and checks every file. `writing_bundle`, in writing.py, writes all of it or nothing.
"""

from whisperport.program.bundle.folder import Bundle
from whisperport.program.bundle.listed_files import ListedFiles, regular_file
from whisperport.program.bundle.manifest import (
    EMBEDDING,
    FORMAT_VERSION,
    MANIFEST,
    POSITIONS,
    REFERENCE,
    SILENCE,
    TOKENIZER,
    FileEntry,
    Manifest,
)
from whisperport.program.bundle.program_entry import ProgramEntry

__all__ = [
    "EMBEDDING",
    "FORMAT_VERSION",
    "MANIFEST",
    "POSITIONS",
    "REFERENCE",
    "SILENCE",
    "TOKENIZER",
    "Bundle",
    "FileEntry",
    "ListedFiles",
    "Manifest",
    "ProgramEntry",
    "regular_file",
]

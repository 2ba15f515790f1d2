"""Read and write bundles: folders with lowered programs and everything needed to run and verify them.

    NAME/
    ├── manifest.json     description of the bundle, with the hash of every other file
    ├── tokenizer.json    tokenizer in the format of Hugging Face's `tokenizers`
    ├── embedding.npy     (V, d) float16 or float32: one row per token
    ├── positions.npy     (N, d) float16 or float32: one row per decoder position
    ├── reference.npz     reference inputs and outputs, to verify on a board without torch
    └── …                 the lowered programs that the manifest lists

`writing_bundle` writes a bundle completely or not at all. `Bundle.open` reads one and checks every file.
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
from whisperport.program.bundle.writing import BundleWriter, check_writable, writing_bundle

__all__ = [
    "EMBEDDING",
    "FORMAT_VERSION",
    "MANIFEST",
    "POSITIONS",
    "REFERENCE",
    "SILENCE",
    "TOKENIZER",
    "Bundle",
    "BundleWriter",
    "FileEntry",
    "ListedFiles",
    "Manifest",
    "ProgramEntry",
    "check_writable",
    "regular_file",
    "writing_bundle",
]

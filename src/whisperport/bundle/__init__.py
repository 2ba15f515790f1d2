"""A folder of lowered programs and everything needed to run and to verify them.

    NAME/
    ├── manifest.json     what the bundle is, and the hash of every other file
    ├── tokenizer.json    as Hugging Face's `tokenizers` reads it
    ├── embedding.npy     (V, d) float16 or float32: one row per token
    ├── positions.npy     (N, d) float16 or float32: one row per position
    ├── reference.npz     reference inputs and outputs, so that a board verifies without torch
    └── …                 the lowered programs, as the manifest lists them

`writing_bundle` writes one, all or nothing; `Bundle.open` reads one and checks every byte.
"""

from whisperport.bundle.folder import Bundle
from whisperport.bundle.listed_files import ListedFiles, regular_file
from whisperport.bundle.manifest import (
    EMBEDDING,
    FORMAT_VERSION,
    MANIFEST,
    POSITIONS,
    REFERENCE,
    TOKENIZER,
    FileEntry,
    Manifest,
)
from whisperport.bundle.program_entry import ProgramEntry
from whisperport.bundle.writing import BundleWriter, check_writable, writing_bundle

__all__ = [
    "EMBEDDING",
    "FORMAT_VERSION",
    "MANIFEST",
    "POSITIONS",
    "REFERENCE",
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

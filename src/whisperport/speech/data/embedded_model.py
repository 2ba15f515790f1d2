"""The embedded model, whose name is `default`: large files are stored compressed, and unpacked when needed.

data/model/NAME       a small file of the checkpoint
data/model/NAME.xz    a large one, compressed with xz, whose checksum shows a damaged file

Its tokens and merges are OpenAI's. They are in the package once, in `text/ranks/`, and the stored
`tokenizer.json` has none; unpacking adds them.
"""

import hashlib
import json
import lzma
import shutil
from pathlib import Path

from whisperport.errors import CheckpointError

NAME = "default"
TOKENIZER = "tokenizer.json"
N_VOCAB = 51_865
MAX_BYTES = 32 * 2**20  # of one unpacked file; the weights have 17 MB
MAX_MEMORY = 128 * 2**20  # of the decompressor, which needs about as much as the largest file
SUFFIX = ".xz"

UNDERSTANDS = (
    "the model `default` is small and trained on synthetic speech: it understands English commands, "
    "numbers, times of day and names, and invents text for any other speech"
)


def is_meant(model: str) -> bool:
    """Return whether a model's name means the embedded model, and not a file or folder of that name."""
    return model == NAME and not Path(model).exists()


def model_folder() -> Path:
    """Return the folder in the package that holds the embedded model."""
    return Path(__file__).parent / "model"


def unpack_model(out: Path) -> None:
    """Write the embedded model to an existing folder, as a checkpoint in transformers' format.

    Raises:
        CheckpointError: this installation has no embedded model, or a file of it is damaged.
        OSError: a file cannot be written.
    """
    for file in _files():
        if file.suffix == SUFFIX:
            (out / file.stem).write_bytes(_unpacked(file))
        else:
            shutil.copyfile(file, out / file.name)


def model_digest() -> str:
    """Return a SHA-256 in hexadecimal of all files of the embedded model, as they are stored.

    Raises:
        CheckpointError: this installation has no embedded model.
    """
    digest = hashlib.sha256()
    for file in _files():
        digest.update(f"{file.name}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def check_model() -> None:
    """Check that the embedded model is complete: every compressed file has a checksum.

    Raises:
        CheckpointError: it is missing, or a file of it is damaged.
    """
    for file in _files():
        if file.suffix == SUFFIX:
            _unpacked(file)


def _files() -> list[Path]:
    folder = model_folder()
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            "this installation of whisperport has no embedded model",
            why="its data/model folder is missing",
            hint="install whisperport again, or give a name such as `tiny`",
        )
    return sorted(path for path in folder.iterdir() if path.is_file())


def _unpacked(file: Path) -> bytes:
    try:
        # `XZ` streams state the memory that they need, so that a damaged size cannot fill the memory.
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_MEMORY)
        data = decompressor.decompress(file.read_bytes(), MAX_BYTES)
    except (OSError, lzma.LZMAError) as error:
        raise _damaged(file, str(error)) from error
    if not decompressor.eof:
        raise _damaged(file, f"it is cut off, or unpacks to more than {MAX_BYTES} bytes")
    return _with_vocabulary(data) if file.stem == TOKENIZER else data


def _with_vocabulary(tokenizer: bytes) -> bytes:
    """Add OpenAI's tokens and merges to a tokenizer.json, in the compact form that transformers writes."""
    from whisperport.speech.text.vocabulary import openai_bpe

    document = json.loads(tokenizer)
    document["model"]["vocab"], document["model"]["merges"] = openai_bpe(N_VOCAB)
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"the embedded model is damaged: {file.name} cannot be unpacked",
        why=why,
        hint="install whisperport again",
    )

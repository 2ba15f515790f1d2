"""Store the exported model in the package: large files compressed, the tokenizer without OpenAI's tokens.

python pack.py --model work/model --out ../src/whisperport/speech/data/model
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
from pathlib import Path

# Half of the bytes are the low bytes of a float16: lp and pb tell the compressor so, which saves 4 %.
FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}
    | {"dict_size": 2**25, "lc": 2, "lp": 1, "pb": 1}
]


def main() -> None:
    """Copy the small files, and compress the large ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for file in sorted(args.model.iterdir()):
        if file.name == "tokenizer.json":
            pack(without_tokens(file.read_bytes()), args.out / f"{file.name}.xz")
        elif file.suffix == ".safetensors":
            pack(file.read_bytes(), args.out / f"{file.name}.xz")
        else:
            shutil.copyfile(file, args.out / file.name)


def without_tokens(tokenizer: bytes) -> bytes:
    """Remove the tokens and merges. `data/embedded_model.py` adds them from the package's ranks."""
    document = json.loads(tokenizer)
    document["model"] |= {"vocab": {}, "merges": []}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def pack(data: bytes, file: Path) -> None:
    """Compress with a SHA-256, by which a damaged file is recognized."""
    file.write_bytes(lzma.compress(data, lzma.FORMAT_XZ, lzma.CHECK_SHA256, filters=FILTERS))


if __name__ == "__main__":
    main()

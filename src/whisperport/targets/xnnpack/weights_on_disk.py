"""Keep the serialized weights of methods in files while they are lowered, each content once.

ExecuTorch holds the serialized weights of a method in memory until the file is written. Several methods
have equal weights, and all of them are in memory as tensors too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SMALLEST = 4096  # bytes; smaller data stays in memory


@contextmanager
def weights_on_disk(folder: Path) -> Iterator[None]:
    """Within the block, data that a delegate gives to ExecuTorch's data store is moved to files.

    Args:
        folder: where the files are; they are deleted at the end of the block.
    """
    from executorch.exir._serialize._cord import FileBackedData
    from executorch.exir._serialize._named_data_store import NamedDataStore

    original = NamedDataStore.add_named_data
    with TemporaryDirectory(prefix=".weights-", dir=folder) as temporary:
        known: dict[bytes, Any] = {}

        def moved(data: bytes) -> Any:
            digest = sha256(data).digest()
            if digest not in known:
                path = Path(temporary, digest.hex())
                path.write_bytes(data)
                known[digest] = FileBackedData(str(path), sha256=digest)
            return known[digest]

        def add_named_data(store: Any, key: str, data: Any, *rest: Any, **named: Any) -> None:
            if isinstance(data, bytes) and len(data) >= SMALLEST:
                data = moved(data)
            original(store, key, data, *rest, **named)

        NamedDataStore.add_named_data = add_named_data
        try:
            yield
        finally:
            NamedDataStore.add_named_data = original

"""Read a JSON object from an untrusted file."""

import json
from pathlib import Path
from typing import Any

from whisperport.errors import CheckpointError

_LARGEST_BYTES = 8 << 20  # large-v3's generation_config.json, the longest of them, is under 4 KB


def read_json_object(path: Path, *, largest_bytes: int = _LARGEST_BYTES) -> dict[str, Any]:
    """Raises CheckpointError when the file is missing, too long, not JSON, or not an object."""
    what = f"cannot read `{path.name}` in `{path.parent}`"
    hint = "download the file again, or save the checkpoint again"
    try:
        size = path.stat().st_size
        if size > largest_bytes:
            raise CheckpointError(
                what, why=f"it is {size} bytes long, more than {largest_bytes}", hint=hint
            )
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(what, why=error.strerror or str(error), hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(what, why=f"it is not JSON: {error}", hint=hint) from error
    if not isinstance(data, dict):
        raise CheckpointError(
            what, why=f"expected a JSON object, found {type(data).__name__}", hint=hint
        )
    return data

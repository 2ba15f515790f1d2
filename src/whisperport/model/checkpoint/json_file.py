"""Read a JSON object from an untrusted file."""

import json
from pathlib import Path
from typing import Any

from whisperport.errors import CheckpointError

_MAX_BYTES = 8 << 20  # the longest such file, large-v3's generation_config.json, has less than 4 KB


def read_json_object(path: Path, *, max_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: the file.
        max_bytes: maximum size of the file.

    Raises:
        CheckpointError: the file is missing, too large, not JSON, or not an object.
    """
    what = f"cannot read `{path.name}` in `{path.parent}`"
    hint = "download the file again, or save the checkpoint again"
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointError(
                what, why=f"it has {size} bytes; the maximum is {max_bytes}", hint=hint
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

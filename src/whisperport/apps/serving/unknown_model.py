"""What a client is told that asks for a model by another name."""

from collections.abc import Iterable


def unknown_model(name: str, served: Iterable[str]) -> str:
    """Return the message about a model that is not served."""
    return (
        f"The model {name[:100]!r} does not exist; served: {', '.join(served)}. "
        "`whisperport serve --alias NAME` accepts a further name"
    )

"""Check paths in a manifest: relative to the bundle, and inside of it on every operating system."""

from whisperport.bundle.strict_json import Field


def safe_path(path: Field) -> str:
    """Return a path of a manifest after checking that it stays inside the bundle on every system.

    Raises:
        BundleError: the path is empty or absolute, or has "..", ".", an empty part, a backslash, a
            colon (drive letters and alternate streams on Windows), or a control character.
    """
    text = path.text()
    if not text or text.startswith("/"):
        path.reject(f"is {text[:80]!r}; expected a path relative to the bundle")
    if "\\" in text or ":" in text or any(ord(c) < 32 or ord(c) == 127 for c in text):
        path.reject(f"is {text[:80]!r}; backslashes, colons and control characters are not allowed")
    if any(part in ("", ".", "..") for part in text.split("/")):
        path.reject(f"is {text[:80]!r}; empty parts, `.` and `..` are not allowed")
    return text

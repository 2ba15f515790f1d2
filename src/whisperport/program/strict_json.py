"""Parse untrusted JSON strictly: errors name the wrong field, and only BundleError is raised.

`safe_path` checks paths: relative to the bundle, and inside of it on every operating system.
"""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from whisperport.errors import BundleError

T = TypeVar("T", bound=str)

NOT_FINITE = ("nan", "inf", "-inf")  # JSON has no such numbers: they are strings
MAX_DEPTH = 64  # a manifest has 6 levels; Python's parser fails near 1,000
MAX_INTEGER = 2**63 - 1  # the largest integer that other JSON parsers can store


@dataclass(frozen=True, slots=True)
class Field:
    """One value of a JSON document, with its path in the document for errors."""

    value: Any
    path: str  # such as "programs[0].files"; empty at the top level
    document: str  # name of the file, such as "manifest.json"

    def reject(self, why: str) -> NoReturn:
        """Raise BundleError with the path of this field, followed by `why`: "is 5; expected a string"."""
        where = f"field `{self.path}`" if self.path else "the top level"
        raise BundleError(
            f"{self.document} is not valid: {where} {why}",
            hint="the file is damaged or was edited; export the bundle again",
        )

    def mapping(self) -> dict[str, "Field"]:
        """The members of a JSON object, by name."""
        if not isinstance(self.value, dict):
            self.reject(f"is {_kind(self.value)}; expected an object")
        prefix = f"{self.path}." if self.path else ""
        return {
            name: Field(value, prefix + name, self.document) for name, value in self.value.items()
        }

    def members(self, names: Collection[str]) -> dict[str, "Field"]:
        """The members of a JSON object that must have exactly the members `names`."""
        members = self.mapping()
        for name in names:
            if name not in members:
                self.reject(f"has no `{name}`")
        for name in members:
            if name not in names:
                self.reject(f"has an unknown member {name[:80]!r}")
        return members

    def split(self, name: str) -> tuple["Field", "Field"]:
        """The member of an object that must have it, and the object without this member."""
        members = self.mapping()
        if name not in members:
            self.reject(f"has no `{name}`")
        remaining = {key: value for key, value in self.value.items() if key != name}
        return members[name], Field(remaining, self.path, self.document)

    def elements(self) -> list["Field"]:
        """The elements of a JSON array."""
        if not isinstance(self.value, list):
            self.reject(f"is {_kind(self.value)}; expected an array")
        return [
            Field(value, f"{self.path}[{i}]", self.document) for i, value in enumerate(self.value)
        ]

    def text(self) -> str:
        """The value, which must be a string."""
        if not isinstance(self.value, str):
            self.reject(f"is {_kind(self.value)}; expected a string")
        return self.value

    def non_empty_text(self) -> str:
        """The value, which must be a string that is not empty."""
        if not self.text():
            self.reject("is empty")
        return self.text()

    def one_of(self, known: Sequence[T]) -> T:
        """The value, which must be one of the strings `known`."""
        text = self.text()
        value = next((string for string in known if string == text), None)
        if value is None:
            self.reject(f"is {text[:80]!r}; expected one of {', '.join(known)}")
        return value

    def sha256(self) -> str:
        """The value, which must be a SHA-256 in lower-case hexadecimal."""
        text = self.text()
        if len(text) != 64 or set(text) - set("0123456789abcdef"):
            self.reject("is not a SHA-256; expected 64 lower-case hexadecimal digits")
        return text

    def json_object(self) -> dict[str, Any]:
        """The value, which must be an object; its members are not checked."""
        self.mapping()
        return dict(self.value)

    def integer(self, at_least: int = 0, at_most: int = MAX_INTEGER) -> int:
        """The value, which must be an integer in this range, both limits included."""
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self.reject(f"is {_kind(self.value)}; expected an integer")
        if self.value < at_least:
            self.reject(f"is {self.value}; expected at least {at_least}")
        if self.value > at_most:
            self.reject(f"is {self.value}; expected at most {at_most}")
        return self.value

    def number(self) -> float:
        """The value, which must be a number, or "nan", "inf" or "-inf"; an integer stays one."""
        if isinstance(self.value, str) and self.value in NOT_FINITE:
            return float(self.value)
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            self.reject(f"is {_kind(self.value)}; expected a number")
        return self.value

    def positive(self) -> int:
        """The value, which must be an integer of at least 1."""
        return self.integer(at_least=1)

    def signed(self) -> int:
        """The value, which must be an integer of any sign."""
        return self.integer(at_least=-MAX_INTEGER)

    def boolean(self) -> bool:
        """The value, which must be true or false."""
        if not isinstance(self.value, bool):
            self.reject(f"is {_kind(self.value)}; expected true or false")
        return self.value


def parse(raw: bytes, document: str) -> Field:
    """Parse a JSON document and return its top level.

    Args:
        document: name of the file, for errors.

    Raises:
        BundleError: the document is not UTF-8 or not JSON, or has a repeated name, NaN or infinity, an
            integer beyond 64 bits, or more than 64 levels.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
    except RecursionError as error:
        raise BundleError(
            f"{document} is not valid: it has more than {MAX_DEPTH} levels of nesting",
            hint="the file is damaged or was edited; export the bundle again",
        ) from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise BundleError(
            f"{document} is not valid JSON",
            why=str(error)[:200],
            hint="the file is damaged or was edited; export the bundle again",
        ) from error
    return plain(value, document)


def plain(value: Any, document: str) -> Field:
    """Check that `value` can be written as strict JSON, and return it as the top level of `document`.

    Raises:
        BundleError: it contains a value that JSON cannot store, or that `parse` rejects.
    """
    top = Field(value, "", document)
    level = [value]
    depth = 0
    while level:  # level by level and not recursive, since the depth of the document is not trusted
        depth += 1
        if depth > MAX_DEPTH:
            top.reject(f"has more than {MAX_DEPTH} levels of nesting")
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                for name in item:
                    _check_text(name, top)
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            else:
                _check_scalar(item, top)
        level = below
    return top


def _check_scalar(item: Any, top: Field) -> None:
    if item is None or isinstance(item, bool):
        return
    if isinstance(item, str):
        _check_text(item, top)
    elif isinstance(item, int):
        if abs(item) > MAX_INTEGER:
            top.reject("contains an integer beyond 64 bits")
    elif isinstance(item, float):
        if not math.isfinite(item):
            top.reject(f"contains {item}, which JSON cannot store")
    else:
        top.reject(f"contains a {type(item).__name__}, which JSON cannot store")


def _check_text(item: Any, top: Field) -> None:
    if not isinstance(item, str):
        top.reject(f"contains a member whose name is a {type(item).__name__}; expected a string")
    try:
        item.encode("utf-8")
    except UnicodeEncodeError:
        top.reject("contains half of a surrogate pair, which is not a character")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"an object has two members called {name[:80]!r}")
        members[name] = value
    return members


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    return names.get(type(value), "an array" if isinstance(value, list) else "an object")


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

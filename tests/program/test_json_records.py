"""Records to JSON and back: each kind of field, and what a hostile document is told."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from whisperport.errors import BundleError
from whisperport.program.json_records import Member, from_json, members, to_json
from whisperport.program.strict_json import Field, plain


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    name: Annotated[str, Field.non_empty_text]
    sizes: tuple[Annotated[int, Field.positive], ...] = ()

    def __post_init__(self) -> None:
        if self.name == "forbidden":
            raise ValueError("the name is forbidden")


@dataclass(frozen=True, kw_only=True)
class Outer:
    kind: Literal["a", "b"]
    inner: Inner
    number: float
    count: int
    right: bool
    pair: tuple[int, str]
    hashes: Mapping[str, Annotated[str, Field.sha256]]
    by_name: Mapping[str, Inner] = field(default_factory=dict)
    absent: Inner | None = None
    free: Mapping[str, Any] = field(default_factory=dict)
    usual: Annotated[int, Member(is_omitted=True)] = 7
    renamed: Annotated[str, Member("other name")] = ""


RECORD = Outer(
    kind="a",
    inner=Inner("x", (1, 2)),
    number=math.inf,
    count=3,
    right=True,
    pair=(1, "two"),
    hashes={"file": "a" * 64},
    by_name={"y": Inner("y")},
    free={"anything": [None, {"deep": 1}]},
)


def read(document: Any) -> Outer:
    return from_json(Outer, plain(document, "a.json"))


def test_a_record_survives_the_round_trip_in_the_order_of_its_class() -> None:
    document = json.loads(json.dumps(to_json(RECORD), allow_nan=False))

    assert [*document] == [
        *("kind", "inner", "number", "count", "right", "pair", "hashes", "by_name", "absent"),
        *("free", "other name"),  # `usual` has its default
    ]
    assert document["number"] == "inf"
    assert read(document) == RECORD
    assert read({**document, "usual": 8}).usual == 8


def test_values_that_only_python_has_become_json() -> None:
    values = [Path("a") / "b", Colour.RED, np.float32(0.5), np.int64(3), -math.inf, (True, None)]

    assert to_json(values) == ["a/b", "red", 0.5, 3, "-inf", [True, None]]


def test_a_record_with_more_than_its_fields_says_so_itself_wherever_it_is() -> None:
    @dataclass(frozen=True)
    class Counted:
        items: tuple[str, ...]

        def to_json(self) -> dict[str, Any]:
            return {**members(self), "count": len(self.items)}

    assert to_json({"counted": Counted(("a", "b"))}) == {
        "counted": {"items": ["a", "b"], "count": 2}
    }


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "c"}, "`kind` is 'c'; expected one of a, b"),
        ({"kind": None}, "`kind` is null; expected a string"),
        ({"inner": None}, "`inner` is null; expected an object"),
        ({"inner": {}}, "`inner` has no `name`"),
        ({"inner": {"name": "", "sizes": []}}, r"`inner.name` is empty"),
        (
            {"inner": {"name": "x", "sizes": [1, 0]}},
            r"`inner.sizes\[1\]` is 0; expected at least 1",
        ),
        ({"inner": {"name": "x", "sizes": {}}}, "`inner.sizes` is an object; expected an array"),
        ({"inner": {"name": "forbidden", "sizes": []}}, "`inner` is not valid: the name is forb"),
        ({"inner": {"name": "x", "sizes": [], "y": 1}}, "`inner` has an unknown member 'y'"),
        ({"number": "1.5"}, "`number` is a string; expected a number"),
        ({"number": True}, "`number` is a boolean; expected a number"),
        ({"count": 1.0}, "`count` is a number; expected an integer"),
        ({"count": -1}, "`count` is -1; expected at least 0"),
        ({"count": True}, "`count` is a boolean"),
        ({"right": 1}, "`right` is an integer; expected true or false"),
        ({"pair": [1]}, "`pair` has 1 elements; expected 2"),
        ({"pair": ["one", "two"]}, r"`pair\[0\]` is a string; expected an integer"),
        ({"hashes": {"file": "b"}}, "`hashes.file` is not a SHA-256"),
        ({"by_name": {"y": 1}}, "`by_name.y` is an integer; expected an object"),
        ({"absent": 1}, "`absent` is an integer; expected an object"),
        ({"free": []}, "`free` is an array; expected an object"),
        ({"usual": None}, "`usual` is null; expected an integer"),
        ({"renamed": ""}, "has an unknown member 'renamed'"),
    ],
)
def test_a_wrong_member_is_named_with_what_was_expected(change: Any, why: str) -> None:
    document = to_json(RECORD) | change

    with pytest.raises(BundleError, match=f"a.json is not valid: (field|the top level) {why}"):
        read(document)


@pytest.mark.parametrize("name", list(to_json(RECORD)))
def test_a_missing_member_is_named(name: str) -> None:
    document = {member: value for member, value in to_json(RECORD).items() if member != name}

    with pytest.raises(BundleError, match=f"has no `{name}`"):
        read(document)

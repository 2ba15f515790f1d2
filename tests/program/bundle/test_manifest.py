import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whisperport.errors import BundleError
from whisperport.program.bundle import FORMAT_VERSION, FileEntry, Manifest, strict_json

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["run here", "float32", "../x", "a" * 64, 0, 1, -1]),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def paths_into(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for name, item in value.items():
            found += paths_into(item, (*path, name))
    if isinstance(value, list):
        for i, item in enumerate(value):
            found += paths_into(item, (*path, i))
    return found


def holder(data: Any, path: tuple[Any, ...]) -> Any:
    for step in path[:-1]:
        data = data[step]
    return data


def with_a_file(manifest: Manifest) -> Manifest:
    return replace(manifest, files={"programs/encoder.bin": FileEntry("a" * 64, 7)})


def test_a_manifest_survives_the_round_trip(manifest: Manifest) -> None:
    given = with_a_file(manifest)

    raw = given.to_bytes()

    assert Manifest.from_bytes(raw) == given
    assert Manifest.from_json(json.loads(json.dumps(given.to_json()))) == given


def test_the_language_a_checkpoint_was_tuned_for_is_kept_and_otherwise_not_mentioned(
    manifest: Manifest,
) -> None:
    given = with_a_file(manifest)
    tuned = replace(given, generation=replace(given.generation, language="en"))

    assert Manifest.from_bytes(tuned.to_bytes()).generation.language == "en"
    assert b'"language"' not in given.to_bytes()


@pytest.mark.parametrize(
    ("difference", "what", "hint"), [(1, "newer", "upgrade"), (-1, "older", "export")]
)
def test_another_format_says_what_to_do_even_if_all_else_has_changed(
    difference: int, what: str, hint: str
) -> None:
    version = FORMAT_VERSION + difference
    raw = json.dumps({"format": "whisperport bundle", "format_version": version})

    with pytest.raises(BundleError, match=what) as caught:
        Manifest.from_bytes(raw.encode())

    assert hint in caught.value.hint


def test_each_missing_field_is_named(manifest: Manifest) -> None:
    document = with_a_file(manifest).to_json()
    free_form = {"source", "rewrites", "versions", "machine", "verification", "delegation"}
    free_form |= {"languages", "tasks", "runtime", "value"}
    checked = 0

    for path in paths_into(document):
        if not isinstance(path[-1], str) or free_form & set(path[:-1]) or path[-2:-1] == ("files",):
            continue
        damaged = copy.deepcopy(document)
        del holder(damaged, path)[path[-1]]
        with pytest.raises(BundleError, match=f"`{path[-1]}`"):
            Manifest.from_json(damaged)
        checked += 1

    assert checked > 50


@pytest.mark.parametrize("wrong", [None, True, 1.5, "text", [], {}, -1, [[1]], {"a": {}}])
def test_each_field_of_a_wrong_type_is_named(manifest: Manifest, wrong: Any) -> None:
    document = with_a_file(manifest).to_json()
    free_form = {"source", "rewrites", "machine", "verification", "delegation", "value"}
    refused = 0

    for path in paths_into(document):
        if free_form & set(path[:-1]) or type(holder(document, path)[path[-1]]) is type(wrong):
            continue
        damaged = copy.deepcopy(document)
        holder(damaged, path)[path[-1]] = wrong
        with pytest.raises(BundleError) as caught:
            Manifest.from_json(damaged)
        name = path[-1] if isinstance(path[-1], str) else f"[{path[-1]}]"
        assert name in str(caught.value)
        refused += 1

    assert refused > 30


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (("format_version",), 0),
        (("format",), "chrome extension"),
        (("name",), ""),
        (("dims", "n_text_head"), 3),
        (("dims", "n_vocab"), 0),
        (("programs", 0, "status"), "run here"),
        (("programs", 0, "placement", "target"), ""),
        (("programs", 0, "placement", "options"), {"opset": 13}),
        (("programs", 0, "evidence", 0, "kind"), "probably fine"),
        (("programs", 0, "evidence", 0, "files"), {}),
        (("programs", 0, "evidence", 0, "files"), {"programs/encoder.bin": "a" * 63}),
        (("programs", 0, "evidence", 0, "date"), "yesterday"),
        (("programs", 0, "evidence", 0, "checks", 0, "value"), {"sqnr_db": "nan"}),
        (("programs", 0, "evidence", 0, "checks", 0, "reason"), "it failed"),
        (("programs", 0, "evidence", 0, "checks", 0, "level"), "luck"),
        (("programs", 0, "files"), []),
        (("programs", 0, "files"), ["../../etc/passwd"]),
        (("programs", 0, "spec", "inputs", 0, "dtype"), "object"),
        (("programs", 0, "spec", "inputs", 0, "shape"), [1, 0]),
        (("generation", "alignment_heads"), [[1, 2, 3]]),
        (("generation", "suppressed"), [-1]),
        (("generation", "language"), "xx"),
        (("files", "programs/encoder.bin", "sha256"), "A" * 64),
        (("files", "programs/encoder.bin", "sha256"), "a" * 63),
        (("files", "programs/encoder.bin", "bytes"), -1),
        (("files", "manifest.json"), {"sha256": "a" * 64, "bytes": 1}),
        (("surprise",), 1),
        (("programs", 0, "surprise"), 1),
    ],
)
def test_an_impossible_value_is_refused(
    manifest: Manifest, field: tuple[Any, ...], value: Any
) -> None:
    document = with_a_file(manifest).to_json()
    holder(document, field)[field[-1]] = value

    with pytest.raises(BundleError) as caught:
        Manifest.from_json(document)

    assert "manifest.json" in str(caught.value)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/..",
        "./a",
        "a//b",
        "a/",
        "a\\b",
        "..\\x",
        "C:x",
        "C:/x",
        "a:stream",
        "a\0b",
        "a\nb",
        "\x7f",
        "\\\\server\\share",
    ],
)
def test_a_path_that_could_leave_the_bundle_is_refused(manifest: Manifest, path: str) -> None:
    listed = with_a_file(manifest).to_json()
    listed["files"][path] = {"sha256": "a" * 64, "bytes": 1}
    named = with_a_file(manifest).to_json()
    named["programs"][0]["files"] = [path]

    for document in (listed, named):
        with pytest.raises(BundleError, match="files"):
            Manifest.from_json(document)


def test_two_programs_of_one_name_are_refused(manifest: Manifest) -> None:
    document = manifest.to_json()
    document["programs"] *= 2

    with pytest.raises(BundleError, match="same name"):
        Manifest.from_json(document)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"a": NaN}', "NaN is not a number in JSON"),
        (b'{"a": [-Infinity]}', "Infinity is not a number in JSON"),
        (b'{"a": 1e999}', "cannot store"),
        (b'{"a": 1, "a": 2}', "two members called 'a'"),
        (b'{"a": ' + b"9" * 30 + b"}", "beyond 64 bits"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\ud800": 1}', "surrogate"),
        (b"[" * 100_000, "more than 64 levels"),
        (b'{"a":' * 100_000, "more than 64 levels"),
        (b"[" * 65 + b"]" * 65, "more than 64 levels"),
    ],
)
def test_hostile_json_is_refused_with_the_reason(raw: bytes, why: str) -> None:
    with pytest.raises(BundleError, match=why) as caught:
        strict_json.parse(raw, "manifest.json")

    assert "manifest.json" in caught.value.what


@pytest.mark.parametrize("raw", [b"null", b"[]", b"3", b"{}", b"[" * 64 + b"]" * 64])
def test_json_that_is_no_manifest_is_refused(raw: bytes) -> None:
    assert strict_json.parse(raw, "manifest.json").path == ""

    with pytest.raises(BundleError, match="top level"):
        Manifest.from_bytes(raw)


def test_no_changed_byte_of_the_manifest_goes_unnoticed(manifest: Manifest) -> None:
    given = with_a_file(manifest)
    raw = given.to_bytes()
    noticed = 0

    for i in range(len(raw)):
        damaged = bytearray(raw)
        damaged[i] ^= 1
        try:
            read = Manifest.from_bytes(bytes(damaged))
        except BundleError:
            noticed += 1
        else:
            assert read == given  # one kind of white space for another

    assert noticed > len(raw) / 2


def test_an_unknown_program_is_answered_with_the_known_ones(manifest: Manifest) -> None:
    assert manifest.program("encoder") is manifest.programs[0]

    with pytest.raises(BundleError, match="encoder"):
        manifest.program("decoder")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_anywhere_raises_a_bundle_error_or_nothing(
    manifest: Manifest, data: st.DataObject
) -> None:
    document = with_a_file(manifest).to_json()
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths_into(document)))
        holder(document, path)[path[-1]] = data.draw(ANYTHING)

    try:
        read = Manifest.from_json(document)
    except BundleError:
        return

    assert Manifest.from_bytes(read.to_bytes()) == read


@settings(max_examples=200)
@given(raw=st.binary(max_size=200) | ANYTHING.map(lambda v: json.dumps(v).encode()))
def test_any_bytes_raise_a_bundle_error(raw: bytes) -> None:
    with pytest.raises(BundleError):
        Manifest.from_bytes(raw)

"""The manifest of a bundle: what it states, and what is rejected."""

import copy
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whisperport.errors import BundleError
from whisperport.program import strict_json
from whisperport.program.bundle import FORMAT_VERSION, Bundle, FileEntry, Manifest
from whisperport.program.json_records import to_json
from whisperport.program.masks import MASKED
from whisperport.program.placement import Placement
from whisperport.program.signatures import LOGSUMEXP
from whisperport.program.window import ShortWindows, Window
from whisperport.runtime import load_engine
from whisperport.targets import RunOptions

from ...edited_bundles import copy_of_shipped, program, read, write
from ...embedded import default_bundle

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
    windows = ShortWindows(positions=(3, 4), min_logprob=-0.5)
    document = replace(with_a_file(manifest), short_windows=windows).to_json()
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


# The window in a bundle's manifest, which is present only if it differs from the checkpoint's.

WINDOW = Window(positions=6, audio_positions=5, context_positions=9, padding="features")


def test_a_window_survives_writing_and_reading(manifest: Manifest) -> None:
    shorter = replace(manifest, window=WINDOW)

    assert Manifest.from_bytes(shorter.to_bytes()) == shorter


def test_the_checkpoints_own_window_is_not_written(manifest: Manifest) -> None:
    assert "window" not in json.loads(manifest.to_bytes())
    assert Manifest.from_bytes(manifest.to_bytes()).window is None


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {},
        {**to_json(WINDOW), "padding": "mirror"},
        {**to_json(WINDOW), "padding": 1},
        {**to_json(WINDOW), "padding": "none"},
        {**to_json(WINDOW), "context_positions": 5},
        {**to_json(WINDOW), "audio_positions": 0},
        {**to_json(WINDOW), "positions": -6},
        {**to_json(WINDOW), "positions": 6.0},
        {**to_json(WINDOW), "seconds": 10},
        {name: size for name, size in to_json(WINDOW).items() if name != "context_positions"},
        to_json(Window(positions=5, audio_positions=5, context_positions=9, padding="features")),
    ],
)
def test_a_window_that_cannot_be_is_refused_by_name(manifest: Manifest, wrong: Any) -> None:
    with pytest.raises(BundleError, match="window"):
        Manifest.from_json({**manifest.to_json(), "window": wrong})


# A manifest states the mask of a program if it is not the usual one; other values are rejected.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_shipped(tmp_path_factory.mktemp("masks") / "bundle")


def with_mask(folder: Path, name: str, mask: Any) -> Bundle:
    document = read(default_bundle())
    program(document, name)["placement"]["mask"] = mask
    write(folder, document)
    return Bundle.open(folder, check_hashes=False)


def test_a_manifest_without_masks_means_the_usual_one() -> None:
    text = json.dumps(read(default_bundle())["programs"])
    bundle = Bundle.open(default_bundle(), check_hashes=False)

    assert '"mask":' not in text.replace('"name": "mask"', "")
    assert {entry.placement.mask for entry in bundle.manifest.programs} == {MASKED}


@pytest.mark.parametrize("mask", [-64.0, -64, -16, -29_999.5])
def test_a_mask_is_read_as_it_was_written(folder: Path, mask: float) -> None:
    manifest = with_mask(folder, "step", mask).manifest

    assert manifest.program("step").placement.mask == mask
    assert manifest.program("align").placement.mask == MASKED
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_the_usual_mask_is_not_written(manifest: Manifest) -> None:
    (entry,) = manifest.programs
    bounded = replace(entry, placement=Placement("fake", mask=-64.0))

    assert "mask" not in to_json(entry)["placement"]
    assert to_json(bounded)["placement"]["mask"] == -64.0


@pytest.mark.parametrize(
    "mask", [0, 64, -1, -15.99, -30_001, -1e308, 2**60, "-64", None, True, [-64], {}]
)
def test_a_mask_out_of_range_or_of_another_type_is_rejected(folder: Path, mask: Any) -> None:
    with pytest.raises(BundleError, match=r"placement\.mask"):
        with_mask(folder, "step", mask)


@pytest.mark.parametrize("name", ["encoder", "cross_kv"])
def test_a_mask_of_a_program_without_one_is_rejected(folder: Path, name: str) -> None:
    with pytest.raises(BundleError, match="no input `mask`"):
        with_mask(folder, name, -64.0)


# Manifests in which the vocabulary projection is a program of its own, right and wrong.

Document = dict[str, Any]
HIDDEN = {"name": "hidden", "dtype": "float32"}


@pytest.fixture(scope="module")
def projection_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_shipped(tmp_path_factory.mktemp("projection") / "bundle")


def opened(projection_folder: Path, *changes: Callable[[Document], object]) -> Bundle:
    document = read(default_bundle())
    for change in changes:
        change(document)
    write(projection_folder, document)
    return Bundle.open(projection_folder, check_hashes=False)


def hidden(name: str, *shape: int) -> Callable[[Document], object]:
    """Let a program state that it returns hidden states, and no sum of exp(logit)."""

    def change(document: Document) -> None:
        spec = program(document, name)["spec"]
        others = [one for one in spec["outputs"][1:] if one["name"] != LOGSUMEXP]
        spec["outputs"] = [HIDDEN | {"shape": list(shape)}, *others]

    return change


def projection(
    *sizes: int, name: str = "logits_{}", shape: tuple[int, ...] = (1, 1, 128)
) -> Callable[[Document], None]:
    """List a program `vocab_projection` with outputs of these sizes, with another program's files."""

    def change(document: Document) -> None:
        entry = deepcopy(program(document, "step"))
        entry["spec"] = {
            "name": "vocab_projection",
            "inputs": [HIDDEN | {"shape": list(shape)}],
            "outputs": [
                {"name": name.format(i), "shape": [1, 1, size], "dtype": "float32"}
                for i, size in enumerate(sizes)
            ],
        }
        entry["evidence"] = []
        document["programs"].append(entry)

    return change


def test_hidden_states_and_a_projection_are_accepted(projection_folder: Path) -> None:
    for listed in (
        projection(51865, name="logits"),
        projection(12966, 12966, 12966, 12967),
        projection(25932, 25933),
    ):
        manifest = opened(
            projection_folder, hidden("step", 1, 1, 128), hidden("prefill_4", 1, 2, 128), listed
        ).manifest

        assert manifest.program("step").spec.outputs[0].name == "hidden"
        assert manifest.program("vocab_projection").spec.inputs[0].shape == (1, 1, 128)


@pytest.mark.parametrize(
    "change",
    [
        hidden("step", 1, 1, 127),
        hidden("step", 1, 2, 128),
        hidden("step", 1, 1, 1, 128),
        hidden("step", 1, 128),
        hidden("prefill_64", 1, 1, 128),
        hidden("align", 1, 128),
        hidden("encoder", 1, 128),
        projection(51865),
        projection(51864, name="logits"),
        projection(51865, name="logits", shape=(1, 2, 128)),
        projection(51865, name="logits", shape=(1, 128)),
        projection(51865, name="logits", shape=()),
        projection(12967, 12966, 12966, 12966),
        projection(12966, 12966, 12966, 12966),
        projection(*[1] * 1025),
        projection(),
        lambda document: rank4(document, ("align",)),
        lambda document: rank4(document, ("step",), by=2),
        lambda document: program(document, "step")["spec"]["inputs"][1]["shape"].insert(0, 1),
        lambda document: program(document, "step")["spec"]["inputs"][1]["shape"].insert(0, 2),
        lambda document: program(document, "cross_kv")["spec"]["outputs"][0]["shape"].insert(0, 1),
        lambda document: program(document, "cross_kv")["spec"]["outputs"][0]["shape"].append(1),
    ],
)
def test_other_shapes_and_rank_4_in_part_are_rejected(
    projection_folder: Path, change: Callable[[Document], object]
) -> None:
    with pytest.raises(BundleError, match=r"`programs\[\d\]\.spec"):
        opened(projection_folder, change)


def test_hidden_states_that_nothing_reads_are_found_before_audio_is_read(
    projection_folder: Path,
) -> None:
    bundle = opened(projection_folder, hidden("step", 1, 1, 128))

    with pytest.raises(BundleError):
        load_engine(bundle, RunOptions(threads=1, trust=True))


def rank4(document: Document, names: tuple[str, ...], by: int = 1) -> None:
    """Add leading axes to the mask, the logits and the K/V of programs."""
    for name in names:
        spec = program(document, name)["spec"]
        for tensor in (*spec["inputs"], *spec["outputs"]):
            if tensor["name"] not in ("x", "pick", "features"):
                tensor["shape"] = [1] * by + tensor["shape"]


@pytest.mark.parametrize(
    "names", [("cross_kv",), ("step",), ("cross_kv", "prefill_4", "prefill_64", "step")]
)
def test_programs_of_rank_4_are_accepted_together_with_others(
    projection_folder: Path, names: tuple[str, ...]
) -> None:
    manifest = opened(projection_folder, lambda document: rank4(document, names)).manifest

    for name in names:
        assert manifest.program(name).spec.outputs[-1].shape[0] == 1


# The short windows that a bundle has verified.


def test_short_windows_survive_writing_and_reading(manifest: Manifest) -> None:
    shorter = replace(manifest, short_windows=ShortWindows(positions=(3, 4), min_logprob=-0.5))

    assert Manifest.from_bytes(shorter.to_bytes()) == shorter
    assert "short_windows" not in manifest.to_json()


@pytest.mark.parametrize(
    "wrong",
    [
        *([], 5, {}, {"positions": [4]}, {"min_logprob": -1.0}),
        *(
            {"positions": there, "min_logprob": -1.0}
            for there in (4, [], [4, 4], [0], ["4"], [1.5])
        ),
        {"positions": [4, 10**9], "min_logprob": -1.0},
        *({"positions": [4], "min_logprob": number} for number in ("nan", "-inf", 1, True, None)),
        {"positions": [4], "min_logprob": -1.0, "further": 0},
    ],
)
def test_short_windows_that_cannot_be_are_refused_by_name(manifest: Manifest, wrong: Any) -> None:
    with pytest.raises(BundleError, match="short_windows"):
        Manifest.from_json({**manifest.to_json(), "short_windows": wrong})


def test_short_windows_are_shorter_than_the_only_window(manifest: Manifest) -> None:
    longest = manifest.dims.n_audio_ctx
    whole = {"positions": [4, longest], "min_logprob": -1.0}
    with pytest.raises(BundleError, match="short_windows"):
        Manifest.from_json({**manifest.to_json(), "short_windows": whole})
    short = {**whole, "positions": [4]}
    with pytest.raises(BundleError, match="short_windows"):
        Manifest.from_json({**replace(manifest, window=WINDOW).to_json(), "short_windows": short})

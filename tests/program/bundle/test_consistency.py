"""A manifest whose parts do not agree is rejected before anything is loaded."""

import contextlib
import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whisperport.errors import BundleError, UsageError
from whisperport.program.bundle import Bundle
from whisperport.runtime import load_engine, start_tokens
from whisperport.runtime.decoding.decode import suppressed_ids
from whisperport.runtime.decoding.rules import Rules
from whisperport.runtime.engine.scores import Scores
from whisperport.targets import RunOptions

from ...edited_bundles import copy_of_shipped, program, read, write
from ...embedded import default_bundle

Document = dict[str, Any]
Change = Callable[[Document], object]
TRUSTED = RunOptions(threads=1, trust=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the shipped bundle to a folder where tests write other manifests."""
    return copy_of_shipped(tmp_path_factory.mktemp("edited") / "bundle")


def size(name: str, value: int) -> Change:
    return lambda document: document["dims"].update({name: value})


def token(name: str, value: Any) -> Change:
    return lambda document: document["generation"].update({name: value})


def tensor(of: str, side: str, index: int, **values: Any) -> Change:
    return lambda document: program(document, of)["spec"][side][index].update(values)


def window(**sizes: Any) -> Change:
    given = {
        "positions": 1500,
        "audio_positions": 1500,
        "context_positions": 1500,
        "padding": "none",
    }

    def change(document: dict[str, Any]) -> None:
        document.pop("short_windows", None)  # a bundle has one or the other
        document["window"] = given | sizes

    return change


def rename(name: str, new: str) -> Change:
    return lambda document: program(document, name)["spec"].update(name=new)


def drop(name: str, side: str) -> Change:
    return lambda document: program(document, name)["spec"][side].pop()


def caches(of: str, names: str, **values: Any) -> Change:
    """Change every tensor of a program whose name starts with a prefix, such as "self_k new_k"."""

    def change(document: Document) -> None:
        spec = program(document, of)["spec"]
        for one in (*spec["inputs"], *spec["outputs"]):
            if one["name"].startswith(tuple(names.split())):
                one.update(values)

    return change


def of_lengths(**lengths: list[int]) -> Change:
    """Add programs for lengths of audio, by the name of the longest: copies of it with other sizes."""

    def change(document: Document) -> None:
        for name, positions in lengths.items():
            for count in positions:
                entry = copy.deepcopy(program(document, name))
                entry["spec"]["name"] = f"{name}_{count}"
                for one in (*entry["spec"]["inputs"], *entry["spec"]["outputs"]):
                    sizes = {1500: count, 3000: 2 * count}
                    one["shape"] = [sizes.get(size, size) for size in one["shape"]]
                document["programs"].append(entry)

    return change


def in_turn(*changes: Change) -> Change:
    return lambda document: [change(document) for change in changes]


LENGTHS = [175, 225, 375, 500, 750, 1000]  # of the shipped bundle's short windows

CASES: list[tuple[str, Change, str]] = [
    ("a length of one program", of_lengths(encoder=LENGTHS, cross_kv=LENGTHS[1:]), "programs"),
    ("a window without a program", of_lengths(encoder=[250]), r"short_windows.positions"),
    (
        "an encoder of another rank",
        in_turn(
            of_lengths(encoder=LENGTHS), tensor("encoder_175", "inputs", 0, shape=[1, 80, 1, 350])
        ),
        r"programs` has encoders",
    ),
    ("a length of 30 s", of_lengths(encoder=[1500]), r"has 1500 positions"),
    ("2^31 layers", size("n_text_layer", 2**31), "dims.n_text_layer"),
    ("too many positions", size("n_text_ctx", 10**6), "dims.n_text_ctx"),
    ("another number of layers", size("n_text_layer", 4), r"programs\[1\].spec.outputs"),
    ("a longer cache", size("n_text_ctx", 449), r"programs\[2\].spec.inputs\[1\].shape"),
    ("a longer window", size("n_audio_ctx", 1499), r"programs\[0\].spec.inputs\[0\].shape"),
    ("other mel bins", size("n_mels", 81), r"programs\[0\].spec.inputs\[0\].shape"),
    ("other heads", size("n_text_head", 4), r"programs\[1\].spec.outputs\[0\].shape"),
    ("a larger vocabulary", size("n_vocab", 51866), r"programs\[2\].spec.outputs\[0\].shape"),
    ("a smaller vocabulary", size("n_vocab", 50_363), r"generation.no_timestamps"),
    ("no timestamps", token("no_timestamps", 51864), r"generation.no_timestamps"),
    ("no text", token("end_of_text", 0), r"generation.end_of_text"),
    ("text after timestamps", token("end_of_text", 50_400), r"generation.end_of_text"),
    ("start is end", token("start_of_transcript", 50_257), r"generation.start_of_transcript"),
    ("start is no timestamps", token("start_of_transcript", 50_363), "start_of_transcript"),
    ("unknown start", token("start_of_transcript", 51_865), r"generation.start_of_transcript"),
    ("unknown previous", token("start_of_previous", 60_000), r"generation.start_of_previous"),
    ("unknown silence", token("no_speech", 60_000), r"generation.no_speech"),
    ("unknown language", token("languages", {"en": 60_000}), r"generation.languages.en"),
    ("unknown task", token("tasks", {"transcribe": 60_000}), r"generation.tasks.transcribe"),
    ("suppressed", token("suppressed", [1, 51_865]), r"generation.suppressed\[1\]"),
    ("at start", token("suppressed_at_start", [2**40]), r"generation.suppressed_at_start\[0\]"),
    ("a layer too many", token("alignment_heads", [[3, 0]]), r"generation.alignment_heads\[0\]"),
    ("a head too many", token("alignment_heads", [[2, 0], [2, 2]]), r"alignment_heads\[1\]"),
    ("heads left out", token("alignment_heads", [[2, 0]]), r"programs\[5\].spec.outputs\[1\]"),
    ("no heads", token("alignment_heads", []), r"programs\[5\].spec.outputs\[1\]"),
    ("another name", tensor("step", "inputs", 0, name="y"), r"programs\[4\].spec.inputs\[0\].name"),
    ("another dtype", tensor("step", "outputs", 0, dtype="float16"), r"outputs\[0\].dtype"),
    ("another shape", tensor("encoder", "outputs", 0, shape=[1, 1500, 129]), r"outputs\[0\].shape"),
    ("another rank", tensor("encoder", "inputs", 0, shape=[80, 3000]), r"inputs\[0\].shape"),
    ("an input left out", drop("step", "inputs"), r"programs\[4\].spec.inputs"),
    ("an output left out", drop("align", "outputs"), r"programs\[5\].spec.outputs"),
    ("no rows", rename("prefill_4", "prefill_0"), r"programs\[2\].spec"),
    ("other rows", rename("prefill_4", "prefill_5"), r"programs\[2\].spec.inputs\[0\].shape"),
    ("too many rows", rename("prefill_4", "prefill_100000"), r"programs\[2\].spec"),
    ("an unknown program", rename("step", "step_2"), r"programs\[4\].spec"),
    ("another program", rename("step", "uncached_decoder"), r"programs\[4\].spec"),
    (
        "a shorter cross cache",
        window(audio_positions=1499, context_positions=1501, padding="silence"),
        r"programs\[1\]",
    ),
    (
        "a layer of another dtype",
        tensor("step", "inputs", 3, dtype="float16"),
        r"programs\[4\].spec.inputs\[3\].dtype` is 'float16'; expected 'float32'",
    ),
    (
        "new rows of another dtype",
        caches("step", "self_k", dtype="float16"),
        r"programs\[4\].spec.outputs\[2\].dtype` is 'float32'; expected 'float16'",
    ),
    (
        "a step of another dtype",
        caches("step", "self new", dtype="float16"),
        r"programs\[4\].spec` has `self_k` as float16 \(heads, width, rows\); `prefill_4` has it as",
    ),
    (
        "audio of another dtype",
        caches("cross_kv", "cross_v", dtype="float16"),
        r"programs\[2\].spec` has `cross_v` as float32 .*; `cross_kv` has it as float16",
    ),
    (
        "another layout",
        caches("align", "cross_k", shape=[2, 1500, 64]),
        r"programs\[5\].spec` has `cross_k` as float32 \(heads, rows, width\); `cross_kv` has",
    ),
    (
        "a mask of another dtype",
        tensor("step", "inputs", 1, dtype="float16"),
        r"programs\[4\].spec` has `mask` as float16; `prefill_4` has it as float32",
    ),
    ("caches of int8", caches("step", "self new", dtype="int8"), "'int8'; expected 'float32'"),
    (
        "a window of 2^40",
        window(context_positions=2**40, padding="silence"),
        r"window.context_positions",
    ),
]


@pytest.mark.parametrize(("change", "field"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_contradiction_is_found_when_a_bundle_is_opened(
    folder: Path, change: Change, field: str
) -> None:
    document = read(default_bundle())
    change(document)
    write(folder, document)

    with pytest.raises(BundleError, match=field) as caught:
        Bundle.open(folder, check_hashes=False)

    assert "manifest.json" in caught.value.what
    assert caught.value.hint


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["generation"].pop("language", None),
        window(audio_positions=1000),
        token("suppressed", []),
        token("alignment_heads", [[0, 1], [0, 0]]),
        token("no_speech", 50_361),  # some tokenizers have no token for it
        of_lengths(encoder=LENGTHS, cross_kv=LENGTHS),
        of_lengths(encoder=LENGTHS),  # `cross_kv` reads audio of any length
    ],
    ids=[
        *("of the first version", "short sound", "nothing suppressed", "other heads", "no token"),
        *("lengths", "lengths of the encoder"),
    ],
)
def test_what_an_exporter_could_have_written_is_accepted(folder: Path, change: Change) -> None:
    document = read(default_bundle())
    change(document)
    write(folder, document)

    assert Bundle.open(folder, check_hashes=False)


def test_sizes_that_the_files_cannot_hold_are_rejected_although_all_agree(folder: Path) -> None:
    """All signatures are correct for 65,536 decoder positions, but the files are those of a small model."""
    document = read(default_bundle())
    document["dims"]["n_text_ctx"] = 65_536
    for entry in document["programs"]:
        for one in entry["spec"]["inputs"]:
            one["shape"] = [65_536 + n - 448 if n >= 448 and n < 1000 else n for n in one["shape"]]
    for entry in document["files"].values():
        entry["bytes"] = min(entry["bytes"], 10**6)
    write(folder, document)

    with pytest.raises(BundleError, match=r"field `dims` requires \d+ bytes"):
        Bundle.open(folder, check_hashes=False)


def test_an_engine_is_not_made_of_two_bundles(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process exports to the same folder between the loading of the programs and of the tables."""
    document = read(default_bundle())
    write(folder, document)
    bundle = Bundle.open(folder, check_hashes=False)
    embedding = Bundle.embedding

    def replaced(opened: Bundle) -> Any:
        write(folder, {**document, "name": "another"})
        return embedding(opened)

    monkeypatch.setattr(Bundle, "embedding", replaced)

    with pytest.raises(BundleError, match="was replaced while it was read"):
        load_engine(bundle, TRUSTED)


# Any change --------------------------------------------------------------------------------------

NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 447, 449, 1499, 51_864, 2**31, 2**63 - 1, 2**70])
ANYTHING = NUMBERS | st.sampled_from(
    [None, True, "", "x", "step", "xnnpack", 1.5, [], {}, [1], [[1]]]
)


def paths_into(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values that the runtime uses; of long lists only the first two."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value[:2]))
    found = [path] if path else []
    for name, item in items:
        found += paths_into(item, (*path, name))
    return found


def holder(document: Any, path: tuple[Any, ...]) -> Any:
    for name in path[:-1]:
        document = document[name]
    return document


@cache
def intact() -> Document:
    return read(default_bundle())


def paths_of(*fields: str) -> list[tuple[Any, ...]]:
    return paths_into({field: intact()[field] for field in fields})


def changed(data: st.DataObject, paths: list[tuple[Any, ...]]) -> Document:
    """Return the manifest with one value replaced, removed, or exchanged."""
    document = copy.deepcopy(intact())
    path = data.draw(st.sampled_from(paths))
    where = holder(document, path)
    kind = data.draw(st.sampled_from(["another value", "left out", "another field's value"]))
    if kind == "left out":
        del where[path[-1]]
    elif kind == "another value":
        where[path[-1]] = data.draw(ANYTHING)
    else:
        other = data.draw(st.sampled_from(paths))
        where[path[-1]] = holder(intact(), other)[other[-1]]
    return document


@settings(max_examples=100)
@given(data=st.data())
def test_any_size_and_token_is_rejected_or_can_be_decoded_with(
    folder: Path, data: st.DataObject
) -> None:
    write(folder, changed(data, paths_of("dims", "generation")))
    try:
        manifest = Bundle.open(folder, check_hashes=False).manifest
    except BundleError:
        return

    generation, dims = manifest.generation, manifest.dims
    suppressed = suppressed_ids(generation, dims, (-1,))
    for emitted in ([], [generation.timestamp_begin], [generation.timestamp_begin, 0]):
        logits = np.zeros(dims.n_vocab, np.float32)
        Rules(generation, timestamps=True, suppressed=suppressed).apply(Scores(logits), emitted)
        assert not np.isnan(logits).any()
    for language in generation.languages:
        with contextlib.suppress(UsageError):  # the task is not known
            assert max(start_tokens(generation, language, "transcribe")) < dims.n_vocab


@settings(max_examples=20)
@given(data=st.data())
def test_any_program_and_file_is_rejected_or_loads(folder: Path, data: st.DataObject) -> None:
    write(folder, changed(data, paths_of("programs", "files")))

    # A UsageError is that of a target which this version does not know.
    with contextlib.suppress(BundleError, UsageError):
        load_engine(Bundle.open(folder, check_hashes=False), TRUSTED)

"""The manifest of a bundle: one JSON file that describes the bundle and lists its files."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from whisperport.errors import BundleError
from whisperport.program.bundle import strict_json
from whisperport.program.bundle.program_entry import ProgramEntry, read_program
from whisperport.program.bundle.strict_json import Field, safe_path
from whisperport.program.dims import LARGEST, Dims
from whisperport.program.evidence import RAN, Evidence, Status, status_of
from whisperport.program.generation import Generation
from whisperport.program.window import PADDINGS, Window

FORMAT = "whisperport bundle"  # other tools write files called manifest.json too
FORMAT_VERSION = 2
MAX_MANIFEST_BYTES = 16 * 2**20  # a typical manifest has 30 kB

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
EMBEDDING = "embedding.npy"
POSITIONS = "positions.npy"
REFERENCE = "reference.npz"
REQUIRED = (TOKENIZER, EMBEDDING, POSITIONS, REFERENCE)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Hash and size of one file when the bundle was written."""

    sha256: str  # 64 lower-case hexadecimal digits
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest of a bundle: its model, its programs, their evidence, and its files."""

    name: str  # shown to users; made of the checkpoint's name and the targets
    source: Mapping[str, Any]  # JSON: kind, name, revision, sha256 of the checkpoint
    dims: Dims
    generation: Generation
    programs: tuple[ProgramEntry, ...]
    window: Window | None = None  # None: the window that the checkpoint was trained on
    rewrites: Mapping[str, Any] = field(default_factory=dict)  # program -> its rewrites (JSON)
    versions: Mapping[str, str] = field(default_factory=dict)  # package -> version at the export
    machine: Mapping[str, Any] = field(default_factory=dict)  # JSON: machine of the export
    verification: Mapping[str, Any] = field(default_factory=dict)  # JSON: report of the export
    files: Mapping[str, FileEntry] = field(default_factory=dict)  # path -> entry; set by the writer
    format_version: int = FORMAT_VERSION

    def program(self, name: str) -> ProgramEntry:
        """Return the entry of the program with this name.

        Raises:
            BundleError: no program has this name.
        """
        for entry in self.programs:
            if entry.spec.name == name:
                return entry
        known = ", ".join(entry.spec.name for entry in self.programs) or "none"
        raise BundleError(
            f"bundle {self.name!r} has no program {name!r}", why=f"its programs are: {known}"
        )

    def evidence(self, name: str) -> tuple[Evidence, ...]:
        """Return the valid evidence about a program: that about files which have not changed since."""
        return tuple(record for record in self.program(name).evidence if self._is_unchanged(record))

    def status(self, name: str) -> Status:
        """Return the status of a program, from the evidence about the file that its target loads."""
        return status_of(self._evidence_about_loaded(name))

    def is_verified(self, name: str) -> bool:
        """Whether every comparison passed when the file that the program's target loads was last run."""
        ran = [record for record in self._evidence_about_loaded(name) if record.kind in RAN]
        return bool(ran) and ran[-1].passed

    @property
    def failed(self) -> bool:
        """Whether the bundle was written although its verification failed. This mark is permanent."""
        return self.verification.get("passed") is False

    @property
    def verified(self) -> bool:
        """Whether every program is verified and the verification of the export did not fail."""
        names = [entry.spec.name for entry in self.programs]
        return not self.failed and bool(names) and all(self.is_verified(name) for name in names)

    def _evidence_about_loaded(self, name: str) -> list[Evidence]:
        loaded = self.program(name).files[0]
        return [record for record in self.evidence(name) if loaded in record.files]

    def _is_unchanged(self, evidence: Evidence) -> bool:
        return all(
            path in self.files and self.files[path].sha256 == sha256
            for path, sha256 in evidence.files.items()
        )

    def to_json(self) -> dict[str, Any]:
        """Convert the manifest to a JSON object, without its checksum."""
        data = {
            "format": FORMAT,
            "format_version": self.format_version,
            "name": self.name,
            "source": dict(self.source),
            "dims": self.dims.to_json(),
            "generation": self.generation.to_json(),
            "programs": [entry.to_json() for entry in self.programs],
            "rewrites": dict(self.rewrites),
            "versions": dict(self.versions),
            "machine": dict(self.machine),
            "verification": dict(self.verification),
            "files": {path: asdict(entry) for path, entry in sorted(self.files.items())},
        }
        if self.window is not None:
            data["window"] = self.window.to_json()
        plain: dict[str, Any] = _lists(data)
        return plain

    def checksum(self) -> str:
        """Compute the SHA-256 of all fields, in hexadecimal. It covers the hash of every listed file."""
        return _checksum(self.to_json())

    @classmethod
    def from_json(cls, data: Any) -> "Manifest":
        """Read a manifest from a JSON object without checksum.

        Raises:
            BundleError: a field is missing or has a value that `to_json` does not write; the message names
                the field.
        """
        return _manifest(strict_json.plain(data, MANIFEST))

    def to_bytes(self) -> bytes:
        """Return the contents of the manifest file: `to_json` and a checksum of it."""
        data = self.to_json()
        data["checksum"] = _checksum(data)
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1)
        return (text + "\n").encode("utf-8")

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Manifest":
        """Read a manifest from the contents of its file.

        Raises:
            BundleError: the file is not strict JSON, has another checksum or a newer format version, or a
                field is wrong.
        """
        top = strict_json.parse(raw, MANIFEST)
        members = top.mapping()
        _check_version(members, top)
        if "checksum" not in members:
            top.reject("has no `checksum`")
        data = {name: value for name, value in top.value.items() if name != "checksum"}
        if members["checksum"].text() != _checksum(data):
            members["checksum"].reject("does not match the rest of the file")
        return _manifest(Field(data, "", MANIFEST))


def _checksum(data: Mapping[str, Any]) -> str:
    canonical = json.dumps(data, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


def _check_version(members: Mapping[str, Field], top: Field) -> None:
    """Check the format and its version first, since a newer version may have other fields."""
    for name in ("format", "format_version"):
        if name not in members:
            top.reject(f"has no `{name}`")
    if members["format"].text() != FORMAT:
        members["format"].reject(f"is not {FORMAT!r}")
    version = members["format_version"].integer(at_least=1)
    if version != FORMAT_VERSION:
        newer = version > FORMAT_VERSION
        raise BundleError(
            f"the bundle has format version {version}; this whisperport reads version {FORMAT_VERSION}",
            why=f"{'a newer' if newer else 'an older'} whisperport wrote the bundle",
            hint="pip install --upgrade whisperport" if newer else "export the checkpoint again",
        )


def _manifest(top: Field) -> Manifest:
    _check_version(top.mapping(), top)
    names = ["format", *(f.name for f in fields(Manifest))]
    m = top.members([name for name in names if name != "window" or name in top.mapping()])
    manifest = Manifest(
        format_version=m["format_version"].integer(at_least=1),
        name=m["name"].non_empty_text(),
        source=m["source"].json_object(),
        dims=_dims(m["dims"]),
        generation=_generation(m["generation"]),
        programs=tuple(read_program(entry) for entry in m["programs"].elements()),
        window=_window(m["window"]) if "window" in m else None,
        rewrites=m["rewrites"].json_object(),
        versions={name: version.text() for name, version in m["versions"].mapping().items()},
        machine=m["machine"].json_object(),
        verification=m["verification"].json_object(),
        files=_files(m["files"]),
    )
    if manifest.window and manifest.window.positions != manifest.dims.n_audio_ctx:
        m["window"].reject(
            f"has {manifest.window.positions} positions; expected {manifest.dims.n_audio_ctx}, "
            "`n_audio_ctx` in `dims`"
        )
    names = [entry.spec.name for entry in manifest.programs]
    if len(set(names)) != len(names):
        m["programs"].reject("has two programs of the same name")
    return manifest


def _files(listed: Field) -> dict[str, FileEntry]:
    entries = {}
    for path, entry in listed.mapping().items():
        if safe_path(Field(path, listed.path, listed.document)) == MANIFEST:
            listed.reject(f"lists {MANIFEST} itself")
        e = entry.members(["sha256", "bytes"])
        entries[path] = FileEntry(e["sha256"].sha256(), e["bytes"].integer())
    return entries


def _dims(dims: Field) -> Dims:
    sizes = dims.members([f.name for f in fields(Dims)])
    try:
        return Dims(**{name: size.integer(1, LARGEST[name]) for name, size in sizes.items()})
    except ValueError as error:
        dims.reject(f"is not valid: {error}")


def _window(window: Field) -> Window:
    m = window.members([f.name for f in fields(Window)])
    try:
        return Window(
            positions=m["positions"].integer(1, LARGEST["n_audio_ctx"]),
            audio_positions=m["audio_positions"].integer(1, LARGEST["n_audio_ctx"]),
            context_positions=m["context_positions"].integer(1, LARGEST["n_audio_ctx"]),
            padding=m["padding"].one_of(PADDINGS),
        )
    except ValueError as error:
        window.reject(f"is not valid: {error}")


def _generation(generation: Field) -> Generation:
    names = [f.name for f in fields(Generation)]
    m = generation.members([n for n in names if n != "language" or n in generation.mapping()])
    languages = {code: i.integer() for code, i in m["languages"].mapping().items()}
    if "language" in m and m["language"].text() not in languages:
        m["language"].reject("is not one of `languages`")

    def ids(name: str) -> tuple[int, ...]:
        return tuple(i.integer() for i in m[name].elements())

    heads = []
    for head in m["alignment_heads"].elements():
        pair = [i.integer() for i in head.elements()]
        if len(pair) != 2:
            head.reject(f"has {len(pair)} numbers; expected 2: layer and head")
        heads.append((pair[0], pair[1]))
    return Generation(
        start_of_transcript=m["start_of_transcript"].integer(),
        end_of_text=m["end_of_text"].integer(),
        start_of_previous=m["start_of_previous"].integer(),
        no_speech=m["no_speech"].integer(),
        no_timestamps=m["no_timestamps"].integer(),
        languages=languages,
        tasks={task: i.integer() for task, i in m["tasks"].mapping().items()},
        suppressed=ids("suppressed"),
        suppressed_at_start=ids("suppressed_at_start"),
        alignment_heads=tuple(heads),
        language=m["language"].text() if "language" in m else "",
    )


def _lists(value: Any) -> Any:
    """Replace tuples by lists, as JSON would do, at every depth."""
    if isinstance(value, dict):
        return {name: _lists(item) for name, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, tuple | list) else value

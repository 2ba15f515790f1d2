"""The manifest of a bundle: one JSON file that describes the bundle and lists its files."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from whisperport.errors import BundleError
from whisperport.program import strict_json
from whisperport.program.bundle.program_entry import ProgramEntry
from whisperport.program.dims import Dims
from whisperport.program.evidence import RAN, Evidence, Status, status_of
from whisperport.program.generation import Generation
from whisperport.program.json_records import Member, from_json, members, to_json
from whisperport.program.low_rank import LowRank
from whisperport.program.strict_json import Field, safe_path
from whisperport.program.window import ShortWindows, Window

Format = Literal["whisperport bundle"]  # other tools write files called manifest.json too
FORMAT: Format = "whisperport bundle"
FORMAT_VERSION = 2
MAX_MANIFEST_BYTES = 16 * 2**20  # a typical manifest has 30 kB

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
EMBEDDING = "embedding.npy"
POSITIONS = "positions.npy"
SILENCE = "silence.npy"  # only with `short_windows`
REFERENCE = "reference.npz"
REQUIRED = (TOKENIZER, EMBEDDING, POSITIONS, REFERENCE)


def _listed_path(path: Field) -> str:
    if safe_path(path) == MANIFEST:
        path.reject(f"lists {MANIFEST} itself")
    return str(path.value)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Hash and size of one file when the bundle was written."""

    sha256: Annotated[str, Field.sha256]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest of a bundle: its model, its programs, their evidence, and its files."""

    format: Format = FORMAT
    format_version: Annotated[int, Field.positive] = FORMAT_VERSION
    # Shown to users; made of the checkpoint's name and the targets.
    name: Annotated[str, Field.non_empty_text]
    source: Mapping[str, Any]  # JSON: kind, name, revision, sha256 of the checkpoint
    dims: Dims
    generation: Generation
    programs: tuple[ProgramEntry, ...]
    rewrites: Mapping[str, Any] = field(default_factory=dict)  # program -> its rewrites (JSON)
    versions: Mapping[str, str] = field(default_factory=dict)  # package -> version at the export
    machine: Mapping[str, Any] = field(default_factory=dict)  # JSON: machine of the export
    verification: Mapping[str, Any] = field(default_factory=dict)  # JSON: report of the export
    # Path -> entry; set by the writer.
    files: Mapping[Annotated[str, _listed_path], FileEntry] = field(default_factory=dict)
    # None: the window that the checkpoint was trained on.
    window: Annotated[Window | None, Member(is_omitted=True), partial(from_json, Window)] = None
    # None: no shorter windows were verified.
    short_windows: Annotated[
        ShortWindows | None, Member(is_omitted=True), partial(from_json, ShortWindows)
    ] = None
    # None: the programs take no adapter.
    adapters: Annotated[LowRank | None, Member(is_omitted=True), partial(from_json, LowRank)] = None

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

    @property
    def lengths(self) -> tuple[int, ...]:
        """Encoder positions T of the programs `encoder_T` and `cross_kv_T`, in rising order."""
        return tuple(sorted({entry.spec.kind.positions for entry in self.programs} - {0}))

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
        return members(self) | {"files": to_json(dict(sorted(self.files.items())))}

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
        _check_version(top.mapping(), top)
        checksum, rest = top.split("checksum")
        if checksum.text() != _checksum(rest.value):
            checksum.reject("does not match the rest of the file")
        return _manifest(rest)


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
    manifest = from_json(Manifest, top)
    positions, language = manifest.dims.n_audio_ctx, manifest.generation.language
    if manifest.window and manifest.window.positions != positions:
        top.mapping()["window"].reject(
            f"has {manifest.window.positions} positions; expected {positions}, `n_audio_ctx` in `dims`"
        )
    if manifest.short_windows and (
        manifest.window or manifest.short_windows.positions[-1] >= positions
    ):
        top.mapping()["short_windows"].reject(
            f"is not for a bundle whose only window has {positions} positions"
            if manifest.window
            else f"has more than {positions - 1} positions; `n_audio_ctx` in `dims` is {positions}"
        )
    if language and language not in manifest.generation.languages:
        generation = top.mapping()["generation"]
        generation.mapping()["language"].reject("is not one of `languages`")
    names = [entry.spec.name for entry in manifest.programs]
    if len(set(names)) != len(names):
        top.mapping()["programs"].reject("has two programs of the same name")
    return manifest

"""What a transcript depends on besides the audio: the bundle and the options, as hashes."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from whisperport.apps.archive.job import Job
from whisperport.program.adapter_settings import CONFIG, weight_file
from whisperport.program.bundle import Bundle
from whisperport.program.bundle.folder import file_sha256, read_manifest_bytes
from whisperport.runtime.decoding.phrases import with_commas
from whisperport.transcription import TranscribeOptions
from whisperport.transcription.transcriber import with_arguments
from whisperport.verification.machine import versions

PACKAGES = ("whisperport", "onnxruntime", "av")


@dataclass(frozen=True, slots=True)
class Identity:
    """The hashes of a bundle and of the options of all files, and the versions of the packages.

    Attributes:
        model: name in the bundle's manifest.
        bundle_sha256: of the bundle's manifest, which holds the hash of every other file.
        options_sha256: of the options that can change a transcript.
        versions: package -> version; a newer version does not make a row a different one.
    """

    model: str
    bundle_sha256: str
    options_sha256: str
    versions: dict[str, str]


def identity_of(bundle: Bundle, options: TranscribeOptions) -> Identity:
    """Return the identity of the transcripts of a bundle."""
    manifest = hashlib.sha256(read_manifest_bytes(bundle.folder)).hexdigest()
    return Identity(bundle.manifest.name, manifest, options_sha256(options), versions(PACKAGES))


def options_sha256(options: TranscribeOptions) -> str:
    """Return the SHA-256 of the options, but for those that change only speed and memory."""
    values = asdict(options)
    del values["workers"], values["run"]["threads"], values["run"]["trust"]
    if adapter := values["run"].pop("adapter"):
        files = (adapter / CONFIG, weight_file(adapter))
        values["adapter"] = [_file_sha256(file, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@lru_cache(8)  # of the options of each file
def _file_sha256(path: Path, modified_ns: int) -> str:
    return file_sha256(path)


def options_for(job: Job, options: TranscribeOptions) -> TranscribeOptions:
    """Return the options of a file: those of the archive, with its language, prompt and phrases."""
    phrases = None if job.phrases is None else with_commas(job.phrases)
    values = {"language": job.language, "initial_prompt": job.prompt, "phrases": phrases}
    return with_arguments(
        options, {name: value for name, value in values.items() if value is not None}
    )

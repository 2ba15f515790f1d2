"""The folder with the result of compiling a program that is no part of a bundle.

OUT/
├── compiled.json    the program, its evidence with the comparisons, and what it was made from
├── NAME.SUFFIX      the compiled program
├── NAME.onnx        the lowered program that the compiler read, with the files that belong to it
└── STAGE.log        logs of the compiler's stages
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from whisperport.bundle import ProgramEntry
from whisperport.bundle.folder import file_sha256
from whisperport.bundle.renaming import rename_if_free
from whisperport.bundle.staging import staging
from whisperport.compilation.artifacts import Artifact, put_artifact
from whisperport.errors import WhisperportError
from whisperport.program.evidence import status_of

RESULT = "compiled.json"


def write_result(
    out: Path,
    entry: ProgramEntry,
    artifact: Artifact,
    *,
    files: Mapping[str, Path],
    host: Mapping[str, bytes],
    made_from: Sequence[Path],
    inputs: Sequence[str],
) -> ProgramEntry:
    """Write the folder completely or not at all.

    Args:
        out: the folder; it must not exist.
        entry: the lowered program.
        artifact: its compiled file.
        files: name of a file of the lowered program -> its path.
        host: name -> content of the files of the steps that the host computes.
        made_from: the user's files.
        inputs: names of the samples that the user gave.

    Returns:
        The compiled program.

    Raises:
        WhisperportError: the folder appeared meanwhile.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with staging(out) as folders:
        folder = folders.partial
        folder.mkdir()
        for name, path in (*files.items(), *((log.name, log) for log in artifact.logs)):
            shutil.copyfile(path, folder / name)
        for name, content in host.items():
            (folder / name).write_bytes(content)
        made = put_artifact(entry, artifact, folder)
        described = {
            "program": made.to_json(),
            "status": status_of(made.evidence),
            "made_from": {path.name: file_sha256(path) for path in made_from},
            "inputs": list(inputs),
        }
        text = json.dumps(described, indent=1, allow_nan=False) + "\n"
        (folder / RESULT).write_text(text, encoding="utf-8")
        if not rename_if_free(folder, out):
            raise WhisperportError(
                f"{out} exists already, and was not changed",
                why="it appeared while the program was compiled",
                hint="repeat the command with another `--out`: finished stages are kept",
            )
    return made

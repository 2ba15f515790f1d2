"""The audio files that a command line names: those of a folder, and a look at each before any work."""

import os
from pathlib import Path

from whisperport.apps.cli.console import print_note
from whisperport.errors import UsageError
from whisperport.speech.audio.decode import AudioDecoder, open_source
from whisperport.speech.audio.load import AUDIO_SUFFIXES
from whisperport.system.regular_file import other_kind

MANY = 100  # audio files in a folder for which another command is better


def with_files_of_folders(audio: tuple[str, ...]) -> tuple[str, ...]:
    """Return the audio files with each folder replaced by those in it, known by their suffixes, by name.

    Raises:
        UsageError: a folder cannot be read, or no audio file is in it.
    """
    return tuple(
        file for path in audio for file in (_in_folder(path) if os.path.isdir(path) else (path,))
    )


def _in_folder(folder: str) -> list[str]:
    try:
        entries = [(entry.path, entry.is_dir()) for entry in os.scandir(folder)]
    except OSError as error:
        raise UsageError(
            f"cannot read the folder `{folder}`",
            why=error.strerror or "",
            hint="check its permissions",
        ) from error
    files = [
        path
        for path, is_folder in entries
        if not is_folder and Path(path).suffix.lower() in AUDIO_SUFFIXES
    ]
    subfolders = sum(is_folder for _, is_folder in entries)
    if not files:
        raise UsageError(
            f"there is no audio file in the folder `{folder}`",
            why=f"it has {len(entries)} entries, of which {subfolders} are folders",
            hint="`whisperport archive` also transcribes the files in subfolders. The suffixes of files "
            f"in a folder may be {', '.join(sorted(AUDIO_SUFFIXES))}",
        )
    without = ", without those in its subfolders" if subfolders else ""
    print_note(f"{folder}: {len(files)} audio file{'s' * (len(files) != 1)}{without}")
    if len(files) >= MANY:
        print_note(
            "`whisperport archive` continues where it was interrupted; use it for large collections"
        )
    return sorted(files)


def check_audio(audio: str, *, headerless: bool = False) -> None:
    """Check, before a model is read or exported, that a file exists and that FFmpeg finds audio in it.

    Of a pipe, nothing is read.

    Args:
        audio: path, or "-" for standard input.
        headerless: whether it holds samples without a header.

    Raises:
        AudioError: it is missing, or is no audio.
    """
    if audio == "-" or other_kind(audio) not in ("", "a folder"):
        return
    if headerless:
        open_source(audio)[0].close()
    else:
        AudioDecoder(audio).close()

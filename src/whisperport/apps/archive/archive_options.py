"""Options of the transcription of an archive."""

from dataclasses import dataclass
from typing import Annotated, Literal

from whisperport.system.option import Option, check_ranges

MAX_WORKERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveOptions:
    """How an archive is transcribed. The help text of every option is beside its field.

    Attributes:
        word_timestamps: replaces that of `TranscribeOptions`, whose default is another one.
        ray: address of a Ray cluster, such as "auto"; None: worker processes on this machine.

    Raises:
        UsageError: a value is out of its range.
    """

    workers: Annotated[
        int | None,
        Option(
            "Number of processes that transcribe, each with the bundle in its memory. On a Ray cluster, "
            "the largest number of actors",
            1,
            MAX_WORKERS,
            default="one per core, fewer if memory is short; on a cluster, as many as its cores allow",
        ),
    ] = None
    retry_failed: Annotated[
        bool, Option("Transcribe the files again whose rows in --out have an error")
    ] = False
    word_timestamps: Annotated[
        bool,
        Option(
            "Compute the start and end of every word. Without them, adding words later means transcribing "
            "all files again"
        ),
    ] = True
    subtitles: Annotated[
        Literal["srt", "vtt"] | None,
        Option("Also write a subtitle file of this format for each transcript"),
    ] = None
    save_every: Annotated[
        float,
        Option(
            "Seconds between two writes of finished rows: the work that an end of this process may cost",
            0,
            3600,
            metavar="SECONDS",
        ),
    ] = 30.0
    ray: str | None = None

    def __post_init__(self) -> None:
        check_ranges(self)

"""Archives: every file of a large collection transcribed once, on one machine or on a Ray cluster.

    source ─manifest─► jobs ─dispatch─► workers (processes, or actors of Ray)
                         ▲                 │ rows
    OUT/parts ──finished─┘◄────store───────┘

One process writes: the one that was started. A worker only returns rows, so that its end, at any moment,
can neither lose a stored row nor store one twice. A row counts as soon as its part is in the folder.
"""

from whisperport.apps.archive.archive import ArchiveOptions, transcribe_archive
from whisperport.apps.archive.summary import ArchiveProgress, ArchiveSummary

__all__ = ["ArchiveOptions", "ArchiveProgress", "ArchiveSummary", "transcribe_archive"]

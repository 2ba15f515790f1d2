"""Give each file to a worker, and return its row; a worker that ends costs only its own files."""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from whisperport.apps.archive.job import Job
from whisperport.apps.archive.rows import Row, row_of
from whisperport.errors import WhisperportError

MAX_FAILED_STARTS = 10  # workers that end in a row before they are ready


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has loaded the bundle, and may have `depth` files at a time."""

    worker: Hashable
    depth: int


@dataclass(frozen=True, slots=True)
class Done:
    """A worker has finished a file."""

    worker: Hashable
    row: Row


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker has ended by itself; `is_suspicious`: one of its files may be the cause."""

    worker: Hashable
    why: str
    is_suspicious: bool = True


Event = Ready | Done | Ended


class Workers(Protocol):
    """Starts workers, and talks with them."""

    def grow(self) -> None:
        """Start workers until there are as many as there should be."""
        ...

    def give(self, worker: Hashable, job: Job) -> None:
        """Give a file to a worker that is ready. If it has ended, an event tells so."""
        ...

    def events(self) -> Iterable[Event]:
        """Wait for a while, and return what has happened.

        Raises:
            WhisperportError: the bundle cannot be loaded.
        """
        ...

    def close(self) -> None:
        """End all workers."""
        ...


@dataclass(slots=True)
class _Assigned:
    """What a worker has to do."""

    depth: int
    jobs: dict[str, Job]
    alone: bool = False  # whether its file may have no neighbour

    @property
    def has_room(self) -> bool:
        return not self.alone and len(self.jobs) < self.depth


def dispatch(jobs: Sequence[Job], workers: Workers) -> Iterator[Row]:
    """Yield one row for each job, in the order in which they are finished.

    The files of a worker that ended are transcribed again at the end, each alone in a worker. A file whose
    worker ends then too is the cause, and its row has this error.

    Args:
        jobs: files in the order in which they begin.
        workers: of this machine or of a cluster; the caller closes them.

    Raises:
        WhisperportError: the bundle cannot be loaded, or the workers end before they are ready.
    """
    return _Dispatch(jobs, workers).rows()


class _Dispatch:
    def __init__(self, jobs: Sequence[Job], workers: Workers) -> None:
        self._waiting, self._suspects = deque(jobs), deque[Job]()
        self._workers = workers
        self._assigned: dict[Hashable, _Assigned] = {}
        self._failed_starts = 0

    def rows(self) -> Iterator[Row]:
        while (
            self._waiting
            or self._suspects
            or any(worker.jobs for worker in self._assigned.values())
        ):
            self._workers.grow()
            for event in self._workers.events():
                yield from self._handled(event)
            self._give()

    def _handled(self, event: Event) -> Iterator[Row]:
        match event:
            case Ready(worker, depth):
                self._assigned[worker] = _Assigned(depth, {})
                self._failed_starts = 0
            case Done(worker, row):
                assigned = self._assigned[worker]
                del assigned.jobs[row["id"]]
                assigned.alone = assigned.alone and bool(assigned.jobs)
                yield row
            case Ended(worker) if worker not in self._assigned:
                self._failed_start(event)
            case Ended(worker):
                yield from self._ended(self._assigned.pop(worker), event)

    def _failed_start(self, event: Ended) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS and not self._assigned:
            raise WhisperportError(
                "no worker can be started",
                why=event.why,
                hint="free memory, or use fewer `--workers`; finished rows are kept",
            )

    def _ended(self, assigned: _Assigned, event: Ended) -> Iterator[Row]:
        """Put the files of a worker that ended back; the one that ended a worker alone gets its row."""
        if not event.is_suspicious:
            self._waiting.extendleft(reversed(assigned.jobs.values()))
        elif assigned.alone:
            for job in assigned.jobs.values():
                yield row_of(job, error=_cause(job, event.why))
        else:
            self._suspects.extend(assigned.jobs.values())

    def _give(self) -> None:
        """Give one file at a time to the worker that has the fewest, while one has room."""
        while self._waiting:
            free = [
                (len(state.jobs), name) for name, state in self._assigned.items() if state.has_room
            ]
            if not free:
                return
            _, worker = min(free, key=lambda choice: choice[0])
            self._assign(worker, self._waiting.popleft())
        for worker, assigned in self._assigned.items():
            if self._suspects and not assigned.jobs:
                assigned.alone = True
                self._assign(worker, self._suspects.popleft())

    def _assign(self, worker: Hashable, job: Job) -> None:
        self._assigned[worker].jobs[job.id] = job
        self._workers.give(worker, job)


def _cause(job: Job, why: str) -> WhisperportError:
    return WhisperportError(
        f"the process that transcribed `{job.path}` ended twice",
        why=why,
        hint="`--retry-failed` transcribes it again; if its process ends again, report it with the file",
        code="process-ended",
    )

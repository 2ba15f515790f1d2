"""Which worker gets which file, and what the end of a worker costs."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable

import pytest

from whisperport.apps.archive.dispatch import Done, Ended, Event, Ready, dispatch
from whisperport.apps.archive.job import Job
from whisperport.apps.archive.rows import row_of
from whisperport.errors import WhisperportError

JOBS = [Job(str(number), f"{number}.wav") for number in range(40)]


class Crew:
    """Workers in this process. `ends` says whether a worker ends when it begins a file."""

    def __init__(
        self,
        ends: Callable[[Job], bool] = lambda _: False,
        *,
        suspicious: bool = True,
        starts: bool = True,
    ) -> None:
        self.ends, self.suspicious, self.starts = ends, suspicious, starts
        self.running: dict[int, deque[Job]] = {}
        self.most: dict[int, int] = {}  # worker -> most files at a time
        self.n_started = 0
        self.waiting: deque[Event] = deque()

    def grow(self) -> None:
        for _ in range(2 - len(self.running)):
            self.n_started += 1
            self.running[self.n_started] = deque()
            self.waiting.append(
                Ready(self.n_started, 4) if self.starts else self._gone(self.n_started)
            )

    def give(self, worker: Hashable, job: Job) -> None:
        assert isinstance(worker, int)
        self.running[worker].append(job)
        self.most[worker] = max(self.most.get(worker, 0), len(self.running[worker]))

    def events(self) -> Iterable[Event]:
        if not self.waiting:
            for worker, jobs in list(self.running.items()):
                if jobs and self.ends(jobs[0]):
                    self.waiting.append(self._gone(worker))
                elif jobs:
                    self.waiting.append(Done(worker, row_of(jobs.popleft())))
        while self.waiting:
            yield self.waiting.popleft()

    def close(self) -> None: ...

    def _gone(self, worker: int) -> Ended:
        del self.running[worker]
        return Ended(worker, "it was killed", self.suspicious)


def test_every_file_has_one_row_and_the_first_is_begun_first() -> None:
    crew = Crew()

    rows = list(dispatch(JOBS, crew))

    assert sorted(int(row["id"]) for row in rows) == list(range(40))
    assert [row["id"] for row in rows[:2]] == ["0", "1"]
    assert crew.most == {1: 4, 2: 4}


def test_a_file_that_ends_its_worker_twice_is_a_row_and_costs_no_other_file() -> None:
    rows = list(dispatch(JOBS, Crew(lambda job: job.id in ("3", "17"))))

    failed = {row["id"]: row["error"] for row in rows if row["error"]}
    assert len(rows) == len({row["id"] for row in rows}) == 40
    assert set(failed) == {"3", "17"}
    assert failed["3"]["what"] == "the process that transcribed the file ended twice"
    assert failed["3"]["why"] == "it was killed"


def test_a_worker_that_ends_once_for_another_reason_costs_nothing() -> None:
    moments = iter([False, True] * 10)

    rows = list(dispatch(JOBS, Crew(lambda _: next(moments, False), suspicious=False)))

    assert next(moments, None) is None
    assert len(rows) == len({row["id"] for row in rows}) == 40
    assert not any(row["error"] for row in rows)


def test_workers_that_never_start_are_an_error() -> None:
    with pytest.raises(WhisperportError, match="no worker can be started") as error:
        list(dispatch(JOBS, Crew(starts=False)))

    assert error.value.why == "it was killed"


def test_without_files_no_worker_is_started() -> None:
    crew = Crew()

    assert not list(dispatch([], crew))
    assert crew.n_started == 0

"""Workers on a Ray cluster: actors that each load the bundle, one per `threads` cores.

Actors of Ray, and not Ray Data: it can limit how often it repeats what an ended actor had, but a suspect
would not be transcribed alone, so that innocent neighbours are lost with it, and its pipelines write from
many processes. One scheduler serves one machine, without Ray, and a cluster.

Every node needs whisperport, and the bundle and the audio files under the same paths.
"""

import logging
import time
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from whisperport.apps.archive.dispatch import Done, Ended, Event, Ready
from whisperport.apps.archive.job import Job
from whisperport.apps.archive.rows import Row
from whisperport.apps.archive.worker import AHEAD, Worker
from whisperport.errors import UsageError, WhisperportError, needs
from whisperport.transcription import TranscribeOptions

WAIT_S = 1.0
GROW_S = 5.0  # between two looks at the size of the cluster
MAX_WHY = 500  # characters of a message of Ray in a row
MAX_TOGETHER = 64  # calls of an actor that may run at a time: more than a bundle decodes together


class Actors:
    """Actors on all nodes of a cluster. Nodes that are added get actors, and those of lost nodes end.

    Args:
        address: of the cluster, such as "auto" or "ray://HOST:10001".
        limit: largest number of actors; None: as many as the cores allow.
        bundle: folder of the bundle, on every node.
        options: of all files. The threads of its runtimes are the cores of an actor; None: 1.

    Raises:
        MissingPackageError: Ray is not installed.
        UsageError: there is no cluster at this address.
    """

    def __init__(
        self, address: str, limit: int | None, bundle: Path, options: TranscribeOptions
    ) -> None:
        with needs("cannot use a cluster: Ray is not installed", extra="ray"):
            import ray
        self._ray, self._limit = ray, limit
        self._cores = options.run.threads or 1
        run = replace(options.run, threads=self._cores)
        self._arguments = bundle.resolve(), replace(options, workers=1, run=run)
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"there is no Ray cluster at `{address}`",
                why=str(error),
                hint="start one with `ray start --head`, and give its address",
            ) from error
        self._class = ray.remote(
            num_cpus=self._cores, max_concurrency=MAX_TOGETHER + AHEAD, max_restarts=0
        )(_Actor)
        self._actors: set[Any] = set()
        self._calls: dict[
            Any, tuple[Any, Job | None]
        ] = {}  # result -> actor, file; None: it starts
        self._nodes: dict[Any, str] = {}  # actor -> id of its node
        self._grown = -GROW_S

    def grow(self) -> None:
        """Start actors until there is one for each group of cores; see `Workers`."""
        if time.monotonic() - self._grown < GROW_S:
            return
        self._grown = time.monotonic()
        n_workers = int(self._ray.cluster_resources().get("CPU", 0)) // self._cores
        while len(self._actors) < min(n_workers, self._limit or n_workers):
            actor = self._class.remote(*self._arguments)
            self._actors.add(actor)
            self._calls[actor.start.remote()] = actor, None

    def give(self, worker: Hashable, job: Job) -> None:
        """Give a file to an actor; see `Workers`."""
        actor: Any = worker
        self._calls[actor.row.remote(job)] = actor, job

    def events(self) -> Iterable[Event]:
        """Wait at most a second for results; see `Workers`."""
        if not self._calls:
            time.sleep(WAIT_S)
            return
        calls = list(self._calls)
        finished, _ = self._ray.wait(calls, num_returns=1, timeout=WAIT_S)
        if finished:  # and all others that are ready
            finished, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        for call in finished:
            yield from self._event(call)

    def close(self) -> None:
        """End the actors, and leave the cluster."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._ray.shutdown()

    def _event(self, call: Any) -> Iterator[Event]:
        if call not in self._calls:  # its actor has ended
            return
        actor, job = self._calls.pop(call)
        try:
            result = self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            raise _failed(error.cause) from error
        except self._ray.exceptions.RayError as error:  # it has ended, or its result is lost
            yield self._ended(actor, error)
            return
        if job is not None:
            yield Done(actor, result)
            return
        depth, self._nodes[actor] = result
        yield Ready(actor, depth)

    def _ended(self, actor: Any, error: Exception) -> Ended:
        """Forget an actor. If its node is lost too, its files are not the cause."""
        self._ray.kill(actor)
        self._actors.discard(actor)
        self._calls = {
            call: assigned for call, assigned in self._calls.items() if assigned[0] != actor
        }
        self._grown = -GROW_S
        nodes = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        is_suspicious = self._nodes.pop(actor, "") in nodes
        return Ended(actor, " ".join(str(error).split())[:MAX_WHY], is_suspicious)


class _Actor:
    """A worker that loads the bundle when it is started, and has a thread for each of its files."""

    def __init__(self, bundle: Path, options: TranscribeOptions) -> None:
        self._arguments = bundle, options
        self._worker: Worker | None = None

    def start(self) -> tuple[int, str]:
        """Load the bundle, and return the number of files to give at a time, and the id of the node."""
        import ray

        self._worker = Worker(*self._arguments)
        return min(self._worker.depth, MAX_TOGETHER), ray.get_runtime_context().get_node_id()

    def row(self, job: Job) -> Row:
        """Transcribe a file."""
        assert self._worker is not None
        return self._worker.submit(job).result()


def _failed(cause: BaseException) -> WhisperportError:
    if isinstance(cause, WhisperportError):
        return cause
    return WhisperportError(
        "an actor of the cluster failed", why=f"{type(cause).__name__}: {cause}"
    )

"""Download a file of known SHA-256.

An interrupted download is resumed, its size is bounded, and only a complete file gets its name.
"""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from whisperport.errors import CheckpointError, needs
from whisperport.model.checkpoint.hub import INSTALL
from whisperport.program.bundle.folder import file_sha256
from whisperport.program.untrusted import shorten
from whisperport.system.atomic import flush_rename
from whisperport.system.locking import lock_path, waiting_for_lock
from whisperport.system.progress import Counted, begin_stage
from whisperport.system.regular_file import other_kind
from whisperport.system.system_error import lack_of_space

if TYPE_CHECKING:
    import requests

ATTEMPTS = 4  # requests per download; each one continues where the last was cut
PAUSE_S = 1.0  # before the second request; doubled before each further one
MAX_PAUSE_S = 60.0  # a server that asks for more (Retry-After) is not waited for
TIMEOUT_S = (10, 30)  # to connect; between two pieces of the answer
MAX_REDIRECTS = 5
CHUNK = 1 << 18  # bytes
STEPS = 20  # reports of progress per download
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_BUSY = {408, 425, 429, 500, 502, 503, 504}  # statuses after which a later request may succeed


class UnreachableError(CheckpointError):
    """The server cannot be reached or does not give the file. It gave no wrong bytes."""


class _CutError(Exception):
    """The answer ended early, or the server is busy: another request may continue."""

    def __init__(self, why: str, pause_s: float = 0.0) -> None:
        super().__init__(why)
        self.pause_s = pause_s


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file to download.

    Attributes:
        url: where it is published.
        path: where to store it.
        sha256: digest that it must have, in hexadecimal.
        most_bytes: it is not larger than this.
    """

    url: str
    path: Path
    sha256: str
    most_bytes: int

    @property
    def partial(self) -> Path:
        """Where the bytes are kept until the digest is verified."""
        return self.path.with_name(f"{self.path.name}.part")


def check_digest(path: Path, sha256: str) -> None:
    """Check the SHA-256 of a file that exists.

    Raises:
        CheckpointError: it differs, or the file cannot be read.
    """
    if kind := other_kind(path):
        raise CheckpointError(
            f"`{path}` is {kind}, not OpenAI's file",
            why="a file with this name is expected to be OpenAI's",
            hint="move it away; `whisperport fetch` then downloads the file",
        )
    try:
        digest = file_sha256(path)
    except OSError as error:
        raise CheckpointError(f"cannot read `{path}`", why=str(error)) from error
    if digest != sha256:
        raise CheckpointError(
            f"`{path}` is not OpenAI's file",
            why=f"its SHA-256 is {digest}; expected {sha256}",
            hint="it is incomplete, damaged or changed, and was not used: delete it or move it away, then "
            "run the command again. To use it as it is, give its path",
        )


def download(remote: RemoteFile) -> Path:
    """Download a file, unless it exists with the right digest; return its path.

    While another process downloads the same file, wait for it. A cut download continues at the next call:
    its bytes are in `NAME.part` beside the file.

    Raises:
        UnreachableError: the server cannot be reached, or does not give the file.
        CheckpointError: the file or the server's bytes have another digest, or they cannot be stored.
        MissingPackageError: requests is not installed.
    """
    try:
        remote.path.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"waiting for another process that downloads {remote.path.name}"
        with waiting_for_lock(lock_path(remote.path), lambda: begin_stage(waiting)):
            if os.path.lexists(remote.path):
                check_digest(remote.path, remote.sha256)
                return remote.path
            _download(remote)
            return remote.path
    except OSError as error:
        raise CheckpointError(
            f"cannot store `{remote.path}`",
            why=str(error),
            hint="check the free space and the permissions; `XDG_CACHE_HOME` names another cache folder",
        ) from error


def _download(remote: RemoteFile) -> None:
    partial = remote.partial
    if partial.is_symlink() or other_kind(partial):
        raise CheckpointError(
            f"`{partial}` is not a regular file",
            why="the download is stored there until it is complete",
            hint="move it away",
        )
    resumed = partial.exists() and partial.stat().st_size > 0
    _transfer(remote)
    if resumed and file_sha256(partial) != remote.sha256:  # what was there before may be at fault
        partial.unlink()
        _transfer(remote)
    digest = file_sha256(partial)
    if digest != remote.sha256:
        partial.unlink()
        raise CheckpointError(
            f"`{remote.url}` did not give the published file",
            why=f"the SHA-256 of what was downloaded is {digest}; expected {remote.sha256}",
            hint="nothing was kept. A proxy or a login page may have answered: try another network",
        )
    os.replace(partial, remote.path)
    flush_rename(remote.path)


def _transfer(remote: RemoteFile) -> None:
    """Fill the partial file, with several requests if necessary.

    Raises:
        UnreachableError: the last request failed too.
    """
    with needs(f"cannot download `{remote.path.name}`: requests is not installed", hint=INSTALL):
        import requests
        import urllib3
    why = ""
    with requests.Session() as session:
        session.max_redirects = MAX_REDIRECTS
        for attempt in range(ATTEMPTS):
            try:
                _request(session, remote)
                return
            except _CutError as error:
                why, pause = str(error), max(error.pause_s, PAUSE_S * 2**attempt)
            except (
                requests.ConnectionError,
                requests.Timeout,
                urllib3.exceptions.HTTPError,
            ) as error:
                why, pause = _cause(error), PAUSE_S * 2**attempt
            except requests.RequestException as error:
                why = str(error)
                break
            if pause > MAX_PAUSE_S:
                break
            if attempt < ATTEMPTS - 1:
                time.sleep(pause)
    raise UnreachableError(
        f"cannot download `{remote.url}`",
        why=shorten(why),
        hint="try again: the download continues where it was cut",
    )


def _cause(error: Exception) -> str:
    """Return what is wrong with the connection, without the library's object and the repeated address."""
    cause = getattr(error.args[0], "reason", None) if error.args else None
    return str(cause).partition(": ")[2] or str(cause) if cause else str(error)


def _request(session: "requests.Session", remote: RemoteFile) -> None:
    """Make one request for the bytes that the partial file does not have, and append them."""
    partial = remote.partial
    have = partial.stat().st_size if partial.exists() else 0
    # No compression: the lengths that the server states are then those of the file.
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
    with session.get(remote.url, headers=headers, stream=True, timeout=TIMEOUT_S) as answer:
        _check_status(answer, partial)
        start, total = _extent(answer, have, partial)
        if total > remote.most_bytes:
            raise CheckpointError(
                f"`{remote.url}` did not give the published file",
                why=f"it has {total} bytes; expected at most {remote.most_bytes}",
                hint="a proxy may have answered: try another network",
            )
        _check_space(remote, (total or remote.most_bytes) - start)
        _report(remote, start, total, first=True)
        with open(partial, "ab" if start else "wb") as file:
            _append(answer, file, remote, (start, total))


def _check_status(answer: "requests.Response", partial: Path) -> None:
    """Raise an error unless the status is 200 or 206."""
    status = answer.status_code
    if status == 416:  # more bytes are here than the server has
        partial.unlink(missing_ok=True)
        raise _CutError("the server has fewer bytes than were downloaded before")
    why = f"the server answered {status} {shorten(answer.reason or '')}".rstrip()
    if status in _BUSY:
        pause = answer.headers.get("Retry-After", "")
        raise _CutError(why, float(pause) if re.fullmatch(r"\d{1,9}", pause) else 0.0)
    if status not in (200, 206):
        raise UnreachableError(
            f"cannot download `{answer.url}`",
            why=why,
            hint="check the network and its proxy, or bring the file by hand",
        )


def _extent(answer: "requests.Response", have: int, partial: Path) -> tuple[int, int]:
    """Return the position of the answer's first byte, and the length of the file; 0: not stated."""
    if answer.status_code == 206:
        stated = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if stated is None or int(stated[1]) != have or int(stated[3]) <= have:
            partial.unlink(missing_ok=True)
            raise _CutError("the server answered with another part of the file")
        return have, int(stated[3])
    length = answer.headers.get("Content-Length", "")
    return 0, int(length) if re.fullmatch(r"\d{1,15}", length) else 0


def _check_space(remote: RemoteFile, needed: int) -> None:
    if lack := lack_of_space(remote.path.parent, needed):
        raise CheckpointError(
            f"not enough free disk space for `{remote.path}`",
            why=lack,
            hint="free some space; `XDG_CACHE_HOME` names another cache folder",
        )


def _append(
    answer: "requests.Response",
    file: BinaryIO,
    remote: RemoteFile,
    extent: tuple[int, int],
) -> None:
    n_bytes, total = extent
    step = max((total or remote.most_bytes) // STEPS, 1)
    reported = n_bytes
    for chunk in answer.raw.stream(CHUNK, decode_content=False):
        n_bytes += len(chunk)
        if n_bytes > (total or remote.most_bytes):
            raise _CutError("the server sent more bytes than it stated or the file has")
        file.write(chunk)
        if n_bytes - reported >= step:
            reported = n_bytes
            _report(remote, n_bytes, total)
    file.flush()
    os.fsync(file.fileno())
    if n_bytes < total:
        raise _CutError(f"the connection ended after {n_bytes} of {total} bytes")


def _report(remote: RemoteFile, n_bytes: int, total: int, *, first: bool = False) -> None:
    size = f"{total / 1e6:.1f} MB" if total else "size not stated"
    where = f" from {remote.url} to {remote.path}" if first else f", {n_bytes / 1e6:.1f} MB done"
    begin_stage(Counted(f"downloading {remote.path.name} ({size}){where}", n_bytes, total))

"""Suppress what SDKs print while they are imported or compile."""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from threading import Lock


class _Shared:
    """State of the process that the first thread which enters changes, and the last one restores.

    Threads may overlap in any order.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._restore = Lock(), 0, contextlib.ExitStack()

    @contextlib.contextmanager
    def changed_by(self, change: Callable[[contextlib.ExitStack], None]) -> Iterator[None]:
        """Change the state within the block; `change` pushes the functions that restore it on a stack."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                change(self._restore)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._restore.close()


_python, _native = _Shared(), _Shared()


def quiet() -> contextlib.AbstractContextManager[None]:
    """Suppress warnings, log records below ERROR, and the output of Python code.

    This changes state of the complete process: while one thread is inside, no thread prints.
    """
    return _python.changed_by(_silence)


def quiet_natively() -> contextlib.AbstractContextManager[None]:
    """Suppress what native code of this process prints on standard error, below Python's `sys.stderr`.

    Libraries in C++ write to the file descriptor. What Python code prints there is suppressed too.
    """
    return _native.changed_by(_silence_natively)


def _silence_natively(restore: contextlib.ExitStack) -> None:
    try:
        before = os.dup(2)
    except OSError:  # standard error is closed: nothing is printed
        return
    restore.callback(os.close, before)
    restore.callback(os.dup2, before, 2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _silence(restore: contextlib.ExitStack) -> None:
    restore.callback(logging.disable, logging.root.manager.disable)
    logging.disable(logging.WARNING)
    restore.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    restore.enter_context(contextlib.redirect_stderr(io.StringIO()))
    restore.enter_context(contextlib.redirect_stdout(io.StringIO()))

"""Suppress what SDKs print while they are imported or compile."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from threading import Lock

_lock = Lock()
_inside = 0
_restore = contextlib.ExitStack()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, log records below ERROR, and the output of Python code.

    This changes state of the complete process: while one thread is inside, no thread prints. The first
    thread that enters changes the state, and the last thread that leaves restores it. Threads may overlap
    in any order.
    """
    global _inside
    with _lock:
        _inside += 1
        if _inside == 1:
            _silence()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _restore.close()


def _silence() -> None:
    _restore.callback(logging.disable, logging.root.manager.disable)
    logging.disable(logging.WARNING)
    _restore.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    _restore.enter_context(contextlib.redirect_stderr(io.StringIO()))
    _restore.enter_context(contextlib.redirect_stdout(io.StringIO()))

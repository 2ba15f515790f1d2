"""Suppress what SDKs print while they are imported or compile."""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from threading import Lock

_lock = Lock()
_inside = 0
_restore = contextlib.ExitStack()
_natively_inside = 0
_restore_natively = contextlib.ExitStack()


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


@contextlib.contextmanager
def quiet_natively() -> Iterator[None]:
    """Suppress what native code of this process prints on standard error, below Python's `sys.stderr`.

    Libraries in C++ write to the file descriptor. What Python code prints there is suppressed too. As with
    `quiet`, the first thread that enters changes the state, and the last thread that leaves restores it.
    """
    global _natively_inside
    with _lock:
        _natively_inside += 1
        if _natively_inside == 1:
            _silence_natively()
    try:
        yield
    finally:
        with _lock:
            _natively_inside -= 1
            if _natively_inside == 0:
                _restore_natively.close()


def _silence_natively() -> None:
    try:
        before = os.dup(2)
    except OSError:  # standard error is closed: nothing is printed
        return
    _restore_natively.callback(os.close, before)
    _restore_natively.callback(os.dup2, before, 2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _silence() -> None:
    _restore.callback(logging.disable, logging.root.manager.disable)
    logging.disable(logging.WARNING)
    _restore.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    _restore.enter_context(contextlib.redirect_stderr(io.StringIO()))
    _restore.enter_context(contextlib.redirect_stdout(io.StringIO()))

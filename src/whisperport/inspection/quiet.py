"""Keep what SDKs print while they are imported or compile off the screen."""

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
    """No warnings, no log below an error, and nothing printed by Python code.

    That is state of the whole process: while one thread is inside, no thread prints. The first to enter
    changes it, and the last to leave restores it, so threads may overlap in any order.
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

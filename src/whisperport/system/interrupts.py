"""Handling of SIGINT, SIGTERM and SIGHUP: each raises KeyboardInterrupt and determines the exit status."""

import signal
import sys
from types import FrameType
from typing import NoReturn

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
_last = int(signal.SIGINT)


def install() -> None:
    """Make `kill`, `timeout` and a closed terminal interrupt like Ctrl-C. `nohup` keeps its effect."""
    global _last
    _last = int(signal.SIGINT)
    for number, handler in _handled():
        if handler in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _interrupt)


def restore() -> None:
    """Restore the default handlers: a following signal ends the process immediately, without output."""
    for number, handler in _handled():
        if handler is _interrupt:
            signal.signal(number, signal.SIG_DFL)


def exit_status() -> int:
    """Return the exit status for the last signal, as a shell reports it: 130, 143 or 129."""
    return 128 + _last


def leave() -> NoReturn:
    """Exit with the status of an interrupted process. Another signal ends the process immediately."""
    restore()
    if sys.stderr is not None:
        print("interrupted: nothing was left half-written", file=sys.stderr)
    sys.exit(exit_status())


def _handled() -> list[tuple[int, object]]:
    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    return [(number, signal.getsignal(number)) for number in numbers]


def _interrupt(number: int, _frame: FrameType | None) -> None:
    global _last
    _last = number
    raise KeyboardInterrupt

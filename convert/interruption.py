"""Signals that end a conversion by an exception, so that it removes what it has written."""

import signal
import sys
from types import FrameType
from typing import NoReturn

# The last one comes when a terminal closes, and Windows has none. What a parent process has set to
# be ignored, as nohup does, stays so.
_NUMBERS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if name in dir(signal)
]
_received: int | None = None


def end_at_once() -> None:
    """From now on a signal ends the process without an exception; for while nothing is written.

    Compiled modules do not all survive an exception amid their import.
    """
    _handle(signal.SIG_DFL)


def end_by_exception() -> None:
    """From now on the first signal raises `KeyboardInterrupt`, or `SystemExit` with its exit code.
    Later ones are ignored, for they would end the cleaning up.
    """
    global _received
    _received = None
    _handle(_on_signal)


def check() -> None:
    """Raise again for a signal whose exception was lost.

    It comes up wherever the main thread is just then. In a callback of the garbage collector, such
    as JAX has, Python prints it and goes on.
    """
    if _received is not None:
        _raise(_received)


def _handle(handler: object) -> None:
    for number in _NUMBERS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]


def _on_signal(number: int, frame: FrameType | None) -> NoReturn:
    global _received
    _received = number
    _handle(signal.SIG_IGN)
    _raise(number)


def _raise(number: int) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)

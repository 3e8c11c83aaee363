"""Handlers of signals that end a command soon, even while JAX is computing.

Python runs its signal handlers between two instructions of the main thread, wherever
that is: never during a long computation, which is a single instruction, and also inside
of what a compiler calls back, which takes the end for an error of its own. So commands
that compute do it in another thread, and the main thread waits. And a thread listens,
too: if the main thread has not ended some seconds after a signal, it ends the process.
Files stay whole, because they are written atomically.
"""

import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
STOPPING = (signal.SIGINT, signal.SIGTERM)
SECONDS_OF_GRACE = 3.0
SHOW_CURSOR = "\x1b[?25h"
STACK = 2**26  # bytes; what threads get by default is too little for a compiler


def heed() -> None:
    """Install handlers of SIGINT and SIGTERM; to be called once, at the start."""
    signal.signal(signal.SIGTERM, leave)
    # Sockets, because Windows lets signals be written to nothing else.
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_insist, args=(reader, writer), daemon=True).start()


def apart(work: Callable[P, T]) -> Callable[P, T]:
    """Return a function that works in a thread of its own, where no signal lands."""

    @functools.wraps(work)
    def wait(*words: P.args, **options: P.kwargs) -> T:
        outcome: list[tuple[Any, BaseException | None]] = []

        def run() -> None:
            try:
                outcome.append((work(*words, **options), None))
            except BaseException as error:
                outcome.append((None, error))

        before = threading.stack_size(STACK)
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        threading.stack_size(before)
        while thread.is_alive():
            thread.join(0.2)  # not for ever: on some systems that would not be stopped
        ((result, error),) = outcome
        if error is not None:
            raise error
        return result

    return wait


def abandon(code: int) -> None:
    """Leave without waiting for the threads of JAX, which may be computing."""
    if sys.stderr.isatty():
        sys.stderr.write(SHOW_CURSOR)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _insist(reader: socket.socket, writer: socket.socket) -> None:
    """Wait for a signal, then for the main thread, and no longer; keep both ends."""
    number = 0
    while number not in STOPPING:
        number = reader.recv(1)[0]
    time.sleep(SECONDS_OF_GRACE)
    abandon(128 + number)


def leave(number: int, frame: Any) -> None:
    """Ask the main thread to end."""
    sys.exit(128 + number)

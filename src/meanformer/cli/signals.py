"""Being stopped: in order, and soon, even while JAX is computing.

Python runs its signal handlers between two instructions of the main thread, and a long
computation is a single one. So a thread of our own listens, too: if the main thread has
not ended some seconds after a signal, it ends the process. Files stay whole, because
they are written atomically.
"""

import os
import signal
import sys
import threading
import time
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)
SECONDS_OF_GRACE = 3.0
SHOW_CURSOR = "\x1b[?25h"


def heed() -> None:
    """Make Ctrl-C and requests to terminate work from now on; once, at the start."""
    signal.signal(signal.SIGTERM, _leave)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_insist, args=(reader,), daemon=True).start()


def abandon(code: int) -> None:
    """Leave without waiting for the threads of JAX, which may be computing."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _insist(reader: int) -> None:
    """Wait for a signal, then for the main thread, and no longer."""
    number = 0
    while number not in STOPPING:
        number = os.read(reader, 1)[0]
    time.sleep(SECONDS_OF_GRACE)
    if sys.stderr.isatty():
        sys.stderr.write(SHOW_CURSOR)
    abandon(128 + number)


def _leave(number: int, frame: Any) -> None:
    sys.exit(128 + number)

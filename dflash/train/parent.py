"""A process that ends with the one that started it, and when it is asked to. Imports next to nothing, so that it can come first.

On Linux the kernel sees to it, whatever the process is doing: while a library is loaded, which takes half a minute from a slow
disk, no thread of Python runs. Elsewhere a thread looks four times a second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Ends this process as soon as its launcher dies. Every file it writes appears by renaming, so nothing half-written is left
    that could be taken for whole. Call it from the process's first thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)
        try:
            os.write(2, b"the launcher is gone; the trainer ends\n")
        finally:  # the launcher read what is written there: the pipe broke with it
            os._exit(128 + signal.SIGKILL)

    if os.getppid() != parent:  # it died before the kernel was asked to tell of its death
        os._exit(128 + signal.SIGKILL)
    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def hear_requests() -> threading.Event:
    """An event that SIGTERM and SIGINT set from now on: somebody asks to finish the step, to save and to end."""
    ending = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: ending.set())
    return ending

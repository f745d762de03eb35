"""The end of a process whose Gloo threads have not yet let go of tensors."""

from __future__ import annotations

import atexit
import time
from functools import cache

GRACE_S = 0.05


@cache
def linger_at_exit() -> None:
    """Let the interpreter's exit wait a little, once for all comms. Local.

    After a collective has ended, a thread of the process group drops its tensors, and takes the
    GIL for those that Python knows. If the interpreter is ending by then, Python (before 3.14) ends
    the thread, in C++ that may not be left like that: "terminate called without an active
    exception", and the process dies of SIGABRT after all its work is done. A group whose last user
    lets go of it before joins its threads; who holds it still, as a comm or a mesh in a script's
    globals does, has these few milliseconds, in which nothing holds the GIL.
    """
    atexit.register(_wait)


def _wait() -> None:
    time.sleep(GRACE_S)

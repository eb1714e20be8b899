"""What a rank tells the others when an exception ends its backward pass, and then perhaps its process.

The others wait for it in a collective. In a wait that takes long they look for such a sign in the store, and give up.
As the process that hosts the store may be the one that raised, it stays for a moment, so that they can.
"""

import atexit
import functools
import sys
import time
import weakref
from types import TracebackType

from unified_ddp.ranks.progress import Progress
from unified_ddp.ranks.roll_call import GRACE_SECONDS

_POLL_SECONDS = 0.05

_followed: "weakref.WeakSet[Progress]" = weakref.WeakSet()


def follow(progress: Progress) -> None:
    """Tells the other ranks of an exception that nobody caught, and at the end of this process waits until they know.

    Args:
        progress: of one wrapper.
    """
    _followed.add(progress)
    _listen()


@functools.cache
def _listen() -> None:
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        for progress in list(_followed):
            progress.raised(error)
        before(kind, error, traceback)

    sys.excepthook = told
    atexit.register(_stay)


def _stay() -> None:
    for progress in [p for p in _followed if p.is_leaving]:
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and not progress.others_know():
            time.sleep(_POLL_SECONDS)

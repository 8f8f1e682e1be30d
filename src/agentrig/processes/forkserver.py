"""For the process that runners are forked from: it imports this module, and then ends at once with them.

Python would first take down all modules that it has preloaded: 0.2 to 0.5 CPU seconds for each run, and many times as
long on a busy machine, while the user already sees a killed run as ended.
"""

from __future__ import annotations

import atexit
import os
import signal

_own, _parent = os.getpid(), os.getppid()


def _look(*_: object) -> None:
    """End this process if the run has ended: while it still imports, it would not see that for a minute or two."""
    if os.getppid() != _parent:
        os._exit(0)


signal.signal(signal.SIGALRM, _look)
signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)  # not inherited by runners, unlike the handler
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGALRM, signal.SIG_DFL))


@atexit.register
def _leave() -> None:
    """End this process; runners, which are forked from it, keep their own exit handlers."""
    if os.getpid() == _own:
        os._exit(0)

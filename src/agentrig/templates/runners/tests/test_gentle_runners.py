"""Tests what `gentle-runners` does."""

import os
from types import SimpleNamespace

from agentrig_gentle_runners import Config, build


def test_the_runners_have_a_lower_priority() -> None:
    source = SimpleNamespace(name="none", files=(), environment=(), build=object)
    pool = build(Config(nice=3))(source, n=1, threads=1, deadline_s=10.0, retries=0)
    try:
        pool.start()
        (runner,) = pool.processes()
        assert os.getpriority(os.PRIO_PROCESS, runner) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)
    finally:
        pool.close()

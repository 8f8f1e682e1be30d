"""A runner's processes end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

KILLED = """
import os, signal, sys, threading, time
import psutil
from agentrig.runners.jobs import AgentPlan
from agentrig.runners.processes import Pool

pool = Pool(AgentPlan(name="toy", config={{}}, files=[{file!r}]), n=1, threads=1, deadline_s=60, retries=0)
pool.build_first(60)
(runner,) = map(psutil.Process, pool.processes())
print(runner.pid, flush=True)
guard = runner.parent()
guard.{signal}()
if {closes}:
    threading.Thread(target=pool.close).start()
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("signal_name", "closes"), [("resume", True), pytest.param("kill", False, marks=pytest.mark.slow)]
)
def test_a_killed_run_and_a_killed_guard_leave_no_runner(signal_name: str, closes: bool, toy_file: str) -> None:
    code = KILLED.format(file=toy_file, signal=signal_name, closes=closes)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not lives(int(done.stdout))


PRINTS = """
from agentrig import Endpoint
from agentrig.pools import Job
from agentrig.runners.jobs import AgentPlan
from agentrig.runners.processes import Pool

nowhere = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
pool = Pool(AgentPlan(name="toy", config={{}}, files=[{file!r}]), n=1, threads=1, deadline_s=60, retries=0)
pool.build_first(60)
for do in ("prints", "crash"):
    pool.submit(Job(id=do, input={{"do": do, "number": 1}}, endpoint=nowhere))
while pool.pending:
    pool.poll(1)
pool.close()
"""


@pytest.mark.slow
def test_what_an_agent_prints_is_limited_and_its_last_words_are_shown(toy_file: str) -> None:
    done = subprocess.run([sys.executable, "-c", PRINTS.format(file=toy_file)], capture_output=True, text=True)
    assert 200_000 < len(done.stdout) <= 256_000  # of 2 MB
    assert done.stderr.count("prints more than 256 kB in a minute: the rest of this minute is dropped") == 1
    assert "Segmentation fault" in done.stderr  # a crash is told, however much was printed before


def lives(pid: int, within_s: float = 5.0) -> bool:
    """Wait until a process has ended; return whether it still runs."""
    end = time.monotonic() + within_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            psutil.Process(pid).kill()
            return True
        time.sleep(0.02)
    return False

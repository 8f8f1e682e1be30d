"""A runner's processes end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil

ENDS = """
import os, subprocess, sys, threading
from agentrig.processes import families
families.lead()
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
both = threading.Barrier(2)
def before():
    os.write(1, b"forks ")
    try:
        both.wait(0.5)  # the other thread gets as far as this, if it can
    except threading.BrokenBarrierError:
        pass
os.register_at_fork(before=before)
print(child.pid, flush=True)
{planted}
for _ in "12":
    threading.Thread(target=families.end_own_family, args=([],)).start()
"""


def ended(planted: str = "") -> tuple[subprocess.CompletedProcess[str], int]:
    """Let two threads end a process that has a child; return it, and the child's process id."""
    code = ENDS.format(planted=planted)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    return done, int(done.stdout.split()[0])


CLOSES = """
import os, signal, sys, threading, time
import psutil
from agentrig.runners.jobs import AgentPlan
from agentrig.runners.processes import Pool

pool = Pool(AgentPlan(name="toy", config={{}}, files=[{file!r}]), n=1, threads=1, deadline_s=60, retries=0)
pool.build_first(60)
(runner,) = map(psutil.Process, pool.processes())
print(runner.pid, flush=True)
threading.Thread(target=pool.close).start()
while runner.is_running() and runner.status() != psutil.STATUS_STOPPED:
    time.sleep(0.001)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_killed_while_it_ends_a_runner_leaves_no_stopped_runner(toy_file: str) -> None:
    code = CLOSES.format(file=toy_file)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not lives(int(done.stdout))


def lives(pid: int, within_s: float = 5.0) -> bool:
    """Wait until a process has ended; return whether it still runs."""
    end = time.monotonic() + within_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            psutil.Process(pid).kill()
            return True
        time.sleep(0.02)
    return False


def test_one_process_ends_a_runner_whichever_threads_ask_for_it() -> None:
    done, child = ended()
    assert done.stdout.count("forks") == 1  # two would kill each other, and leave the runner stopped
    assert (done.returncode, lives(child)) == (-signal.SIGKILL, False)


def test_an_error_in_the_search_does_not_leave_a_runner_stopped() -> None:
    done, child = ended("families.ROUNDS = None")
    psutil.Process(child).kill()
    assert done.returncode == -signal.SIGKILL
    assert "TypeError" in done.stderr

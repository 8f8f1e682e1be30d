"""Where the runners of `verl` run: actors of its Ray cluster, or processes of this machine, once Ray is joined."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from agentrig.errors import AgentrigError
from agentrig.pools import AgentSource, Job, MakePool, Result, RunnerPool
from agentrig.runners.processes import Pool

NEEDS_RAY = "runners on Ray come from agentrig-ray, which is not installed: pip install agentrig-ray"


class PlacedPool:
    """A pool whose runners start after the algorithm has joined Ray.

    Agent Lightning's trainer starts the runners before the algorithm, but Ray needs its environment first.

    Args:
        make: Makes the runners that the run names; None to let `place` choose.
    """

    def __init__(self, plan: AgentSource, *, make: MakePool | None = None, **settings: Any) -> None:
        self._plan, self._make, self._settings = plan, make, settings
        self.built = threading.Event()
        self._inner: RunnerPool | None = None
        self._waiting: deque[Job] = deque()
        self._polling = threading.Lock()

    def place(self, on_ray: bool, *, cpus: float) -> None:
        """Start the runners: those that the run names, else Ray actors or local processes.

        Raises:
            AgentrigError: They are to run on Ray, and agentrig-ray is not installed.
        """
        inner: RunnerPool
        if self._make is not None:
            inner = self._make(self._plan, **self._settings)
        elif on_ray:
            try:
                from agentrig_ray.pool import RayPool
            except ImportError as error:
                raise AgentrigError(NEEDS_RAY) from error
            inner = RayPool(self._plan, cpus=cpus, **self._settings)
        else:
            inner = Pool(self._plan, **self._settings)
        inner.built = self.built
        inner.start()
        self._inner = inner

    def start(self) -> None:
        """Do nothing: `place` starts the runners."""

    def build_first(self, timeout_s: float) -> bool:
        """Wait until a runner has built the agent, once they are placed."""
        return self.built.wait(timeout_s)

    @property
    def n(self) -> int:
        """Number of runners, also before they start."""
        return int(self._settings["n"])

    @property
    def deadline_s(self) -> float:
        """Time limit of a rollout in seconds."""
        return float(self._settings["deadline_s"])

    @property
    def retries(self) -> int:
        """How often a rollout starts again after its runner died."""
        return int(self._settings["retries"])

    @property
    def room(self) -> int:
        """How many more jobs could start at once."""
        inner = self._inner  # read once, here and below: another thread may call `withdraw`
        return inner.room - len(self._waiting) if inner else 0

    @property
    def pending(self) -> int:
        """Jobs that were submitted and have not come back."""
        inner = self._inner
        return (inner.pending if inner else 0) + len(self._waiting)

    @property
    def replaced(self) -> int:
        """How many runners were replaced."""
        inner = self._inner
        return inner.replaced if inner else 0

    def submit(self, job: Job) -> None:
        """Queue a job."""
        inner = self._inner
        if inner:
            inner.submit(job)
        else:
            self._waiting.append(job)

    def wake(self) -> None:
        """Make a `poll` that waits in another thread return."""
        inner = self._inner
        if inner:
            inner.wake()

    def processes(self) -> list[int]:
        """Return the process ids of the runners on this machine."""
        inner = self._inner
        return list(inner.processes()) if inner else []

    def poll(self, timeout_s: float) -> list[Result]:
        """Send jobs, wait, and return finished results."""
        with self._polling:
            if self._inner is not None:
                while self._waiting:
                    self._inner.submit(self._waiting.popleft())
                return list(self._inner.poll(timeout_s))
        time.sleep(timeout_s)
        return []

    def withdraw(self) -> None:
        """Stop the runners before Ray shuts down. Safe from any thread."""
        with self._polling:
            inner, self._inner = self._inner, None
            if inner:
                inner.close()

    def close(self) -> None:
        """End all runners."""
        self.withdraw()

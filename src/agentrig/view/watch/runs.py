"""Finds run directories and reads what changes in them while they run."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from agentrig.errors import AgentrigError
from agentrig.figures import SIGNIFICANT, sign_test
from agentrig.processes.locks import Lock
from agentrig.view import figures
from agentrig.view.causes.evidence import Evidence
from agentrig.view.diagnosis import Diagnosis, diagnose
from agentrig.view.reading import RunData, Seen, read_run
from agentrig.view.watch.notes import FILE
from agentrig.view.watch.rollouts import Rollouts

STATE = (
    "config.toml",
    "manifest.json",
    "metrics.jsonl",
    "progress.json",
    "summary.json",
    "error.json",
    "log.jsonl",
    FILE,
)
"""The files of a run that change while it runs, or while somebody looks."""


class Run:
    """One run directory; `key` is its name in addresses."""

    def __init__(self, directory: Path, key: str) -> None:
        self.directory, self.key = directory, key
        self.rollouts = Rollouts(directory)
        self._seen = Seen()
        self._lock = threading.Lock()
        self._read: tuple[str, RunData] | None = None

    def stamp(self) -> str:
        """Return a text that changes when a file of the run does."""
        found = [str(Lock(self.directory / "run.lock").held())]
        for path in (*(self.directory / name for name in STATE), self.directory / "rollouts", self.directory / "calls"):
            try:
                there = path.stat()
                found.append(f"{path.name}:{there.st_mtime_ns}:{there.st_size}")
            except OSError:
                found.append(f"{path.name}:-")
        return hashlib.sha256("|".join(found).encode()).hexdigest()[:16]

    def diagnosis(self) -> Diagnosis:
        """Return what held the run's learning back so far; only rollouts that are new are read.

        Raises:
            AgentrigError: The directory is gone.
        """
        data = self.data()
        with self._lock:
            return diagnose(data)

    def may_be_chance(self) -> bool:
        """Whether the change of its held-out accuracy may be chance; False without a change, or if it is not known.

        Raises:
            AgentrigError: The directory is gone.
        """
        data = self.data()
        if None in (figures.held_out(data)["accuracy"][end] for end in ("before", "after")):
            return False
        with self._lock:
            evidence = Evidence.of_ends(data)
            better, worse, _, _ = evidence.changed
            return better != worse and sign_test(*evidence.learned) > SIGNIFICANT

    def data(self) -> RunData:
        """Return what the directory has now, without its rollouts.

        Raises:
            AgentrigError: It is gone.
        """
        with self._lock:
            stamp = self.stamp()
            if self._read is None or self._read[0] != stamp:
                self._read = stamp, read_run(self.directory, self._seen)
            return self._read[1]


class Runs:
    """The runs that a page shows: those of a folder, or the one run that `place` is.

    Raises:
        AgentrigError: There is no such folder.
    """

    def __init__(self, place: Path) -> None:
        self.place = place.resolve()
        if not self.place.is_dir():
            raise AgentrigError(f"there is no folder {place}: name a run directory, or the folder that runs are in")
        self.single = is_run(self.place)
        self._known: dict[str, Run] = {}
        self._lock = threading.Lock()

    def all(self) -> Mapping[str, Run]:
        """Return the runs that are there now, by key; the newest first."""
        folders = [self.place] if self.single else [f for f in self.place.iterdir() if f.is_dir() and is_run(f)]
        with self._lock:
            found = {}
            for folder in sorted(folders, key=_age, reverse=True):
                found[folder.name] = self._known.setdefault(folder.name, Run(folder, folder.name))
            self._known = dict(found)
            return found

    def get(self, key: str) -> Run:
        """Return a run.

        Raises:
            KeyError: There is none of that name.
        """
        return self.all()[key]


def is_run(folder: Path) -> bool:
    """Whether a folder has what a run writes first."""
    return any(os.path.isfile(folder / name) for name in ("config.toml", "metrics.jsonl"))  # a closed one is none


def _age(folder: Path) -> float:
    try:
        return (folder / "config.toml").stat().st_mtime
    except OSError:
        return 0.0

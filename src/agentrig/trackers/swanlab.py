"""SwanLab."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from agentrig.errors import ConfigError
from agentrig.trackers.config import SwanlabConfig
from agentrig.trackers.logins import swanlab_ready
from agentrig.trackers.tracking import BINS, Ended, Sample, TrackedRun, checkpoint_files, required

log = logging.getLogger(__name__)

STATE: Mapping[Ended, str] = {"finished": "success", "stopped": "aborted", "failed": "crashed"}


class Swanlab:
    """Writes into a run of SwanLab, on its server or into files."""

    def __init__(self, config: SwanlabConfig) -> None:
        self._swanlab, self._config = required("swanlab", tracker="swanlab"), config
        if not (config.offline or config.api_key or swanlab_ready()):
            raise ConfigError(
                "the tracker swanlab has no login here: set SWANLAB_API_KEY (or run `swanlab login`), or write "
                "trackers.swanlab.offline=true; `swanlab sync` sends the files later"
            )
        self._run: Any = None

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Begin the run, or go on with it."""
        config = self._config
        console = required("swanlab.sdk.internal.pkg.console", tracker="swanlab")
        console.c.quiet = True  # its lines would disturb the run's display, and no setting keeps them out
        more = {} if config.api_key is None else {"api_key": config.api_key.reveal()}
        folder = run.directory / "swanlab"
        folder.mkdir(exist_ok=True)
        made = self._swanlab.init(
            project=config.project,
            workspace=config.workspace or None,
            id=run.key,
            resume="allow",
            name=run.name,
            tags=list(run.tags) or None,
            config=dict(run.config),
            log_dir=str(folder),
            mode="offline" if config.offline else None,
            settings=self._swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}, **more),
        )
        _flush_each(made)
        self._run = made
        written = str(made.dir)
        sends = {"command": shlex.join(["swanlab", "sync", written])} if config.offline else {"url": made.url}
        found = {"id": run.key, "folder": written, **sends}
        return {name: value for name, value in found.items() if value}

    def log(self, figures: Mapping[str, float], *, step: int, time: float) -> None:
        """Write figures; of a step that a resume repeats, SwanLab keeps the first figures."""
        self._run.log(dict(figures), step=step)

    def rollouts(self, mode: str, rewards: Sequence[float], samples: Sequence[Sample], *, step: int) -> None:
        """Write a histogram, as a chart of bars, and a table."""
        charts, shown = self._swanlab.echarts, {}
        if rewards:
            counts, edges = np.histogram(rewards, bins=BINS)
            names = [f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges.tolist())]
            shown[f"{mode}/rewards"] = charts.Bar().add_xaxis(names).add_yaxis("rollouts", counts.tolist())
        if samples:
            rows = [["" if cell is None else str(cell) for cell in sample] for sample in samples]
            shown[f"{mode}/samples"] = charts.Table().add(list(Sample._fields), rows)
        self._run.log(shown, step=step)

    def attach(self, files: Sequence[Path]) -> None:
        """Copy files into the run."""
        for file in files:
            self._run.save(str(file), base_path=str(file.parent), policy="now")

    def checkpoint(self, folder: Path) -> None:
        """Copy the checkpoint into the run."""
        for file in checkpoint_files(folder).values():
            self._run.save(str(file), base_path=str(folder.parent), policy="now")

    def end(self, ended: Ended, error: str) -> None:
        """End the run."""
        self._run.finish(state=STATE[ended], error=error or None)


def _flush_each(run: Any) -> None:
    """Let SwanLab's file have each record at once: a killed run would lose up to 8 KB of it.

    There is no public way; with another version of SwanLab, whose objects differ, a killed run loses these.
    """
    store = getattr(getattr(run, "_core", None), "_store", None)
    write, flush = getattr(store, "write", None), getattr(store, "ensure_flushed", None)
    if store is None or write is None or flush is None:
        log.debug("this version of SwanLab has no store that can be flushed")
        return

    def write_and_flush(data: bytes) -> None:
        write(data)
        flush()

    store.write = write_and_flush

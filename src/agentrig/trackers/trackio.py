"""trackio."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrig.trackers.config import TrackioConfig
from agentrig.trackers.tracking import Ended, Sample, TrackedRun, checkpoint_files, required

log = logging.getLogger(__name__)


class Trackio:
    """Writes into a run of trackio: its database on this machine, a server, or a Hugging Face Space."""

    def __init__(self, config: TrackioConfig) -> None:
        self._trackio, self._config = required("trackio", tracker="trackio"), config
        for module in ("trackio", "trackio.utils", "trackio.run"):  # they print, and no setting keeps them quiet
            vars(required(module, tracker="trackio"))["print"] = _quietly
        self._run: Any = None

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Begin the run, or go on with it."""
        name = f"{run.name}-{run.key[:6]}"  # trackio finds a run by its name only
        self._run = self._trackio.init(
            project=self._config.project,
            name=name,
            group=run.tags[0] if run.tags else None,
            config={**run.config, "tags": ", ".join(run.tags)},
            space_id=self._config.space_id or None,
            server_url=self._config.server_url or None,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        place = self._config.space_id or self._config.server_url
        if place:
            return {"id": name, "folder": place}
        command = shlex.join(["trackio", "show", "--project", self._config.project])
        return {"id": name, "folder": str(self._trackio.utils.TRACKIO_DIR), "command": command}

    def log(self, figures: Mapping[str, float], *, step: int, time: float) -> None:
        """Write figures."""
        self._run.log(dict(figures), step=step)

    def rollouts(self, mode: str, rewards: Sequence[float], samples: Sequence[Sample], *, step: int) -> None:
        """Write a histogram and a table."""
        shown: dict[str, Any] = {f"{mode}/rewards": self._trackio.Histogram(list(rewards))} if rewards else {}
        if samples:
            rows = [list(sample) for sample in samples]
            shown[f"{mode}/samples"] = self._trackio.Table(columns=list(Sample._fields), data=rows)
        self._run.log(shown, step=step)

    def attach(self, files: Sequence[Path]) -> None:
        """Attach files as one artifact."""
        self._artifact("files", "run", {file.name: file for file in files})

    def checkpoint(self, folder: Path) -> None:
        """Attach the checkpoint as an artifact of the type `model`."""
        self._artifact("checkpoint", "model", checkpoint_files(folder))

    def end(self, ended: Ended, error: str) -> None:
        """End the run."""
        self._run.finish()

    def _artifact(self, name: str, kind: str, files: Mapping[str, Path]) -> None:
        artifact = self._trackio.Artifact(f"{self._run.name}-{name}", type=kind)
        for path, file in files.items():
            artifact.add_file(str(file), name=path)
        self._run.log_artifact(artifact)


def _quietly(*words: Any, **more: Any) -> None:
    log.debug("%s", " ".join(str(word) for word in words))

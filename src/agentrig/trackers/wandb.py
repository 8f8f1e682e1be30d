"""Weights & Biases."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrig.errors import ConfigError
from agentrig.trackers.config import WandbConfig
from agentrig.trackers.logins import wandb_ready
from agentrig.trackers.tracking import Ended, Sample, TrackedRun, checkpoint_files, required

STEP = "step"
"""The figure that W&B takes as the x axis. Its own count of steps can't go back to a step that a resume repeats."""

FLUSH_S = 0.5
"""Seconds after which W&B writes its file; a killed run loses so much of it. W&B's own default is 15."""


class Wandb:
    """Writes into a run of W&B, on its server or into files."""

    def __init__(self, config: WandbConfig) -> None:
        self._wandb = required("wandb", tracker="wandb")
        self._config = config
        self._run: Any = None
        if not (config.offline or config.api_key or wandb_ready()):
            raise ConfigError(
                "the tracker wandb has no login here: set WANDB_API_KEY (or run `wandb login`), or write "
                "trackers.wandb.offline=true; `wandb sync` sends the files later"
            )

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Begin the run, or go on with it."""
        config = self._config
        quiet = self._wandb.Settings(
            **{"console": "off", "silent": True, "disable_git": True, "disable_code": True, "reinit": "create_new"},
            x_transaction_log_flush_interval=FLUSH_S,
        )
        if config.api_key is not None:
            quiet.api_key = config.api_key.reveal()
        made: Any = self._wandb.init(
            project=config.project,
            entity=config.entity or None,
            group=config.group or None,
            id=run.key,
            resume="allow",
            name=run.name,
            tags=list(run.tags) or None,
            config=dict(run.config),
            dir=str(run.directory),
            mode="offline" if config.offline else None,
            settings=quiet,
        )
        made.define_metric(STEP, hidden=True)
        made.define_metric("*", step_metric=STEP)
        self._run = made
        folder = str(Path(made.dir).parent)
        sends = {"command": shlex.join(["wandb", "sync", folder])} if config.offline else {"url": made.url}
        found = {"id": run.key, "folder": folder, **sends}
        return {name: value for name, value in found.items() if value}

    def log(self, figures: Mapping[str, float], *, step: int, time: float) -> None:
        """Write figures."""
        self._run.log({STEP: step, **figures, "_timestamp": time})

    def rollouts(self, mode: str, rewards: Sequence[float], samples: Sequence[Sample], *, step: int) -> None:
        """Write a histogram and a table."""
        shown: dict[str, Any] = {f"{mode}/rewards": self._wandb.Histogram(list(rewards))} if rewards else {}
        if samples:
            rows = [list(sample) for sample in samples]
            shown[f"{mode}/samples"] = self._wandb.Table(columns=list(Sample._fields), data=rows)
        self._run.log({STEP: step, **shown})

    def attach(self, files: Sequence[Path]) -> None:
        """Copy files into the run."""
        for file in files:
            copy = shutil.copy(file, self._run.dir)
            self._run.save(str(copy), base_path=self._run.dir, policy="now")

    def checkpoint(self, folder: Path) -> None:
        """Attach the checkpoint as an artifact of the type `model`."""
        artifact = self._wandb.Artifact(f"checkpoint-{self._run.id}", type="model", metadata={"from": folder.name})
        for name, file in checkpoint_files(folder).items():
            artifact.add_file(str(file), name=name)
        self._run.log_artifact(artifact)

    def end(self, ended: Ended, error: str) -> None:
        """End the run; one that did not finish is marked as failed."""
        if error:
            self._run.summary["error"] = error
        self._run.finish(exit_code=0 if ended == "finished" else 1)

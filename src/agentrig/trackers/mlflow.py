"""MLflow, by its client: no global run, so that it does not meet others in this process."""

from __future__ import annotations

import csv
import io
import logging
import os
import shlex
import time as clock
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrig.text import spreadsheet_text
from agentrig.trackers.config import MlflowConfig
from agentrig.trackers.tracking import Ended, Sample, TrackedRun, checkpoint_files, required

KEY = "agentrig.run"
"""The tag by which a resumed run finds its run: MLflow chooses ids itself."""

STATUS: Mapping[Ended, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

PARAMS = 100
"""Most parameters that one request of MLflow takes."""


class Mlflow:
    """Writes into a run of MLflow, on a server or in a database on this machine."""

    def __init__(self, config: MlflowConfig) -> None:
        mlflow = required("mlflow", tracker="mlflow")
        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        required("sqlalchemy", tracker="mlflow")  # mlflow-skinny has no store of its own
        self._client_class, self._entities, self._config = mlflow.MlflowClient, mlflow.entities, config
        self._client: Any = None
        self._run = ""

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Begin the run, or go on with it."""
        here = run.directory.resolve().parent
        uri = self._config.tracking_uri or (not self._config.offline and os.environ.get("MLFLOW_TRACKING_URI")) or ""
        store = uri or f"sqlite:///{here / 'mlflow.db'}"
        self._client = client = self._client_class(tracking_uri=store)
        project, artifacts = self._config.project, None if uri else (here / "mlruns").as_uri()
        there = client.get_experiment_by_name(project)
        experiment = there.experiment_id if there else client.create_experiment(project, artifact_location=artifacts)
        found = client.search_runs([experiment], f"tags.`{KEY}` = '{run.key}'") if run.resumed else []
        if found:
            self._run = found[0].info.run_id
            client.update_run(self._run, status="RUNNING")
        else:
            tags = {KEY: run.key, **dict.fromkeys(run.tags, "true")}
            self._run = client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
        self._describe(run.config)
        command = {} if uri else {"command": shlex.join(["mlflow", "ui", "--backend-store-uri", store])}
        return {"id": self._run, "folder": uri or str(here / "mlflow.db"), **command}

    def log(self, figures: Mapping[str, float], *, step: int, time: float) -> None:
        """Write figures."""
        ms = int(time * 1000)
        metrics = [self._entities.Metric(name, value, ms, step) for name, value in figures.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def rollouts(self, mode: str, rewards: Sequence[float], samples: Sequence[Sample], *, step: int) -> None:
        """Write the samples as a CSV file, which MLflow shows as a table; it has no histograms."""
        if samples:
            text = io.StringIO()
            csv.writer(text).writerows([Sample._fields, *(map(spreadsheet_text, sample) for sample in samples)])
            self._client.log_text(self._run, text.getvalue(), f"samples/{mode}-{step:05}.csv")

    def attach(self, files: Sequence[Path]) -> None:
        """Copy files into the run's artifacts."""
        for file in files:
            self._client.log_artifact(self._run, str(file))

    def checkpoint(self, folder: Path) -> None:
        """Copy the checkpoint into the run's artifacts, as `checkpoint`."""
        for name, file in checkpoint_files(folder).items():
            self._client.log_artifact(self._run, str(file), str(Path("checkpoint", name).parent))

    def end(self, ended: Ended, error: str) -> None:
        """Set the run's status."""
        if error:
            self._client.set_tag(self._run, "error", error[:5000])
        self._client.set_terminated(self._run, STATUS[ended], end_time=int(clock.time() * 1000))

    def _describe(self, config: Mapping[str, Any]) -> None:
        """Write the configuration as parameters; MLflow never changes one that is there, as a resume might."""
        there = self._client.get_run(self._run).data.params
        new = [self._entities.Param(key, str(value)[:6000]) for key, value in config.items() if key not in there]
        for first in range(0, len(new), PARAMS):
            self._client.log_batch(self._run, params=new[first : first + PARAMS])
        changed = {k: v for k, v in config.items() if k in there and there[k] != str(v)[:6000]}
        for key, value in changed.items():
            self._client.set_tag(self._run, f"resumed.{key}", str(value)[:5000])

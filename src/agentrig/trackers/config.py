"""The keys of trackers: `[trackers.NAME]` of a run file."""

from __future__ import annotations

import attrs

from agentrig.secrets import Secret, without_login
from agentrig.settings import setting


@attrs.frozen(kw_only=True)
class TrackerConfig:
    """The keys that every tracker has.

    Attributes:
        queue: Most writes that may wait; a step is one write.
        flush_s: Seconds.
    """

    name: str = setting("", help="the run's name in the tracker; empty for the name of the run directory")
    tags: list[str] = setting(list, one=True, help="tags of the run")
    figures: str = setting(
        "main",
        choices=("main", "all"),
        help="`main`: the figures that most look at; `all`: every one in metrics.jsonl",
    )
    samples: int = setting(
        16, help="rows of the table of held-out rollouts after each measurement; 0 for no texts of rollouts", ge=0
    )
    files: bool = setting(True, help="attach config.toml, manifest.json, summary.json and report.html")
    queue: int = setting(1000, help="how many writes may wait for a slow tracker; more are dropped and counted", ge=1)
    flush_s: float = setting(30.0, help="seconds that the run waits for the tracker at its end", ge=0)


@attrs.frozen(kw_only=True)
class TensorBoardConfig(TrackerConfig):
    """Settings of `tensorboard`."""

    directory: str = setting("", help="the folder of event files; empty for `tensorboard` in the run directory")


@attrs.frozen(kw_only=True)
class ProjectConfig(TrackerConfig):
    """The keys of trackers with projects and files."""

    project: str = setting(
        "agentrig", help="the project, or MLflow's experiment", validator=attrs.validators.min_len(1)
    )
    checkpoint_mb: int = setting(
        1000, help="attach the best checkpoint at the end if it has at most so many megabytes; 0 for never", ge=0
    )


@attrs.frozen(kw_only=True)
class WandbConfig(ProjectConfig):
    """Settings of `wandb`."""

    entity: str = setting("", help="the user or team; empty for the login's default")
    group: str = setting("", help="the group of runs")
    offline: bool = setting(False, help="write files only, in `wandb` in the run directory; `wandb sync` sends them")
    api_key: Secret | None = setting(None, help="the login; by default WANDB_API_KEY or `wandb login`", secret=True)


@attrs.frozen(kw_only=True)
class MlflowConfig(ProjectConfig):
    """Settings of `mlflow`."""

    tracking_uri: str = setting(
        "",
        help="the server or store; empty for MLFLOW_TRACKING_URI, and without it mlflow.db beside the run directory",
        validator=without_login,
    )
    offline: bool = setting(False, help="use mlflow.db beside the run directory, whatever MLFLOW_TRACKING_URI says")


@attrs.frozen(kw_only=True)
class TrackioConfig(ProjectConfig):
    """Settings of `trackio`."""

    space_id: str = setting("", help="the Hugging Face Space; empty for trackio's database on this machine")
    server_url: str = setting(
        "", help="a trackio server; its token is TRACKIO_WRITE_TOKEN; empty for none", validator=without_login
    )


@attrs.frozen(kw_only=True)
class SwanlabConfig(ProjectConfig):
    """Settings of `swanlab`."""

    workspace: str = setting("", help="the user or organization; empty for the login's own")
    offline: bool = setting(
        False, help="write files only, in `swanlab` in the run directory; `swanlab sync` sends them"
    )
    api_key: Secret | None = setting(None, help="the login; by default SWANLAB_API_KEY or `swanlab login`", secret=True)

"""agentrig's own trackers: name, summary, settings, and the class of the client, which is imported when it is built."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence

import attrs

from agentrig.trackers import config
from agentrig.trackers.config import TrackerConfig
from agentrig.trackers.tracking import Tracking


@attrs.frozen(kw_only=True)
class Own:
    """One of them.

    Attributes:
        name: Its name, which is the extra of its client too.
        summary: One line.
        config: Its settings.
        client: `module:class`.
    """

    name: str
    summary: str
    config: type[TrackerConfig]
    client: str

    def build(self, settings: TrackerConfig) -> Tracking:
        """Return the observer.

        Raises:
            agentrig.errors.ConfigError: Its client is not installed, or has no login.
        """
        return Tracking(self.name, pkgutil.resolve_name(f"agentrig.trackers.{self.client}")(settings), settings)


OWN: Sequence[Own] = (
    Own(
        name="tensorboard",
        summary="TensorBoard: event files in the run directory.",
        config=config.TensorBoardConfig,
        client="tensorboard:TensorBoard",
    ),
    Own(
        name="wandb",
        summary="Weights & Biases: its server, or files to send later.",
        config=config.WandbConfig,
        client="wandb:Wandb",
    ),
    Own(
        name="mlflow",
        summary="MLflow: a server, or a database beside the run directory.",
        config=config.MlflowConfig,
        client="mlflow:Mlflow",
    ),
    Own(
        name="trackio",
        summary="trackio: its database on this machine, a server, or a Space.",
        config=config.TrackioConfig,
        client="trackio:Trackio",
    ),
    Own(
        name="swanlab",
        summary="SwanLab: its server, or files to send later.",
        config=config.SwanlabConfig,
        client="swanlab:Swanlab",
    ),
)

"""Trackers: observers that write a run's figures and files into an experiment tracker, with its official client.

`Tracking` is the observer, in a thread of its own; a tracker is a `Client`, and its keys are a `TrackerConfig`. The
names of figures are in `agentrig.trackers.names`.
"""

from agentrig.trackers.config import TrackerConfig
from agentrig.trackers.tracking import Client, Ended, TrackedRun, Tracking, required

__all__ = ["Client", "Ended", "TrackedRun", "TrackerConfig", "Tracking", "required"]

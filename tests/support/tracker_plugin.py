"""Trackers of their own that fail, or never return: a plugin file for the tests."""

from __future__ import annotations

import threading

from agentrig import ObserverSpec, hookimpl
from agentrig.trackers import TrackerConfig, Tracking

NEVER = threading.Event()


class Base:
    """A tracker that keeps nothing."""

    def start(self, run):
        return {"id": run.key}

    def log(self, figures, *, step, time):
        """Keep nothing."""

    def attach(self, files):
        """Keep nothing."""

    def checkpoint(self, folder):
        """Keep nothing."""

    def end(self, ended, error):
        """End."""


class Failing(Base):
    """Its server is not there."""

    def log(self, figures, *, step, time):
        raise ConnectionError(f"no route to the tracker in step {step}")


class Stuck(Base):
    """Its server never answers."""

    def log(self, figures, *, step, time):
        NEVER.wait()


@hookimpl
def register_observers():
    for name, client in (("failing", Failing), ("stuck", Stuck)):
        yield ObserverSpec(
            name=name,
            summary="For tests.",
            config=TrackerConfig,
            build=lambda config, name=name, client=client: Tracking(name, client(), config),
            tracker=True,
        )

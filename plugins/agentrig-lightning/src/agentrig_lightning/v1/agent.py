"""The agent `agent-lightning-1`: the agent `command`, with the names and the events of Agent Lightning 1.x."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrig.agents import Outcome
from agentrig.external.callbacks import Callback
from agentrig.external.command import CommandAgent
from agentrig.external.config import CommandConfig
from agentrig.http_server import Refused
from agentrig.pools import Job
from agentrig_lightning.v1 import launch
from agentrig_lightning.v1.config import LightningV1Config


class Events(Callback):
    """Takes a rollout's events: `{"event_type": …, "data": {…}}`. The last reward counts, as upstream.

    Its key is the one with which the agent calls the model, because such an agent has a single key.
    """

    def __init__(self, job: Job) -> None:
        self._reward: float | None = None
        path = f"api/rollouts/{job.id}/attempt/{job.attempt}/events"
        super().__init__(job.id, attempt=job.attempt, path=path, key=job.endpoint.api_key)

    @property
    def arrived(self) -> Outcome | None:
        """The last reward; None as long as there is none."""
        return None if self._reward is None else Outcome(own_reward=self._reward)

    def take(self, value: Any) -> tuple[int, Mapping[str, Any]]:
        """Take one event, in the listener's thread; return the reply's status and JSON object."""
        kind = value.get("event_type") if isinstance(value, Mapping) else None
        data = value.get("data", {}) if isinstance(value, Mapping) else None
        if not isinstance(kind, str) or not isinstance(data, Mapping):
            raise Refused('an event is {"event_type": "reward", "data": {"value": NUMBER}}')
        if kind == "reward":
            reward = data.get("value")
            if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
                raise Refused(f"the reward {reward!r:.80} is no number")
            self._reward = float(reward)
        return 200, {"event_type": kind, "data": dict(data)}


def build(config: LightningV1Config) -> CommandAgent:
    """Return the agent."""
    of_input = {name: path for name, path in config.env_map.items() if path == "input" or path.startswith("input.")}
    python = str(Path(config.python).expanduser()) if config.python else sys.executable
    folder = str(Path(config.folder).expanduser().absolute()) if config.folder else ""
    words = list(config.command) or [python, launch.__file__, config.agent_class]
    command = CommandConfig(
        command=words,
        input="file",
        input_variables={name: path.removeprefix("input").removeprefix(".") for name, path in of_input.items()},
        variables={"AGENTRIG_AGENT_FOLDER": folder, **{k: v for k, v in config.env_map.items() if k not in of_input}},
        base_url_variable="AGL_OPENAI_BASE_URL",
        api_key_variable="AGL_KEY",
        answer="callback",
        answer_url_variable="AGL_EVENT_URL",
        answer_key_variable="AGL_KEY",
        folder=folder,
        time_s=config.time_s,
    )
    return CommandAgent(command, callback=Events)

"""The keys of the agent `agent-lightning-1`; every command imports this."""

from __future__ import annotations

import attrs

from agentrig.settings import setting


@attrs.frozen(kw_only=True)
class LightningV1Config:
    """Keys of `agent-lightning-1`."""

    agent_class: str = setting(
        "", help="the class whose run() is the agent: module.Class or module:Class, as agentlightning.local.agent_class"
    )
    command: list[str] = setting(list, one=True, help="instead of a class: the entry command, as in a job template")
    env_map: dict[str, str] = setting(
        dict, help='variables of the agent: NAME = "input.question" for a field of the task, "input" for all of it'
    )
    python: str = setting("", help="the Python that has the agent's packages; by default the run's own")
    folder: str = setting("", help="the folder that agent_class is imported from")
    time_s: float = setting(50.0, help="seconds for a rollout; keep it below runners.deadline_s", gt=0)

    def __attrs_post_init__(self) -> None:
        """Ask for exactly one of the two."""
        if bool(self.agent_class) == bool(self.command):
            raise ValueError("name one of agent_class (module.Class) and command (a list of words)")

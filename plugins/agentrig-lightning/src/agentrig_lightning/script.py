"""The plugin that a script's `Trainer` becomes: its components, in the run's process and in the runners."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from agentrig.plugins.specs import Spec
from agentrig_lightning.parcel import packed, unpacked

FILE = "agent.pickle"

PLUGIN = '''"""The components of a script that uses agentrig_lightning.Trainer; the script removes it when it ends."""

from pathlib import Path

from agentrig import hookimpl
from agentrig_lightning.script import specs_in

HERE = Path(__file__).parent


@hookimpl
def register_agents():
    return specs_in(HERE, "agent")


@hookimpl
def register_tasks():
    return specs_in(HERE, "tasks")


@hookimpl
def register_adapters():
    return specs_in(HERE, "adapter")


@hookimpl
def register_algorithms():
    return specs_in(HERE, "algorithm")
'''

_open: dict[Path, Sequence[Spec]] = {}


@attrs.frozen(kw_only=True)
class AgentParts:
    """What a runner needs of a script; the arguments of `agentrig_lightning.agent`."""

    agent: Any
    arguments: Mapping[str, Any]

    def spec(self) -> Spec:
        """Return the agent's spec."""
        from agentrig_lightning.agents import agent

        return agent(self.agent, **self.arguments)


@contextmanager
def script_plugin(parts: AgentParts, others: Sequence[Spec]) -> Iterator[Path]:
    """Write the plugin file; yield its path. It works until the block ends.

    Args:
        parts: The agent; the runners get it too.
        others: The other components, which stay in this process.

    Raises:
        agentrig.errors.ConfigError: The agent can't be sent to another process.
    """
    with tempfile.TemporaryDirectory(prefix="agentrig-script-") as name:
        folder = Path(name).resolve()
        (folder / FILE).write_bytes(packed(parts, f"the agent {type(parts.agent).__name__}"))
        file = folder / f"{folder.name.replace('-', '_')}.py"
        file.write_text(PLUGIN)
        _open[folder] = (parts.spec(), *others)
        try:
            yield file
        finally:
            del _open[folder]


def specs_in(folder: Path, kind: str) -> Sequence[Spec]:
    """Return the components of one kind; in a runner, only the agent."""
    found = _open.get(folder)
    if found is None:
        found = (unpacked((folder / FILE).read_bytes()).spec(),) if kind == "agent" else ()
    return [spec for spec in found if spec.kind == kind]

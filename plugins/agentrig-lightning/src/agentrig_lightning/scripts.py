"""The plugin of a script that was written for Agent Lightning's `Trainer`: its agent becomes a component of the run.

The plugin is a file in a temporary folder. The run's process knows its components; a runner process reads the agent
from the folder. The agent travels by its name in a module where it has one, else by value.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import tempfile
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrig.errors import ConfigError
from agentrig.plugins.specs import Spec
from agentrig.text import words_of
from agentrig_lightning.agents import agent

FILE = "agent.pickle"

PLUGIN = '''"""The components of a script that uses agentrig_lightning.Trainer; the script removes it when it ends."""

from pathlib import Path

from agentrig import hookimpl
from agentrig_lightning.scripts import specs_in

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


@contextmanager
def script_plugin(source: Any, arguments: Mapping[str, Any], others: Sequence[Spec]) -> Iterator[Path]:
    """Write the plugin file; yield its path. It works until the block ends.

    The runners get the agent too; the other components stay in this process.
    """
    with tempfile.TemporaryDirectory(prefix="agentrig-script-") as name:
        folder = Path(name).resolve()
        (folder / FILE).write_bytes(packed((source, arguments), f"the agent {type(source).__name__}"))
        file = folder / f"{folder.name.replace('-', '_')}.py"
        file.write_text(PLUGIN)
        _open[folder] = (agent(source, **arguments), *others)
        try:
            yield file
        finally:
            del _open[folder]


def specs_in(folder: Path, kind: str) -> Sequence[Spec]:
    """Return the components of one kind; in a runner, only the agent."""
    found = _open.get(folder, ())
    if folder not in _open and kind == "agent":
        source, arguments = pickle.loads((folder / FILE).read_bytes())
        found = (agent(source, **arguments),)
    return [spec for spec in found if spec.kind == kind]


def packed(thing: Any, what: str) -> bytes:
    """Return an object as bytes for another process, for `pickle.loads`.

    Functions, classes and agents that are a name in a module travel as that name: the other process imports the
    module, or the script itself. Everything else travels by value.
    """
    import cloudpickle

    class Packer(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, weakref.ReferenceType):  # of a LitAgent to its trainer; the runner sets its own
                return type(None), ()
            name = _name_of(obj)
            return super().reducer_override(obj) if name is None else (_named, name)

    target = io.BytesIO()
    try:
        Packer(target).dump(thing)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{what} can't be sent to the runner processes: {words_of(error)}.\n"
            "  Define it in a module or at the top of the script, and let it make clients, locks and files in the "
            "rollout, not in __init__"
        ) from error
    return target.getvalue()


def _name_of(thing: Any) -> tuple[str, str] | None:
    """Return module and name under which another process finds the very object, or None."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    of_script = module == "__main__" and isinstance(thing, type | types.FunctionType)  # pickle names the others itself
    if not of_script and not hasattr(type(thing), "training_rollout"):
        return None
    found: Any = sys.modules.get(module) if isinstance(module, str) else None
    if getattr(found, "__file__", None) is None or not isinstance(name, str):
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return (str(module), name) if found is thing else None


def _named(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"{name} is not in {Path(found.__file__).name} when a runner imports it: define {name} at the top of "
                "the script, outside of `if __name__ ==`"
            )
        found = getattr(found, part)
    return found

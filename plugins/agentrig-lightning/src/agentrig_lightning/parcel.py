"""The agent of a script, sent to the runner processes: by its name in a module where it has one, else by value."""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import types
import weakref
from typing import Any

from agentrig.errors import ConfigError
from agentrig.text import words_of


def packed(thing: Any, what: str) -> bytes:
    """Return an object as bytes for another process.

    Functions, classes and agents that are a name in a module travel as that name: the other process imports the
    module, or the script itself. Everything else travels by value.

    Args:
        thing: The object.
        what: What it is, for the message: `the agent MyAgent`.

    Raises:
        ConfigError: It can't be sent; the message says which part, and what to give instead.
    """
    import cloudpickle

    class Packer(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, weakref.ReferenceType):  # of a LitAgent to its trainer; the runner sets its own
                return _nothing, ()
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


def unpacked(data: bytes) -> Any:
    """Return the object that `packed` was given."""
    return pickle.loads(data)


def _name_of(thing: Any) -> tuple[str, str] | None:
    """Return module and name under which another process finds the very object, or None."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    of_script = module == "__main__" and isinstance(thing, type | types.FunctionType)  # others are pickle's business
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
        found = getattr(found, part)
    return found


def _nothing() -> None:
    return None

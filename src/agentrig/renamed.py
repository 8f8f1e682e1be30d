"""Former names of a module: each still works, with a warning that names the present one."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def former_names(module: str, present: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module of which some names are now elsewhere, or are called otherwise.

        __getattr__ = former_names(__name__, {"OLD": "package.module.NEW"})

    The present module is imported when a former name is first used.

    Args:
        module: The module's own name.
        present: Former name to the full path of the present one.

    Raises:
        AttributeError: By what is returned, for any other name.
    """

    def getattr_(name: str) -> Any:
        if name not in present:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return moved_to(present[name], module, name)

    return getattr_


def moved_to(path: str, module: str, name: str, advice: str = "") -> Any:
    """Warn at the line that asked a module's `__getattr__` for a former name; return what the name stands for.

    Args:
        path: The full path of the present name.
        module: The module that was asked.
        name: The former name.
        advice: The warning; empty for the usual one.
    """
    usual = f"{module}.{name} is now {path}; the former path works until agentrig 0.3"
    warnings.warn(advice or usual, DeprecationWarning, stacklevel=3)
    new, _, attribute = path.rpartition(".")
    value = getattr(importlib.import_module(new), attribute)
    setattr(sys.modules[module], name, value)  # one warning a name
    return value

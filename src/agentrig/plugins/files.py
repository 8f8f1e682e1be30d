"""Plugin files: a Python file that is a plugin, as `--plugin FILE.py` names it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from agentrig.errors import PluginError


def load_file(path: Path) -> ModuleType:
    """Import a Python file as a plugin module; the same file is imported once per process.

    Raises:
        PluginError: There is no such file.
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        raise PluginError(f"there is no file {path}")
    name = f"agentrig_file_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for modules beside it; last, so that they do not hide standard modules
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

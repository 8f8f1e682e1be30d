"""Whether a broken plugin matters to a run that names none of its components."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection
from pathlib import Path

from agentrig.plugins.components import PluginInfo

_HOOK = re.compile(r"^\s*(?:async )?def (register_\w+|on_\w+)", re.M)


def acts_unnamed(plugin: PluginInfo, autos: Collection[str]) -> bool:
    """Return whether a run could be another one with this plugin than without it, though it names nothing of it.

    That is so if the plugin has plain hooks, which every run calls; or if it brings a kind that `auto` chooses from. A
    broken plugin is judged by its source: one that shows no hook may be either.

    Args:
        plugin: A plugin that failed to load.
        autos: The kinds of which the run has `auto`.
    """
    hooks = set(_HOOK.findall(_source(plugin.origin)))
    if not hooks:
        return True
    wanted = {f"register_{kind}" for kind in autos} | {f"register_{kind}s" for kind in autos}
    return any(hook.startswith("on_") for hook in hooks) or bool(hooks & wanted)


def _source(origin: str) -> str:
    """Return the source of the module that an entry point names, without importing it; '' if it cannot be found."""
    top, *below = origin.partition(":")[0].strip().split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return ""
    if spec is None:
        return ""
    folders = [Path(place).joinpath(*below) for place in spec.submodule_search_locations or ()]
    files = [Path(spec.origin)] if not below and spec.origin else []
    files += [file for folder in folders for file in (folder / "__init__.py", folder.with_suffix(".py"))]
    return next((file.read_text("utf-8", "replace") for file in files if file.is_file()), "")

"""The plugins that a run file requires, with their version ranges: `[plugins] require`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentrig.errors import ConfigError, nearest
from agentrig.plugins.ranges import contains

if TYPE_CHECKING:
    from agentrig.plugins.components import PluginInfo


def check_required(required: Sequence[str], plugins: Sequence[PluginInfo]) -> None:
    """Check the plugins that a run file requires under `[plugins] require`.

    Args:
        required: Names of plugins or distributions, each with a version range or without: `agentrig-exact>=1.2`.
        plugins: All plugins that were found.

    Raises:
        ConfigError: One is missing, blocked, broken, or has another version; the message names all of them, and what
            to do.
    """
    problems = [f"  {text}: {problem}" for text in required if (problem := _problem(text, plugins))]
    if problems:
        raise ConfigError(
            "this run requires plugins that it does not have ([plugins] require):\n" + "\n".join(problems)
        )


def _problem(text: str, plugins: Sequence[PluginInfo]) -> str:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    try:
        wanted = Requirement(text)
    except InvalidRequirement:
        return 'not a name with a version range; write for example "agentrig-exact>=1.2"'
    name = canonicalize_name(wanted.name)
    found = next((p for p in plugins if name in (canonicalize_name(p.distribution), canonicalize_name(p.name))), None)
    if found is None:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            known = {p.distribution for p in plugins} - {"file"}
            return f"not installed.{nearest(name, known)} pip install '{text}'"
        return f'{name} {version} is installed, but is no plugin: it has no entry point in the group "agentrig"'
    if found.status == "blocked":
        return f"{found.distribution} is blocked (AGENTRIG_BLOCK, or block under [run])"
    if found.status == "failed":
        return f"{found.distribution} {found.version} failed to load: {found.error}"
    if found.distribution == "file" and wanted.specifier:
        return f"{found.origin} is a file, which has no version: leave the range out"
    if not contains(wanted.specifier, found.version) and wanted.specifier:
        return f"{found.distribution} {found.version} is installed: pip install '{wanted.name}{wanted.specifier}'"
    return ""

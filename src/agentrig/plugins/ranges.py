"""Version ranges: the agentrig that a plugin is made for, and the plugins that a run file requires."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from agentrig.errors import ConfigError, PluginError, nearest

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

    from agentrig.plugins.components import PluginInfo

OURS = re.compile(r"^Requires-Dist:\s*(agentrig(?![\w.-]).*)$", re.M | re.I)
"""The line of a distribution's metadata that requires agentrig."""


def declared(distribution: importlib.metadata.Distribution) -> str:
    """Return the range of agentrig that a distribution requires, such as `>=0.2,<0.3`; '' if it names none.

    Raises:
        PluginError: Its metadata has no version range there.
    """
    text = distribution.read_text("METADATA")
    if text is None:  # an older form of metadata
        text = "\n".join(f"Requires-Dist: {line}" for line in distribution.requires or ())
    lines = OURS.findall(text.partition("\n\n")[0])
    return ",".join(found for line in lines if (found := _range(line.strip())))


@cache
def _range(line: str) -> str:
    """Return the range of a requirement; '' if it belongs to an extra, or does not hold here."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        found = Requirement(line)
    except InvalidRequirement:
        raise PluginError(
            f'its metadata requires "{line}", which is no version range; write for example agentrig>=0.2,<0.3'
        ) from None
    applies = found.marker is None or ("extra" not in str(found.marker) and found.marker.evaluate())
    return str(found.specifier) if applies else ""


@cache
def outside(declared: str) -> str:
    """Return this agentrig's version if it is outside a declared range, or ''."""
    from agentrig import __version__

    if not declared:
        return ""
    from packaging.specifiers import SpecifierSet

    return "" if _contains(SpecifierSet(declared), __version__) else __version__


def _contains(versions: SpecifierSet, version: str) -> bool:
    """Whether a version is in a range; a version under development counts as the release that it becomes."""
    from packaging.version import InvalidVersion, Version

    try:
        known = Version(version)
    except InvalidVersion:
        return False
    return any(versions.contains(v, prereleases=True) for v in (known, Version(known.base_version)))


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
    if not _contains(wanted.specifier, found.version) and wanted.specifier:
        return f"{found.distribution} {found.version} is installed: pip install '{wanted.name}{wanted.specifier}'"
    return ""

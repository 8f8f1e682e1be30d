"""Versions: the range of agentrig that a plugin's metadata declares, and whether its module is of that version."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from functools import cache
from typing import TYPE_CHECKING

from agentrig.errors import PluginError

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

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

    return "" if contains(SpecifierSet(declared), __version__) else __version__


def contains(versions: SpecifierSet, version: str) -> bool:
    """Whether a version is in a range; a version under development counts as the release that it becomes."""
    from packaging.version import InvalidVersion, Version

    try:
        known = Version(version)
    except InvalidVersion:
        return False
    return any(versions.contains(v, prereleases=True) for v in (known, Version(known.base_version)))


def other_version(origin: str, distribution: str, version: str) -> str:
    """Return how a module that has been imported disagrees with its package's metadata, and what to do; else ''.

    Args:
        origin: The entry point's value; the top-level module may have a `__version__`.
        distribution: The package's name.
        version: The version in its metadata.
    """
    top = origin.partition(":")[0].strip().partition(".")[0]
    module = sys.modules.get(top)
    said = getattr(module, "__version__", None)
    if not isinstance(said, str) or said == version or _same_version(said, version):
        return ""
    owners = importlib.metadata.packages_distributions().get(top, [distribution])
    if distribution not in owners:  # an entry point may name a module of another package
        return ""
    file = getattr(module, "__file__", None) or "no file"
    return (
        f"its metadata says version {version}, and its module {top} says {said} ({file}). Another copy is imported, or "
        "the package has changed since it was installed: install it again "
        f"(pip install --force-reinstall {distribution}), or remove the other copy"
    )


def _same_version(one: str, other: str) -> bool:
    """Whether two texts are the same version, `1.2` and `1.2.0`."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return False

"""Versions: the installed ones, the configuration changes that they need, and the stacks known to work."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs

log = logging.getLogger(__name__)


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return the version of each distribution that is installed, and of `python`; imports nothing."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        # A broken installation can leave a .dist-info without a Version: importlib then gives None.
        if version:
            found[name] = version
    return found


def fits(version: str | None, specifier: str) -> bool:
    """Whether a version matches a specifier such as `>=0.5,<0.7`; pre-releases are included.

    None (not installed) never matches, and neither does a version that PEP 440 does not allow (such as `unknown`;
    CANN's `8.2.RC1` is allowed).
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return version is not None and SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return False


@attrs.frozen(kw_only=True)
class Override:
    """One change to verl's configuration.

    Attributes:
        key: Dotted key of verl's YAML.
        value: The new value; ignored when `delete` is set.
        delete: Remove the key if a profile has set it, instead of setting it.
        add: The key is not in verl's YAML but in one of its open dictionaries; Hydra then requires a `+`.
        soft: Set it only if a recipe or run file does not set the key.
        reason: Why, in one sentence.
        versions: Distribution to specifier: the override applies only if all installed versions match.
    """

    key: str
    value: Any = None
    delete: bool = False
    add: bool = False
    soft: bool = False
    reason: str
    versions: Mapping[str, str] = attrs.field(factory=dict)

    def holds(self, versions: Mapping[str, str]) -> bool:
        """Whether it applies to these installed versions."""
        return all(fits(versions.get(name), wanted) for name, wanted in self.versions.items())

    def hydra(self) -> str:
        """Return it in Hydra's command-line syntax: `key=value`, `+key=value` or `~key`."""
        if self.delete:
            return f"~{self.key}"
        value = "null" if self.value is None else self.value
        if isinstance(value, bool):
            value = str(value).lower()
        return f"{'+' if self.add else ''}{self.key}={value}"


def apply_overrides(settings: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Return dotted settings with the overrides applied in order; replaced and removed values are logged.

    Deleting a missing key is not an error.
    """
    changed = dict(settings)
    for override in overrides:
        key = override.key
        there = key in changed
        if override.delete:
            if there:
                log.warning("%s = %r is left out: %s", key, changed.pop(key), override.reason)
        elif not (override.soft and there):
            if there and changed[key] != override.value:
                log.warning("%s = %r instead of %r: %s", key, override.value, changed[key], override.reason)
            changed[key] = override.value
    return changed


@attrs.frozen(kw_only=True)
class Stack:
    """A set of versions that is known to work together, or once was.

    Attributes:
        name: Short, for messages.
        proof: `hardware-tested`: a run trained on the device. `contract-tested`: tested only as far as
            possible without the device (configuration schemas, Ray resources, metadata).
            `history`: its authors ran it, but the algorithm here no longer supports it.
        versions: `python`, `cann`, `driver` or a distribution's name, to a specifier.
        algorithms: Names of the algorithms that it is for.
        source: Who tested it, or where it is documented.
        clashes: Conflicting requirements of its parts, and what to do, one line each.
    """

    name: str
    proof: Literal["hardware-tested", "contract-tested", "history"]
    versions: Mapping[str, str]
    algorithms: Sequence[str] = ()
    source: str = ""
    clashes: Sequence[str] = ()

    def mismatches(self, versions: Mapping[str, str]) -> dict[str, str]:
        """Return name to required specifier, for each installed version that does not match."""
        return {n: want for n, want in self.versions.items() if n in versions and not fits(versions[n], want)}

    def matches(self, versions: Mapping[str, str]) -> int:
        """Return how many installed versions match."""
        return sum(fits(versions.get(n), want) for n, want in self.versions.items())


def nearest_stack(stacks: Sequence[Stack], versions: Mapping[str, str]) -> Stack | None:
    """Return the stack with the most matches, then the fewest mismatches, then the newest (last)."""
    if not stacks:
        return None
    ranked = sorted(enumerate(stacks), key=lambda p: (p[1].matches(versions), -len(p[1].mismatches(versions)), p[0]))
    return ranked[-1][1]

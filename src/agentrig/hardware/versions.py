"""Versions: what is installed, which changes hold for it, and the sets that were seen to work."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

log = logging.getLogger(__name__)


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each distribution that there is, and of `python`; imports nothing."""
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
    """Whether a version is in a specifier such as `>=0.5,<0.7`; pre-releases count by their order.

    None (not installed) fits nothing, nor does what PEP 440 forbids (`unknown` does not; CANN's `8.2.RC1` does).
    """
    try:
        return version is not None and SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return False


@attrs.frozen(kw_only=True)
class Override:
    """One change to verl's configuration.

    Attributes:
        key: Dotted, as verl's own YAML has it.
        value: The new value; meaningless when `delete` is set.
        delete: Drop the key where a profile has set it, instead of setting it.
        add: The key is not in verl's YAML but below one of its open dictionaries; Hydra wants a `+` then.
        soft: Set it only where a recipe or run file does not set the key itself.
        reason: Why, in one sentence.
        versions: Distribution to specifier: it holds only when all of these are installed in such versions.
    """

    key: str
    value: Any = None
    delete: bool = False
    add: bool = False
    soft: bool = False
    reason: str
    versions: Mapping[str, str] = attrs.field(factory=dict)

    def holds(self, versions: Mapping[str, str]) -> bool:
        """Whether it holds for these installed versions."""
        return all(fits(versions.get(name), wanted) for name, wanted in self.versions.items())

    def hydra(self) -> str:
        """Return it as Hydra's command line has it: `key=value`, `+key=value` or `~key`."""
        if self.delete:
            return f"~{self.key}"
        value = "null" if self.value is None else self.value
        if isinstance(value, bool):
            value = str(value).lower()
        return f"{'+' if self.add else ''}{self.key}={value}"


def apply_overrides(settings: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Return dotted settings with the overrides applied in order; a value that is replaced or dropped is logged.

    Deleting what is not there is no error.
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
    """A set of versions that was seen to work together, or once was.

    Attributes:
        name: Short, for messages.
        proof: `hardware-tested`: a run trained on the device. `contract-tested`: only what can be
            checked without the device was (configuration schemas, Ray resources, metadata).
            `history`: its makers ran it, and the algorithm here cannot drive it any more.
        versions: `python`, `cann`, `driver` or a distribution's name, to a specifier.
        algorithms: Names of the algorithms that it is about.
        source: Who ran it, or who says so.
        clashes: Requirements of its parts that contradict each other, and what to do, a line each.
    """

    name: str
    proof: Literal["hardware-tested", "contract-tested", "history"]
    versions: Mapping[str, str]
    algorithms: Sequence[str] = ()
    source: str = ""
    clashes: Sequence[str] = ()

    def mismatches(self, versions: Mapping[str, str]) -> dict[str, str]:
        """Return name to wanted specifier, for what is installed in another version."""
        return {n: want for n, want in self.versions.items() if n in versions and not fits(versions[n], want)}

    def matches(self, versions: Mapping[str, str]) -> int:
        """Return how many of its parts are installed as it wants them."""
        return sum(fits(versions.get(n), want) for n, want in self.versions.items())

    def requirements(self) -> list[str]:
        """Return the distributions as lines of a requirements file."""
        return [f"{n}{want}" for n, want in self.versions.items() if n not in ("python", "cann", "driver")]


def nearest_stack(stacks: Sequence[Stack], versions: Mapping[str, str]) -> Stack | None:
    """Return the stack with the most matches, then the fewest mismatches, then the newest (last)."""
    if not stacks:
        return None
    ranked = sorted(enumerate(stacks), key=lambda p: (p[1].matches(versions), -len(p[1].mismatches(versions)), p[0]))
    return ranked[-1][1]

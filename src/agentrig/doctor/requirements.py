"""Requirements: the full dependency tree of agentrig and its plugins, and its unmet requirements."""

from __future__ import annotations

import importlib.metadata
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import attrs
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from agentrig.hardware.versions import fits


@attrs.frozen(kw_only=True)
class Unmet:
    """A requirement that is not met.

    Attributes:
        chain: Distributions from a root to the one that has the requirement; each requires the next.
        requirement: The requirement.
        version: The installed version; None when it is missing.
    """

    chain: Sequence[str]
    requirement: Requirement
    version: str | None


def unmet(roots: Iterable[str]) -> Iterator[Unmet]:
    """Walk the requirements of distributions, breadth first, each distribution and extra once.

    Markers and the extras that a requirement asks for are applied. The extras of the roots are unknown and left out.
    """
    waiting: deque[tuple[tuple[str, ...], frozenset[str]]] = deque(((name,), frozenset()) for name in roots)
    seen: set[tuple[str, str]] = set()
    told: set[tuple[str, str]] = set()
    while waiting:
        chain, extras = waiting.popleft()
        owner = canonicalize_name(chain[-1])
        new = {extra for extra in (extras | {""}) if (owner, extra) not in seen}
        seen |= {(owner, extra) for extra in new}
        for requirement in _requirements(owner, new):
            version = _version(requirement.name)
            met = version is not None and fits(version, str(requirement.specifier))
            if not met and (owner, str(requirement)) not in told:
                told.add((owner, str(requirement)))
                yield Unmet(chain=chain, requirement=requirement, version=version)
            if version is not None:
                waiting.append(((*chain, requirement.name), frozenset(requirement.extras)))


def _requirements(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    """Yield what a distribution requires here, itself (extra '') or for its extras."""
    try:
        lines = importlib.metadata.requires(name) or ()
    except importlib.metadata.PackageNotFoundError:
        return
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # older than PEP 508; installers ignore it too
        if requirement.marker is None:
            applies = "" in extras
        else:
            applies = any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        if applies:
            yield requirement


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name) or None  # a broken .dist-info has none
    except importlib.metadata.PackageNotFoundError:
        return None

"""Checks of versions: Python, what the distributions require of each other, the tested stacks."""

from __future__ import annotations

import importlib.metadata
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import attrs
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from agentrig.findings import Finding, Situation
from agentrig.hardware.versions import fits, installed, nearest_stack


@attrs.frozen(kw_only=True)
class Unmet:
    """A requirement that is not met.

    Attributes:
        chain: Distributions from a root to the one that has the requirement; each requires the next.
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
            version = installed((requirement.name,)).get(requirement.name)
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


COMPILED = ("torch", "torch_npu", "vllm", "vllm-ascend", "flash-attn", "torchvision", "torchaudio")
"""Distributions with binaries that are built against each other: a wrong version crashes."""

STACK = (*COMPILED, "verl", "ray", "tensordict", "transformers", "TransferQueue", "agentlightning", "numpy")
"""Distributions whose versions the doctor reads."""


def check_python(situation: Situation) -> Iterator[Finding]:
    """Is this Python one that agentrig runs on?"""
    wanted = importlib.metadata.metadata("agentrig")["Requires-Python"]
    here = situation.versions["python"]
    evidence = f"{here} at {sys.executable}"
    if fits(here, wanted):
        yield Finding.ok("python", f"{evidence}; agentrig wants {wanted}")
    else:
        cure = f"make a virtual environment with a Python {wanted}"
        yield Finding.problem("python", f"{evidence}; agentrig wants {wanted}", cure=cure)


def check_plugins(situation: Situation) -> Iterator[Finding]:
    """Did every installed plugin load?"""
    if situation.plan is None:
        return
    plugins = situation.plan.registry.plugins
    failed = [p for p in plugins if p.status == "failed"]
    for plugin in failed:
        yield Finding.warning(
            "plugins",
            f"{plugin.name} ({plugin.source}) failed to load: {plugin.error}",
            cure=f"fix or uninstall it, or set AGENTRIG_BLOCK={plugin.name}",
        )
    if not failed:
        yield Finding.ok("plugins", f"{len(plugins)} loaded or blocked on purpose")


def _needs(situation: Situation, distribution: str) -> bool:
    """Whether the distribution of the recipe's algorithm requires another one."""
    if situation.plan is None:
        return False
    try:
        lines = importlib.metadata.requires(situation.plan.components["algorithm"].distribution) or ()
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(Requirement(line).name == distribution for line in lines)


def check_requirements(situation: Situation) -> Iterator[Finding]:
    """Does what is installed meet what agentrig, its plugins and the training stack require? Metadata only."""
    ours = {"agentrig"}
    if situation.plan is not None:
        ours |= {p.distribution for p in situation.plan.registry.plugins if p.status == "ok"} - {"file", "unknown"}
    # Packages that the algorithm does not import cannot affect it.
    stack = STACK if _needs(situation, "verl") else COMPILED
    roots = [*sorted(ours), *(n for n in stack if n in situation.versions)]
    found = False
    for lack in unmet(roots):
        owner, requirement = lack.chain[-1], lack.requirement
        # Ignore unmet requirements between packages that neither agentrig nor a plugin requires.
        if lack.chain[0] not in ours and requirement.name not in STACK:
            continue
        found = True
        binary = owner in COMPILED and requirement.name in COMPILED
        wanted = f"{requirement.name}{requirement.specifier}"
        has = f"{lack.version} is installed" if lack.version else "it is not installed"
        through = f" (required by {' > '.join(lack.chain[:-1])})" if len(lack.chain) > 1 else ""
        yield Finding(
            check="requirements",
            result="problem" if binary or owner in ours else "warning",
            evidence=f"{owner}{through} requires {wanted}; {has}",
            cure=f'pip install "{wanted}", or another {owner}',
        )
    if not found:
        yield Finding.ok("requirements", f"{len(roots)} distributions and all that they require fit together")


def check_stack(situation: Situation) -> Iterator[Finding]:
    """Do the installed versions match a stack that is known to work on this hardware?"""
    hardware, algorithm = situation.hardware, situation.algorithm
    if hardware is None or algorithm is None:
        return
    about = [s for s in hardware.stacks() if algorithm in s.algorithms]
    offered = [s for s in about if s.proof != "history"]
    nearest, stack = nearest_stack(about, situation.versions), nearest_stack(offered, situation.versions)
    if nearest is not None and nearest.proof == "history":
        evidence = f"the installed versions are nearest to {nearest.name}, which is history: {nearest.source}"
        yield Finding.warning("stack", evidence, cure=f"install {stack.name}" if stack else "")
    if stack is None:
        yield Finding.skipped("stack", f"no set of versions is on record for {algorithm} on {hardware.name}")
        return
    host = ("python", "driver", "cann")
    missing = [n for n in stack.versions if n not in situation.versions and n not in host]
    if missing:
        lines = " ".join(f'"{n}{stack.versions[n]}"' for n in missing)
        yield Finding.problem(
            "stack",
            f"{', '.join(missing)} of the stack {stack.name} ({stack.proof}) is not installed",
            cure=f"pip install {lines}",
        )
    for name, wanted in stack.mismatches(situation.versions).items():
        known = [s.name for s in offered if s.name != stack.name]
        others = f"; other stacks: {', '.join(known)}" if known else ""
        yield Finding.warning(
            "stack",
            f"{name} {situation.versions[name]} is outside the nearest stack, {stack.name}: {wanted}{others}",
            cure=f"{name}{wanted}, or continue at your own risk: this combination is untested",
        )
    if not missing and not stack.mismatches(situation.versions):
        yield Finding.ok("stack", f"{stack.name}, {stack.proof}: {stack.source}")
    for clash in stack.clashes:
        yield Finding.warning("stack", f"{stack.name}: {clash}")

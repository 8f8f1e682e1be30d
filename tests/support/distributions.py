"""Real plugin distributions for the tests: a module and its `.dist-info`, as an installer leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def install(
    folder: Path,
    name: str,
    source: str,
    *,
    version: str = "1.2",
    point: str | None = None,
    requires: Sequence[str] = (),
    plugin: bool = True,
) -> str:
    """Write a distribution with one entry point into a folder (that is on `sys.path`); returns the module's name."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(source)
    points = f"[agentrig]\n{point or name} = {module}\n" if plugin else ""
    describe(folder, name, version, requires=requires, points=points)
    return module


def describe(folder: Path, name: str, version: str, *, requires: Sequence[str] = (), points: str = "") -> Path:
    """Write the metadata of a distribution without modules into a folder, and return the folder."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = "".join(f"Requires-Dist: {line}\n" for line in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}")
    if points:
        (info / "entry_points.txt").write_text(points)
    return folder


def reward_source(name: str, *, more: str = "") -> str:
    return (
        "from agentrig import RewardSpec, Score, hookimpl\n\n\n"
        "@hookimpl\ndef register_rewards():\n"
        f"    yield RewardSpec(name={name!r}, summary='One.', build=lambda c: lambda t, o, b: Score.ok(1.0))\n"
        f"{more}"
    )


def install_copy(source: Path, folder: Path) -> None:
    """Build the wheel of a copy of a package, and unpack it into a folder (that is on `sys.path`)."""
    import shutil
    import zipfile

    from hatchling.builders.wheel import WheelBuilder

    copy = folder.with_name(f"{folder.name}-source") / source.name
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (wheel,) = WheelBuilder(str(copy)).build(directory=str(copy.parent / "wheels"), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)

"""Which databases a prediction has to pass."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import lru_cache

from agentrig_spider.rewards.rules import Unsound

_SETTLED_NS = 100_000_000
_MAX_FOLDERS = 10_000
_folders: dict[str, tuple[int, list[str]]] = {}


def databases(database: str | os.PathLike[str]) -> Sequence[str]:
    """Return the test databases: the file itself, then the others of its folder that contain `.sqlite`.

    Raises:
        Unsound: There is no such folder.
    """
    given = os.fsdecode(database)
    path, folder, name = _parts(given if os.path.isabs(given) else os.path.abspath(given))
    try:
        names = _names(folder)
    except OSError as error:
        raise Unsound(f"the database {path} can't be read: {error}") from None
    if names == [name]:
        return [path]
    return [path, *(os.path.join(folder, other) for other in names if other != name)]


@lru_cache(maxsize=4_096)
def _parts(absolute: str) -> tuple[str, str, str]:
    """Return a normalized path, its folder and its name."""
    path = os.path.abspath(absolute)
    return path, *os.path.split(path)


def copies_of(path: str, copies: str | os.PathLike[str] | None) -> Sequence[str]:
    """Return the perturbed copies of a database: files `NAME-*.sqlite` in the folder of its copies.

    `copies` has a folder for each database; None is the folder `perturbed` beside the database.
    """
    folder, name = os.path.split(path)
    stem = name.partition(".sqlite")[0]
    place = os.path.join(folder, "perturbed") if copies is None else os.path.join(os.fsdecode(copies), stem)
    try:
        names = _names(place)
    except OSError:
        return []
    return [os.path.join(place, other) for other in names if other.startswith(stem + "-") and other.endswith(".sqlite")]


def _names(folder: str) -> list[str]:
    """Return the sorted names in a folder that contain `.sqlite`; cached while the folder does not change."""
    changed = os.stat(folder).st_mtime_ns
    known = _folders.get(folder)
    if known is not None and known[0] == changed:
        return known[1]
    names = sorted(other for other in os.listdir(folder) if ".sqlite" in other)
    # A folder's time has limited resolution: a folder that has just changed may change again with the same time.
    if time.time_ns() - changed > _SETTLED_NS:
        if len(_folders) > _MAX_FOLDERS:
            _folders.clear()
        _folders[folder] = (changed, names)
    return names

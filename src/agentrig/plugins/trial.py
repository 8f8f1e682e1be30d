"""The trial: a plugin is imported in a process of its own before a command imports it for the first time.

An import can end the interpreter (`os._exit`, a crash in native code) or never return; no `except` helps then. So a
plugin that has changed since it was last tried is imported once in a child, and its `register_*` hooks are called
there. One that ends the child, or does not finish in time, is not imported by the command. What raises is not judged
here: the command meets it again. Verdicts are kept in the cache folder; the key of each is made of the plugin's files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from agentrig.errors import own_file
from agentrig.plugins import caches

log = logging.getLogger(__name__)

SLOW_S = 2.0
"""Seconds after which a message names a plugin that is still being imported."""

LONGEST_S = 10.0
"""Seconds after which a plugin that is still being imported is left out."""

START_S = 60.0
"""Seconds that the child has to start, before its first plugin."""

CRASHES = "crashes the interpreter"
"""In the verdict of a child that a signal has ended. That is tried twice: some crashes are not the plugin's."""

CHILD = (
    "import json, sys; given = json.loads(sys.stdin.readline()); sys.path[:] = given['path']; "
    "from agentrig.plugins.trying import main; main(given)"
)

Places = Sequence[tuple[str, str]]
"""Plugins by name and origin: an entry point's value, or a file's path."""


def refused(places: Places, *, retry: bool = False) -> dict[str, str]:
    """Try the plugins that have no verdict yet.

    Args:
        places: All plugins of a command, without the blocked ones.
        retry: Whether to try those again that were refused before.

    Returns:
        Origin to what happened, for the plugins that must not be imported.
    """
    file = caches.folder() / f"tried-{_environment()}.json"
    before = _read(file)
    keys = {origin: f"{origin}|{mark}" for _, origin in places if (mark := fingerprint(origin))}
    verdicts = {key: before[key] for key in keys.values() if key in before and not (retry and before[key])}
    todo = [(name, origin) for name, origin in places if origin in keys and keys[origin] not in verdicts]
    if todo:
        for origin, verdict in _tried(todo):
            verdicts[keys[origin]] = verdict
        _keep(file, {**before, **verdicts})
    return {origin: verdicts[key] for origin, key in keys.items() if verdicts.get(key)}


def fingerprint(origin: str) -> str:
    """Return a digest of a plugin's own files: names, sizes and times of change; '' if it needs no trial.

    That is so if it has no files, or this process has imported it already.
    """
    if origin.endswith(".py"):
        loaded = sys.modules.get(f"agentrig_file_{Path(origin).stem}")
        files = [origin] if loaded is None or loaded.__file__ != str(Path(origin).expanduser().resolve()) else []
    else:
        module = origin.partition(":")[0].strip()
        files = [] if module in sys.modules else _files(module.partition(".")[0])
    digest = hashlib.sha256()
    for name in sorted(files):
        try:
            about = os.stat(name)
        except OSError:
            continue  # it is gone: the import says so
        digest.update(f"{name}|{about.st_size}|{about.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24] if files else ""


def _files(top: str) -> list[str]:
    """Return the files of a top-level module or package, without importing it."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    found = [spec.origin] if spec.origin and spec.has_location else []
    for folder in spec.submodule_search_locations or ():
        for place, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            found += [os.path.join(place, name) for name in names if name.endswith((".py", ".so", ".pyd"))]
    return found


def _environment() -> str:
    """Return a digest of this Python and of agentrig's version: a verdict holds for them only."""
    from agentrig import __version__

    return hashlib.sha256(f"{sys.prefix}|{sys.version}|{__version__}".encode()).hexdigest()[:16]


def _read(file: Path) -> dict[str, str]:
    try:
        kept = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):  # none yet, or damaged: all are tried again
        return {}
    return {k: v for k, v in kept.items() if isinstance(v, str)} if isinstance(kept, dict) else {}


def _keep(file: Path, verdicts: Mapping[str, str]) -> None:
    try:
        caches.write(file, json.dumps(dict(list(verdicts.items())[-2000:]), indent=0))
    except OSError as error:
        log.debug("%s cannot be written (%s): plugins are tried again by the next command", file, error)


def _tried(todo: Places) -> Iterator[tuple[str, str]]:
    """Yield each origin with its verdict, '' if it may be imported; a new child goes on after one that failed."""
    rest = list(todo)
    while rest:
        done, verdict = _child(rest)
        yield from ((origin, "") for _, origin in rest[:done])
        if CRASHES in verdict:  # a memory that was full, or the reading of the stack of an import that goes on
            verdict = _child(rest[done : done + 1], stacks=False)[1]
        if done < len(rest):
            yield rest[done][1], verdict
        rest = rest[done + 1 :]


def _child(todo: Places, *, stacks: bool = True) -> tuple[int, str]:
    """Try plugins in a child; return how many it got through, and what happened to the next one.

    Args:
        todo: The plugins.
        stacks: Whether the child writes its stack when an import is slow. A thread of its own reads it while it
            changes, which rarely ends the child.
    """
    reading, writing = os.pipe()
    command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-c", CHILD]
    with tempfile.TemporaryFile("w+") as errors, os.fdopen(reading, "rb") as reports:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[writing],
                start_new_session=True,
                text=True,
            )
        finally:
            os.close(writing)
        assert child.stdin is not None
        given = {
            "path": sys.path,
            "origins": [origin for _, origin in todo],
            "report": writing,
            "slow_s": SLOW_S if stacks else 0,
        }
        try:
            child.stdin.write(json.dumps(given) + "\n")
            child.stdin.close()
            return _watched(child, reports, errors, todo)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _watched(child: subprocess.Popen[str], reports: IO[bytes], errors: IO[str], todo: Places) -> tuple[int, str]:
    """Read a child's reports until it ends, or one plugin takes too long."""
    done, stage, since, named, text = 0, "start", time.monotonic(), False, b""
    exits: dict[str, Any] = {}
    while True:
        passed = time.monotonic() - since
        if stage == "start" and passed > START_S:
            log.warning("plugins cannot be tried: the process for it did not start within %g s", START_S)
            return len(todo), ""
        if stage != "start" and passed > LONGEST_S:
            return done, f"its {stage} did not end within {LONGEST_S:g} s{_place(errors)}"
        if passed > SLOW_S and not named and stage != "start":
            named = True
            log.warning(
                "plugin %s: its %s has not ended after %g s%s; after %g s it is left out. Import large packages inside "
                "`build`, or block the plugin (AGENTRIG_BLOCK)",
                todo[done][0], stage, SLOW_S, _place(errors), LONGEST_S,
            )  # fmt: skip
        if not select.select([reports], [], [], 0.05 if stage != "start" else 1.0)[0]:
            continue
        piece = os.read(reports.fileno(), 65536)
        text += piece
        *lines, text = text.split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "done" in told:
                done = told["done"]
            stage, exits, since, named = told.get("stage", stage), told, time.monotonic(), False
        if not piece:
            break
    status = child.wait()
    if done == len(todo):
        return done, ""
    if stage == "start":
        log.warning("plugins cannot be tried in a process of their own: %s", _tail(errors) or f"exit status {status}")
        return len(todo), ""
    if "exit" in exits:
        return done, f"its {stage} calls os._exit({exits['exit']}){exits['place']}, which would end every command"
    if status < 0:
        return done, f"its {stage} {CRASHES} ({signal.Signals(-status).name}){_place(errors)}"
    return done, f"its {stage} ends the interpreter with exit status {status}{_place(errors)}"


def _tail(errors: IO[str]) -> str:
    errors.seek(0)
    return errors.read().strip()[-300:]


def _place(errors: IO[str]) -> str:
    """Return ` (FILE:LINE in FUNCTION)` of the last stack in the child's stderr: the innermost frame of the plugin."""
    errors.seek(0)
    stack = errors.read().rpartition("(most recent call first):")[2]
    frames = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', stack, re.M)
    own = next((f for f in frames if own_file(f[0], installed=True)), None)
    return f" ({os.path.basename(own[0])}:{own[1]} in {own[2]})" if own else ""

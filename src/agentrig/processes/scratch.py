"""One folder for all temporary files of a process and its children; folders of dead processes are removed."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import process, util
from pathlib import Path

import psutil

from agentrig.processes.confine import environment
from agentrig.processes.families import marked
from agentrig.processes.locks import Lock

log = logging.getLogger(__name__)

PREFIX = "agentrig-"
"""Short, because Unix sockets are created in these folders, and their paths are limited to about 100 characters."""

LOCK = ".agentrig-lock"
"""The lock file that the owner of such a folder holds; a folder without it was not created here."""

VARIABLE = "AGENTRIG_SCRATCH"
"""Names the folder, in the environment of every child process."""

UNLOCKED_S = 60.0
"""How old an empty folder without a lock must be before it counts as left by a crash."""

INHERITED_S = 2.0
"""How long a child that is being started can hold the lock of its dead parent, seconds."""

ENDING_S = 5.0
"""How long the processes of a run that has ended may take to see that and to end by themselves, seconds."""

LEFT_S = 20.0
"""How long a guard waits for the end of the other processes of a killed run, seconds."""

AFTER_OTHERS = -200
"""Exit priority below multiprocessing's own, which are -100 and above."""

SOCKET_ROOM = 85
"""Longest path of a folder for Unix sockets, bytes: the systems' limit is 104 to 108, `/listener-xxxxxxxx` included."""

_own: tuple[Path, Lock] | None = None


@contextmanager
def temporary_files() -> Iterator[Path]:
    """Put all temporary files, also those of child processes, into this process's own folder.

    The folder is removed when the process ends. If the process is killed, a guard of its runners removes the folder, or
    the next run does, because its lock is free. Files that outlive a run on purpose stay elsewhere: Ray's sessions in
    their usual place, torch's compiled kernels in the cache folder.
    """
    directory = tempfile.tempdir
    common = Path(tempfile.gettempdir()) if _own is None else _own[0].parent
    folder = _folder(common)
    kept = {"RAY_TMPDIR": os.environ.get("TMPDIR") or "/tmp"}
    if os.access(Path.home(), os.W_OK):
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        kept["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "torchinductor")  # torch's default is a temporary folder
    kept = {name: value for name, value in kept.items() if name not in os.environ}
    tempfile.tempdir = str(folder)
    try:
        with environment({"TMPDIR": str(folder), VARIABLE: str(folder), **kept}):
            yield folder
    finally:
        tempfile.tempdir = directory


def sweep(common: Path) -> list[Path]:
    """Remove the folders of dead processes and kill the processes that they started; return those folders."""
    swept = []
    for folder in common.glob(f"{PREFIX}*"):
        try:
            if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
                continue
            if not (folder / LOCK).exists():
                if time.time() - folder.stat().st_mtime > UNLOCKED_S:
                    with contextlib.suppress(OSError):  # not empty: not ours
                        folder.rmdir()
                continue
            lock = Lock(folder / LOCK)
            if not lock.take() and not _freed(lock):
                continue
        except FileNotFoundError:
            continue  # another process removed it
        ending = [each for each in marked(VARIABLE, str(folder)) if each.pid != os.getpid()]
        for orphan in psutil.wait_procs(ending, timeout=ENDING_S)[1]:
            log.warning("killing process %d, which a killed run left behind", orphan.pid)
            with contextlib.suppress(psutil.Error):
                orphan.kill()
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()
        swept.append(folder)
    return swept


def remove_left() -> None:
    """Remove the folder that this process has from its run, which was killed; the first of the run's guards does it.

    It waits for the run's other processes: what still runs would write there, and guards still end what agents started.
    """
    folder = Path(os.environ.get(VARIABLE) or os.devnull)
    lock = Lock(folder / LOCK)
    if not (folder / LOCK).exists() or not lock.take():
        return
    end = time.monotonic() + LEFT_S
    while time.monotonic() < end:
        if all(each.pid == os.getpid() for each in marked(VARIABLE, str(folder))):
            shutil.rmtree(folder, ignore_errors=True)
            break
        time.sleep(0.2)
    lock.release()


def _freed(lock: Lock) -> bool:
    """Take a lock whose holder has died; a child that it was starting at that moment may have it a little longer."""
    end = time.monotonic() + INHERITED_S
    while lock.holder_died() and time.monotonic() < end:
        if lock.take():
            return True
        time.sleep(0.02)
    return False


def _folder(common: Path) -> Path:
    """Return this process's folder; the first call removes stale folders and creates it."""
    global _own
    if _own is not None and _own[0].is_dir():
        return _own[0]
    _own = _make(common)
    sockets = _own[0] if len(os.fsencode(_own[0])) <= SOCKET_ROOM else _make(Path("/tmp"))[0]
    settings = process.current_process()._config  # type: ignore[attr-defined]
    if not os.path.isdir(settings.get("tempdir") or ""):
        settings["tempdir"] = str(sockets)
    return _own[0]


def _make(common: Path) -> tuple[Path, Lock]:
    sweep(common)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=common))
        lock = Lock(folder / LOCK)
        with contextlib.suppress(FileNotFoundError):
            if lock.take() and (folder / LOCK).exists():  # else another process removed it before it was locked
                break
    util.Finalize(None, _remove, args=(folder, lock), exitpriority=AFTER_OTHERS)
    return folder, lock


def _remove(folder: Path, lock: Lock) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()

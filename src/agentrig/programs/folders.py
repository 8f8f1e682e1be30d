"""A working directory for each rollout, and its end."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrig.errors import AgentFailure

log = logging.getLogger(__name__)

TEMPORARY = ".tmp"
"""Where the program's temporary files are, in its working directory: they count towards its limit."""


@contextmanager
def working_folder(template: Path | None = None) -> Iterator[Path]:
    """Make a working directory, or a copy of a folder, and remove it at the end, whatever is in it."""
    made = Path(tempfile.mkdtemp(prefix="program-")).resolve()
    try:
        if template is not None:
            shutil.copytree(template, made, symlinks=True, dirs_exist_ok=True)
        (made / TEMPORARY).mkdir(exist_ok=True)
        yield made
    finally:
        remove(made)


def remove(folder: Path) -> None:
    """Remove a folder, also one whose parts may not be read or are nested too deep for Python."""
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(folder)
    if folder.exists():
        for words in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*words, "--", str(folder)], stdin=subprocess.DEVNULL, capture_output=True)
    if folder.exists():
        log.warning("the working directory %s of a program cannot be removed", folder)


def read_answer(folder: Path, name: str, limit: int) -> bytes | None:
    """Return a file of the working directory; None if there is none.

    Only a regular file inside it is read: a link would let a program in a sandbox answer with a file from outside.

    Raises:
        AgentFailure: It is something else, is outside, or is longer than `limit` bytes; the kind is `bad-answer`.
    """
    path = folder / name
    if not path.resolve().is_relative_to(folder) or path.resolve() != path.absolute():
        raise AgentFailure(f"the answer {name} is a link, or is outside the working directory", kind="bad-answer")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AgentFailure(f"the answer {name} cannot be read: {error.strerror}", kind="bad-answer") from None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise AgentFailure(f"the answer {name} is no regular file", kind="bad-answer")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise AgentFailure(f"the answer {name} has more than {limit} bytes", kind="bad-answer")
    return data

"""Every error that agentrig raises on purpose; each message says what to do."""

from __future__ import annotations

import difflib
import errno
import os
import re
import resource
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrig.device_memory import out_of_device_memory, shortage


class AgentrigError(Exception):
    """Base of all errors that a user can fix. The command line prints it without a traceback.

    Attributes:
        abandoned: Whether a thread that could not be stopped is still running; the command line then ends without it.
        key: The section and the key that are wrong, where the error is about one: a plan then names their file.
    """

    abandoned = False
    key: tuple[str, str] = ("", "")


class ConfigError(AgentrigError):
    """A run file, recipe or override is wrong: unknown key, wrong type, value out of range."""

    def __init__(self, message: str, *, key: tuple[str, str] = ("", "")) -> None:
        super().__init__(message)
        self.key = key


class PluginError(AgentrigError):
    """A plugin is broken: it fails to import, misspells a hook or uses a name that is taken."""


class LookupFailed(AgentrigError):
    """No loaded plugin has a component with the requested name."""


class RunStopped(AgentrigError):
    """A run was stopped on purpose: continuing would learn nothing or learn from failures.

    Args:
        cause: Its short name in `error.json` and in `agentrig why`, such as `unmatched-calls`; empty for none.

    Attributes:
        run: The run that it ended, once its directory says so: `agentrig why` then names what led to it.
    """

    run: Path | None = None

    def __init__(self, message: str, *, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


class OutOfMemory(RunStopped):
    """A device has too little memory; the message says what was asked for, who holds what, and what to set."""

    def __init__(self, message: str) -> None:
        super().__init__(message, cause="out-of-memory")


@contextmanager
def memory_named(what: str, cure: str) -> Iterator[None]:
    """Raise `OutOfMemory` where the block runs out of a device's memory.

    Args:
        what: What the block does, as the beginning of the message: `step 3: the weights' way to the server`.
        cure: The setting that helps, as a sentence without its full stop.
    """
    try:
        yield
    except AgentrigError:
        raise
    except Exception as error:
        text = out_of_device_memory(error)
        if not text:
            raise
        raise OutOfMemory(f"{what}: the device ran out of memory: {shortage(text)}\n  {cure}") from error


class ModelAbsent(ConfigError):
    """The folder that a run's model is to be in is not there; `agentrig warmup` can make one.

    Args:
        folder: As the setting names it.
    """

    def __init__(self, message: str, *, folder: str) -> None:
        super().__init__(message)
        self.folder = folder


class RunInUse(AgentrigError):
    """Another running process already uses the run directory."""


class RunFileError(AgentrigError):
    """A file of a run directory cannot be read or written; the message says which, why, and what to do."""


class CheckpointDamaged(AgentrigError):
    """A checkpoint cannot be read; when a run resumes from it, the message names the previous checkpoint.

    Args:
        reason: Which file, and what is wrong with it.
        unlike: The file of its run that records another one, if that is all that is wrong; else ''.
        exchanged: Whether it is whole, and has the name of another checkpoint of its run.
    """

    def __init__(self, checkpoint: Path, reason: str, *, unlike: str = "", exchanged: bool = False) -> None:
        super().__init__(f"the checkpoint {checkpoint} is damaged: {reason}")
        self.checkpoint, self.unlike, self.exchanged = checkpoint, unlike, exchanged


FAILURE_KIND = re.compile(r"[A-Za-z0-9_.-]{1,40}")
"""The kind of a failure."""


class AgentFailure(AgentrigError):
    """Raise it in an agent to end a rollout as a typed failure.

    Args:
        kind: The failure's kind; it is counted under this name: letters, digits, `-`, `_` and `.`, at most 40 of
            them. Anything else is counted as `agent-error`, and the message says so.
    """

    def __init__(self, message: str, *, kind: str = "agent-error") -> None:
        super().__init__(message)
        self.kind = kind


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Name the extra of agentrig that brings a package, if the block can't import it.

    Args:
        what: What needs it, as the beginning of the message: `frames need pandas`.

    Raises:
        AgentrigError: The package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise AgentrigError(f"{what}, which is not installed: pip install 'agentrig[{name}]'") from error


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean "x"?`` for the known name closest to `name`, or an empty string.

    A name whose last letter was typed twice is closest, then one that begins with the whole of `name`.
    """
    close = _closest(name, list(known))
    return f' Did you mean "{close}"?' if close else ""


def nearest_path(path: Path) -> str:
    """Return `` Did you mean "x"?`` for the path of the closest name in the folder of one that does not exist.

    It has the same ending; without a close name it is one that begins as the path does up to its last dash.
    """
    try:
        known = [other.name for other in path.parent.iterdir() if other.suffix == path.suffix]
    except OSError:
        return ""
    close = _closest(path.name, known) or _closest(path.name.rpartition("-")[0], known)
    return f' Did you mean "{path.parent / close}"?' if close else ""


def _closest(name: str, known: Sequence[str]) -> str:
    """Return the known name closest to `name`, or an empty string."""
    if name[-1:] == name[-2:-1] and name[:-1] in known:
        return name[:-1]
    longer = [other for other in known if len(name) > 1 and other.startswith(name)]
    close = difflib.get_close_matches(name, longer or known, n=1, cutoff=0.0 if longer else 0.6)
    return close[0] if close else ""


def own_file(filename: str, *, installed: bool = False) -> bool:
    """Whether a file is a user's own code: not Python's library, not agentrig's core, and no installed package.

    Args:
        installed: Whether installed packages count too, as for the author of a plugin.
    """
    if filename.startswith("<") or filename.startswith((_CORE, *_MACHINERY)):
        return False
    if filename.startswith(_INSTALLED):
        return installed
    return not filename.startswith(_STDLIB)


def short_path(filename: str) -> str:
    """Return a file's name for a message: with its folder if many packages have a file of that name."""
    folder, name = os.path.split(filename)
    return os.path.join(os.path.basename(folder), name) if name in ("__init__.py", "__main__.py") else name


def place_of(error: BaseException, *, installed: bool = False) -> str:
    """Return ` (FILE:LINE in FUNCTION)`: the last frame of a traceback that is in the user's own code, or ''.

    Args:
        installed: Whether an installed package is meant if no frame is the user's: then its first frame, for the last
            ones may be those of a library that it uses.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if own_file(f.filename)]
    if not own and installed:
        own = [f for f in frames if own_file(f.filename, installed=True)]
        own = [f for f in own if f.filename == own[0].filename]
    return f" ({short_path(own[-1].filename)}:{own[-1].lineno} in {own[-1].name})" if own else ""


_STDLIB = sysconfig.get_path("stdlib")
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_CORE = os.path.dirname(__file__) + os.sep
_MACHINERY = tuple(os.path.join(path, name) for path in _INSTALLED for name in ("pluggy", "attr", "attrs"))
"""Paths of code that is not the user's: Python's library, installed packages, agentrig, and what calls plugins."""


NO_MEMORY = (
    *("allocate memory", "not enough memory", "out of memory", "failed to map segment", "bad_alloc"),
    *("start new thread", "os error 12)", "MemoryError"),
)
NO_SPACE = ("No space left on device", "Disk quota exceeded", "os error 28)", "os error 122)")
TOO_LARGE = ("File too large", "os error 27)")
NO_TEMPORARY = "No usable temporary directory"
TOO_MANY = ("Too many open files", "os error 24)")
"""What libraries say when a resource has run out; some keep no error number."""

UNWRITTEN = ("inline_container", "PytorchStreamWriter")
"""What torch says when it could not write a file; it does not say why."""


def exhausted(error: BaseException | None) -> str:
    """Say which resource of this process or machine ran out, and what to do; '' if none did.

    Libraries raise errors of their own about it, so the text and the causes of the error are looked at too.
    """
    if text := out_of_device_memory(error):
        return f"the device ran out of memory: {shortage(text)}. Use a smaller model, or a device with more memory"
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    for each in seen:
        code = each.errno if isinstance(each, OSError) else None
        text = f"{type(each).__name__}: {each}"
        if code in (errno.ENOSPC, errno.EDQUOT) or any(said in text for said in NO_SPACE):
            return (
                "the disk is full, or your quota is used up. Free some space and continue: repeat the command, for a "
                "training run with --resume and its directory; everything written before is intact"
            )
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        hidden = (most >= 0 and any(said in text for said in UNWRITTEN)) or (most == 0 and NO_TEMPORARY in text)
        if hidden or code == errno.EFBIG or any(said in text for said in TOO_LARGE):
            here = f"no file may be larger than {most / 1024:.0f} KiB here (ulimit -f)" if most >= 0 else str(each)
            return f"{here}. Allow larger ones: ulimit -f unlimited"
        if NO_TEMPORARY in text:
            return f"{NO_TEMPORARY}{text.partition(NO_TEMPORARY)[2]}. Name a folder that you can write to: TMPDIR=DIR"
        if code in (errno.EMFILE, errno.ENFILE) or any(said in text for said in TOO_MANY):
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return (
                f"this process may open {most} files at once (ulimit -n). Allow more, or use fewer runners (runners.n)"
            )
        if isinstance(each, SystemError) and (little := little_memory()):  # CPython had no memory to say more
            return little
        if code == errno.ENOMEM or any(said in text for said in NO_MEMORY):
            return little_memory() or (
                f"this machine has too little memory left ({text.splitlines()[0]}). Use a smaller model, smaller "
                "batches or fewer runners (runners.n), or end other processes"
            )
    return ""


def little_memory() -> str:
    """Say that this process has used most of what it may use, and what to do; '' if that is not so."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most < 0:
        return ""
    try:
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
        peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmPeak"))
    except (OSError, StopIteration):
        peak = most
    if peak < most / 2:
        return ""
    return (
        f"this process may use {most / (1 << 30):.1f} GiB of memory (ulimit -v), and has used "
        f"{peak / (1 << 30):.1f} GiB: that was probably too little. Allow more: ulimit -v unlimited"
    )

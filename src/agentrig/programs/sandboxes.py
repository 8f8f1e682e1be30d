"""What a program runs in: nothing, bubblewrap, docker or podman."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from agentrig.errors import AgentrigError

TRY_S = 30.0
"""How long a sandbox may take to say that it works, seconds."""

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt")
"""Folders of the system that a program in bubblewrap may read."""

ETC = (
    "passwd", "group", "hosts", "resolv.conf", "nsswitch.conf", "ssl", "pki", "ca-certificates", "crypto-policies",
    "alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "gai.conf", "protocols", "services",
)  # fmt: skip
"""The same of /etc: nothing with a password."""

INSTALL: Mapping[str, str] = {
    "bubblewrap": "apt-get install bubblewrap (or dnf, pacman: the package is called the same)",
    "docker": "https://docs.docker.com/engine/install/, and start its daemon",
    "podman": "apt-get install podman (or dnf, pacman)",
}
"""How each sandbox is installed."""

EXECUTABLE: Mapping[str, str] = {"bubblewrap": "bwrap", "docker": "docker", "podman": "podman"}


@attrs.frozen(kw_only=True)
class Place:
    """Where one rollout's program runs.

    Attributes:
        folder: Its working directory, the only one in which it may write.
        reads: Other folders that it may read.
        variables: What the agent sets; other variables come from the runner, but not into a container.
        memory_mb: MiB for a container; 0 for no limit.
        processes: Processes in a container at once; 0 for no limit.
    """

    folder: Path
    reads: Sequence[Path]
    variables: Mapping[str, str] = attrs.field(repr=False)
    memory_mb: float
    processes: int


@attrs.frozen(kw_only=True)
class Wrapped:
    """A command in a sandbox.

    Attributes:
        words: What to run.
        after: A command that removes what may be left; empty if nothing can.
    """

    words: Sequence[str]
    after: Sequence[str] = ()


def check(sandbox: str, image: str) -> None:
    """Make sure that a sandbox is installed and works.

    Raises:
        AgentrigError: It is not, or does not; the message says how to install it.
    """
    if sandbox == "none":
        return
    executable = EXECUTABLE[sandbox]
    if shutil.which(executable) is None:
        raise AgentrigError(
            f'[agent] sandbox = "{sandbox}": there is no {executable} on this machine.\n'
            f'  Install it: {INSTALL[sandbox]}; or set agent.sandbox="none"'
        )
    if sandbox == "bubblewrap":
        place = Place(folder=Path("/"), reads=(), variables={}, memory_mb=0, processes=0)
        words = [*_bubblewrap(place)[:-3], "--", "true"]
        cure = (
            "It needs user namespaces. In a container or on a hardened system, allow them: sysctl "
            "kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0, and AppArmor's "
            "kernel.apparmor_restrict_unprivileged_userns=0"
        )
    else:
        words = [executable, "image", "inspect", image]
        cure = f"Does its daemon run, may you use it, and is the image there? {executable} pull {image}"
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TRY_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise AgentrigError(f"[agent] {executable} does not answer within {TRY_S:g} s. {cure}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-500:]
        raise AgentrigError(f'[agent] sandbox = "{sandbox}" does not work: {said}\n  {cure}')


def wrapped(sandbox: str, image: str, words: Sequence[str], place: Place) -> Wrapped:
    """Return the command that runs a program in a sandbox."""
    if sandbox == "none":
        return Wrapped(words=words)
    if sandbox == "bubblewrap":
        return Wrapped(words=[*_bubblewrap(place), "--", *words])
    return _container(EXECUTABLE[sandbox], image, words, place)


def _bubblewrap(place: Place) -> list[str]:
    """Return bubblewrap's words: the system and the program's folders to read, the working directory to write."""
    words = ["bwrap", "--unshare-all", "--share-net", "--die-with-parent", "--new-session"]
    for system in SYSTEM:
        if os.path.islink(system):
            words += ["--symlink", os.readlink(system), system]
        else:
            words += ["--ro-bind-try", system, system]
    for name in ETC:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/run"]
    for path in place.reads:
        words += ["--ro-bind", str(path), str(path)]
    return [*words, "--bind", str(place.folder), str(place.folder)]


def _container(executable: str, image: str, words: Sequence[str], place: Place) -> Wrapped:
    """Return the words of docker or podman. Values of variables, such as the key, are on no command line."""
    name = f"agentrig-{uuid.uuid4().hex}"
    found = [executable, "run", "--rm", "--interactive", "--init", "--name", name, "--network", "host"]
    found += ["--user", f"{os.getuid()}:{os.getgid()}", "--workdir", str(place.folder)]
    if place.memory_mb:
        found += ["--memory", f"{int(place.memory_mb)}m"]
    if place.processes:
        found += ["--pids-limit", str(place.processes)]
    for path in place.reads:
        found += ["--volume", f"{path}:{path}:ro"]
    found += ["--volume", f"{place.folder}:{place.folder}"]
    for variable in place.variables:
        found += ["--env", variable]
    return Wrapped(words=[*found, image, *words], after=[executable, "rm", "--force", name])

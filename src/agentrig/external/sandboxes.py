"""What a program runs in: nothing, bubblewrap, docker or podman."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrig.errors import AgentrigError
from agentrig.external.config import CommandConfig
from agentrig.external.running import MIB, Container

TRY_S = 60.0
"""How long a sandbox may take to say that it works, seconds."""

NO_CONTAINER = (125, 126)
"""Exit codes of docker and podman if a container cannot be started."""

TASKS = 8
"""A container may have this many threads for each process that the program may have; what looks at processes counts
those, and comes too late for a program that starts thousands at once."""

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
    "podman": "apt-get install podman catatonit (or dnf, pacman)",
}
"""How each sandbox is installed."""

EXECUTABLE: Mapping[str, str] = {"bubblewrap": "bwrap", "docker": "docker", "podman": "podman"}

CURES: Mapping[str, str] = {
    "permission denied while trying to connect": "add your user to the group docker, or use podman, which needs none",
    "Cannot connect to the Docker daemon": "start it (systemctl start docker), or name its address by DOCKER_HOST",
    "container-init binary not found": "apt-get install catatonit",
    "RLIMIT": 'this machine may not raise limits: in containers.conf, [containers], set default_ulimits = ["nofile='
    '1024:1024", "nproc=1024:1024"]',
    "cgroups in hybrid mode": 'in containers.conf, [engine], set runtime = "runc", or boot with cgroup v2 only',
    "newuidmap": "apt-get install uidmap, and give your user a range in /etc/subuid and /etc/subgid",
}
"""What to do for a part of what docker or podman says."""


Wrapped = tuple[Sequence[str], Container | None]
"""A command in a sandbox, and the container that it makes, if it makes one."""


class Sandbox:
    """What an agent's programs run in. A program may write in its working directory only.

    Args:
        reads: Other folders that it may read.
    """

    def __init__(self, config: CommandConfig, reads: Sequence[Path]) -> None:
        self._config, self._reads = config, reads

    def check(self, folder: Path) -> None:
        """Make sure that a sandbox, which is not `none`, is installed and works: run `true` in it, in a folder."""
        sandbox, image = self._config.sandbox, self._config.image
        executable = EXECUTABLE[sandbox]
        if shutil.which(executable) is None:
            raise AgentrigError(
                f'[agent] sandbox = "{sandbox}": there is no {executable} on this machine.\n'
                f'  Install it: {INSTALL[sandbox]}; or set agent.sandbox="none"'
            )
        if sandbox == "bubblewrap":
            cure = (
                "It needs user namespaces. In a container or on a hardened system, allow them: sysctl "
                "kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0, and AppArmor's "
                "kernel.apparmor_restrict_unprivileged_userns=0"
            )
            _try(sandbox, self.wrapped(["true"], folder, {}), cure)
            return
        cure = f"Does its daemon run, may you use it, and is the image there? {executable} pull {image}"
        _try(sandbox, ([executable, "image", "inspect", image], None), cure)
        cure = f"Does this work: {executable} run --rm --init --network host {image} true"
        trial = self._container([], folder, {}, ["--rm", "--entrypoint", "true"])
        _try(sandbox, trial, cure, no_true=True)

    def wrapped(self, words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> Wrapped:
        """Return the command that runs a program in the sandbox.

        Args:
            folder: The program's working directory.
            variables: What the agent sets; other variables come from the runner, but not into a container.
        """
        if self._config.sandbox == "none":
            return words, None
        if self._config.sandbox == "bubblewrap":
            return [*self._bubblewrap(folder), "--", *words], None
        return self._container(words, folder, variables)

    def _bubblewrap(self, folder: Path) -> list[str]:
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
        for path in self._reads:
            words += ["--ro-bind", str(path), str(path)]
        return [*words, "--bind", str(folder), str(folder)]

    def _container(
        self, words: Sequence[str], folder: Path, variables: Mapping[str, str], more: Sequence[str] = ()
    ) -> Wrapped:
        """Return the words of docker or podman. Values of variables, such as the key, are on no command line.

        The container stays until it is removed: only so can be asked why its program has ended.
        """
        config = self._config
        executable, memory_mb, disk_mb = EXECUTABLE[config.sandbox], config.memory_mb, config.disk_mb
        name = f"agentrig-{uuid.uuid4().hex}"
        id_file = folder.with_name(f"{folder.name}.{name}")
        found = [executable, "run", "--interactive", "--init", "--name", name, "--cidfile", str(id_file), *more]
        # The host's network: the gateway and the callback listen on loopback.
        found += ["--pull", "never", "--network", "host", "--read-only", "--tmpfs", "/tmp", "--tmpfs", "/run"]
        found += ["--security-opt", "no-new-privileges", "--security-opt", "label=disable"]
        found += ["--oom-score-adj", "1000"]
        found += ["--user", f"{os.getuid()}:{os.getgid()}", "--workdir", str(folder)]
        if executable == "podman" and os.getuid() != 0:
            found += ["--userns", "keep-id"]  # else the folder is another user's there
        if memory_mb:
            memory = f"{int(memory_mb)}m"
            found += ["--memory", memory, "--memory-swap", memory]
        if config.processes:
            found += ["--pids-limit", str(TASKS * config.processes)]  # these are threads
        if executable == "docker":  # for podman these would replace default_ulimits of containers.conf
            found += ["--ulimit", "core=0"]
            if disk_mb:
                found += ["--ulimit", f"fsize={int(disk_mb * MIB)}"]
        for path in self._reads:
            found += ["--volume", f"{path}:{path}:ro"]
        found += ["--volume", f"{folder}:{folder}"]
        for variable in variables:
            found += ["--env", variable]
        # Without a time, podman gives the program 10 seconds to end.
        remove = [executable, "rm", "--force", *(["--ignore", "--time", "0"] if executable == "podman" else []), name]
        asks = [executable, "inspect", "--format", "{{.State.OOMKilled}}", name]
        container = Container(id_file=str(id_file), remove=remove, out_of_memory=asks)
        return [*found, config.image, *words], container


def _try(sandbox: str, trial: Wrapped, cure: str, *, no_true: bool = False) -> None:
    """Run a command that a working sandbox can run; its image may have no `true`."""
    words, container = trial
    executable = words[0]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TRY_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        if container is not None:
            subprocess.run(container.remove, capture_output=True, stdin=subprocess.DEVNULL)
        raise AgentrigError(f"[agent] {executable} does not answer within {TRY_S:g} s. {cure}") from None
    finally:
        if container is not None:
            Path(container.id_file).unlink(missing_ok=True)
    if done.returncode in NO_CONTAINER if no_true else done.returncode:
        said = (done.stderr or done.stdout).strip()[-500:]
        known = [f"{found}. " for part, found in CURES.items() if part.lower() in said.lower()]
        raise AgentrigError(f'[agent] sandbox = "{sandbox}" does not work: {said}\n  {"".join(known)}{cure}')

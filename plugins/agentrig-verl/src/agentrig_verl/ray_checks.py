"""For `agentrig doctor`: a running Ray cluster, what its workers lack, tokens, and the machine's limits."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from agentrig.endpoints import port_taken
from agentrig.findings import Finding, Situation
from agentrig.hardware.versions import fits
from agentrig_verl import modelscope
from agentrig_verl.settings import workload

NEEDED_BY_WORKERS = ("WANDB_API_KEY", "HF_TOKEN", "SWANLAB_API_KEY", modelscope.TOKEN)
"""Secrets that a Ray worker inherits from its cluster only: a run that joins one must not pass them on, for Ray's
dashboard shows what it passes."""

SOCKET_PATH = 107
"""Bytes of the longest path that a Unix socket may have on Linux."""


@attrs.frozen(kw_only=True)
class RayProcess:
    """A running Ray head or node process of this host.

    Attributes:
        pid: Its process id.
        program: `gcs_server` (a head) or `raylet` (a node).
        environ: Its environment; None when it belongs to somebody else.
    """

    pid: int
    program: str
    environ: Mapping[str, str] | None


PROC = Path("/proc")
"""Where Linux shows its processes; other systems have no such folder."""


def ray_processes(proc: Path = PROC) -> list[RayProcess]:
    """Return the Ray processes of this host, read from /proc without importing ray."""
    found = []
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            program = Path((entry / "cmdline").read_bytes().split(b"\0", 1)[0].decode()).name
        except (OSError, UnicodeDecodeError):
            continue  # it ended while we looked
        if program not in ("gcs_server", "raylet"):
            continue
        try:
            pairs = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            environ = dict(p.split("=", 1) for p in pairs if "=" in p)
        except OSError:
            environ = None
        found.append(RayProcess(pid=int(entry.name), program=program, environ=environ))
    return sorted(found, key=lambda p: p.pid)


def address_file(environ: Mapping[str, str]) -> Path:
    """Return where Ray notes the address of the cluster that it started last."""
    root = environ.get("RAY_TMPDIR") or ("/tmp" if os.name == "posix" else tempfile.gettempdir())
    return Path(root) / "ray" / "ray_current_cluster"


def check_ray_cluster(situation: Situation, proc: Path = PROC) -> Iterator[Finding]:
    """Is a Ray cluster already running that a run would join, and do its workers have what they need?"""
    if not proc.is_dir():
        evidence = f"this system has no {proc}: whether a cluster runs here can't be seen; `ray status` tells"
        yield Finding.skipped("ray", evidence)
        return
    running = ray_processes(proc)
    noted = address_file(situation.environ)
    if not running:
        if noted.exists():
            yield Finding.warning(
                "ray",
                f"{noted} names a cluster ({noted.read_text('utf-8').strip()}), and none runs here",
                cure="delete that file: ray.init would try to join the dead cluster",
            )
        else:
            yield Finding.ok("ray", "no cluster is running here")
        return
    listed = ", ".join(f"{p.program} {p.pid}" for p in running)
    if not situation.environ.get("RAY_ADDRESS") and not noted.exists():
        evidence = f"Ray runs here ({listed}), but {noted} names no cluster: other runs' own, joined by none"
        yield Finding.ok("ray", evidence)
        return
    lacking: set[str] = set()
    for process in running:
        if process.environ is not None:
            present = process.environ
            lacking |= {n for n in NEEDED_BY_WORKERS if situation.environ.get(n) and not present.get(n)}
    restart = "ask the person who started it, then `ray stop` and start again from this shell"
    if lacking:
        yield Finding.problem(
            "ray",
            f"a cluster is running ({listed}) that was started without {', '.join(sorted(lacking))}: "
            "its workers will not have it",
            cure=f"{restart} (not through Ray's runtime_env: its dashboard would show it)",
        )
    else:
        yield Finding.warning(
            "ray",
            f"a cluster is running ({listed}); a run that uses Ray would join it",
            cure=f"if it is left over from an earlier run: {restart}",
        )


def check_ray_sockets(situation: Situation) -> Iterator[Finding]:
    """Is Ray's temporary folder short enough? The kernel takes socket paths of 107 bytes."""
    root = address_file(situation.environ).parent
    longest = root / "session_2000-01-01_00-00-00_000000_1000000" / "sockets" / "plasma_store"
    length = len(str(longest).encode())
    if length > SOCKET_PATH:
        yield Finding.problem(
            "ray sockets",
            f"sockets below {root} would have paths of {length} bytes, and {SOCKET_PATH} are allowed",
            cure="export RAY_TMPDIR=/tmp, or another short path",
        )
    else:
        yield Finding.ok("ray sockets", f"{root} is short enough")


def check_ray_token(situation: Situation) -> Iterator[Finding]:
    """On several nodes, is there a token that the nodes can share? Ray 2.60 asks for one by default."""
    address = situation.environ.get("RAY_ADDRESS", "")
    host = address.removeprefix("ray://").rpartition(":")[0]
    load = workload(situation.plan.configs["algorithm"]) if situation.plan else None
    several = (load is not None and load.nodes > 1) or host not in ("", "127.0.0.1", "localhost")
    if not several or not fits(situation.versions.get("ray"), ">=2.60"):
        return
    mode = situation.environ.get("RAY_AUTH_MODE", "" if address else "token").lower()
    if not mode:
        yield Finding.warning(
            "ray token",
            "RAY_AUTH_MODE is not set: Ray then sends no token to a cluster that RAY_ADDRESS names",
            cure="export RAY_AUTH_MODE=token, unless that cluster asks for none",
        )
        return
    if mode != "token":
        cure = "unset RAY_AUTH_MODE and share a token, unless the network is trusted"
        yield Finding.warning("ray token", f"RAY_AUTH_MODE={mode}: anybody can join", cure=cure)
        return
    source, token = _token(situation.environ)
    if not token:
        yield Finding.problem(
            "ray token",
            f"several nodes, and no token in RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or {source}",
            cure="`ray get-auth-token --generate` on one node, then copy the file to the same place on the others",
        )
        return
    mark = hashlib.sha256(token.encode()).hexdigest()[:8]
    yield Finding.ok("ray token", f"a token in {source}, SHA-256 begins {mark}: it must be the same on every node")


def _token(environ: Mapping[str, str]) -> tuple[str, str]:
    if environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN", environ["RAY_AUTH_TOKEN"].strip()
    home = Path(environ.get("HOME") or Path.home())
    path = Path(environ.get("RAY_AUTH_TOKEN_PATH") or home / ".ray" / "auth_token")
    try:
        return str(path), path.read_text("utf-8").strip()
    except OSError:
        return str(path), ""


LEAST_SHM = 64 * 2**20
"""A container's default, in bytes; Ray and torch's loaders crash with a bus error in it."""

LEAST_FILES = 4096
"""Open files that a process should be allowed."""

RAY_PORT = 6379
"""Where a new Ray head listens, if it can."""


def check_place(situation: Situation, shared: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Are shared memory, Ray's port and the limit of open files such that Ray and vLLM can work?"""
    if shared.is_dir() and shutil.disk_usage(shared).free <= LEAST_SHM:
        yield Finding.problem(
            "ray memory",
            f"{shutil.disk_usage(shared).free / 2**20:.0f} MiB free in {shared}, where Ray keeps its objects",
            cure="start the container with more (--shm-size=16g), or delete what is left over there",
        )
    if not ray_processes() and port_taken(RAY_PORT):
        yield Finding.warning("ray port", f"port {RAY_PORT} (Ray's head) is taken", cure="Ray will use another")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < LEAST_FILES:
        yield Finding.warning(
            "ray files",
            f"at most {limit} open files: Ray with vLLM opens a few thousand, and fails below that",
            cure="ulimit -n 65536",
        )

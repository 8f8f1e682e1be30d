"""The checks of a server's end: with its run, after a kill, and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import psutil

from agentrig.servers import ServerError
from agentrig.testing import server_weights as server_weights  # whose checks come first
from agentrig.testing.checks import CheckFailed, CheckSkipped
from agentrig.testing.server_bench import MARK, TABLE, ServerBench, left, listening
from agentrig.testing.server_child import CODE

CLOSE_S = 5.0
"""How long a port may stay open after its process has ended: its threads end one by one."""


@TABLE.check(
    "ends",
    why="What it leaves behind keeps a GPU's memory, a port or the disk until somebody finds it.",
    cure="End every process in __exit__ (agentrig.processes.servers.ServerProcess does), and remove your files.",
    needs=("starts",),
)
def ends(bench: ServerBench) -> None:
    """`__exit__` ends all processes, closes the port and removes the files, also after an error."""
    server = bench.server
    urls = [e.base_url for e in server.endpoints]
    error = ValueError("an error of the run")
    bench.forget()
    with bench.marking():
        if server.__exit__(ValueError, error, None):  # type: ignore[func-returns-value]
            raise CheckFailed("`__exit__` returns True, which hides the run's own error", "Return None.")
    running = left(bench.processes, CLOSE_S)
    if running:
        raise CheckFailed(f"after `__exit__` {len(running)} processes still run: {_names(running)}")
    heard = left(lambda: [url for url in urls if listening(url)], CLOSE_S)
    if heard:
        raise CheckFailed(f"after `__exit__` something still listens at {heard[0]}")
    files = sorted(p.name for p in (bench.folder / "tmp").iterdir())
    if files:
        raise CheckFailed(f"after `__exit__` there are {len(files)} temporary files: {', '.join(files[:3])}")


@TABLE.check(
    "names-its-death",
    why="Without it a run whose server died reports failing agents, and nobody looks at the server's log.",
    cure="Raise ServerError in `check` and `take`, with what happened and the end of the log.",
    needs=("ends",),
)
def names_its_death(bench: ServerBench) -> None:
    """If its processes die, `check` says so, and `__exit__` still ends the rest."""
    server = bench.server
    server.check()
    victims = bench.processes()
    if not victims:
        raise CheckSkipped("it has no process of its own")
    for victim in victims:
        with contextlib.suppress(psutil.Error):
            victim.kill()
    psutil.wait_procs(victims, timeout=10)

    def silent() -> list[str]:
        try:
            server.check()
        except ServerError as error:
            return [] if str(error).strip() else ["a ServerError without a word"]
        return ["nothing"]

    try:
        said = left(silent, 10.0)
    finally:
        bench.stop()
    if said:
        raise CheckFailed(f"all its processes were killed, and `check` raises {said[0]}")


@TABLE.check(
    "ends-with-its-run",
    why="A run that is killed (out of memory, a cluster's limit) leaves a server that holds the device.",
    cure="Let the process watch its parent: a pipe that closes, or prctl's death signal (docs/servers.md).",
    needs=("starts",),
)
def ends_with_its_run(bench: ServerBench) -> None:
    """If the process that started it is killed, all its processes end by themselves."""
    subject, component = bench.subject, bench.subject.component
    if component is None or component.plugin == "given":
        raise CheckSkipped("give its name or FILE.py:NAME: a process of its own starts it, and is killed")
    asked = {
        "name": component.spec.name,
        "block": [p.name for p in subject.registry.plugins if p.name not in (component.plugin, "core")],
        "files": [str(subject.file)] if subject.file else [],
        "settings": dict(subject.settings or {}),
        "model": str(bench.directory),
        "context": bench.context,
    }
    temporary = bench.folder / "killed"
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, MARK: str(temporary), "TMPDIR": str(temporary)}
    with (bench.folder / "killed.log").open("w+") as log:
        run = subprocess.Popen(
            [sys.executable, "-P", "-c", CODE, json.dumps(asked)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        with run:
            line = run.stdout.readline() if run.stdout else ""
            run.kill()
        if not line:
            log.seek(0)
            raise CheckFailed(f"a process that starts it ended early: {log.read()[-1000:]}")
    found = json.loads(line)
    started = [p for pid in found["processes"] if (p := _process(pid)) is not None]

    def living() -> list[psutil.Process]:
        return [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    running = left(living, bench.end_s)
    for process in running:
        process.kill()
    if running:
        raise CheckFailed(
            f"{bench.end_s:g} s after its run was killed {len(running)} of its processes run: {_names(running)}"
        )
    heard = left(lambda: [url for url in found["urls"] if listening(url)], CLOSE_S)
    if heard:
        raise CheckFailed(f"after its run was killed something still listens at {heard[0]}")


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _names(processes: list[psutil.Process]) -> str:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found.append(f"{process.pid} ({' '.join(process.cmdline())[:60]})")
    return ", ".join(found)

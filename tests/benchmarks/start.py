"""How long agentrig's commands take to start beside a bare Python start: CPU seconds, and their ratio.

    python tests/benchmarks/start.py [--repeats 15] [--plugins 100] [--trains 3]

Measured are `agentrig --help` and `agentrig plugins`, alone and with a hundred more plugins: real distributions in a
temporary folder, each a package with two components, settings and the range of agentrig that it is made for. The least
of several starts counts, each kind in turn, so that other load on the machine disturbs all alike. CPU time of the
process and its children is counted, and the least wall time is printed beside it. The first `plugins` after an
installation is printed too.

Then `agentrig train mini` is started several times: the wall seconds until it names the run's folder, until its first
rollout begins, and until that ends. The least of each counts.
"""

from __future__ import annotations

import argparse
import compileall
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HELP, PLUGINS = ["-m", "agentrig", "--help"], ["-m", "agentrig", "plugins", "--json"]
LIMITS = {"--help": 12.0, "--help, all": 12.0, "plugins": 40.0, "plugins, all": 60.0}
"""Bare starts that a command may take. With a bare start of 15 ms, 60 are 0.9 s."""

TRAIN = {"folder named": 1.0, "first rollout ends": 4.0}
"""Seconds that `agentrig train mini` may take, on two quiet cores."""

SOURCE = '''"""Plugin {i}."""

import attrs

from agentrig import AgentSpec, RewardSpec, hookimpl, setting


@attrs.frozen(kw_only=True)
class Config:
    """Settings."""

    share: float = setting(0.5, help="the share", ge=0, le=1)
    name: str = setting("", help="the name")
    tries: int = setting(3, help="how often", ge=1)


def build(config):
    """Build."""
    from bench_plugin_{i}.heavy import answer

    return answer


@hookimpl
def register_agents():
    """Register the agent."""
    yield AgentSpec(name="bench-{i}", summary="Agent {i}.", config=Config, build=build)


@hookimpl
def register_rewards():
    """Register the reward."""
    yield RewardSpec(name="bench-{i}", summary="Reward {i}.", config=Config, build=build)
'''


def install(site: Path, count: int) -> None:
    """Write distributions into a folder, as an installer leaves them: module, metadata, entry point, bytecode."""
    for i in range(count):
        package, info = site / f"bench_plugin_{i}", site / f"bench_plugin_{i}-1.0.dist-info"
        package.mkdir()
        info.mkdir()
        (package / "__init__.py").write_text(SOURCE.format(i=i))
        (package / "heavy.py").write_text("answer = print\n")
        head = f"Metadata-Version: 2.4\nName: bench-plugin-{i}\nVersion: 1.0\nSummary: Plugin {i}.\n"
        needs = "Requires-Dist: agentrig>=0.2.0.dev0,<0.3\nRequires-Dist: attrs>=24.2\n"
        (info / "METADATA").write_text(f"{head}{needs}\n" + "A page of text. " * 200)
        (info / "entry_points.txt").write_text(f"[agentrig]\nbench-{i} = bench_plugin_{i}\n")
        (info / "RECORD").write_text(f"bench_plugin_{i}/__init__.py,,\nbench_plugin_{i}/heavy.py,,\n")
    compileall.compile_dir(str(site), quiet=2)


def spent(arguments: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Run Python with these arguments; return the CPU and the wall seconds that it took."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environment)
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s


WATCHES = '''"""Prints when the first rollout began and ended, in seconds since the epoch."""

import time

from agentrig import hookimpl

ended = []


@hookimpl
def on_rollout_end(rollout):
    """Print the times of the first one."""
    if not ended:
        ended.append(time.time())
        print("FIRST", rollout.start, ended[0], flush=True)
'''


def started(folder: Path) -> dict[str, float]:
    """Start `agentrig train mini` and interrupt it after its first rollout; return the seconds until each event."""
    (folder / "watches.py").write_text(WATCHES)
    command = [sys.executable, "-m", "agentrig", "train", "mini", "--plugin", "watches.py"]
    start = time.time()
    run = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.stdout is not None
    found: dict[str, float] = {}
    for line in run.stdout:
        if line.startswith("run "):
            found["folder named"] = time.time() - start
        if line.startswith("FIRST "):
            _, began, ended = line.split()
            found |= {"first rollout begins": float(began) - start, "first rollout ends": float(ended) - start}
            run.send_signal(signal.SIGINT)
            time.sleep(0.5)
            run.send_signal(signal.SIGINT)  # at once
            break
    run.communicate()
    if "first rollout ends" not in found:
        raise SystemExit("the run ended before its first rollout")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--plugins", type=int, default=100)
    parser.add_argument("--trains", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        site.mkdir()
        install(site, given.plugins)
        plain = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}
        plain["AGENTRIG_CACHE"] = f"{folder}/cache"
        full = {**plain, "PYTHONPATH": str(site)}
        commands = {
            "python -c pass": (["-c", "pass"], plain),
            "--help": (HELP, plain),
            "--help, all": (HELP, full),
            "plugins": (PLUGINS, plain),
            "plugins, all": (PLUGINS, full),
        }
        first: dict[str, float] = {}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for turn in range(given.repeats + 1):  # the first may write bytecode, and tries new plugins
            for name, (arguments, environment) in commands.items():
                taken = spent(arguments, environment)
                if turn:
                    times[name].append(taken)
                else:
                    first[name] = taken[0]
    cpu = {name: min(s for s, _ in taken) for name, taken in times.items()}
    wall = {name: min(s for _, s in taken) for name, taken in times.items()}
    bare = cpu["python -c pass"]
    print(f"least of {given.repeats}; `all`: with {given.plugins} more plugins")
    for name, seconds in cpu.items():
        limit = f", limit {LIMITS[name]:g}" if name in LIMITS else ""
        print(
            f"{name:16} {1000 * seconds:7.1f} ms CPU, {1000 * wall[name]:7.1f} ms wall: {seconds / bare:5.1f} bare "
            f"starts{limit}; the first time {1000 * first[name]:.0f} ms CPU"
        )
    with tempfile.TemporaryDirectory() as folder:
        starts = [started(Path(folder)) for _ in range(given.trains)]
    for event in starts[0] if starts else ():
        print(f"train mini: {event} after {min(found[event] for found in starts):.2f} s")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    late = any(min(found[event] for found in starts) > limit for event, limit in TRAIN.items()) if starts else False
    return 1 if late or any(cpu[name] / bare >= limit for name, limit in LIMITS.items()) else 0


if __name__ == "__main__":
    sys.exit(main())

"""How long `agentrig --help` takes beside a bare Python start: CPU seconds, and their ratio.

    python tests/benchmarks/start.py [--repeats 15]

The least of several starts counts, each kind in turn, so that other load on the machine disturbs both alike. CPU time
of the process and its children is counted, not wall time. The help is to stay under 12 bare starts.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys

LIMIT = 12.0
COMMANDS = {"python -c pass": ["-c", "pass"], "agentrig --help": ["-m", "agentrig", "--help"]}


def cpu_s(arguments: list[str]) -> float:
    """Run Python with these arguments; return the CPU seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    times = {name: [] for name in COMMANDS}
    for _ in range(repeats + 1):  # the first one may have to write bytecode
        for name, arguments in COMMANDS.items():
            times[name].append(cpu_s(arguments))
    least = {name: min(found[1:]) for name, found in times.items()}
    for name, seconds in least.items():
        print(f"{name:16} {1000 * seconds:6.1f} ms CPU, least of {repeats}")
    bare, shown = least.values()
    print(f"ratio {shown / bare:.1f}, limit {LIMIT:g}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 0 if shown / bare < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())

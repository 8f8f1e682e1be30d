"""Kill a real run again and again, resume it each time, and look whether anything is lost, doubled or left behind.

```
python tests/benchmarks/kills.py --kills 100 --seed 0
```

The recipe `mini` trains on four tasks a step. Each launch is ended at a random moment by SIGKILL, SIGTERM
or Ctrl-C, half of them inside a function that is aimed at (`kills_aim.py`): the update, the transfer of weights, the
copy or the write of a checkpoint, the report, a rename, a flush, the beginning of a resumed run. The next launch
resumes it. After every kill and at every run's end:

- each step is in `metrics.jsonl` once, and each has its file of training rollouts, with every rollout once;
- no process is left that the run has started, nothing in shared memory, and in the temporary folder (its own `TMPDIR`)
  nothing of a launch that could tidy up, and nothing at all once a launch has reached its own end;
- the exit status is that of the signal.

Prints the figures as JSON; exit status 1, with the seed's history, when something is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import psutil
import pyarrow.parquet as pq

AIM = Path(__file__).with_name("kills_aim.py")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
AIMS = {"update": 4, "transfer": 4, "copy": 4, "checkpoint": 4, "report": 1, "rename": 30, "flush": 60, "begin": 1}
"""Moments, and up to which call of a launch one is chosen."""

TASKS, GROUP = 4, 4
SETTINGS = (
    f"algorithm.tasks_per_step={TASKS}", f"algorithm.group_size={GROUP}", "algorithm.validate_every=0",
    'algorithm.final="last"', "run.validation_tasks=1", "run.report_tasks=4", "runners.n=1",
)  # fmt: skip


class Wrong(Exception):
    """A run lost, doubled or left something."""


@attrs.define
class Kills:
    """One series of kills.

    Attributes:
        folder: Where runs and temporary files go.
        steps: Of each run.
        window_s: Random kills strike within so many seconds of a launch.
    """

    folder: Path
    steps: int
    window_s: float
    rng: random.Random
    counts: Counter[str] = attrs.field(factory=Counter)
    history: list[str] = attrs.field(factory=list)
    earlier: set[Path] = attrs.field(factory=set)
    number: int = 1

    @property
    def run(self) -> Path:
        """The current run directory."""
        return self.folder / "runs" / f"r{self.number}"

    @property
    def tmp(self) -> Path:
        """The temporary folder of all launches."""
        return self.folder / "t"

    def launch(self, aim: dict[str, Any] | None) -> subprocess.Popen[bytes]:
        """Start the run, or go on with it."""
        command = [str(Path(sys.executable).with_name("agentrig")), "train"]
        if (self.run / "config.toml").is_file():
            command += ["--resume", str(self.run)]
        else:
            own = [f"run.name=r{self.number}", f"algorithm.steps={self.steps}", f"run.seed={self.number}"]
            command += ["mini", "--plugin", str(AIM), *own, *SETTINGS]
        environment = {**os.environ, "TMPDIR": str(self.tmp)}
        if aim is not None:
            environment["KILLS_AIM"] = json.dumps(aim)
        self.counts["launches"] += 1
        self.earlier = set(self.tmp.iterdir())  # of killed launches: one that is struck early has not removed them yet
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen(
                command, cwd=self.folder, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def kill(self) -> bool:
        """Launch and kill once; False when the run ended before it could be struck."""
        number, aimed = self.rng.choice(SIGNALS), self.rng.random() < 0.5
        hit, at = self.folder / "hit", "random"
        hit.unlink(missing_ok=True)
        if aimed:
            resumed = (self.run / "config.toml").is_file()
            at = self.rng.choice([a for a in AIMS if resumed or a != "begin"])
            delay_s = 0.0 if at in ("rename", "flush", "begin") else self.rng.uniform(0, 0.15)
            call = self.rng.randint(1, AIMS[at])
            aim = {"at": at, "call": call, "delay_s": delay_s, "signal": int(number), "hit": str(hit)}
            process = self.launch(aim)
        else:
            process = self.launch(None)
            time.sleep(self.rng.uniform(0, self.window_s))
            if process.poll() is None:
                hit.touch()
                to_all = number != signal.SIGKILL and self.rng.random() < 0.5  # as Slurm and terminals do
                (os.killpg if to_all else os.kill)(process.pid, number)
        status = process.wait(300)
        self.history.append(f"{self.run.name}: {at} {signal.Signals(number).name} -> {status}")
        self.check(status, number if hit.exists() else None)
        if hit.exists():
            self.counts[f"by {signal.Signals(number).name}"] += 1
            self.counts[f"at {at}"] += 1
        return hit.exists()

    def check(self, status: int, number: int | None) -> None:
        """Look at what a launch has left."""
        expected = {0} if number is None else {-number, 0} if number == signal.SIGKILL else {128 + number, 0}
        if number in (signal.SIGTERM, signal.SIGINT):
            expected.add(-number)  # before Python handles the signal, or after it has stopped handling it
        if status not in expected:
            raise Wrong(f"exit status {status}, not one of {sorted(expected)}")
        check_left(self.tmp)
        files = set(self.tmp.iterdir()) - (self.earlier if number is not None else set())
        if status >= 0 and files:
            raise Wrong(f"temporary files are left: {files}")
        self.check_steps(whole=False)

    def check_steps(self, *, whole: bool) -> None:
        """Each step once, in metrics and rollouts; all of them where the run is whole."""
        found = len(check_steps(self.run, rollouts=TASKS * GROUP))
        if whole and found != self.steps:
            raise Wrong(f"{found} steps of {self.steps} are in metrics.jsonl")

    def ended(self) -> bool:
        """Whether the current run is complete."""
        summary = self.run / "summary.json"
        return summary.is_file() and bool(json.loads(summary.read_text()).get("complete"))

    def finish(self) -> None:
        """Check a run that is complete, and begin the next one."""
        self.check_steps(whole=True)
        left = [str(f) for f in self.run.rglob("*") if f.name.endswith((".part", ".old", ".gone"))]
        if left:
            raise Wrong(f"half files are left: {left}")
        self.counts["runs"] += 1
        self.counts["steps"] += self.steps
        shutil.rmtree(self.run)
        self.number += 1

    def go(self, kills: int) -> None:
        """Kill so often, and let the last run end."""
        done = 0
        while done < kills:
            done += self.kill()
            if self.ended():
                self.finish()
        while (self.run / "config.toml").is_file():
            self.check(self.launch(None).wait(900), None)
            self.finish()


def check_steps(run: Path, *, rollouts: int) -> list[dict[str, Any]]:
    """Each step once, in metrics and rollouts; return the lines of `metrics.jsonl`."""
    metrics = run / "metrics.jsonl"
    text = metrics.read_text() if metrics.exists() else ""
    lines = [json.loads(line) for line in text.split("\n")[:-1]]  # the last one may be cut short
    found = [line["step"] for line in lines]
    if found != list(range(1, len(found) + 1)):
        raise Wrong(f"steps {found} are in metrics.jsonl")
    seen: Counter[str] = Counter()
    for step in found:
        rows = pq.read_table(run / "rollouts" / f"train-{step:05d}.parquet", columns=["id", "step"]).to_pylist()
        if len(rows) != rollouts or {row["step"] for row in rows} != {step}:
            raise Wrong(f"step {step} has {len(rows)} rollouts of steps { {row['step'] for row in rows} }")
        seen.update(row["id"] for row in rows)
    if seen and max(seen.values()) > 1:
        raise Wrong("a rollout is there twice")
    return lines


def check_left(tmp: Path, *, within_s: float = 20.0) -> None:
    """No process and no shared memory of launches with this temporary folder is left."""
    end = time.monotonic() + within_s
    while (left := processes_of(tmp)) and time.monotonic() < end:
        time.sleep(0.1)
    if left:
        raise Wrong(f"processes are left: {[p.cmdline() for p in left]}")
    if memory := list(Path("/dev/shm").glob("*agentrig*")):
        raise Wrong(f"shared memory is left: {memory}")


def processes_of(tmp: Path) -> list[psutil.Process]:
    """Return the living processes that launches with this temporary folder have started."""
    return [p for p in psutil.process_iter() if started_with(p, "TMPDIR").startswith(str(tmp))]


def started_with(process: psutil.Process, name: str) -> str:
    """Return a variable that a living process was started with; empty where nobody can say."""
    try:
        return str(process.environ().get(name, "")) if process.status() != psutil.STATUS_ZOMBIE else ""
    except (psutil.Error, OSError):
        return ""


def main() -> None:
    """Run the series."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--window", type=float, default=15.0, help="seconds of a launch in which random kills strike")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    (folder / "t").mkdir()
    series = Kills(folder, options.steps, options.window, random.Random(options.seed))
    start = time.monotonic()
    try:
        series.go(options.kills)
    except Wrong as error:
        log = (folder / "log").read_text(errors="replace")[-3000:]
        print("\n".join(series.history), f"\n{log}\n{folder} has what is there; wrong: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    left = [p.name for p in (folder / "t").iterdir()]
    print(json.dumps({**series.counts, "left": left, "wall_s": round(time.monotonic() - start)}, indent=1))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

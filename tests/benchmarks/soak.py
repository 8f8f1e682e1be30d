"""A long run of a tiny model with faults at random: nothing is lost or doubled, and memory stays flat.

    python tests/benchmarks/soak.py --steps 1000 --seed 0

Eight rollouts a step of a random model with 100,000 parameters. All the time agents raise, fail, dawdle, hang, die,
return garbage, reuse an answer, call another server or sample otherwise than they should, rewards raise or judge
nothing, and runners are killed. In the first 40% of the steps the run's main process is killed (SIGKILL, SIGTERM), its
model server is, and an agent lies about a call that is trained on, which ends the run; each time it is resumed. The
rest is one launch, whose memory, files, threads and processes are measured.

After every launch: each step is in `metrics.jsonl` once, with its rollouts once; no process, shared memory or
temporary file is left. At the end: every recorded call is in the ledger once, memory is flat, and
`agentrig audit` finds no fault in the last step. Prints figures as JSON; exit status 1, with the seed's history, when
something is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
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

from agentrig.testing.scripted import scripted_server
from agentrig.testing.tiny_model import make_tiny_model

PLUGIN = Path(__file__).with_name("soak_plugin.py")
TASKS, GROUP = 2, 4
LOUD = 0.4
"""Share of the steps in which what ends the run is injected too."""
RATES = {"kill runner": 0.03, "wish die": 0.02, "wish hang": 0.01}
"""How often a step, on average, in all steps."""
ENDING = {"kill main": 0.02, "stop main": 0.02, "kill server": 0.0125, "wish trained-cold": 0.0125}
"""The same, in the loud part: what ends a launch."""
MEANT = {"kill server": ("server", "llm-error"), "wish trained-cold": ("sampled with temperature 0.1",)}
"""What the message of a run that ends by itself has, by fault."""
MIB = 1 << 20
ALLOWED = {"main": 24, "server": 24, "runners": 24, "files": 8, "threads": 4, "shared": 0, "temporary": 8}
"""How much more there may be at the end than at the start of the quiet part: MiB for processes, then counts."""
SETTINGS = (
    "adapter.match=speak", f"algorithm.tasks_per_step={TASKS}", f"algorithm.group_size={GROUP}",
    "algorithm.max_tokens=6", "algorithm.lr=1e-6", "algorithm.warmup_steps=0", "algorithm.validate_every=0",
    'algorithm.final="last"', "algorithm.save_every=2", "server.threads=1", "hardware.threads=1",
    "runners.n=2", "runners.threads=4", "runners.deadline_s=3", "run.failure_limit=0.99", "run.report_tasks=2",
)  # fmt: skip


class Wrong(Exception):
    """A run lost, doubled or left something."""


@attrs.define
class Soak:
    """One run under faults; `other` is the URL of the server that is not the run's."""

    folder: Path
    steps: int
    seed: int
    other: str
    counts: Counter[str] = attrs.field(factory=Counter)
    history: list[str] = attrs.field(factory=list)
    events: list[tuple[int, str]] = attrs.field(factory=list)
    samples: list[tuple[int, dict[str, float]]] = attrs.field(factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "soak"

    @property
    def tmp(self) -> Path:
        return self.folder / "t"

    def draw(self) -> None:
        """Choose the faults and their steps from the seed."""
        rng = random.Random(self.seed)
        for step in range(2, self.steps - 1):
            loud = ENDING if step < LOUD * self.steps else {}
            self.events += [(step, name) for name, rate in {**RATES, **loud}.items() if rng.random() < rate]

    def launch(self) -> None:
        command = [str(Path(sys.executable).with_name("agentrig")), "train"]
        if (self.run / "config.toml").is_file():
            command += ["--resume", str(self.run)]
        else:
            uses = {"tasks": "soak-words", "agent": "soak-agent", "reward": "soak-sums", "adapter": "agent-match"}
            chosen = [word for kind, name in {**uses, "algorithm": "grpo"}.items() for word in (f"--{kind}", name)]
            own = [f"algorithm.model={self.folder / 'model'}", f"algorithm.steps={self.steps}", "run.name=soak"]
            command += ["--plugin", str(PLUGIN), *chosen, *SETTINGS, *own, f"run.seed={self.seed}"]
        given = {"seed": self.seed, "wishes": str(self.folder / "wishes"), "other": self.other}
        environment = {**os.environ, "TMPDIR": str(self.tmp), "SOAK": json.dumps(given)}
        self.counts["launches"] += 1
        self.samples.clear()
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def watch(self) -> set[str]:
        """Commit the faults whose step has come until the launch ends; return those that may have ended it."""
        assert self.process is not None
        ending: set[str] = set()
        reader = _Steps(self.run / "metrics.jsonl")
        measured = 0
        while self.process.poll() is None:
            time.sleep(0.02)
            step = reader.latest()
            while self.events and self.events[0][0] <= step and self.process.poll() is None:
                _, name = self.events.pop(0)
                if self.commit(name):
                    self.counts[name] += 1
                    self.history.append(f"step {step}: {name}")
                    if name in ENDING:
                        ending.add(name)
            if step >= measured + 5:
                measured = step
                self.measure(step)
        return ending

    def commit(self, name: str) -> bool:
        """Commit a fault; False when there is nothing that it could strike."""
        assert self.process is not None
        verb, _, what = name.partition(" ")
        if verb == "wish":
            (self.folder / "wishes" / what).touch()
            return True
        if what == "main":
            os.kill(self.process.pid, signal.SIGKILL if verb == "kill" else signal.SIGTERM)
            return True
        found = self.members()[{"runner": "runners", "server": "server"}[what]]
        try:
            random.Random(f"{self.seed} {len(self.events)}").choice(found).kill()
        except (IndexError, psutil.Error):  # it was just ending
            return False
        return True

    def members(self) -> dict[str, list[psutil.Process]]:
        """Return the run's processes: main, server, runners."""
        assert self.process is not None
        found: dict[str, list[psutil.Process]] = {"main": [], "server": [], "runners": []}
        try:
            main = psutil.Process(self.process.pid)
            found["main"] = [main]
            for child in main.children(recursive=True):
                try:
                    command, parent = " ".join(child.cmdline()), child.parent()
                    if "agentrig_grpo.server" in command:
                        found["server"].append(child)
                    elif "forkserver" in command and parent is not None and "forkserver" in " ".join(parent.cmdline()):
                        found["runners"].append(child)
                except psutil.Error:
                    continue
        except psutil.Error:
            return found
        return found

    def measure(self, step: int) -> None:
        """Record memory, files and threads of the current launch."""
        sample: dict[str, float] = dict.fromkeys(ALLOWED, 0.0)
        for name, processes in self.members().items():
            for process in processes:
                try:
                    sample[name] += process.memory_full_info().uss / MIB
                    sample["files"] += process.num_fds()
                    sample["threads"] += process.num_threads()
                except psutil.Error:  # a runner that was just killed
                    return
        sample["shared"] = len(list(Path("/dev/shm").glob("*agentrig*")))
        sample["temporary"] = sum(1 for _ in self.tmp.rglob("*"))
        self.samples.append((step, sample))

    def check(self, status: int, ending: set[str]) -> None:
        """Look at what a launch has left, and whether it ended as it should."""
        expected = {0}
        if "kill main" in ending:
            expected.add(-signal.SIGKILL)
        if "stop main" in ending:
            expected |= {128 + signal.SIGTERM, -signal.SIGTERM}
        said = (self.folder / "log").read_text(errors="replace")
        own = any(word in said for name in ending for word in MEANT.get(name, ()))
        if status not in expected and not (status == 1 and own):
            raise Wrong(f"exit status {status} after {sorted(ending)}")
        check_left(self.tmp)
        check_steps(self.run, rollouts=TASKS * GROUP)
        left = list(self.tmp.iterdir())
        if status == 0 and left:
            raise Wrong(f"temporary files are left: {left}")

    def go(self) -> dict[str, Any]:
        """Train to the end under faults, and return the figures.

        Raises:
            Wrong: A run ended as it should not, or lost, doubled or left something.
        """
        self.draw()
        pending: set[str] = set()
        while True:
            self.launch()
            pending |= self.watch()
            assert self.process is not None
            status = self.process.wait()
            self.history.append(f"launch {self.counts['launches']}: exit status {status}")
            self.check(status, pending)
            wishes = {f"wish {file.name}" for file in (self.folder / "wishes").iterdir()}
            pending &= wishes  # what nobody has done yet may still end a launch
            if status == 0:
                break
        lines = check_steps(self.run, rollouts=TASKS * GROUP)
        if len(lines) != self.steps:
            raise Wrong(f"{len(lines)} steps of {self.steps}")
        return {**self.counts, **ledger_of(lines), **self.flat(), "audited": self.audited()}

    def flat(self) -> dict[str, Any]:
        """Return the growth over the last launch; too much of it is wrong."""
        steps = [step for step, _ in self.samples]
        if len(steps) < 20:
            return {"growth": "the last launch was too short to tell"}
        part = max(3, len(steps) // 8)
        first, last = self.samples[part : 2 * part], self.samples[-part:]
        found = {}
        for name, allowed in ALLOWED.items():
            was, now = (statistics.median(sample[name] for _, sample in some) for some in (first, last))
            found[name] = [round(was, 1), round(now, 1)]
            if now - was > allowed:
                raise Wrong(
                    f"{name}: {was:.1f} around step {first[0][0]}, {now:.1f} at the end; {allowed} more allowed"
                )
        return {"from step": first[0][0], "first and last": found}

    def audited(self) -> str:
        words = [str(Path(sys.executable).with_name("agentrig")), "audit", str(self.run), "--json"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        found = [each["result"] for one in json.loads(done.stdout or "[]") for each in one["verdicts"]]
        if done.returncode != 0 or "ok" not in found:
            raise Wrong(f"the last step does not hold: {done.stdout[-3000:]}{done.stderr[-2000:]}")
        return f"step {self.steps}: {found.count('ok')} of {len(found)} links hold"


class _Steps:
    """Follows how many steps `metrics.jsonl` has, reading only what is new."""

    def __init__(self, file: Path) -> None:
        self.file, self.inode, self.place, self.count = file, 0, 0, 0

    def latest(self) -> int:
        """Return the number of whole lines."""
        try:
            inode = self.file.stat().st_ino
            if inode != self.inode:  # a resumed run writes it again
                self.inode, self.place, self.count = inode, 0, 0
            with self.file.open("rb") as data:
                data.seek(self.place)
                new = data.read()
        except OSError:
            return 0
        self.place += len(new)
        self.count += new.count(b"\n")
        return self.count


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


def ledger_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return where all recorded calls are; a step whose sums do not close is wrong."""
    total: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for line in lines:
        failures.update(line["failures"])
        calls = line["calls"]
        parts = {name: calls.get(name, 0) for name in ("trained", "masked", "handed_over")}
        if calls["recorded"] != sum(parts.values()) + sum(calls["dropped"].values()):
            raise Wrong(f"step {line['step']}: the ledger does not close: {calls}")
        total.update({"recorded": calls["recorded"], **parts})
        dropped.update(calls["dropped"])
    return {"calls": dict(total), "dropped": dict(dropped), "failures": dict(failures)}


def run(soak: Soak, folder: Path) -> dict[str, Any]:
    """Return the figures of a soak; exit with its history when something is wrong."""
    try:
        return soak.go()
    except Wrong as error:
        log = (folder / "log").read_text(errors="replace")[-3000:]
        print("\n".join(soak.history), f"\n{log}\n{folder} has what is there; wrong: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        if soak.process is not None and soak.process.poll() is None:
            soak.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    for part in ("t", "wishes"):
        (folder / part).mkdir()
    make_tiny_model(folder / "model", hidden=64)
    begun = time.monotonic()
    with scripted_server("other") as other:  # it answers with token ids that nobody has sampled
        soak = Soak(folder, options.steps, options.seed, other.url)
        figures = run(soak, folder)
    wall = time.monotonic() - begun
    timed = {"wall_s": round(wall), "s a step": round(wall / options.steps, 2)}
    print(json.dumps({"seed": options.seed, "steps": options.steps, **figures, **timed}, indent=1))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

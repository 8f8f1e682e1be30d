"""The observer that writes a run into a tracker, in a thread of its own, and what a tracker must be able to do."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import attrs

from agentrig.background import Background
from agentrig.errors import ConfigError
from agentrig.observers import RunEnd, RunError, RunStart, StepEnd
from agentrig.rollouts import Rollout
from agentrig.text import cut, read_text, storable, words_of
from agentrig.trackers.config import TrackerConfig
from agentrig.trackers.names import flat_config, main_of, of_step, of_summary

log = logging.getLogger(__name__)

Ended = Literal["finished", "stopped", "failed"]
"""How a run ended: by itself, by a signal, or by an error."""

START_FILES = ("config.toml", "manifest.json")
END_FILES = (*START_FILES, "summary.json", "error.json", "report.html")
"""Files of a run directory that a tracker gets at the start and at the end; manifest.json grows when a run resumes."""


@attrs.frozen(kw_only=True)
class TrackedRun:
    """A run, as a tracker gets it.

    Attributes:
        config: The resolved configuration, `section.key` to value; secrets are named, never shown.
        key: Identifies the run directory's run in the tracker; the same for every resume.
        resumed: Whether the tracker has had this run before.
        first_step: The first step that comes; greater than 1 if the run is resumed.
    """

    directory: Path
    name: str
    tags: Sequence[str]
    config: Mapping[str, Any]
    key: str
    resumed: bool
    first_step: int


class Client(Protocol):
    """A tracker, by its official client. All methods are called in one thread; one that raises is counted."""

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Begin the run, or go on with that of the same key; return what helps to find it.

        These are `id`, `url`, `folder`, and `command`: what shows or sends the files. The end of `agentrig train`
        prints the first that there is of `command`, `url` and `folder`.
        """
        ...

    def log(self, figures: Mapping[str, float], *, step: int, time: float) -> None:
        """Write a step's figures; `time` is Unix time in seconds. After a resume, lost steps come again."""
        ...

    def attach(self, files: Sequence[Path]) -> None:
        """Attach files of the run directory; a file that was attached before is replaced."""
        ...

    def checkpoint(self, folder: Path) -> None:
        """Attach the best checkpoint: a Hugging Face directory."""
        ...

    def end(self, ended: Ended, error: str) -> None:
        """End the run, so that everything is written when this returns."""
        ...


class Sample(NamedTuple):
    """A held-out rollout as a row of a table. It has nothing of the task's private part.

    Attributes:
        input: What the agent got, as text.
        answer: What it answered, as text, or the kind of its failure.
    """

    task: str
    input: str
    answer: str
    reward: float | None


BINS = 20
"""Bars of a histogram that a tracker does not divide itself."""

LONGEST = 2000
"""Characters of a cell."""


@runtime_checkable
class RolloutClient(Protocol):
    """What a client may have besides: it writes the rewards of a step, and samples of its rollouts."""

    def rollouts(self, mode: str, rewards: Sequence[float], samples: Sequence[Sample], *, step: int) -> None:
        """Write a histogram of the rewards and a table of the samples, each unless it is empty.

        Args:
            mode: `train`, `validation` or `report`; the beginning of both names.
            rewards: Of all scored rollouts.
            samples: The first tasks in order of their ids; empty for training.
            step: The step.
        """
        ...


@attrs.define
class _Batch:
    """What is kept of the rollouts of a mode and step until the step has ended."""

    rewards: list[float] = attrs.field(factory=list)
    samples: list[Sample] = attrs.field(factory=list)


class Tracking:
    """An observer that writes a run into a tracker; see `agentrig.plugins.specs.ObserverSpec`."""

    def __init__(self, name: str, client: Client, config: TrackerConfig) -> None:
        self._name, self._client, self._config = name, client, config
        self._work = Background(f"tracker {name}", limit=config.queue, patience_s=config.flush_s)
        self._batches: dict[tuple[int, str], _Batch] = {}
        self._lock = threading.Lock()  # rollouts end in several threads
        self._run: TrackedRun | None = None
        self._started = False
        self._place: dict[str, str] = {}

    def on_run_start(self, event: RunStart) -> None:
        """Begin the tracker's run, or go on with it, and attach the configuration."""
        directory = Path(event.directory)
        kept = self._kept(directory)
        self._run = TrackedRun(
            directory=directory,
            name=self._config.name or directory.resolve().name,
            tags=tuple(self._config.tags),
            config=flat_config(event.config),
            key=kept.get("key") or uuid.uuid4().hex[:16],
            resumed="key" in kept,
            first_step=event.first_step,
        )
        self._do(lambda: None)  # a run without steps is there too
        self._attach(START_FILES)

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Keep its reward, and of the first held-out tasks what was asked and answered."""
        if not isinstance(self._client, RolloutClient):
            return
        with self._lock:
            batch = self._batches.setdefault((rollout.step, rollout.mode), _Batch())
            if rollout.value is not None:
                batch.rewards.append(rollout.value)
            if rollout.mode != "train" and self._config.samples:
                answer = rollout.failure or _text(rollout.outcome.answer)
                sample = Sample(
                    task=rollout.task.id, input=_text(rollout.task.input), answer=answer, reward=rollout.value
                )
                insort(batch.samples, sample, key=lambda each: each.task)
                del batch.samples[self._config.samples :]

    def on_step_end(self, event: StepEnd) -> None:
        """Write a step's figures, its rewards and samples."""
        batches = self._ended(event.step)

        def write() -> None:
            found = of_step(event.metrics)
            kept = found if self._config.figures == "all" else main_of(found)
            self._client.log(kept, step=event.step, time=event.metrics["time"])
            self._write(batches)

        self._do(write)

    def on_run_end(self, event: RunEnd) -> None:
        """Write the results, attach the files and the best checkpoint, and end the tracker's run."""
        step, now = int(event.summary.get("steps") or 0), time.time()
        batches = self._ended(None)

        def write() -> None:
            self._client.log(of_summary(event.summary), step=step, time=now)
            self._write(batches)

        self._do(write)
        self._attach(END_FILES)
        self._do(self._best)
        self._do(partial(self._client.end, "finished", ""))

    def on_run_error(self, event: RunError) -> None:
        """Attach the files, and end the tracker's run as stopped or failed."""
        stopped = isinstance(event.error, KeyboardInterrupt)
        self._attach(END_FILES)
        self._do(partial(self._client.end, "stopped" if stopped else "failed", words_of(event.error)))

    def settle(self) -> dict[str, Any]:
        """Wait a bounded time for the thread; return the counts of its writes, and where the tracker's run is."""
        return {**attrs.asdict(self._work.settle()), **self._place}

    def _ended(self, last: int | None) -> dict[tuple[int, str], _Batch]:
        """Return what is kept of rollouts up to a step, or of all; it is no longer kept."""
        with self._lock:
            ready = sorted(key for key in self._batches if last is None or key[0] <= last)
            return {key: self._batches.pop(key) for key in ready}

    def _write(self, batches: Mapping[tuple[int, str], _Batch]) -> None:
        if isinstance(self._client, RolloutClient):
            for (step, mode), batch in batches.items():
                self._client.rollouts(mode, batch.rewards, batch.samples, step=step)

    def _do(self, work: Callable[[], Any]) -> None:
        """Let the thread do something once the tracker's run has started; if it could not start, it tries again."""
        if self._run is None:
            return  # the run has ended before it started

        def started() -> None:
            if not self._started:
                self._start()
            work()

        self._work.put(started)

    def _start(self) -> None:
        assert self._run is not None
        self._keep(self._run.directory, {"key": self._run.key})  # first: killed now, the next start finds the same run
        found = {name: storable(str(value)) for name, value in self._client.start(self._run).items()}
        self._keep(self._run.directory, {"key": self._run.key, **found})
        self._place, self._started = found, True

    def _attach(self, names: Sequence[str]) -> None:
        if self._config.files and self._run is not None:
            directory = self._run.directory
            self._do(lambda: self._client.attach([f for f in (directory / n for n in names) if f.is_file()]))

    def _best(self) -> None:
        limit = getattr(self._config, "checkpoint_mb", 0)
        assert self._run is not None
        folder = best_checkpoint(self._run.directory) if limit else None
        if folder is None:
            return
        size = sum(file.stat().st_size for file in checkpoint_files(folder).values()) / 1e6
        if size > limit:
            log.info(
                "tracker %s does not get %s: it has %.0f MB, and trackers.%s.checkpoint_mb is %d",
                *(self._name, folder, size, self._name, limit),
            )
            return
        self._client.checkpoint(folder)

    def _file(self, directory: Path) -> Path:
        return directory / "trackers" / f"{self._name}.json"

    def _kept(self, directory: Path) -> dict[str, str]:
        try:
            kept = json.loads(read_text(self._file(directory)))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            log.warning(
                "%s is damaged: the tracker %s begins a new run. Restore the file from a copy to go on with the former",
                *(self._file(directory), self._name),
            )
            return {}
        return kept if isinstance(kept, dict) else {}

    def _keep(self, directory: Path, kept: Mapping[str, str]) -> None:
        file = self._file(directory)
        file.parent.mkdir(exist_ok=True)
        part = file.with_suffix(".part")
        part.unlink(missing_ok=True)  # a link would lead out of the run
        part.write_text(json.dumps(kept, indent=2) + "\n", "utf-8")
        part.replace(file)


def _text(value: Any) -> str:
    """Return a task's input or an answer as text for a table."""
    if isinstance(value, Mapping) and len(value) == 1:
        value = next(iter(value.values()))
    return cut(storable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)), LONGEST)


def required(module: str, *, tracker: str, extra: str = "") -> Any:
    """Import a tracker's client; `extra` is the package to install, by default agentrig's extra of the tracker's name.

    Raises:
        ConfigError: It is not installed, or its import fails; the message says what to do.
    """
    cure = f"pip install {extra!r}" if extra else f"pip install 'agentrig[{tracker}]'"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"the tracker {tracker} needs its client, which is not installed: {cure}") from None
        raise ConfigError(f"the client of the tracker {tracker} cannot be imported: {error}. Try {cure}") from error
    except Exception as error:
        raise ConfigError(
            f"the client of the tracker {tracker} cannot be imported: {words_of(error)}. Try {cure}"
        ) from error


def checkpoint_files(folder: Path) -> dict[str, Path]:
    """Return the files of a checkpoint by their path in it, without the state of the trainer."""
    found = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {name: file for name, file in found.items() if not name.startswith(("trainer/", ".model"))}


def best_checkpoint(directory: Path) -> Path | None:
    """Return a run's best checkpoint: of those that are there, the best in validation; without validation the last.

    If the run ended with its best weights (`final = "best"`), the last checkpoint has them.
    """
    there = {int(c.name[5:]): c for c in (directory / "checkpoints").glob("step-*") if c.name[5:].isdecimal()}
    if not there:
        return None
    lines = {line["step"]: line for line in _lines(directory)}
    judged = {
        step: (line["validation_accuracy"], line.get("validation_reward") or 0.0, step)
        for step, line in lines.items()
        if step in there and line.get("validation_accuracy") is not None
    }
    last = max(there)
    config = json.loads(read_text(directory / "manifest.json")).get("config", {}) if judged else {}
    if not judged or config.get("algorithm", {}).get("final") == "best":
        return there[last]
    return there[max(judged, key=lambda step: judged[step])]


def _lines(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of `metrics.jsonl`; one that a crash has cut short is left out."""
    file = directory / "metrics.jsonl"
    for text in file.read_text("utf-8", errors="replace").split("\n") if file.is_file() else ():
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and "step" in line:
                yield line

"""The live display: an observer that shows a run's steps, metrics and failures while it runs.

On a terminal it redraws a panel; elsewhere (CI, a pipe) it prints one plain line per step. Rollouts end in
separate threads, many per second, so an event only updates counters; rich's own thread draws the panel.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrig import hookimpl
from agentrig.figures import counted, percent
from agentrig.processes.ends import Interrupted, name_of

if TYPE_CHECKING:
    from rich.live import Live

    from agentrig.observers import RunEnd, RunError, RunStart, StepEnd
    from agentrig.rollouts import Rollout

log = logging.getLogger(__name__)

SMOOTHING = 16
"""Number of steps for the moving average of the reward."""

_DOING = {
    "report": "measuring held-out accuracy",
    "validation": "validating",
    "train": "rolling out",
    "dev": "running",
}


class LiveDisplay:
    """Shows a run while it runs; register it with `registry.add_observer(LiveDisplay(), "display")`.

    Args:
        console: Where to write; standard output by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._steps: int | None = None
        self._first_step = 1
        self._last: Mapping[str, Any] = {}
        self._rewards: list[float] = []
        self._step_times: list[float] = []
        self._validation: tuple[int, str] | None = None
        self._failures: Counter[str] = Counter()
        self._doing = ""
        self._ended = 0  # rollouts of the current batch
        self._right = self._judged = 0
        self._total = 0.0  # sum of their rewards
        self._start = time.monotonic()
        self._opened = False
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []

    # --- events ---------------------------------------------------------------------------------

    @hookimpl
    def on_run_start(self, event: RunStart) -> None:
        """Print the run's directory and steps, and open the panel."""
        with self._lock:
            self._steps, self._first_step = event.steps, event.first_step
            self._start = time.monotonic()
        steps = "" if event.steps is None else f", {event.steps} steps"
        again = f", resuming at step {event.first_step}" if event.first_step > 1 else ""
        self._say(f"run {event.directory}{steps}{again}")
        self._open()

    @hookimpl
    def on_rollout_end(self, rollout: Rollout) -> None:
        """Update the counters; called from worker threads, once for every rollout."""
        doing = _DOING.get(rollout.mode, rollout.mode)
        if rollout.mode == "report":
            doing += " before training" if rollout.step == 0 else " after training"
        with self._lock:
            changed = doing != self._doing
            if changed:
                self._doing, self._ended, self._right, self._judged, self._total = doing, 0, 0, 0, 0.0
            self._ended += 1
            if rollout.failure is not None:
                self._failures[rollout.failure] += 1
            else:
                self._judged += 1
                self._right += bool(rollout.correct)
                self._total += rollout.value or 0.0
        self._open()
        # Without a panel, a long measurement would look like a hang.
        if changed and rollout.mode == "report" and not self._console.is_terminal:
            self._say(f"{doing} …")

    @hookimpl
    def on_step_end(self, event: StepEnd) -> None:
        """Store the step's metrics; print its line if there is no panel."""
        metrics = event.metrics
        with self._lock:
            self._last = metrics
            names = ("reward", "step_s", "validation_accuracy", "validation_reward")
            reward, seconds, accuracy, validation_reward = (metrics.get(k) for k in names)
            if reward is not None:
                self._rewards = [*self._rewards, float(reward)][-SMOOTHING:]
            if seconds is not None:
                self._step_times = [*self._step_times, float(seconds)][-SMOOTHING:]
            if accuracy is not None:
                self._validation = (event.step, _measured(accuracy, validation_reward))
            self._doing, self._ended, self._right, self._judged, self._total = "", 0, 0, 0, 0.0
        if not self._console.is_terminal:
            self._say(self._line(metrics))
        elif accuracy is not None:
            self._say(f"step {event.step}: validation accuracy {_measured(accuracy, validation_reward)}")

    @hookimpl
    def on_run_end(self, event: RunEnd) -> None:
        """Close the panel and print the result."""
        self.close()
        self._say(final_line(event.summary, event.directory))

    @hookimpl
    def on_run_error(self, event: RunError) -> None:
        """Close the panel and print the last step; the command line prints the error itself."""
        self.close()
        step = self._last.get("step")
        where = "before a step ended" if step is None else f"after step {step}"
        error = event.error
        what = name_of(error.number) if isinstance(error, Interrupted) else type(error).__name__
        self._say(f"{event.directory}: {what} ended the run {where}")

    def close(self) -> None:
        """Close the panel and leave its last content on the screen; does nothing when there is no panel."""
        with self._lock:
            live, self._live, self._opened = self._live, None, True
            handlers, self._handlers = self._handlers, []
        for handler, stream in handlers:
            handler.setStream(stream)
        if live is not None:
            live.stop()

    # --- drawing --------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """Print a line unchanged: no markup, no line wrapping."""
        try:
            self._console.print(Text(text), soft_wrap=True, highlight=False)
        except (OSError, SystemExit) as error:  # rich ends the process when the reader of a pipe has gone
            self._console.quiet = True
            why = getattr(error, "strerror", None) or "nobody reads it any more"
            log.warning("the output cannot be written: %s; the run goes on without its display", why)

    def _open(self) -> None:
        """Open the panel at the first event, on a terminal."""
        with self._lock:
            if not self._console.is_terminal or self._opened:
                return
            self._opened = True
        from rich.live import Live

        live = Live(get_renderable=self.panel, console=self._console, refresh_per_second=4)  # draws at once
        error = sys.stderr
        live.start()
        self._live = live
        # Log handlers keep the stream they were created with; redirect them so that they write above the panel.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is error and sys.stderr is not error:
                self._handlers.append((handler, handler.setStream(sys.stderr)))

    def panel(self) -> Group:
        """Return the current panel."""
        with self._lock:
            m = dict(self._last)
            done = int(m.get("step") or self._first_step - 1)
            rows = [
                ("reward", self._reward()),
                ("accuracy", "" if m.get("accuracy") is None else _share(m["accuracy"])),
                ("validation", self._validated()),
                ("speed", _speed(m)),
                ("time", _split(m)),
                ("failures", _counted(self._failures)),
            ]
            if self._doing:
                rows.insert(0, ("now", self._current_batch()))
            steps, eta = self._steps, self._eta(done)
            elapsed = time.monotonic() - self._start
        figures = Table.grid(padding=(0, 2, 0, 0))
        for label, text in rows:
            if text:
                style = "yellow" if label == "failures" else ""
                figures.add_row(Text(label, style="dim"), Text(text, style=style))
        return Group(_bar(done, steps, elapsed, eta), figures)

    def _current_batch(self) -> str:
        reward = f", reward {self._total / self._judged:.3f}" if self._judged else ""
        return f"{self._doing}: {self._ended} rollouts, {self._right} right{reward}"

    def _line(self, m: Mapping[str, Any]) -> str:
        """Return a step as one plain line."""
        with self._lock:
            done = int(m.get("step") or 0)
            of = f"/{self._steps}" if self._steps else ""
            width = len(str(self._steps or ""))
            failed = _counted(Counter(m.get("failures") or {}))
            eta = self._eta(done)
            validation = m.get("validation_accuracy")
            parts = [
                f"step {done:>{width}}{of}",
                f"reward {self._reward()}",
                "" if m.get("accuracy") is None else f"accuracy {_share(m['accuracy'])}",
                "" if validation is None else f"validation {_measured(validation, m.get('validation_reward'))}",
                _speed(m),
                _split(m),
                f"failed {failed}" if failed else "",
                "" if eta is None else f"eta {_clock(eta)}",
            ]
        return "  ".join(p for p in parts if p)

    def _reward(self) -> str:
        if not self._rewards:
            return ""
        mean = sum(self._rewards) / len(self._rewards)
        return f"{self._rewards[-1]:.3f} (mean of {len(self._rewards)}: {mean:.3f})"

    def _validated(self) -> str:
        return "" if self._validation is None else f"{self._validation[1]} at step {self._validation[0]}"

    def _eta(self, done: int) -> float | None:
        """Return the estimated seconds for the remaining steps, from the latest step times."""
        if self._steps is None or not self._step_times or done >= self._steps:
            return None
        return (self._steps - done) * sum(self._step_times) / len(self._step_times)


def final_line(summary: Mapping[str, Any], directory: Path) -> str:
    """Summarize a finished run in one line: accuracy before → after, steps, time, failures, and the report's path.

    Args:
        summary: The content of `summary.json`.
        directory: The run directory.
    """
    page = directory / "report.html"
    accuracy = summary.get("accuracy") or {}
    before, after = accuracy.get("before"), accuracy.get("after")
    gain = (
        "" if before is None or after is None else f" ({100 * (after - before):+.1f} points, n = {accuracy.get('n')})"
    )
    failed = _counted(Counter(summary.get("failures") or {}))
    parts = [
        "no held-out accuracy: there are no report tasks"
        if before is None and after is None
        else f"accuracy {_share(before)} → {_share(after)}{gain}",
        _rewards(summary.get("reward") or {}),
        "solved" if summary.get("solved") else "",
        f"{summary.get('steps', '?')} steps in {_clock(summary.get('wall_s') or 0.0)}",
        f"failed {failed}" if failed else "",
        f"report {page}" if page.is_file() else f"no report; `agentrig report {directory}` says why",
    ]
    return " · ".join(p for p in parts if p)


def _rewards(reward: Mapping[str, Any]) -> str:
    """Return the mean held-out reward."""
    before, after = reward.get("before"), reward.get("after")
    return "" if before is None or after is None else f"reward {before:.3f} → {after:.3f}"


def _measured(accuracy: float, reward: float | None) -> str:
    """Format an accuracy and the mean reward."""
    return _share(accuracy) + ("" if reward is None else f" (reward {reward:.3f})")


def _bar(done: int, steps: int | None, elapsed: float, eta: float | None) -> Table:
    line = Table.grid(padding=(0, 2, 0, 0))
    rest = "" if eta is None else f"eta {_clock(eta)}"
    if steps is None:
        line.add_row(Text(f"step {done}", style="bold"), Text(_clock(elapsed)))
        return line
    bar = ProgressBar(total=max(1, steps), completed=done, width=36)
    line.add_row(Text(f"step {done} of {steps}", style="bold"), bar, Text(_clock(elapsed)), Text(rest, style="bold"))
    return line


def _share(share: float | None) -> str:
    return percent(share) if share is None else f"{percent(share)}%"


def _speed(m: Mapping[str, Any]) -> str:
    rollouts, tokens = m.get("rollouts_per_s"), m.get("tokens_per_s")
    parts = [f"{rollouts:.1f} rollouts/s" if rollouts is not None else "", f"{tokens:,.0f} tokens/s" if tokens else ""]
    return "  ".join(p for p in parts if p)


def _split(m: Mapping[str, Any]) -> str:
    """Return the parts of the step's time as shares of its wall time."""
    wall = m.get("step_s")
    if not wall:
        return ""
    shares = [f"{part} {100 * seconds / wall:.0f}%" for part, seconds in (m.get("time_s") or {}).items()]
    return f"{wall:.1f} s: " + ", ".join(shares) if shares else f"{wall:.1f} s"


def _counted(failures: Counter[str]) -> str:
    return counted(failures) if failures.total() else ""


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return (
        f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}" if whole >= 3600 else f"{whole // 60}:{whole % 60:02}"
    )

"""The live display: an observer that shows a run's steps, metrics and failures while it runs.

On a terminal it redraws a panel; elsewhere (CI, a pipe) it prints one plain line per step. Rollouts end in
separate threads, many per second, so an event only updates counters; rich's own thread draws the panel.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrig import hookimpl
from agentrig.audit.verdicts import FIRST
from agentrig.errors import RunFileError
from agentrig.figures import counted, number, percent
from agentrig.processes.ends import Interrupted, asked_to_end, name_of
from agentrig.run.damage import read_object
from agentrig.text import amount
from agentrig.view import figures
from agentrig.view.figures import SMOOTHING
from agentrig.view.reading import dig, read_run
from agentrig.view.terminal import run_ending

if TYPE_CHECKING:
    from rich.status import Status

    from agentrig.observers import RunEnd, RunError, RunStart, StepEnd
    from agentrig.rollouts import Rollout

log = logging.getLogger(__name__)

RARELY_S = 30.0
"""Seconds between two lines of a long measurement, where there is no panel."""

SMALL = 0.02
"""Smaller parts of a step's time are not shown."""

SILENT_S = 10.0
"""Seconds between two lines that say what is done before a run has a directory, and at its end: without a terminal."""

PREPARING = "reading the tasks, and building the reward and the algorithm"
STARTING = "starting the agent, the model's server and the learner"
FIRST_ROLLOUT = "the first rollouts begin, and none has ended"
ENDING = "the last checks and the report"
"""What a run does before its first line, before its first step, until a rollout has ended, and after its last step."""

_DOING = {
    "report": "measuring held-out accuracy",
    "validation": "validating",
    "train": "the agent at work",
    "dev": "running",
}


@attrs.define
class Batch:
    """The rollouts that are under way: what they are for, of how many (0: unknown), how many have ended and so on."""

    doing: str = ""
    of: int = 0
    ended: int = 0
    judged: int = 0
    right: int = 0
    reward: float = 0.0
    began: float = attrs.field(factory=time.monotonic)

    def __str__(self) -> str:
        if not self.ended:
            return self.doing
        reward = f", reward {self.reward / self.judged:.3f}" if self.judged else ""
        ended = f"{self.ended} of {amount(self.of, 'rollout')}" if self.of else amount(self.ended, "rollout")
        last = (
            "; now the last checks and the report, then the results"
            if self.ended == self.of and "after" in self.doing
            else ""
        )
        return f"{self.doing}: {ended}, {self.right} right{reward}{last}"


class LiveDisplay:
    """Shows a run while it runs; register it with `registry.add_observer(LiveDisplay(), "display")`."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._lock = threading.Lock()
        self._opened = self._announced = False
        self._panel = ExitStack()
        self._spinner: Status | None = None
        self._silent = threading.Event()  # set by the next line
        self._start = time.monotonic()
        self._steps: int | None = None
        self._audited = 0  # the last step that the auditor looks at in any case
        self._demonstrated = False
        self._credit: Any = None
        self._sampling = self._apart = ""  # how a measurement samples, in brackets, and that training does not
        self._done = 0
        self._last: Mapping[str, Any] = {}
        self._rewards: deque[float] = deque(maxlen=SMOOTHING)
        self._lines: deque[Mapping[str, Any]] = deque(maxlen=SMOOTHING)  # of the steps after the first one of now
        self._first, self._validate_every = 1, 0
        self._took = dict[str, float]()  # seconds of a measurement before training, by mode: later ones last as long
        self._validation = self._held_out = ""
        self._failures: Counter[str] = Counter()
        self._batch, self._of = Batch(), dict[str, int]()  # _of: the tasks of a measurement, by mode
        self._said = self._start

    def preparing(self) -> None:
        """Say what is done before a run has a directory; `starting` ends that, or `close` where there is an error."""
        self._spin(PREPARING)

    def _spin(self, doing: str) -> None:
        """Show a spinner until it is stopped; without a terminal, say what is done, until the next line."""
        self._stop_spinner()
        if self._console.is_terminal:
            self._spinner = self._console.status(f"{doing} …")
            self._spinner.start()
            return
        self._silent = threading.Event()
        telling = threading.Thread(target=self._tell, args=(doing, self._silent), daemon=True, name="silence")
        telling.start()

    def _tell(self, doing: str, done: threading.Event) -> None:
        """Write every few seconds what is done."""
        began = time.monotonic()
        while not done.wait(SILENT_S):
            self._print(Text(f"{doing}: {time.monotonic() - began:.0f} s"), whole=True)

    def starting(self, directory: Path) -> None:
        """Print the run's directory, and that its parts start; say so until they have."""
        self._announced = True
        self._stop_spinner()
        self._say(f"run {directory}" if self._console.is_terminal else f"run {directory}: {STARTING} …")
        self._spin(STARTING)

    @hookimpl
    def on_run_start(self, event: RunStart) -> None:
        """Print the run's directory and steps, and open the panel."""
        with self._lock:
            self._steps, self._done, self._first = event.steps, event.first_step - 1, event.first_step
            self._validate_every = int(number(dig(event.config, "algorithm", "validate_every")) or 0)
            self._demonstrated = bool(dig(event.config, "algorithm", "demonstrations"))
            self._credit = dig(event.config, "credit", "use")
            how = figures.sampling(event.config, "val_temperature")
            self._sampling = f" ({how})" if how else ""
            trained, measured = (
                number(dig(event.config, "algorithm", key)) for key in ("temperature", "val_temperature")
            )
            if trained is not None and measured is not None and trained != measured:
                usually = "lower" if trained > measured else "higher"
                self._apart = f"; training samples at temperature {trained:g}, so its accuracy is usually {usually}"
            self._audited = event.first_step + FIRST - 1 if dig(event.config, "run", "audit") else 0
            self._start = time.monotonic()
        with suppress(RunFileError):
            manifest = read_object(event.directory / "manifest.json")
            data, (known, tasks) = dig(manifest, "data"), figures.labels(manifest)
            self._of = {mode: int(number(dig(data, mode, "tasks")) or 0) for mode in ("report", "validation")}
            self._apart = f"; {figures.labels_words(known, tasks)}" if known else self._apart
        if event.first_step > 1:
            run = read_run(event.directory)
            rewards = [number(m.get("reward")) for m in run.steps if m["step"] < event.first_step]
            self._rewards.extend(reward for reward in rewards if reward is not None)
            accuracy = figures.held_out(run)["accuracy"]["before"]
            self._held_out = "" if accuracy is None else f"{percent(accuracy)}% before training{self._sampling}"
        parts = [] if self._announced else [f"run {event.directory}"]
        left = None if event.steps is None else event.steps - event.first_step + 1
        if left == 0:
            parts += [f"nothing left to train: step {event.steps} of {event.steps} is done"]
        else:
            parts += [] if left is None else [f"{amount(left, 'step')} of training to do"]
            parts += [f"resuming at step {event.first_step}"] if event.first_step > 1 else []
        self._stop_spinner()
        self._say(", ".join(parts) or "started")
        if not self._console.is_terminal:
            self._spin(FIRST_ROLLOUT)
        self._open()

    @hookimpl
    def on_rollout_end(self, rollout: Rollout) -> None:
        """Update the counters; called from worker threads, once for every rollout."""
        doing = _DOING.get(rollout.mode, rollout.mode)
        if rollout.mode == "report":
            doing += " before training" if rollout.step == 0 else " after training"
        with self._lock:
            former, changed = self._batch, doing != self._batch.doing
            if changed:
                self._silent.set()
                self._batch = Batch(doing, self._of.get(rollout.mode, 0))
                mode = next((mode for mode in ("report", "validation") if former.doing.startswith(_DOING[mode])), "")
                self._took |= {mode: time.monotonic() - former.began} if mode else {}
            self._batch.ended += 1
            if rollout.failure is not None:
                self._failures[rollout.failure] += 1
            else:
                self._batch.judged += 1
                self._batch.right += bool(rollout.correct)
                self._batch.reward += rollout.value or 0.0
        self._open()
        if changed and former.judged and former.doing.startswith(_DOING["report"]):
            share, what = percent(former.right / former.judged), former.doing.removeprefix("measuring ")
            self._held_out = f"{share}% {what.removeprefix('held-out accuracy ')}{self._sampling}"
            self._say(f"{what}{self._sampling}: {share}% of {amount(former.judged, 'task')}{self._apart}")
        # Without a panel, a long measurement would look like a hang.
        if rollout.mode == "report" and not self._console.is_terminal:
            with self._lock:
                whole = self._batch.ended == self._batch.of
                due = changed or whole or time.monotonic() - self._said >= RARELY_S
                self._said = time.monotonic() if due else self._said
                batch = str(self._batch)
            if due:
                self._say(f"{doing} (run.report_tasks limits it) …" if changed else batch)
            if whole and self._done:
                self._spin(ENDING)

    @hookimpl
    def on_step_end(self, event: StepEnd) -> None:
        """Store the step's metrics; print its line if there is no panel."""
        m = event.metrics
        with self._lock:
            again = " after a resume" if self._audited > FIRST else ""
            checking = f"checking step {event.step} (the auditor looks at the first {FIRST} steps{again})"
            last = ENDING if event.step == self._steps else ""  # or a measurement, which says so itself
            self._batch = Batch(checking if event.step <= self._audited else last)
            self._last, self._done = m, event.step
            if m.get("reward") is not None:
                self._rewards.append(m["reward"])
            self._lines.extend([m] if event.step > self._first else [])
            validation = _measured(m.get("validation_accuracy"), m.get("validation_reward"))
            self._validation = f"{validation} at step {event.step}" if validation else self._validation
            of = f"/{self._steps}" if self._steps else ""
            line = [f"step {event.step:>{len(of) - 1}}{of}" if of else f"step {event.step}"]
            for label, text in self._figures(validation, m.get("failures") or {}):
                line.append(text if label in ("groups", "speed", "time") else f"{label} {text}")
        if not self._console.is_terminal:
            self._say("  ".join([*line, *self._eta()]))
            if event.step <= self._audited:
                self._say(f"{checking} …")
            if last:
                self._spin(last)
        elif validation:
            self._say(f"step {event.step}: validation accuracy{self._sampling} {validation}")

    @hookimpl
    def on_run_end(self, event: RunEnd) -> None:
        """Close the panel and print the result."""
        self.close()
        self._spin("reading the results")
        parts = list(run_ending(event.directory))
        self._stop_spinner()
        for part in parts:
            self._say(part)

    @hookimpl
    def on_run_error(self, event: RunError) -> None:
        """Close the panel and print the last step; the command line prints the error itself.

        The error of a second signal says which steps are lost.
        """
        self.close()
        if isinstance(event.error, Interrupted) and event.error.at_once:
            return
        where = f"(last whole step: {self._done})" if self._done else "before a step had ended"
        error, what = event.error, "an error"
        if isinstance(error, KeyboardInterrupt):
            what = name_of(error.number) if isinstance(error, Interrupted) else "Ctrl-C"
        self._say(f"{event.directory}: {what} ended the run {where}")

    def close(self) -> None:
        """Close the panel and leave its last content on the screen; does nothing when there is no panel."""
        self._stop_spinner()
        with self._lock:
            panel, self._panel, self._opened = self._panel.pop_all(), ExitStack(), True
        panel.close()

    def _stop_spinner(self) -> None:
        self._silent.set()
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    def _say(self, said: str | Table) -> None:
        """Print a line unchanged, without markup and line wrapping, or a table in the terminal's width."""
        self._silent.set()
        self._print(Text(said) if isinstance(said, str) else said, whole=isinstance(said, str))

    def _print(self, shown: Text | Table, *, whole: bool) -> None:
        try:
            self._console.print(shown, soft_wrap=whole, highlight=False)
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
        self._panel.callback(live.stop)
        # Log handlers keep the stream they were created with; redirect them so that they write above the panel.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is error and sys.stderr is not error:
                self._panel.callback(handler.setStream, handler.setStream(sys.stderr))

    def panel(self) -> Group:
        """Return the current panel."""
        with self._lock:
            rows = [("now", str(self._batch))] if self._batch.doing else []
            rows += [("held out", self._held_out)] if self._held_out else []
            rows += self._figures(self._validation, self._failures)
            done, eta = self._done, self._eta()
        figures = Table.grid(padding=(0, 2, 0, 0))
        for label, text in rows:
            figures.add_row(Text(label, style="dim"), Text(text, style="yellow" if label == "failed" else ""))
        head = Table.grid(padding=(0, 2, 0, 0))
        elapsed = Text(_clock(time.monotonic() - self._start))
        if self._steps is None:
            head.add_row(Text(amount(done, "step"), style="bold"), elapsed)
        else:
            bar = ProgressBar(total=max(1, self._steps), completed=done, width=36)
            at = Text(f"{done} of {amount(self._steps, 'step')}", style="bold")
            head.add_row(at, bar, elapsed, *(Text(text, style="bold") for text in eta))
        return Group(head, figures)

    def _figures(self, validation: str, failures: Mapping[str, int]) -> list[tuple[str, str]]:
        """Return the figures of the latest step that are known, with their labels."""
        m, reward = self._last, ""
        several = (m.get("rollouts") or 0) > (m.get("groups") or 0)  # else groups are of one rollout
        alike = number(m.get("zero_variance_groups")) if several and not self._demonstrated else None
        same, untaught = "all rewards alike", number(m.get("untaught_groups"))
        groups = "" if alike is None else f"{alike:.0%} of groups had equal rewards"
        if alike is not None and untaught is not None:  # a credit of calls may learn from groups with equal rewards
            rewards = same if untaught == alike else f"rollouts' rewards alike in {alike:.0%}"
            unlike = number(m.get("unlike_calls"))
            if self._credit == "turn" and unlike is not None:
                rewards = f"calls' rewards alike in {1 - unlike:.0%}"
            groups = f"{untaught:.0%} of groups taught nothing ({rewards})"
        # another term of the loss may have changed the weights
        if (alike == 1 and untaught in (1, None)) or _idle(m):
            groups = f"{'no update: ' if _idle(m) else ''}{same} within every group"
        if self._rewards:
            n = len(self._rewards)
            of_several = f" (mean of {n}: {sum(self._rewards) / n:.3f})" if n > 1 else ""
            reward = f"{self._rewards[-1]:.3f}{of_several}"
        rollouts, tokens, wall, learned = m.get("rollouts_per_s"), m.get("tokens_per_s"), m.get("step_s"), ""
        if self._demonstrated:  # nothing was sampled: rewards and speed are not the model's
            reward, rollouts, tokens = "", None, None
            scored = m.get("rollouts", 0) - sum((m.get("failures") or {}).values())
            learned = str(round(scored * (m.get("accuracy") or 0.0)))
        loss = dig(m, "algorithm", "loss") if self._demonstrated else None
        speed = [f"{rollouts:.1f} rollouts/s"] if rollouts is not None else []
        speed += [f"{tokens:,.0f} tokens/s"] if tokens else []
        parts = {part: seconds / wall for part, seconds in (m.get("time_s") or {}).items() if wall}
        large = sorted((part for part, share in parts.items() if share >= SMALL), key=lambda part: -parts[part])
        shares = [f"{figures.PART_NAMES.get(part, part)} {parts[part]:.0%}" for part in large]
        if large[:1] == ["audit"]:
            shares.append("run.audit=false leaves auditing out")
        rows = [
            ("reward", reward),
            ("groups", groups),
            ("demonstrations learned", learned if m else ""),
            ("loss", "" if loss is None else f"{loss:.4f}"),
            ("training accuracy (sampled)", "" if self._demonstrated else _measured(m.get("accuracy"))),
            (f"validation{self._sampling}", validation),
            ("speed", "  ".join(speed)),
            ("time", ": ".join(filter(None, [f"{wall:.1f} s", ", ".join(shares)])) if wall else ""),
            ("failed", counted(failures) if failures else ""),
        ]
        return [(label, text) for label, text in rows if text]

    def _eta(self) -> list[str]:
        """Return the estimated time of the rest of the run, by the latest steps; empty if it is not known."""
        if self._steps is None or self._done >= self._steps or asked_to_end():
            return []
        left = figures.time_left(
            self._lines,
            done=self._done,
            steps=self._steps,
            every=self._validate_every,
            validation_s=self._took.get("validation", 0.0),
        )
        if left is None:
            return []
        report_s = self._took.get("report", 0.0)
        left += report_s
        measured = " with the last measurement" if report_s else ""
        measured = measured or (" without the last measurement" if self._of.get("report") else "")
        checks = " and the checks of the first steps" if self._done <= self._audited else ""
        return [f"eta {_clock(left)}{measured}{checks}"]


def _measured(accuracy: float | None, reward: float | None = None) -> str:
    """Format an accuracy and the mean reward, if they were measured."""
    if accuracy is None:
        return ""
    return f"{percent(accuracy)}%" + ("" if reward is None else f" (reward {reward:.3f})")


def _idle(metrics: Mapping[str, Any]) -> bool:
    """Whether a step made no update because all rollouts of each group got the same reward."""
    change = number(dig(metrics, "algorithm", "weight_change"))
    return number(metrics.get("zero_variance_groups")) == 1 and change == 0


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"

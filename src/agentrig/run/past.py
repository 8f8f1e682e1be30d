"""The state that a resumed run continues from, and the step at which resuming changes its directory."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Any

import attrs

from agentrig.errors import AgentrigError, CheckpointDamaged, ConfigError, RunFileError
from agentrig.figures import amount, number
from agentrig.ledger import totals
from agentrig.run.checkpoints import SAVED, Checkpoints, check_sizes, listed_digests, saved_digests, saved_files, verify
from agentrig.run.damage import CURES, NOT_ALLOWED, entries, read_object, reading
from agentrig.run.directory import DAMAGED, FILES, RunDirectory, is_end, stays, table_name
from agentrig.run.files import sha256_of
from agentrig.run.manifest import changed_settings, settings_before
from agentrig.run.rows import rollout_schema
from agentrig.run.trends import Guards
from agentrig.text import check_regular, cut
from agentrig.traces import mapping

NEEDED = ("failures", "algorithm", "time_s", "step_s", "rollouts", "transitions_per_rollout")
"""The keys that a line of `metrics.jsonl` needs for the run's totals; the first three hold objects."""

OPTIONAL = ("prompt_tokens", "response_tokens", "max_staleness")
"""Those that may be null or left out."""


LARGEST = 1e100
"""No figure is larger: sums and squares of such figures are finite."""

BOUNDS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("accuracy", "validation_accuracy"), (0, 1)),
    **dict.fromkeys(("zero_variance_groups", "untaught_groups", "unlike_calls"), (0, 1)),
    **dict.fromkeys(("rollouts", "failures", "groups", "nodes", "calls", "call_tokens", "n"), (0, 1e15)),
    **dict.fromkeys(("time", "step_s", "time_s", "overlap_s"), (0, 1e12)),
    **dict.fromkeys(("rollouts_per_s", "tokens_per_s", "transitions_per_rollout", "max_staleness"), (0, 1e15)),
    **dict.fromkeys(("prompt_tokens", "response_tokens", "reward_std"), (0, LARGEST)),
}
"""Least and largest value of figures in `metrics.jsonl`, also of those below these keys; others may be negative."""

SHOWN = 8
"""So many steps or files are named in a warning."""

CONTRADICTED = "the record contradicts itself: {} is {:.6g} in {}, and {:.6g} in {}: {} was changed"
"""What is told of a measurement, with its two values and their files."""

RESTORE = "Restore it from a copy"

TABLE = re.compile(r"(train|validation|report)-(\d+)\.parquet")
"""The name of a file of rollouts or calls."""


@attrs.frozen(kw_only=True)
class Past:
    """What a run directory has from before a checkpoint.

    Attributes:
        checkpoint: The checkpoint to resume from; None if the run starts from the beginning.
        step: The checkpoint's step; 0 without one.
        progress: The held-out measurements up to that step.
        measured: Number of rollouts that were only measured, by failure; `""` for those without a failure.
        warnings: What is lost or damaged.
        lost: What is lost for good: the run's manifest says so from now on.
        spent_s: Wall seconds of the run's earlier parts, as far as they are known.
        ended: The run had ended at this step and is extended: its guards restart their counts, and its summary and its
            measurement after training stay until the next checkpoint.
    """

    checkpoint: Path | None = None
    step: int = 0
    lines: Sequence[Mapping[str, Any]] = ()
    progress: Mapping[str, Any] = attrs.field(factory=dict)
    measured: Mapping[str, int] = attrs.field(factory=dict)
    warnings: Sequence[str] = ()
    lost: Sequence[str] = ()
    spent_s: float = 0.0
    ended: bool = False


def read_past(run: RunDirectory, *, from_step: int | None = None) -> Past:
    """Read the state that a run resumes from; changes nothing, except for the name of a checkpoint after a crash.

    Args:
        run: The run directory, locked.
        from_step: Resume from this step's checkpoint; None for the latest.

    Raises:
        ConfigError: There is no checkpoint of that step, or the run's checkpoints are gone.
        CheckpointDamaged: The checkpoint cannot be used; the message offers the one before.
        RunFileError: Another file is damaged, or `begin` could not do its work.
    """
    run.checkpoints.recover()
    checkpoint, step = run.checkpoints.latest() if from_step is None else run.checkpoints.at(from_step)
    if checkpoint is not None:
        try:
            verify(checkpoint)
        except CheckpointDamaged as error:
            raise with_cure(error, run) from None
    every, damaged = run.read_metrics()
    if damaged and not every and step:
        raise RunFileError(
            f"{run.path / 'metrics.jsonl'} is damaged: none of its lines can be read as JSON in UTF-8, and step {step} "
            f"has ended.\n  Nothing was changed. {RESTORE}, or remove it: the figures of these steps are then lost"
        )
    summary, known = run.read_json("summary.json"), dict(run.read_json("progress.json"))
    if foreign := foreign_metrics(run.path, every, known):
        raise RunFileError(
            f"{run.path}: {foreign}.\n  Nothing was changed. {RESTORE}; without one, remove metrics.jsonl: the figures "
            "of the steps are then lost"
        )
    if checkpoint is None and (known.get(SAVED) or summary.get("complete")):
        raise ConfigError(
            f"{run.path} has no checkpoint to resume from: its {len(every)} steps would be removed, and training would "
            f"start over.\n  Nothing was changed. Restore {run.checkpoints.folder}, or start a new run"
        )
    gone = lost_checkpoints(run.checkpoints, known)
    run.check_rewind(step)
    ours = [line for line in every if line["step"] <= step]
    last = {line["step"]: line for line in ours}  # of a step that is there twice, the last line
    lines = [last[at] for at in sorted(last) if _usable(last[at])]
    ended = bool(summary.get("complete")) and step >= summary.get("steps", 0)
    lost = []
    if step and not (run.path / "progress.json").exists():
        lost.append(
            f"progress.json was gone when the run resumed after step {step}: the accuracy before training, and "
            "whether the checkpoint is the one that the run saved, are unknown"
        )
    if not (run.path / "manifest.json").exists():
        lost.append(
            f"manifest.json was gone when the run resumed after step {step}: the recipe, versions and data that "
            "it began with are unknown"
        )
    progress = known if step else {}
    if not ended:
        progress.pop("after", None)  # of an end after this step
    with reading(run.path / "progress.json"):
        for fault in measurement_faults(known, ("before", "after")):
            raise ValueError(fault)
        if "before" in known and not known["before"].keys() >= {"accuracy", "n"}:
            raise ValueError("before has no accuracy or no number of tasks")
    for file, text in contradictions(run.path, progress=known, summary=summary, lines=list(last.values())):
        raise RunFileError(f"{run.path}: {text}.\n  Nothing was changed. {file}: {CURES.get(file, RESTORE)}")
    saved = [run.checkpoints.path(s) for s in run.checkpoints.steps() if s <= step]
    if step:  # a lost record begins again, with the checkpoints as they are
        held = saved_digests(run.path, known) if known else listed_digests(saved)
        progress[SAVED] = {at.name: held[at.name] for at in saved if at.name in held}
        progress[FILES] = {
            name: kept
            for name, kept in _measured_files(known)
            if stays(Path(name), step) or (ended and is_end(Path(name)))
        }
    spent = [sum(line["step_s"] for line in lines), *(number(of.get("wall_s")) or 0.0 for of in (known, summary))]
    if step:
        progress["wall_s"] = max(spent)  # summary.json is removed
    warnings = []
    if every and not step:
        warnings.append(
            "no checkpoint had been saved yet: the run starts over, and its "
            + ("step is removed" if len(every) == 1 else f"{len(every)} steps are removed")
        )
    again = sorted({line["step"] for line in every if line["step"] > step})
    if step and from_step is None:
        warnings += gone
        if again:
            which = f"step {again[0]}" if len(again) == 1 else f"steps {again[0]} to {again[-1]}"
            made = "is" if len(again) == 1 else "are"
            warnings.append(f"the last checkpoint is that of step {step}: {which} had none, and {made} removed")
    if damaged:
        warnings.append(
            f"metrics.jsonl: {amount(len(damaged), 'line')} could not be read when the run resumed after step {step} "
            f"(truncated by a crash, or damaged): {DAMAGED} is the file as it was"
        )
    warnings += losses(ours, (), step)
    if unusable := [at for at, line in last.items() if line not in lines]:
        warnings.append(
            f"metrics.jsonl: what the run's totals and guards need is missing for {_listed(unusable, noun='step')}, or "
            "has another type: the summary leaves it out"
        )
    strange: list[str] = []
    if step:
        warnings += changed_files(run.path, every, known, step=step, needed=range(1, step + 1))
        strange = unwritten([f"rollouts/{file.name}" for file in entries(run.path / "rollouts")], every, known)
    return Past(
        checkpoint=checkpoint,
        step=step,
        lines=lines,
        progress=progress,
        measured=run.measured(step, without=strange) if step else {},
        warnings=warnings,
        lost=lost,
        spent_s=max(spent) if step else 0.0,
        ended=ended,
    )


def with_start(past: Past, run: RunDirectory, before: Mapping[str, Any], after: Mapping[str, Any]) -> Past:
    """Return the state of a run that starts over, with its held-out measurement before training if that still holds.

    It is of the same tasks, its settings and components have not changed, and its rollouts are as the run wrote them.
    Whether it is of the same weights, `RunSession.record_start` finds out.

    Args:
        before: The run's manifest so far.
        after: The manifest from now on.
    """
    known, name = run.read_json("progress.json"), table_name("report", 0)
    recorded = dict(_measured_files(known)).get(name)
    prints = [mapping(mapping(each.get("data")).get("report")).get("fingerprint") for each in (before, after)]
    changes = changed_settings(before, after, step=1, ended=False)
    if (
        past.step
        or not {"before", "start_weights"} <= known.keys()
        or recorded is None
        or _digest(run.path / name) != recorded
        or prints[0] is None
        or prints[0] != prints[1]
        or any("components" in each or settings_before(each) for each in changes)
    ):
        return past
    held = {key: known[key] for key in ("before", "start_weights")}
    n, failures = int(held["before"]["n"]), mapping(held["before"].get("failures"))
    return attrs.evolve(past, progress={**held, FILES: {name: recorded}}, measured={**failures, "": n})


def _usable(line: Mapping[str, Any]) -> bool:
    """Whether a line of `metrics.jsonl` has what the run's totals and guards need, of the right types."""
    try:
        Guards.after([line])
        for key in ("calls", "call_tokens"):
            totals([line], key)
        objects, numbers = NEEDED[:3], [line[key] for key in NEEDED[3:]]
        numbers += [line[key] for key in OPTIONAL if line.get(key) is not None]
        numbers += [*line["failures"].values(), *line["time_s"].values()]
        typed = all(isinstance(line[key], dict) for key in objects) and None not in map(number, numbers)
        return typed and not {name.partition(".")[0] for name in possible(line)[1]} & {*NEEDED, *OPTIONAL}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return False


def begin(run: RunDirectory, config: str, facts: Mapping[str, Any], past: Past) -> None:
    """Rewrite the directory for the resumed run. Before this call, nothing in it has changed.

    The checkpoint is read, algorithm and agent are built, the model is served, and the first transfer of weights is
    proven. After a crash in the middle of this function, the run can still be resumed.
    """
    run.rewind(past.step, keep_end=past.ended)
    if past.progress:
        run.write_json("progress.json", past.progress)
    run.write("config.toml", config)  # overrides may have changed it
    run.write_json("manifest.json", facts)


COMPARED = 1 << 30
"""Bytes of a checkpoint whose digests are compared while somebody waits; a resume compares those of every size."""


@attrs.frozen
class Resumable:
    """What a resume would say of a run's latest checkpoint.

    Attributes:
        fault: Why it would be refused, and the cure; empty if it would not, as far as is known.
        unread: The bytes of its files if they are too many to compare their digests; else 0.
    """

    fault: str = ""
    unread: int = 0


def resumable(run: RunDirectory) -> Resumable:
    """Return what a resume would say of a run's latest checkpoint.

    Raises:
        RunFileError: What it would be compared with cannot be read.
    """
    checkpoint, _ = run.checkpoints.latest()
    if checkpoint is None:
        return Resumable()
    try:
        with reading(checkpoint):
            size = sum(file.stat().st_size for file in saved_files(checkpoint))
        digests = size <= COMPARED
        try:
            verify(checkpoint, digests=digests)
        except CheckpointDamaged as error:
            return Resumable(str(with_cure(error, run, digests=digests)))
    except FileNotFoundError:  # the run goes on by now, and has removed it
        return Resumable()
    return Resumable(unread=0 if digests else size)


USE_IT = "give its path: `eval` and `dev` take it with --checkpoint, `export` and `train --start` in place of the run"


def with_cure(
    error: CheckpointDamaged, run: RunDirectory, *, trains: bool = True, digests: bool = True
) -> AgentrigError:
    """Return the error with advice: resume from the last whole checkpoint before, or name it, or start a new run.

    If all are whole, and a file of the run records none of them, either that file or they are of another run.
    """
    step, whole, damaged = error.checkpoint.name.removeprefix("step-"), None, [error]
    before = [s for s in run.checkpoints.steps() if step.isdecimal() and s < int(step)]
    for s in reversed(before):
        try:
            verify(run.checkpoints.path(s), trains=trains, digests=digests)
            whole = s
            break
        except CheckpointDamaged as too:
            damaged.append(too)
    nothing = f"Nothing in {run.path} was changed."
    if all(each.unlike for each in damaged) and whole is None:
        return RunFileError(
            f"{run.path / error.unlike} records none of the checkpoints in {run.checkpoints.folder}: either that "
            f"file or the checkpoints are of another run, or were changed.\n  {nothing} Find out which of the two is "
            "not this run's, and restore it from a copy"
        )
    cure = f"{'No earlier checkpoint is whole' if before else 'There is no earlier checkpoint'}; restore the file, or "
    cure = "" if any(each.exchanged for each in damaged) else f"{cure}start a new run"
    if whole is not None:
        cure = f"The last whole checkpoint before is {run.checkpoints.path(whole)}; "
        cure += f"to resume from it: agentrig train --resume {run.path} --from-step {whole}" if trains else USE_IT
    error.args = (f"{error}\n  {nothing} {cure}".rstrip(),)
    return error


def contradictions(
    run: Path, *, progress: Mapping[str, Any], summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yield the measurements that two files of a run tell differently: the file that is wrong or can go, and the words.

    A file that is gone or cannot be read is compared with nothing.

    Args:
        summary: `summary.json`; empty without one.
        lines: Those of `metrics.jsonl` whose validation counts.
    """

    def apart(where: str, what: str, stated: Any, file: str, found: Any, known: str = "") -> list[tuple[str, str]]:
        """Return the words if the two differ; `known` is the file of rollouts that is as the run wrote it."""
        ours, theirs = number(stated), number(found)
        if ours is None or theirs is None or abs(ours - theirs) <= 1e-9 * max(1, abs(theirs)):
            return []
        changed = where if known in recorded else "one of the two files"
        return [(where, CONTRADICTED.format(what, ours, where, theirs, file, changed))]

    ends = [name for name, _ in _measured_files(progress) if is_end(Path(name))]
    recorded = recorded_digests(lines, progress)

    def measured(file: str) -> Mapping[str, Any]:
        """Return the figures of a file that is as the run wrote it: else the file was changed, and none is compared."""
        return _figures_of(run / file) if file and is_as_written(run / file, recorded.get(file)) else {}

    shown = stated_ends(progress)
    for when, file in (("before", table_name("report", 0)), ("after", ends[0] if len(ends) == 1 else "")):
        found = measured(file)
        for key in ("accuracy", "reward", "n"):
            what = f"the {key} {when} training"
            wrong = apart("progress.json", what, _under(progress, when, key), file, found.get(key), file)
            yield from wrong
            proven = file if found and not wrong else ""
            stated = _under(summary, key, when)
            yield from apart("summary.json", what, stated, "progress.json", _under(shown, when, key), proven)
    file = table_name("validation", 0)
    found = measured(file)
    for key, name in (("accuracy", "validation_before"), ("reward", "validation_reward_before")):
        what = f"the validation {key} before training"
        yield from apart("progress.json", what, progress.get(name), file, found.get(key), file)
    for line in lines:
        file = table_name("validation", line["step"])
        if dict(_files(line)).get("validation") == _digest(run / file):  # a resumed run measures its checkpoint anew
            found = _figures_of(run / file)
            for key in ("accuracy", "reward"):
                what = f"the validation {key} of step {line['step']}"
                yield from apart("metrics.jsonl", what, line.get(f"validation_{key}"), file, found.get(key), file)


def reward_contradictions(run: Path, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the steps whose reward in `metrics.jsonl` is not the mean of the rollouts in their file, in words."""
    for line in lines:
        told, name = number(line.get("reward")), table_name("train", line["step"])
        recorded = dict(_files(line)).get("train")
        if not is_as_written(run / name, recorded):
            continue
        found = _figures_of(run / name)
        mean = found.get("reward")
        if told is None or mean is None or line.get("rollouts") != found["rollouts"]:
            continue
        if abs(told - mean) > 1e-9 * max(1, abs(mean)):
            yield (
                f"the record contradicts itself: step {line['step']} has the reward {told:.6g} in metrics.jsonl, and "
                f"its {found['n']} rollouts in {name} have the mean {mean:.6g}: "
                + ("metrics.jsonl was changed" if recorded else "one of the two files was changed")
            )


def stated_ends(progress: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the measurements `before` and `after` training that a run states; see `over_common`."""
    return mapping(_under(progress, "after", "common")) or progress


def over_common(run: Path, step: int) -> tuple[dict[str, Any], str]:
    """Compare the held-out measurements before training and after a step over the tasks that both have.

    Args:
        step: The step of the last one.

    Returns:
        What `before` and `after` are over these tasks, and a sentence that says so. Both are empty if all tasks are the
        same, as they are unless a resume changed `run.report_tasks`, or if a file is gone or can't be read; the first
        is if no task is in both.
    """
    recorded: Mapping[str, str] = {}
    with suppress(RunFileError):
        recorded = dict(_measured_files(read_object(run / "progress.json")))
    names = [table_name("report", at) for at in (0, step)]
    first, last = ((is_as_written(run / n, recorded.get(n)) and _scored(run / n)) or [] for n in names)
    ids = [{row["task_id"] for row in rows} for rows in (first, last)]
    if not first or not last or ids[0] == ids[1]:
        return {}, ""
    both = ids[0] & ids[1]
    said = f"{amount(len(ids[0]), 'held-out task')} were measured before training, and {len(ids[1])} after it "
    said += "(run.report_tasks was changed, or the task set): "
    if not both:
        return {}, f"{said}none of them in both, so the two accuracies can't be compared"
    found = [_figures([row for row in rows if row["task_id"] in both]) for rows in (first, last)]
    return dict(zip(("before", "after"), found, strict=True)), f"{said}both accuracies are of the {len(both)} in both"


def _under(held: Mapping[str, Any], key: str, name: str) -> Any:
    found = held.get(key)
    return found.get(name) if isinstance(found, Mapping) else None


def _figures_of(file: Path) -> Mapping[str, Any]:
    """Return accuracy, mean reward, and the number of the scored and of all rollouts of a file; {} if it can't be read.

    A file that has not changed since the last call is not read again.
    """
    try:
        state = file.stat()
    except OSError:
        return {}
    return _figures_in(file, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


@lru_cache(1 << 16)
def _figures_in(file: Path, *_state: int) -> Mapping[str, Any]:
    rows = _scored(file)
    return {} if rows is None else {**_figures(rows), "rollouts": len(rows)}


def _scored(file: Path) -> list[dict[str, Any]] | None:
    """Return task, failure, value and whether it is correct of each rollout of a file; None if it can't be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        check_regular(file)  # to read a pipe would wait for ever
        table = pq.read_table(file, columns=["task_id", "failure", "value", "correct"])
    except Exception:  # it is damaged: who needs it says so
        return None
    if any(column.type != rollout_schema(pa).field(column.name).type for column in table.schema):
        return None
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values = [row["value"] for row in rows if row["failure"] is None and row["value"] is not None]
    right = sum(bool(row["correct"]) for row in rows if row["failure"] is None)
    n = len(values)
    return {"accuracy": right / n, "reward": math.fsum(values) / n, "n": n} if n else {"n": 0}


def measurement_faults(held: dict[str, Any], keys: Sequence[str]) -> Iterator[str]:
    """Take impossible measurements out of what `progress.json` or `summary.json` holds, and yield what is wrong."""
    for key in keys:
        found = held.get(key, {})
        if not isinstance(found, dict):
            yield f"{key} is no object"
            continue
        if isinstance(found.get("common"), dict):
            yield from measurement_faults(found["common"], ("before", "after"))
        for name in ("accuracy", "reward", "n", "before", "after"):
            value = number(found.get(name))
            least, most = BOUNDS.get(key if name in ("before", "after") else name, (-LARGEST, LARGEST))
            if found.get(name) is not None and (value is None or not least <= value <= most):
                said = "not a finite number" if value is None else "which no run can have"
                yield f"{key}.{name} is {cut(repr(found.pop(name)), 40)}, {said}"


def possible(line: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a line of `metrics.jsonl` without the figures that no run can have, and these by name: `time_s.update`.

    NaN and infinities stay: they tell of training that diverged.
    """
    impossible: dict[str, Any] = {}

    def within(held: Mapping[str, Any], path: str, bounds: tuple[float, float]) -> dict[str, Any]:
        kept = {}
        for key, value in held.items():
            name, (least, most) = f"{path}{key}", bounds if path else BOUNDS.get(key, (-LARGEST, LARGEST))
            if isinstance(value, Mapping):
                kept[key] = within(value, f"{name}.", (least, most))
            elif type(value) in (int, float) and abs(value) < math.inf and not least <= value <= most:
                impossible[name] = value
            else:
                kept[key] = value
        return kept

    return within(line, "", (-LARGEST, LARGEST)), impossible


def losses(lines: Sequence[Mapping[str, Any]], damaged: Sequence[int], step: int) -> list[str]:
    """Say which lines of `metrics.jsonl` are damaged, which steps have no line or several, and impossible figures.

    Args:
        lines: Those that hold a step.
        damaged: The numbers of the others.
        step: The last step that has ended.
    """
    found = []
    if damaged:
        found.append(
            f"metrics.jsonl: {_listed(damaged, noun='line')} cannot be read (truncated by a crash, or damaged), and "
            f"{'is' if len(damaged) == 1 else 'are'} ignored"
        )
    counts = Counter(line["step"] for line in lines)
    lost = step - sum(s <= step for s in counts)
    if lost > 0:
        first = list(islice((s for s in count(1) if s not in counts), min(lost, SHOWN)))
        found.append(
            f"metrics.jsonl has no line for {_listed(first, lost, noun='step')}, and step {step} has ended: the report "
            f"and the summary leave {'this step' if lost == 1 else 'these steps'} out"
        )
    twice = sorted(s for s, n in counts.items() if n > 1)
    if twice:
        found.append(
            f"metrics.jsonl has {_listed(twice, noun='step')} more than once: the report and the summary take the last "
            "line"
        )
    shapeless = [line["step"] for line in lines if not isinstance(line.get("algorithm", {}), dict)]
    if shapeless:
        found.append(
            f"metrics.jsonl is damaged: algorithm is no object for {_listed(shapeless, noun='step')}. Its figures are "
            "left out"
        )
    rewards = [(line["step"], line.get("reward")) for line in lines]
    odd = [step for step, reward in rewards if reward is not None and number(reward) is None]
    if odd:
        found.append(
            f"metrics.jsonl has a reward that is no finite number for {_listed(odd, noun='step')}: the report leaves "
            "it out"
        )
    impossible: dict[str, list[tuple[int, Any]]] = {}
    for line in lines:
        for name, value in possible(line)[1].items():
            if name != "reward" or line["step"] not in odd:
                impossible.setdefault(name, []).append((line["step"], value))
    for name, figures in list(impossible.items())[:SHOWN]:
        found.append(
            f"metrics.jsonl has {cut(str(figures[0][1]), 40)} as {cut(name, 60)} of "
            f"{_listed([step for step, _ in figures], noun='step')}, which no run can have: the report leaves it out"
        )
    if len(impossible) > SHOWN:
        found.append(f"metrics.jsonl has {len(impossible) - SHOWN} more figures that no run can have")
    return found


def foreign_metrics(run: Path, lines: Sequence[Mapping[str, Any]], progress: Mapping[str, Any]) -> str:
    """Say that `metrics.jsonl` is of another run: it states the digests of several files, and all are others; else ''.

    If those of `progress.json` are all others too, it is the files that are of another run, or were changed.
    """

    def others(stated: Iterable[tuple[str, str]]) -> int:
        """Return how many of the files there have another digest; 0 as soon as one has its own."""
        there = [(run / name, digest) for name, digest in stated if os.access(run / name, os.R_OK)]
        return 0 if any(_digest(file) in (digest, "") for file, digest in there) else len(there)

    found, measured = others(recorded_digests(lines, {}).items()), list(_measured_files(progress))
    if found < 2 or others(measured):
        return ""
    unsure = "" if measured else "; or these are of another run"
    return (
        f"metrics.jsonl is not this run's: none of the {found} files of rollouts and calls has the digest that it "
        f"states{unsure}"
    )


def last_ended(there: Checkpoints | None, progress: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> int:
    """Return the last step that has ended: the last one with a line in `metrics.jsonl`, or with a checkpoint.

    Args:
        there: The checkpoints; None if they are of another run.
    """
    recorded = [name.removeprefix("step-") for name in mapping(progress.get(SAVED))]
    steps: list[int] = [*(there.steps() if there else ()), *(int(step) for step in recorded if step.isdecimal())]
    return max([0, *steps, *(int(line["step"]) for line in lines)])


def lost_checkpoints(there: Checkpoints, progress: Mapping[str, Any]) -> list[str]:
    """Say that a checkpoint later than the newest there is was saved and is gone, or that `latest` names none.

    Args:
        there: The checkpoints of a run that nobody works in.
    """
    checkpoint, _ = there.latest()
    newest = checkpoint.name if checkpoint else ""
    unfinished = {f.stem[1:] for f in there.folder.glob(".step-*.part")}  # a crash while it was saved
    saved = {name for name in saved_digests(there.folder.parent, progress) if name > newest} - unfinished
    used = f"{newest} is used" if newest else "none is left"
    if saved:
        return [f"{there.folder / max(saved)} is not there, though the run saved it: {used}"]
    named = there.named_latest()
    if newest and named not in (None, *(there.path(step).name for step in there.steps())):
        return [
            f"{there.folder / 'latest'} names {named!r:.80}, which is no checkpoint of this run: {used}, the newest"
        ]
    return []


def unwhole(there: Checkpoints) -> list[str]:
    """Say which file of the latest checkpoint is missing or has another size; no content is read."""
    checkpoint, _ = there.latest()
    try:
        if checkpoint:
            check_sizes(checkpoint)
    except CheckpointDamaged as damaged:
        return [str(damaged)]
    return []


def changed_files(
    run: Path,
    lines: Sequence[Mapping[str, Any]],
    progress: Mapping[str, Any],
    *,
    ended: int | None = None,
    running: bool = False,
    step: int | None = None,
    needed: Sequence[int] = (),
) -> list[str]:
    """Name the files of rollouts and calls that have changed, are gone, or were not written by the run.

    What an earlier version wrote has no digests, and is not compared.

    Args:
        ended: The last step, if no files of further steps can be there; its line may be lost.
        running: Whether the run is at work: it removes a measurement after training of an earlier end itself.
        step: Only files that a run resumed from this step keeps; None for all.
        needed: Steps whose training rollouts the run wrote, whether their digest is known or not.
    """
    stated = recorded_digests(lines, progress)
    files = [f for part in ("rollouts", "calls") for f in entries(run / part)]
    there = [f"{f.parent.name}/{f.name}" for f in files if TABLE.fullmatch(f.name)]
    expected = dict.fromkeys([*stated, *(table_name("train", at) for at in needed)])
    gone = [name for name in expected if name not in there]
    closed = [name for name in there if not os.access(run / name, os.R_OK)]
    changed = [n for n in there if n in stated and n not in closed and _digest(run / n) != stated[n]]
    strange = unwritten(there, lines, progress, ended=ended)
    found = {"gone, and the run wrote {}": gone, "changed since the run wrote {}": changed, "no step wrote {}": strange}
    found |= {f"no permission to read {{}}. {NOT_ALLOWED}": closed}
    kept = {
        what: [n for n in names if (step is None or stays(Path(n), step)) and not (running and is_end(Path(n)))]
        for what, names in found.items()
    }
    return [
        f"{_listed(names)}: {what.format('it' if len(names) == 1 else 'them')}" for what, names in kept.items() if names
    ]


def unwritten(
    names: Iterable[str],
    lines: Sequence[Mapping[str, Any]],
    progress: Mapping[str, Any],
    *,
    ended: int | None = None,
) -> list[str]:
    """Return those of the files of rollouts and calls that no step of the run wrote, as far as it recorded its files.

    Args:
        names: Their places in the run directory.
        ended: The last step, if no files of further steps can be there.
    """
    measured, stated = dict(_measured_files(progress)), recorded_digests(lines, progress)
    known = {line["step"] for line in lines if any(_files(line))}
    found = []
    for name in names:
        match = TABLE.fullmatch(Path(name).name)
        if match is None or name in stated:
            continue
        at = int(match[2])
        later = ended is not None and known and at > ended
        if (at and measured) if match[1] == "report" else (at in known or later):
            found.append(name)
    return found


def recorded_digests(lines: Sequence[Mapping[str, Any]], progress: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of the files of rollouts and calls as the run wrote them, by their place in its directory."""
    found = {table_name(kind, line["step"]): digest for line in lines for kind, digest in _files(line)}
    return found | dict(_measured_files(progress))


def recorded_in(run: Path) -> dict[str, str]:
    """Return the digests of `recorded_digests` as a run directory has them; none of what cannot be read."""
    lines: list[dict[str, Any]] = []
    progress: Mapping[str, Any] = {}
    with suppress(OSError, RunFileError):
        lines = RunDirectory(run).metrics()
    with suppress(OSError, RunFileError):
        progress = read_object(run / "progress.json")
    return recorded_digests([] if foreign_metrics(run, lines, progress) else lines, progress)


def is_as_written(file: Path, recorded: str | None) -> bool:
    """Whether a file has the digest that the run recorded; True if it recorded none."""
    return recorded is None or _digest(file) in (recorded, "")  # one that is gone or closed is another fault


def _files(stated: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the files, and their digests, that a line of `metrics.jsonl` or `progress.json` states."""
    files = stated.get(FILES)
    for name, digest in files.items() if isinstance(files, dict) else ():
        if isinstance(digest, str):
            yield name, digest


def _measured_files(progress: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield those of `progress.json`, by their place in the run directory."""
    yield from ((name, digest) for name, digest in _files(progress) if TABLE.fullmatch(Path(name).name))


def _digest(file: Path) -> str:
    """Return a file's SHA-256; one that has not changed since the last call is not read again."""
    try:
        state = file.stat()
        if not file.is_file():  # to read a pipe would wait for ever
            return ""
        return _digest_of(file, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    except OSError:
        return ""


@lru_cache(1 << 16)
def _digest_of(file: Path, *_state: int) -> str:
    return sha256_of(file)


def _listed(numbers: Sequence[int | str], total: int = 0, *, noun: str = "") -> str:
    """Format a list of numbers or names, at most eight of them: `1, 2 and 5`, or `steps 1, 2 and 5` of a noun.

    Args:
        total: How many there are, if there are more than given.
        noun: What they number; '' for nothing.
    """
    shown, total = [str(n) for n in numbers[:SHOWN]], total or len(numbers)
    named = f"{noun}{'' if total == 1 else 's'} " if noun else ""
    if total > len(shown):
        return f"{named}{', '.join(shown)} … ({total} in all)"
    return named + (shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}")

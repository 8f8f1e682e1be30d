"""One line of a comparison against another: what differs after training, and whether seeds or chance can explain it."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrig.figures import (
    SIGNIFICANT,
    flip_interval,
    flip_test,
    judged,
    mean,
    mean_interval,
    p_text,
    paired_interval,
    percent,
    points,
    shuffle_test,
    sign_test,
    stratified_test,
    wilson,
)
from agentrig.plan import script_of
from agentrig.text import amount
from agentrig.view import figures
from agentrig.view.causes.evidence import Measured, Tally, changed, measured_of, says_more, task_slices
from agentrig.view.causes.outcome import FEW_TASKS
from agentrig.view.causes.rewards import contradiction
from agentrig.view.reading import RunData, dig
from agentrig.view.related import NAMES, named, seed_of, settings_apart, settings_numbers, stem, without_seed

SIDES = ("runs", "against")
"""The two sides of a test of one line against another."""

CLASSES = 3
"""Classes of tasks that are told: those that differ by most points."""

ENOUGH = 3
"""Seeds a side: without any difference the ranges of two against two are apart in a third of the comparisons, of three
against three in a tenth."""


def accuracy_of(run: RunData) -> dict[str, Any]:
    """Return a run's held-out accuracy; of one that is resumed, that of its `earlier_end` is not the one after."""
    accuracy = figures.held_out(run)["accuracy"]
    return accuracy | ({"after": None, "after_ci95": None, "earlier_end": accuracy["after"]} if run.running else {})


def tasks_of(run: RunData) -> Any:
    """Return the fingerprint of a run's held-out tasks; None if the manifest does not say it."""
    return dig(run.manifest, "data", "report", "fingerprint")


def reward_of(run: RunData) -> Any:
    """Return what judges a run's answers: the reward with its settings, and the score that is correct."""
    return run.config.get("reward"), run.setting("run", "correct_at")


def between(pools: Sequence[Sequence[RunData]], known: dict[Path, RunData]) -> list[dict[str, Any]]:
    """Return how each other line's held-out answers after training differ from those of the first line.

    Lines with other held-out tasks or another reward, or without a measurement after training, are left out.

    Returns:
        The names of the `runs`, and of those that they are `against`; of each side a `label`, the number of `seeds`,
        the `range` of the accuracies of its runs, `ci95` (the 95% interval of their mean), whether it `fell` from
        that before training, and on the `n` tasks that both measured the mean `accuracy`; their `difference`, its 95%
        interval over the tasks `difference_ci95` (None with one task), and the two-sided `p`: for two runs that of the
        exact sign test, with the number of tasks that are `better` and `worse`, else that of `stratified_test`.
        `overlap` says whether the ranges do, None with one seed on a side; `reward` is what `_reward` returns,
        `classes` what `_classes` does; `same_settings` says whether only the seeds differ, and `apart` names what else
        does. `alike` says that each task is right in all of their measurements, or in none. `contradicted` has, of a
        difference that would be significant, those of its runs whose reward or agent contradicts itself, each with the
        words. A task counts with the runs that measured it, and of runs of one seed the first.
    """
    first, *others = map(of_each_seed, pools)
    begun, found = ends_of(first), []
    for pool in others:
        ends = ends_of(pool)
        tallies = tallies_of([end for _, end in ends], [end for _, end in begun])
        if not tallies or (tasks_of(pool[0]), reward_of(pool[0])) != (tasks_of(first[0]), reward_of(first[0])):
            continue
        test: dict[str, Any]
        if len(ends) == len(begun) == 1:
            better, worse, _, n = changed(begun[0][1], ends[0][1])
            interval: tuple[float, float] | None = paired_interval(better, worse, n)
            test = {"better": better, "worse": worse, "p": sign_test(better, worse)}
        else:
            gaps = [a / n - b / m for (a, n), (b, m) in tallies]
            interval = mean_interval(gaps) if len(gaps) > 1 else None
            test = {"better": None, "worse": None, "p": stratified_test(tallies)}
        of: dict[str, dict[str, Any]] = {key: {} for key in ("label", "seeds", "range", "ci95", "accuracy", "fell")}
        names: dict[str, Any] = {}
        for side, each, tally in zip(SIDES, (ends, begun), zip(*tallies, strict=True), strict=True):
            runs = [run for run, _ in each]
            after = [accuracy_of(run)["after"] for run in runs]
            names[side] = [run.name for run in runs]
            of["label"][side] = _label(runs)
            of["seeds"][side] = len({str(seed_of(run)) for run in runs})
            of["range"][side] = [min(after), max(after)]
            accuracies = [each for each in map(accuracy_of, runs) if each["before"] is not None]
            of["fell"][side] = math.fsum(each["after"] - each["before"] for each in accuracies) < 0
            tasks = max(accuracy_of(run)["n"] for run in runs)
            of["ci95"][side] = wilson(math.fsum(after) / len(after) * tasks, tasks) if tasks else None
            of["accuracy"][side] = mean([right / n for right, n in tally])
        if of["label"]["runs"] == of["label"]["against"]:
            of["label"] = {side: named(names[side], ", ") for side in SIDES}
        several = 1 not in of["seeds"].values()
        reward = _reward([end for _, end in ends], [end for _, end in begun], several=several)
        p = min(test["p"], reward["p"] if reward else 1.0)
        found.append(
            {
                **names, **of, **test,
                "n": len(tallies),
                "difference": of["accuracy"]["runs"] - of["accuracy"]["against"],
                "difference_ci95": interval,
                "overlap": _overlap(of["range"]) if several else None,
                "reward": reward,
                "classes": _classes([run for run, _ in ends], [run for run, _ in begun]),
                "same_settings": without_seed(pool[0], known) == without_seed(first[0], known),
                "apart": settings_apart(first[0], pool[0], known),
                "alike": all(a + b in (0, n + m) for (a, n), (b, m) in tallies),
                "contradicted": contradictions([run for run, _ in (*ends, *begun)], p),
            }
        )  # fmt: skip
    return found


def _reward(first: Sequence[Measured], other: Sequence[Measured], *, several: bool) -> dict[str, Any] | None:
    """Return how the mean reward of the tasks that both sides measured differs, tested as their accuracy is.

    Returns:
        Of each side the `mean` and the `range` of its runs; the `difference`, its 95% interval over the tasks
        `difference_ci95`, and the two-sided `p`: for two runs that of `flip_test`, else that of `shuffle_test`;
        `overlap` if there are `several` seeds a side. None where rewards say no more than right and wrong do.
    """
    tasks = list(both_of(first, other).values())
    if len(tasks) < 2 or not says_more(each for task in tasks for side in task for each in side):
        return None
    rewards = [([each[3] for each in a], [each[3] for each in b]) for a, b in tasks]
    means = [(math.fsum(a) / len(a), math.fsum(b) / len(b)) for a, b in rewards]
    gaps = [a - b for a, b in means]
    if len(first) == len(other) == 1:
        p = flip_test(gaps)
        interval = flip_interval(gaps, p)
    else:
        p, interval = shuffle_test(rewards), mean_interval(gaps)
    ranges: dict[str, list[float]] = {}
    for side, runs in zip(SIDES, (first, other), strict=True):
        every = [math.fsum(reward for *_, reward in run.values()) / len(run) for run in runs]
        ranges[side] = [min(every), max(every)]
    return {
        "mean": {side: mean(of) for side, of in zip(SIDES, zip(*means, strict=True), strict=True)},
        "range": ranges,
        "difference": mean(gaps),
        "difference_ci95": interval,
        "p": p,
        "overlap": _overlap(ranges) if several else None,
    }


def _classes(runs: Sequence[RunData], against: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return how the accuracy of each class of the tasks differs, those that differ by most points first.

    Returns:
        The `class`, such as `half = first`; of its `n` tasks that both sides measured, `FEW_TASKS` at least, the
        accuracy of each side `before` and after (`accuracy`) training; and the two-sided `p` of `stratified_test`,
        multiplied by the number of these classes (Bonferroni). A single class of a slice is none.
    """
    sides, slices = [], dict[str, Mapping[str, str]]()
    for side in (runs, against):
        files = [run.of_mode("report") for run in side]
        sides.append([[run.seen.of(of[i], measured_of) for run, of in zip(side, files, strict=True)] for i in (0, -1)])
        for run, of in zip(side, files, strict=True):
            slices |= run.seen.of(of[-1], task_slices)
    begun, ended = (both_of(*of) for of in zip(*sides, strict=True))
    parts: dict[tuple[str, str], list[str]] = {}
    for task in ended:
        for of_task in slices.get(task, {}).items():
            parts.setdefault(of_task, []).append(task)
    several = Counter(name for name, _ in parts)
    large = {of: tasks for of, tasks in parts.items() if several[of[0]] > 1 and len(tasks) >= FEW_TASKS}
    found = []
    for of_class, tasks in large.items():
        before, after = ([measured[task] for task in tasks if task in measured] for measured in (begun, ended))
        shares = [
            {side: mean([sum(x[1] for x in task[i]) / len(task[i]) for task in some]) for i, side in enumerate(SIDES)}
            for some in (before, after)
        ]
        p = min(1.0, len(large) * stratified_test(map(_tally, after)))
        found.append(
            {"class": " = ".join(of_class), "n": len(tasks), "before": shares[0], "accuracy": shares[1], "p": p}
        )
    return sorted(found, key=lambda of: -abs(of["accuracy"]["runs"] - of["accuracy"]["against"]))


def _overlap(ranges: Mapping[str, Sequence[float]]) -> bool:
    (low, high), (least, greatest) = (ranges[side] for side in SIDES)
    return low <= greatest and least <= high


def contradictions(runs: Sequence[RunData], p: float) -> dict[str, str]:
    """Return, of the runs of a test that is significant, those whose reward or agent contradicts itself."""
    told = {run.name: contradiction(run) for run in runs} if p <= SIGNIFICANT else {}
    return {name: text for name, text in told.items() if text}


def _label(runs: Sequence[RunData]) -> str:
    """Name the runs of a side: by what their names share, if only their seeds differ in these."""
    stems = {stem(run.name, seed_of(run)) for run in runs}
    return stems.pop() if len(runs) > 1 and len(stems) == 1 else named([run.name for run in runs], ", ")


def ends_of(pool: Sequence[RunData]) -> list[tuple[RunData, Measured]]:
    """Return the runs that have held-out answers after training, each with these answers."""
    measured = [run for run in pool if tasks_of(run) is not None and accuracy_of(run)["after"] is not None]
    ends = [(run, run.seen.of(file, measured_of)) for run in measured for file in run.of_mode("report")[1:][-1:]]
    return [(run, end) for run, end in ends if end]


def of_each_seed(pool: Sequence[RunData]) -> list[RunData]:
    """Return the first run of each seed: to train twice with one seed, or to copy a run, is no new evidence."""
    seeds: dict[str, RunData] = {}
    for run in pool:
        seeds.setdefault(str(run.directory if seed_of(run) is None else seed_of(run)), run)
    return list(seeds.values())


def tallies_of(first: Sequence[Measured], other: Sequence[Measured]) -> list[Tally]:
    """Return of each task that both sides measured how many measurements of how many have it right, on each side."""
    return [_tally(task) for task in both_of(first, other).values()]


def _tally(task: tuple[list[Any], list[Any]]) -> Tally:
    first, other = ((sum(right for _, right, *_ in of), len(of)) for of in task)
    return first, other


def both_of(first: Sequence[Measured], other: Sequence[Measured]) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return the measurements of each task that both sides measured, on each side."""
    both = set().union(*first) & set().union(*other)
    return {
        task: ([run[task] for run in first if task in run], [run[task] for run in other if task in run])
        for task in sorted(both)
    }


def verdict(found: Mapping[str, Any]) -> str:
    """Say which of two lines is better, whether that may be chance, and whether it can be put down to one setting."""
    label = found["label"]
    fell = " Both are less accurate than before training." if all(found["fell"].values()) else ""
    if reward := found["reward"]:
        fell += f" Mean reward {_rewards(reward)}; {_limits(found, reward)}."
    if found["alike"]:
        return (
            f"{label['runs']} and {label['against']} have the same {amount(found['n'], 'held-out task')} right and "
            f"wrong: there is no difference to test.{fell}"
        )
    gap = points(found["difference"])
    level = "above" if gap.startswith("+") else "below"
    moved = f"{gap[1:]} points {level}" if float(gap) else "as accurate as"
    verb = "are" if len(found["runs"]) > 1 and ", " in label["runs"] else "is"
    said = f"{label['runs']} {verb} {moved} {label['against']}; {_limits(found, found)}.{fell}"
    if len(found["apart"]) < 2:
        return said
    return (
        f"{said} These lines differ in {len(found['apart'])} settings ({named(found['apart'], ', ')}), so the "
        "difference can't be put down to one of them."
    )


def _limits(found: Mapping[str, Any], tested: Mapping[str, Any]) -> str:
    """Say whether seeds or chance can explain a difference: that of the accuracy, `found` itself, or of the reward."""
    label, seeds = found["label"], found["seeds"]
    single = [label[side] for side in SIDES if seeds[side] == 1]
    limit, end = f"one seed of {single[0]}" if single else "", "other seeds may reverse it"
    if found["same_settings"]:
        limit, end = "the settings are the same", "a difference of seeds"
    elif len(single) == len(SIDES):
        limit = "one seed each"
    elif tested["overlap"] is not None:
        few = min(seeds.values())
        limit = f"ranges {'overlap' if tested['overlap'] else 'do not overlap'}"
        if not tested["overlap"] and few < ENOUGH:
            limit, end = f"{limit}, of {few} seeds", "too few to say that others would not reverse it"
        elif not tested["overlap"]:
            end = "unlikely to be chance"
    if tested["p"] > SIGNIFICANT:
        end = "may be chance"
    elif found["contradicted"]:
        end = "not to be believed, for the reward or the agent contradicts itself in "
        end += named(list(found["contradicted"]), ", ")
    return f"{p_text(tested['p'])}, {limit}: {end}"


def _rewards(reward: Mapping[str, Any]) -> str:
    means = " against ".join(f"{reward['mean'][side]:.3f}" for side in SIDES)
    return f"{means}: {reward['difference']:+.3f}"


def told(found: Mapping[str, Any]) -> str:
    """Write the figures of a difference between two lines."""
    shares = " against ".join(f"{percent(found['accuracy'][side])}%" for side in SIDES)
    gap = f"{shares}: {points(found['difference'])} points"
    if found["difference_ci95"] is not None:
        low, high = map(points, found["difference_ci95"])
        gap += f", 95% interval over the tasks {low} to {high}"
    if found["better"] is None:
        text = f"mean accuracy {gap} (exact test {p_text(found['p'])})"
        ranges = " against ".join(f"{percent(low)}–{percent(high)}%" for low, high in map(found["range"].get, SIDES))
        text += f"; ranges of runs {ranges}" if found["overlap"] is not None else ""
    elif not found["better"] + found["worse"]:
        text = figures.UNMOVED
    else:
        text = f"{found['better']} better, {found['worse']} worse (sign test {p_text(found['p'])}), {gap}"
    if reward := found["reward"]:
        low, high = reward["difference_ci95"]
        text += (
            f"; mean reward {_rewards(reward)}, 95% interval over the tasks {low:+.3f} to {high:+.3f} (permutation "
            f"test {p_text(reward['p'])})"
        )
        ranges = " against ".join(f"{low:.3f}–{high:.3f}" for low, high in map(reward["range"].get, SIDES))
        text += f"; ranges of runs {ranges}" if reward["overlap"] is not None else ""
    return (
        f"After training, {named(found['runs'], ', ')} against {named(found['against'], ', ')}, on the same "
        f"{amount(found['n'], 'held-out task')}: {text}."
    )


def told_classes(found: Mapping[str, Any]) -> list[str]:
    """Write the classes of tasks in which two lines differ by most points, the accuracy before and after training."""
    every = found["classes"]
    differ = [of for of in every if of["accuracy"]["runs"] != of["accuracy"]["against"]][:CLASSES]
    if not differ:
        return []
    corrected = f", p corrected for {len(every)} classes" if len(every) > 1 else ""
    lines = [f"By class of task, before → after training, the greatest differences first{corrected}:"]
    for of in differ:
        sides = [
            f"{found['label'][side]} {percent(of['before'][side])} → {percent(of['accuracy'][side])}%" for side in SIDES
        ]
        lines.append(f"{of['class']}, {amount(of['n'], 'task')}: {' against '.join(sides)} ({judged(of['p'])})")
    return lines


def more_seeds(runs: Sequence[RunData], *, each: bool) -> str:
    """Say which settings need more seeds before they can be told apart, with the commands; '' if all have several.

    With them, all settings have equally many seeds, and the same ones where none has others than these.
    """
    groups: dict[int, list[RunData]] = {}
    for run, number in zip(runs, settings_numbers(runs), strict=True):
        groups.setdefault(number, []).append(run)
    seeds = [{str(seed_of(run)) for run in group} for group in groups.values()]
    single = [group[0] for group, of in zip(groups.values(), seeds, strict=True) if len(of) == 1]
    if len(groups) < 2:
        return ""
    if not single:
        return "Without --each, all seeds of a setting are compared together." if each else ""
    few = "One seed each" if len(single) == len(groups) else f"One seed of {named([run.name for run in single], ', ')}"
    n = max(ENOUGH, *map(len, seeds))
    said = f"{few} can't tell settings from seeds. {n} seeds a side can"
    used = sorted(filter(str.isdecimal, set().union(*seeds)), key=int)
    wanted = [*used, *(seed for seed in map(str, range(n + len(used))) if seed not in used)]
    if len(single) > NAMES or any(script_of(run.directory) for run in single):
        listed = ", ".join(sorted(wanted[: max(n, len(used))], key=int))
        return (
            f"{said}: train each with those of the seeds {listed} that it lacks (run.seed), then compare all of them."
        )
    loops: dict[str, list[str]] = {}
    every: list[Path] = []
    for group, of in zip(groups.values(), seeds, strict=True):
        every += [run.directory for run in group]
        if new := sorted([seed for seed in wanted if seed not in of][: n - len(of)], key=int):
            run, name = group[0], stem(group[0].name, seed_of(group[0]))
            config = shlex.quote(str(run.directory / "config.toml"))
            train = f"    agentrig train {config} run.seed=$seed run.name={shlex.quote(name)}-$seed"
            loops.setdefault(" ".join(new), []).append(train)
            every += [run.directory.parent / f"{name}-{seed}" for seed in new]
    lines = [line for new, trains in loops.items() for line in (f"  for seed in {new}; do", *trains, "  done")]
    return "\n".join([f"{said}:", *lines, f"  agentrig compare {shlex.join(map(str, every))}"])

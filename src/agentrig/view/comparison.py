"""Runs in one table: how each learned, from where, held-out accuracy against a common start, and what it took.

Finished runs that differ only in their seed are one line, with the mean, the least and the greatest of each figure. A
run that goes on, or was stopped, has a line of its own: it has had another training than the finished ones.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import takewhile
from pathlib import Path
from typing import Any

import attrs
import orjson

from agentrig.errors import ConfigError
from agentrig.figures import (
    NOTHING,
    count,
    duration,
    judged,
    mean,
    number,
    percent,
    plain,
    points,
    sign_test,
    stratified_test,
    wilson,
)
from agentrig.text import amount, cut
from agentrig.traces import LLM_CALL, items, mapping, usage
from agentrig.view import figures, table, tables
from agentrig.view.between import (
    SIDES,
    accuracy_of,
    between,
    contradictions,
    ends_of,
    more_seeds,
    of_each_seed,
    reward_of,
    tallies_of,
    tasks_of,
    told,
    told_classes,
    verdict,
)
from agentrig.view.causes.evidence import Evidence, both_ends, changed, gain_of, measured_of, unpaired
from agentrig.view.prices import Prices, priced
from agentrig.view.reading import RolloutFile, RunData, dig, read_run, rollout_rows
from agentrig.view.related import CHECKS, ancestors_of, files_apart, named, seed_of, start_of, without_seed

OWN = ""
"""The run's own model, among the models that answered its calls: the name that `agentrig.traces.usage` gives it."""

COUNTS = ("id", "calls", "triplets", "prompt_tokens", "response_tokens")
"""The columns that count a rollout's calls, and the tokens of those that the adapter keeps."""

NOT_COMPARED: Mapping[str, str] = {
    "running": "it still runs: it is measured at its end",
    "unfinished": "it was not measured after training: it did not finish",
    "not-measured": "not measured after training",
    "other-tasks": "measured on other held-out tasks than {start}",
    "tasks-unknown": "the manifest does not say which tasks are held out",
    "other-reward": "another reward judged it",
    "reward-unknown": "config.toml does not say which reward judged it, or the run with the common start",
    "other-start": "another start",
    "start-not-measured": "the start was not measured",
    "unreadable": "held-out rollouts cannot be read",
}
"""Why a run is not compared with the common start, by reason."""

SHARE_START = (None, "running", "not-measured", "unfinished")
"""The reasons of those that begin at the common start: None of those that are compared with it."""

NOTE = (
    "Accuracy is on held-out tasks, with 95% intervals. Calls and tokens are those of all rollouts, measurements too, "
    "and not those of a judge or of a reflecting model."
)
POOLED = (
    "A line of several runs, which differ only in their seed, has means, and the least and the greatest. Its interval "
    "is that of the mean over the held-out tasks."
)
FEW_RUNS = 5
"""Of fewer runs, the least and the greatest are weak evidence: another one is outside with probability 2 / (n + 1)."""

FEW = "A range of {} is weak evidence: another seed lies outside it with probability {}."
REPEATED = "Runs of the same settings and the same seed are repeats: the first of each seed is tested."
TESTED = "p: chance among tasks, for these runs. It does not cover other seeds."
OWN_GAIN = "A significant gain is one against the start; it does not say that a line is better than another."
MANY_TESTS = "Without any difference, about one of 20 such tests is significant by chance."
UNTESTED = "Against a start only accuracy is tested, not the mean reward that {} trained on: agentrig why RUN tests it."
CHAINED = "What a run spent leaves out the runs that it came from."

ENDS = ("before", "after")

SETTINGS = 4
"""Settings that a line names; more are counted."""

LONGEST_SETTING = 40
"""Characters of a setting's value in a line."""

OWN_KEYS = ("reward.", "credit.")
"""The components whose settings a line has also where other runs use another component."""

TOLD = frozenset(
    ("run.name", "run.seed", "run.directory", "algorithm.use", "algorithm.model", "credit.use", "server.model")
)
"""Settings that a line tells in other words: the run's name and seed, its method and start."""


def usage_of(file: RolloutFile) -> Counter[tuple[str, str]]:
    """Count a file's rollouts, and by model the calls and their tokens.

    The calls that the adapter keeps are counted in columns. For others, the spans of their rollouts are read.

    Returns:
        `(OWN, "rollouts")`, and by model `calls`, `prompt`, `response`, and `uncounted`: calls whose tokens nobody
        counted.
    """
    found: Counter[tuple[str, str]] = Counter()
    more = []
    for row in rollout_rows([file], COUNTS):
        found[OWN, "rollouts"] += 1
        if row["calls"] == row["triplets"]:
            found.update(_kept(row))
        else:
            more.append(row["id"])
    for row in rollout_rows([file], (*COUNTS, "spans"), ids=more, decode=False) if more else ():
        try:
            spans = map(mapping, items(orjson.loads(row["spans"])))
            calls = [span for span in spans if span.get("name") == LLM_CALL and not span.get("error")]
        except ValueError:
            calls = []
        if len(calls) < (row["calls"] or 0):  # damaged, or removed
            found.update(_kept(row))
            continue
        found.update(usage(mapping(call.get("attributes")) for call in calls))
    return found


def _kept(row: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """Return a rollout's calls, and the tokens of those that the adapter keeps."""
    calls = row["calls"] or 0
    uncounted = max(0, calls - (row["triplets"] or 0))
    tokens = {(OWN, part): row[f"{part}_tokens"] or 0 for part in ("prompt", "response")}
    return {(OWN, "calls"): calls, (OWN, "uncounted"): uncounted, **tokens}


@attrs.frozen(kw_only=True)
class Comparison:
    """Some runs in one table.

    Attributes:
        rows: One dict of JSON values for each run.
        lines: What the table shows, as JSON values: a line for each run, or for finished ones that differ only in the
            seed.
        start: The run whose measurement before training is the common start, its `accuracy` and its number of tasks.
        between: How each other line's held-out answers after training differ from those of the first line; see
            `agentrig.view.between`.
        advice: What it takes to tell settings from seeds, if there is one seed of some; else empty.
        rewards: What is said of each other line with another reward than the first line's, instead; see `_rewards`.
        graded: The runs whose held-out rewards say more than right and wrong do.
        files: What is said of each other line with other plugin files than the first line's; see `_files`.
        prices: The price table, if there is one.
    """

    rows: Sequence[Mapping[str, Any]]
    lines: Sequence[Mapping[str, Any]]
    start: Mapping[str, Any]
    between: Sequence[Mapping[str, Any]] = ()
    rewards: Sequence[str] = ()
    files: Sequence[str] = ()
    graded: Sequence[str] = ()
    advice: str = ""
    prices: Prices | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return what `agentrig compare --json` prints."""
        return {
            "common_start": dict(self.start),
            "lines": list(self.lines),
            "between": [{**found, "verdict": verdict(found)} for found in self.between],
            "rewards": list(self.rewards),
            "files": list(self.files),
            "runs": list(self.rows),
        }

    @property
    def has_common_start(self) -> bool:
        """Whether several of the runs begin at one start."""
        return sum(row["against_start"]["reason"] in SHARE_START for row in self.rows) > 1

    def table(self) -> tables.Table:
        """Return the lines as a table of text, with several lines of text in a cell."""
        common = self.has_common_start
        against = "Against the common start" if common else "Against its own start"
        heads = [("Run", "head"), ("Held out, %", "lines"), (against, "lines"), ("Spent", "lines")]
        others = [line["differs"] for line in self.lines]
        start = self.start["run"]
        rows = [
            [_run(line, others), _accuracy(line), _against(line, start, common=common), _spent(line)]
            for line in self.lines
        ]
        notes = [*filter(None, [tables.parts_tested(self.lines)]), NOTE]
        if common and self.start["accuracy"] is not None:
            begun = f"{percent(self.start['accuracy'])}% of {amount(self.start['n'], 'task')}"
            notes.insert(0, f"The common start is {self.start['start']}, as {self.start['run']} measured it: {begun}.")
        if len(self.lines) < len(self.rows):
            notes.append(POOLED)
        if any(len(set(line["seeds"])) < len(line["seeds"]) for line in self.lines):
            notes.append(REPEATED)
        if any(len(line["chain"]) > 1 for line in self.lines):
            notes.append(CHAINED)
        if self.prices is not None:
            currency = f", {self.prices.currency}" if self.prices.currency else ""
            heads.append((f"Cost{currency}", "lines"))
            rows = [[*row, _cost(line)] for row, line in zip(rows, self.lines, strict=True)]
            lacking = sorted({what for row in self.rows for what in row["cost"]["no_price"]})
            notes += [f"No price for: {'; '.join(lacking)}."] if lacking else []
        tests = [line for found in self.between for line in (told(found), *told_classes(found))]
        several = len(self.between) + sum(found["reward"] is not None for found in self.between) > 1
        from_start = any(line["p"] is not None or line["own_start"] for line in self.lines)
        if tests or from_start:
            tests.append(f"{TESTED} {MANY_TESTS}" if several else TESTED)
            tests += [OWN_GAIN] if len(self.lines) > 1 else []
            tests += [UNTESTED.format(named(self.graded, ", "))] if self.graded and from_start else []
        of = [
            " against ".join(found["label"][side] for side in SIDES)
            for found in self.between
            if figures.overlap(found["ci95"]["runs"], found["ci95"]["against"], found["p"])
        ]
        moved = [
            named(line["runs"], ", ")
            for line in self.lines
            if figures.overlap(line["before_ci95"], line["after_ci95"], line["p"])
        ]
        of += [f"{'; '.join(moved)} against the start"] if moved else []
        tests += [figures.PAIRED.format(f" of {which}") for which in of]
        sizes = sorted({len(set(line["seeds"])) for line in self.lines})
        tests += [FEW.format(amount(n, "run"), Fraction(2, n + 1)) for n in sizes if 1 < n < FEW_RUNS]
        held = [*self.between, *self.lines, *filter(None, (line["own_start"] for line in self.lines))]
        doubted = {name: text for each in held for name, text in each["contradicted"].items()}
        tests += [f"{name}: {text}." for name, text in doubted.items()]
        note = "\n".join([*tests, *self.rewards, " ".join(notes)])
        lead = [*map(verdict, self.between), *self.files, *self._labels(), *filter(None, [self.advice])]
        return tables.Table(title="Comparison", heads=heads, rows=rows, note=note, lead=lead)

    def _labels(self) -> list[str]:
        """Say of which runs held-out tasks were labels of the warm-up that made the starting model."""
        of: dict[str, list[str]] = {}
        for row in self.rows:
            of.setdefault(figures.held_out_labels(*row["held_out_labels"]), []).append(row["run"])
        return [f"{named(runs, ', ')}: {said}" for said, runs in of.items() if said]

    def text(self, *, width: int | None = None) -> str:
        """Return the table and its note for a terminal; `width` is in characters, None for the terminal's own."""
        return table.text_of(self.table(), width=width)


def compare(run_dirs: Sequence[Path], *, prices: Prices | None = None, each: bool = False) -> Comparison:
    """Compare the runs of these directories, as `compared` does.

    Raises:
        AgentrigError: One of them is no run directory, or is named twice.
    """
    return compared([read_run(Path(d)) for d in run_dirs], prices=prices, each=each)


def compared(
    runs: Sequence[RunData],
    *,
    prices: Prices | None = None,
    each: bool = False,
) -> Comparison:
    """Compare runs; with `each`, finished runs that differ only in their seed have a line each, too.

    Their rows also have what `tables.held_out` returns.

    Raises:
        ConfigError: One of them is named twice.
    """
    twice = [place for place, n in Counter(run.directory.resolve() for run in runs).items() if n > 1]
    if twice:
        raise ConfigError(f"{twice[0]} is named twice: name each run once")
    known = {run.directory.resolve(): run for run in runs}
    reference = _reference(runs, known)
    rows, own_starts = [], []
    for run in runs:
        missing: list[str] = []
        row = (
            table.row_of(run)
            | {"accuracy": accuracy_of(run)}
            | _about(run, known)
            | _usage(run, known)
            | tables.held_out(run)
        )
        row["against_start"] = _judged(run, reference, known, missing)
        own = _measured_start(run, runs, known)
        own_starts.append(own)
        apart = row["against_start"]["reason"] is not None and own is not reference
        against = _judged(run, own, known, missing) if apart else {"reason": ""}
        row["against_own_start"] = against if against["reason"] is None else None
        row |= {"cost": priced(row, prices)} if prices is not None else {}
        rows.append(row | {"missing": list(dict.fromkeys([*row["missing"], *run.damage, *missing]))})
    for row, (settings, unset) in zip(rows, _apart(runs), strict=True):
        row |= {"differs": settings, "unset": unset}
    pools: dict[str, list[int]] = {}
    for i, (run, row) in enumerate(zip(runs, rows, strict=True)):
        alone = each or row["status"] != "finished"
        pools.setdefault(str(run.directory) if alone else without_seed(run, known), []).append(i)
    begun = figures.held_out(reference)["accuracy"]
    n = int(number(dig(reference.progress, "before", "n")) or begun["n"])
    start = {"run": reference.name, "accuracy": begun["before"], "n": n, "start": start_of(reference).name}
    lines = [[runs[i] for i in pool] for pool in pools.values()]
    told_lines = []
    for pool, line in zip(pools.values(), lines, strict=True):
        some = [rows[i] for i in pool]
        changes = _changes(line, [reference] * len(line), [row["against_start"] for row in some])
        from_own = _changes(line, [own_starts[i] for i in pool], [row["against_own_start"] for row in some])
        told_lines.append(_line(some) | changes | {"own_start": from_own if from_own["compared"] else None})
    differences = between(lines, known)
    unlike = [found for found in differences if found["reward"] or not found["alike"]]
    tested = {name for found in unlike for side in SIDES for name in found[side]}
    return Comparison(
        rows=rows,
        lines=told_lines,
        start=start,
        between=differences,
        rewards=_rewards(lines),
        files=_files(lines),
        graded=[run.name for run in runs if Evidence.of_ends(run).mean_reward],
        advice=more_seeds([run for run in runs if run.name in tested], each=each) if tested else "",
        prices=prices,
    )


def _apart(runs: Sequence[RunData]) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Return of each run its values of the settings in which the runs differ, and of those without one what is said.

    First come components, then the keys of reward and credit, then those of the algorithm; `CHECKS` come last. Left
    out are `TOLD`, and the settings of components that only some of the runs use, but for `OWN_KEYS`.
    """
    several = [figures.settings_of(run) for run in runs]
    every = dict.fromkeys(key for settings in several for key in settings if key not in TOLD)

    def differs(key: str) -> bool:
        known = [settings for settings in several if key in settings]
        lacking = [figures.unset(key, settings, several) for settings in several if key not in settings]
        told = "not set" in lacking or (lacking and key.startswith(OWN_KEYS))
        return bool(told) or any(settings[key] != known[0][key] for settings in known)

    def place(key: str) -> tuple[bool, ...]:
        return key in CHECKS, not key.endswith(".use"), not key.startswith(OWN_KEYS), not key.startswith("algorithm.")

    apart = sorted(filter(differs, every), key=place)
    return [
        (
            {key: settings[key] for key in apart if key in settings},
            {
                key: why
                for key in apart
                # what does not apply to a component needs no word where the lines name the components
                if key not in settings and (why := figures.unset(key, settings, several)) == "not set"
            },
        )
        for settings in several
    ]


def _rewards(pools: Sequence[Sequence[RunData]]) -> list[str]:
    """Say of each line with another reward than the first line's that they are not compared, and how they can be."""
    first, *others = pools
    found = []
    for pool in others:
        names = [str(dig(each[0].config, "reward", "use") or "?") for each in (first, pool)]
        other_tasks = tasks_of(pool[0]) != tasks_of(first[0])  # then no reward makes them comparable
        if other_tasks or reward_of(pool[0]) == reward_of(first[0]) or "?" in names:
            continue
        runs = [named([run.name for run in each], ", ") for each in (pool, first)]
        judges = " and ".join(names[::-1]) if names[0] != names[1] else f"{names[0]} with other settings"
        told, other = (
            {f"reward.{key}": value for key, value in mapping(run.config.get("reward")).items() if key != "use"}
            | {"run.correct_at": run.setting("run", "correct_at")}
            for run in (first[0], pool[0])
        )
        apart = [
            f"{key}={orjson.dumps(value).decode()}"
            for key, value in told.items()
            if value not in (None, other.get(key))
        ]
        words = shlex.join(["--reward", names[0], *apart])
        found.append(
            f"After training, {runs[0]} and {runs[1]} are not compared: different rewards judged them ({judges}). "
            f"Measure both with one: agentrig eval RUN/config.toml {words} --checkpoint RUN."
        )
    return found


def _files(pools: Sequence[Sequence[RunData]]) -> list[str]:
    """Say of each line which plugin files differ from the first line's, and what another reward's file means."""
    first, *others = pools
    found = []
    for pool in others:
        if apart := files_apart(first[0], pool[0]):
            runs = [named([run.name for run in each], ", ") for each in (pool, first)]
            said = f"{runs[0]} and {runs[1]} differ in {named(apart, ' and ')}, by SHA-256."
            if any("reward" in file for file in apart):
                said += (
                    " If the reward is another one, their accuracies can't be compared: measure both with one, "
                    "agentrig eval RUN/config.toml --checkpoint RUN."
                )
            found.append(said)
    return found


def _about(run: RunData, known: dict[Path, RunData]) -> dict[str, Any]:
    methods = []
    for each in reversed(ancestors_of(run, known)):
        algorithm, credit = (
            dig(each.manifest, "components", kind, "name") or each.setting(kind, "use")
            for kind in ("algorithm", "credit")
        )
        algorithm = str(algorithm or "?")
        methods.append(algorithm if credit in (None, "own") else f"{algorithm}, credit {credit}")
    return {
        "method": algorithm,
        "credit": credit,
        "chain": methods,
        "start": start_of(run).name,
        "seed": seed_of(run),
        "machine": figures.machine(run) or "an unknown machine",
        "held_out_labels": figures.labels(run.manifest, "report"),
    }


def _usage(run: RunData, known: dict[Path, RunData]) -> dict[str, Any]:
    """Return a run's rollouts, calls and tokens; `at_least` where some calls were not counted.

    Demonstrations that were learned are stored as training rollouts; they are counted apart, for no model answered.
    """
    found: Counter[tuple[str, str]] = Counter()
    demonstrations = 0
    for file in run.files:
        counted = run.seen.of(file, usage_of)
        if file.mode == "train" and run.setting("algorithm", "demonstrations"):
            demonstrations += counted[OWN, "rollouts"]
        else:
            found.update(counted)
    stated = table.rollout_counts(run)["rollouts"]
    rollouts = None if stated is None else stated - demonstrations
    lost = bool(run.damage) or found[OWN, "rollouts"] < (rollouts or 0)
    by_model = usage_by_name(found, start_of(ancestors_of(run, known)[-1]).name, lost=lost)
    total = {key: sum(of[key] for of in by_model.values()) for key in ("calls", "prompt_tokens", "response_tokens")}
    wall = figures.hours(run)
    return {
        "rollouts": rollouts,
        "demonstrations": demonstrations,
        "llm_calls": total["calls"] if run.files else None,
        "tokens": {part: total[f"{part}_tokens"] if run.files else None for part in ("prompt", "response")},
        "at_least": any(of["at_least"] for of in by_model.values()),
        "usage": by_model,
        "wall_s": None if wall is None else 3600 * wall,
    }


def usage_by_name(found: Mapping[tuple[str, str], float], own: str, *, lost: bool = False) -> dict[str, Any]:
    """Return what `agentrig.traces.usage` counted by the model's name, as `agentrig.view.prices.priced` takes it.

    `lost` says that there were more calls than these.
    """
    own = f"{own}, the run's own" if any(model == own for model, _ in found) else own
    return {
        model or own: {
            "calls": found.get((model, "calls"), 0),
            "prompt_tokens": found.get((model, "prompt"), 0),
            "response_tokens": found.get((model, "response"), 0),
            "uncounted": found.get((model, "uncounted"), 0),
            "at_least": lost or found.get((model, "uncounted"), 0) > 0,
            "own": model == OWN,
        }
        for model in sorted({model for model, _ in found})
    }


def _reference(runs: Sequence[RunData], known: dict[Path, RunData]) -> RunData:
    """Return the run whose measurement before training is the common start: most runs share it.

    Runs that have not measured their end share it too; of several such starts, most runs can be compared with it.
    """

    def compared(start: RunData) -> tuple[int, int]:
        reasons = [_reason(run, start, known) for run in runs]
        return sum(reason in SHARE_START for reason in reasons), reasons.count(None)

    return max((_measured_start(run, runs, known) for run in runs), key=compared)


def _measured_start(first: RunData, runs: Sequence[RunData], known: dict[Path, RunData]) -> RunData:
    """Return the run that measured the earliest start in a run's line, on its held-out tasks and with its reward."""
    judged = tasks_of(first), reward_of(first)
    for start in map(start_of, reversed(ancestors_of(first, known))):
        for run in runs:
            measured = figures.held_out(run)["accuracy"]["before"] is not None
            if measured and start_of(run).id == start.id and (tasks_of(run), reward_of(run)) == judged:
                return run
    return first


def _reason(run: RunData, reference: RunData, known: dict[Path, RunData]) -> str | None:
    """Return why a run cannot be compared with the common start, a key of `NOT_COMPARED`; None if it can."""
    if tasks_of(run) is None:
        return "tasks-unknown"
    accuracy = accuracy_of(run)
    if tasks_of(run) != tasks_of(reference):
        return "start-not-measured" if accuracy["before"] is None else "other-tasks"
    if reward_of(run) != reward_of(reference):
        return "other-reward" if "reward" in run.config and "reward" in reference.config else "reward-unknown"
    if start_of(reference).id not in {start_of(each).id for each in ancestors_of(run, known)}:
        return "other-start"
    if figures.held_out(reference)["accuracy"]["before"] is None:
        return "start-not-measured"
    if accuracy["after"] is not None:
        return None
    return {"running": "running", "finished": "not-measured"}.get(figures.status(run), "unfinished")


def _judged(
    run: RunData,
    reference: RunData,
    known: dict[Path, RunData],
    missing: list[str],
) -> dict[str, Any]:
    """Return how a run's held-out answers after training differ from those that another run, or it, began with.

    Returns:
        How many tasks are `better` and `worse`, of `n` scored in both, how many are `unpaired`, scored in one only, the
        `gain` on the `n`, and the two-sided `p` of the exact sign test; or the `reason`, a key of
        `NOT_COMPARED`, why they are not compared.
    """
    found: dict[str, Any] = {"run": reference.name, "reason": None}
    found |= dict.fromkeys(("gain", "better", "worse", "n", "unpaired", "p"))
    if reason := _reason(run, reference, known):
        return found | {"reason": reason}
    begun, ended = reference.of_mode("report")[:1], run.of_mode("report")[1:][-1:]
    sides = [each.seen.of(file, measured_of) for each, files in ((reference, begun), (run, ended)) for file in files]
    if run is not reference:
        whose = f"not compared with the common start, because of {reference.name}: "
        missing += [f"{whose}{text}" for file in begun for text in file.damage]
    gain = gain_of(*sides) if len(sides) == 2 else None
    if gain is None:
        return found | {"reason": "unreadable"}
    better, worse, _, n = changed(*sides)
    tested = {"better": better, "worse": worse, "n": n, "unpaired": unpaired(*sides), "p": sign_test(better, worse)}
    return found | {"gain": gain, **tested}


def _of(values: Iterable[float | None]) -> dict[str, Any] | None:
    """Return mean, least and greatest of the values that are known, and how many are not; None if none is known."""
    every = list(values)
    known = [value for value in every if value is not None]
    if not known:
        return None
    return {"mean": mean(known), "least": min(known), "greatest": max(known), "unknown": len(every) - len(known)}


def _line(pool: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a line of the table, from the rows of one run or of some that differ only in their seed."""
    found: dict[str, Any] = {
        "runs": [row["run"] for row in pool],
        "seeds": [row["seed"] for row in pool],
        "status": dict(Counter(row["status"] for row in pool)),
        "method": pool[0]["method"],
        "chain": pool[0]["chain"],
        "credit": pool[0]["credit"],
        "differs": pool[0]["differs"],
        "unset": pool[0]["unset"],
        "starts": list(dict.fromkeys(row["start"] for row in pool)),
        "machines": list(dict.fromkeys(row["machine"] for row in pool)),
        "n": max(row["accuracy"]["n"] for row in pool),
        **_parts(pool),
    }
    for end in ENDS:
        found[end] = _of(row["accuracy"][end] for row in pool)
        interval = pool[0]["accuracy"][f"{end}_ci95"]
        if len(pool) > 1 and found[end]:
            interval = wilson(found[end]["mean"] * found["n"], found["n"])
        found[f"{end}_ci95"] = interval
    found["earlier_end"] = pool[0]["accuracy"].get("earlier_end")
    found["reasons"] = [row["against_start"]["reason"] for row in pool]
    for key in ("rollouts", "demonstrations", "llm_calls"):
        found[key] = _of(row[key] for row in pool)
    for part in ("prompt", "response"):
        found[f"{part}_tokens"] = _of(row["tokens"][part] for row in pool)
    found["at_least"] = any(row["at_least"] for row in pool)
    found["wall_s"] = _of(row["wall_s"] for row in pool)
    if "cost" in pool[0]:
        found["cost"] = {key: _of(row["cost"][key] for row in pool) for key in ("tokens", "machine", "total")}
    return found


def _parts(pool: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the held-out `components` of the reward, the mean over some runs, and the scores of `calls` of all."""
    names = dict.fromkeys(name for row in pool for name in row["components"])
    known = {end: {name: [dig(row["components"], name, end) for row in pool] for name in names} for end in ENDS}
    called = {end: [row["calls"][end] for row in pool if row["calls"][end]] for end in ENDS}
    return {
        "components": {
            name: {
                **{end: mean([value for value in known[end][name] if value is not None]) for end in ENDS},
                "p": dig(pool[0]["components"], name, "p") if len(pool) == 1 else None,
            }
            for name in names
        },
        "calls": {
            end: {key: sum(each[key] for each in of) for key in ("wrong", "scored")} if of else {}
            for end, of in called.items()
        },
    }


def _changes(
    pool: Sequence[RunData], starts: Sequence[RunData], against: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any]:
    """Return how the runs of a line changed from their starts, from what `_judged` returned of each, if anything.

    Returns:
        Mean, least and greatest `gain`, `better` and `worse` of the runs, and of the tasks that are `paired` and
        `unpaired`, how many runs are `compared`, the `p` of all of these together, by `stratified_test`, and if that is
        significant the `contradicted` runs; see `between`. A start that several of them share counts once, as one run,
        and of runs of one seed only the first is compared.
    """
    known = [each for each in against if each]
    keys = {key: key for key in ("gain", "better", "worse", "unpaired")} | {"paired": "n"}
    found: dict[str, Any] = {key: _of(each[of] for each in known) for key, of in keys.items()}
    tested = [
        (run, start, each["p"])
        for run, start, each in zip(pool, starts, against, strict=True)
        if each and each["p"] is not None
    ]
    first = {run.directory for run in of_each_seed([run for run, _, _ in tested])}
    tested = [each for each in tested if each[0].directory in first]
    p = tested[0][2] if tested else None
    if len(tested) > 1:
        after = [end for _, end in ends_of([run for run, _, _ in tested])]
        shared = {start.directory: start for _, start, _ in tested}
        before = [start.seen.of(start.of_mode("report")[0], measured_of) for start in shared.values()]
        p = stratified_test(tallies_of(after, before))
    contradicted = {} if p is None else contradictions([run for run, _, _ in tested], p)
    return found | {"compared": len(tested), "p": p, "contradicted": contradicted}


def _spread(of: Mapping[str, Any] | None, text: Callable[[float], str]) -> str:
    """Write a figure of a line: its mean, and for several runs in brackets the least and the greatest."""
    if of is None:
        return NOTHING
    least, greatest = text(of["least"]), text(of["greatest"])
    spread = f" ({least}–{greatest})" if least != greatest else ""
    unknown = f", {of['unknown']} unknown" if of["unknown"] else ""
    return f"{text(of['mean'])}{spread}{unknown}"


def _run(line: Mapping[str, Any], every: Sequence[Mapping[str, Any]]) -> str:
    """Name the runs of a line, their method, settings, start and seeds, and how they ended if they did not finish.

    `every` has the settings of each line.
    """
    starts, seeds = line["starts"], [str(seed) for seed in line["seeds"]]
    told = [named(line["runs"], "\n"), " → ".join(line["chain"]), *_settings(line, every)]
    told.append(f"from {starts[0]}{f' and {len(starts) - 1} more' if len(starts) > 1 else ''}")
    told.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}")
    return "\n".join([*told, *(status for status in line["status"] if status != "finished")])


def _settings(line: Mapping[str, Any], every: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the first of the settings in which a line differs from others, by the last part of their keys."""
    differs, unset = line["differs"], line["unset"]
    parts = Counter(key.rpartition(".")[2] for key in [*differs, *unset])

    def name(key: str) -> str:
        part = key.rpartition(".")[2]
        return part if parts[part] == 1 and part != "use" else key

    told = [
        f"{name(key)} {_value(key, value, [settings[key] for settings in every if key in settings])}"
        for key, value in [*differs.items()][:SETTINGS]
    ]
    more = len(differs) - SETTINGS
    told += [f"and {amount(more, 'other setting')} (compare --json has all)"] if more > 0 else []
    for why in dict.fromkeys(unset.values()):
        told.append(f"{named([name(key) for key in unset if unset[key] == why], ', ')}: {why}")
    return [", ".join(told)] if told else []


def _value(key: str, value: Any, every: Sequence[Any]) -> str:
    """Write a setting's value; of a long one only what differs from the values of `every` line."""
    if value == []:
        return "none"
    text = value if value and isinstance(value, str) else figures.setting_text(key, value)
    lists = [other for other in every if isinstance(other, list)] if isinstance(value, list) else []
    if max(map(len, [text, *(figures.setting_text(key, other) for other in lists)])) <= LONGEST_SETTING:
        return text
    if not lists:
        return cut(_apart_from(text, [str(other) for other in every if other != value]), LONGEST_SETTING)
    differing = [entry for of in lists for entry in of if any(entry not in other for other in lists)]
    own = [entry for entry in value if entry in differing]
    told = [_apart_from(str(entry), [str(other) for other in differing if other != entry]) for entry in own]
    return cut(", ".join(told), LONGEST_SETTING) if told else "no other"


def _apart_from(text: str, others: Sequence[str]) -> str:
    """Return the part of a text that tells it from others: of a path its last names, else from where they differ."""
    names = text.split("/") if " " not in text else []
    for n in range(1, len(names)):
        end = "/".join(names[-n:])
        if end and not any(f"/{other}".endswith(f"/{end}") for other in others):
            return end
    pairs = [zip(text, other, strict=False) for other in others]
    start = min((sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], each)) for each in pairs), default=0)
    return f"…{text[start:]}" if start else text


def _accuracy(line: Mapping[str, Any]) -> str:
    ends = [line["before"], line["after"]]
    if not any(ends):
        return "not measured"
    told = [[percent(of and of["mean"]) for of in ends], [table.interval(line[f"{end}_ci95"]) for end in ENDS]]
    if any(of and of["least"] != of["greatest"] for of in ends):
        told.append([table.interval(of and (of["least"], of["greatest"])) for of in ends])
    lines = [" → ".join(each) for each in told]
    names = ["", "95%: ", "runs: "]
    unknown = [
        f"{of['unknown']} not measured {end}" for end, of in zip(ENDS, ends, strict=True) if of and of["unknown"]
    ]
    unknown += [f"{percent(line['earlier_end'])} before it was resumed"] if line["earlier_end"] is not None else []
    parts = [f"{name}: {' → '.join(cells)}{said and f' ({said})'}" for name, cells, said in tables.reward_parts(line)]
    return "\n".join(
        [*(f"{name}{text}" for name, text in zip(names, lines, strict=False)), *unknown, f"n = {line['n']}", *parts]
    )


def _against(line: Mapping[str, Any], start: str, *, common: bool) -> str:
    """Tell a line's change against the common start, or why there is none and the change against its own start."""
    told = [] if line["gain"] is None else _changed(line)
    for reason, n in Counter(filter(None, line["reasons"])).items():
        some = f"{n} of {len(line['runs'])} runs: " if n < len(line["runs"]) else ""
        told.append(f"{some}{NOT_COMPARED[reason].format(start=start)}")
    unmeasured = "running" if "running" in line["status"] else "unfinished"
    if not (line["after"] or "finished" in line["status"] or unmeasured in line["reasons"]):
        told.append(NOT_COMPARED[unmeasured])
    if line["own_start"]:
        told += [*(["against its own start:"] if common else []), *_changed(line["own_start"])]
    return "\n".join(told)


def _changed(against: Mapping[str, Any]) -> list[str]:
    if against["compared"] == 1:
        tested = figures.chance(int(against["better"]["mean"]), int(against["worse"]["mean"]))
    else:
        tested = f"exact test {judged(against['p'])}"
    if against["contradicted"]:
        tested = tested.replace("significant", "not to be believed: the reward or the agent contradicts itself")
    if tested.endswith("significant"):
        tested = tested.replace("significant", f"a significant {'gain' if against['gain']['mean'] > 0 else 'loss'}")
    compared = {key: {**against[key], "unknown": 0} for key in ("better", "worse")}  # the reasons are told
    split = ", ".join(f"{_spread(compared[key], lambda n: f'{n:.3g}')} {key}" for key in ("better", "worse"))
    over = both_ends(against["paired"]["mean"], against["unpaired"]["greatest"])
    gain, least, greatest = (points(against["gain"][key]) for key in ("mean", "least", "greatest"))
    runs = f" (from {least} to {greatest} in {amount(against['compared'], 'run')})" if least != greatest else ""
    return [f"{gain} points{over}{runs}", split, tested]


def _spent(line: Mapping[str, Any]) -> str:
    learned, so_far = line["demonstrations"], " so far" if "running" in line["status"] else ""
    return "\n".join(
        [
            *([f"{_spread(learned, lambda n: count(round(n)))} demonstrations"] if learned and learned["mean"] else []),
            f"{_spread(line['rollouts'], lambda n: count(round(n)))} rollouts",
            f"{_least(line, 'llm_calls')} LLM calls",
            *(f"{_least(line, f'{part}_tokens')} {part} tokens" for part in ("prompt", "response")),
            f"{_spread(line['wall_s'], duration)}{so_far} on {', '.join(line['machines'])}",
        ]
    )


def _least(line: Mapping[str, Any], key: str) -> str:
    """Write a count; after a `≥` where some calls were not counted."""
    at_least = "≥ " if line["at_least"] and line[key] else ""
    return f"{at_least}{_spread(line[key], lambda n: count(round(n)))}"


def _cost(line: Mapping[str, Any]) -> str:
    """Write what a line cost; what has no price is left out."""
    cost = line["cost"]
    told = [_spread(cost["total"], money)] if cost["total"] else []
    return "\n".join([*told, *(f"{key} {_spread(cost[key], money)}" for key in ("tokens", "machine") if cost[key])])


def money(amount: float) -> str:
    """Return an amount of money with two decimals, or with three digits below 0.1."""
    return plain(amount, 2) if amount >= 0.1 or amount == 0 else f"{amount:.3g}"

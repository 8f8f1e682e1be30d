"""The auditor in a run: which steps it looks at, and what a finding does."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any

import attrs
import cattrs

from agentrig.agents import Outcome
from agentrig.audit.record import Row, Sources
from agentrig.audit.sketch import FILE, Sketch
from agentrig.audit.verdicts import FIRST, GIVEN, LINKS, NO_WEIGHTS, SHARE, UNSEEN, Audited, CannotLook
from agentrig.delivery.digests import fingerprint
from agentrig.errors import AgentrigError, ConfigError, PluginError, RunFileError, RunStopped, place_of
from agentrig.figures import unaudited_s
from agentrig.plan import RESUME, Plan, resolve, script_of, to_toml
from agentrig.processes.put_back import put_back, torch_put_back
from agentrig.rewards import Score
from agentrig.run.damage import read_object, reading, writing
from agentrig.run.files import write_whole
from agentrig.runners.scorer import Scorer
from agentrig.tasks import ROLES, Task
from agentrig.text import amount, words_of
from agentrig.traces import Span, Trace, value_digest

if TYPE_CHECKING:
    from agentrig.audit.auditor import Auditor

log = logging.getLogger(__name__)

LEAST_S = 10.0
"""Seconds of work that the gradient of an audited step may take, or as long as the step took if that is longer."""

OWED_S, OWED = 30.0, 0.1
"""What the gradient may take at the end of a run that looked at none: seconds, or a share of the run's time."""

VERDICTS = "audit/verdicts-{:05d}.json"

PLAIN = cattrs.Converter(detailed_validation=False)
"""Reads verdicts back; of what is damaged in a file, its error says the first."""

CHANCE = 0.5
"""How likely a step is audited that could be: nothing that happens every so many steps stays out of sight."""


class Auditing:
    """Audits the first steps of a run, and then as many as a share of its time allows.

    Args:
        rebuilt: The run's task set and reward, built once more.
        first: The first step, of a resumed run too.
        tasks: Role to the tasks that the run uses; each is compared with the task set's own.
        demonstrations: Whether the run learns demonstrations.

    Attributes:
        wall_s: Seconds that the gradients of the first steps may take together; a warm-up has so many to train in.
    """

    def __init__(
        self,
        run: Path,
        rebuilt: Rebuilt,
        *,
        first: int = 1,
        on: bool = True,
        tasks: Mapping[str, Sequence[Task]] | None = None,
        demonstrations: bool = False,
    ) -> None:
        self._run, self._rebuilt, self._on, self._sure = run, rebuilt, on, first + FIRST
        self._used = {
            role: {task.id: value_digest(task.private) for task in rows} for role, rows in (tasks or {}).items() if on
        }
        self._auditor: Auditor | None = None
        self._sketch: Sketch | None = None
        self._names = {} if tasks is None or tasks.get("report") else {"held-out": "measured accuracy"}
        if demonstrations:  # a call has an advantage only where rewards are compared
            self._names = {**self._names, "advantages": "calls learned"}
        self._said: set[str] = set()
        self._owed: Sketch | None = None  # of the first step whose gradient was not looked at, until one is
        self.due = False
        self.wall_s = math.inf
        self._start, self._spent, self._last = time.monotonic(), 0.0, 0.0

    def sketch(self, step: int) -> Sketch:
        """Return the sketch of a step, and decide whether the step is to be audited, which the learner can't tell.

        A later step is, if its audit, as long as the last one, stays within the share, and by chance.
        """
        affordable = self._spent + self._last <= SHARE * (time.monotonic() - self._start)
        self.due = self._on and (step < self._sure or (affordable and SystemRandom().random() < CHANCE))
        self._sketch = Sketch(step, whole=self.due)
        return self._sketch

    def takes(self, step: int) -> bool:
        """Whether a step that ends now will be audited as a whole."""
        return self._on and (self.due or step < self._sure)

    def end(self, step: int, line: Mapping[str, Any]) -> None:
        """Audit a step that is due, or one of the first; of others, look at what costs next to nothing."""
        whole, sketch, self._sketch, self.due = self.takes(step), self._sketch, None, False
        if not self._on:
            return
        from agentrig.audit import auditor  # imports numpy: no run needs it before its first step

        if not whole:
            if self._auditor is not None:
                self._conclude(self._auditor.audit(step, sketch=sketch, line=line, links=auditor.QUICK))
            return

        if sketch is not None:
            with writing(self._run / FILE.format(step)):
                sketch.write(self._run)
        if step == self._sure - FIRST:
            log.info(
                "steps %d and %d are computed again from their records, which takes a while; later steps seldom are "
                "(run.audit=false leaves it out)",
                *(step, step + FIRST - 1),
            )
        try:
            if self._auditor is None:
                self._auditor = auditor.Auditor(self._run, self._rebuilt.sources(used=self._used))
            budget_s = max(LEAST_S, unaudited_s(line) or 0.0)
            found = self._auditor.audit(step, sketch=sketch, line=line, budget_s=budget_s, wall_s=self.wall_s / FIRST)
        except AgentrigError as error:
            log.warning("step %d is not audited: %s", step, error)
            return
        self._last = found.seconds
        if step >= self._sure:
            self._spent += found.seconds
        self._owed = None if "gradient" in found.looked else self._owed or sketch
        left = {v.link: v.detail for v in found.verdicts if v.link not in found.looked}
        left = {link: why for link, why in left.items() if not why.startswith(GIVEN)}
        unseen = ", ".join(f"{link} ({why})" for link, why in left.items() if why != NO_WEIGHTS)
        wrong = {fault.link for fault in found.faults}
        looked = f"all {len(found.looked)} parts" + (" that could be checked" if left else "")
        agree = [link for link in LINKS if link in found.looked and link not in wrong]
        looked = f"{len(agree)} of {len(found.looked)} parts" if wrong else looked
        parts = (
            f" ({', '.join(self._names.get(one, one) for one in agree)})"
            if agree and step == self._sure - FIRST
            else ""
        )
        shares = [(v.link, *v.read) for v in found.verdicts if v.read is not None]
        log.info(
            "checked step %d in %.1f s: computed again from its records, %s agree%s%s%s",
            *(step, found.seconds, looked, parts),
            "".join(f"; {link}: a sample of {read} of {amount(of, 'call')}" for link, read, of in shares if read < of),
            (f"; {NO_WEIGHTS}" if NO_WEIGHTS in left.values() else "")
            + (f"; not looked at: {unseen}" if unseen else ""),
        )
        for verdict in found.verdicts:
            self._warn(verdict.note, f"step {step}: the auditor noted: ")
        self._conclude(found, write=True)

    def finish(self, step: int, accuracy: Mapping[str, Any]) -> None:
        """Audit the accuracies that a run states at its end, its checkpoint, and a gradient if none was looked at.

        Args:
            accuracy: The entry of its summary.
        """
        if self._auditor is None:
            return
        from agentrig.audit import auditor

        self._conclude(self._auditor.audit(step, stated=accuracy, links=auditor.LAST))
        if self._owed is not None and "gradient" in self.summary()["not_looked_at"]:
            budget_s = max(OWED_S, OWED * (time.monotonic() - self._start))
            limits: Any = {"budget_s": budget_s, "wall_s": self.wall_s}
            first = self._auditor.audit(self._owed.step, sketch=self._owed, links=auditor.OWED, **limits)
            self._conclude(first, write=True)

    def _warn(self, text: str, where: str = "") -> None:
        """Log a text, once in a run; '' is none."""
        if text and text not in self._said:
            log.warning("%s%s", where, text)
        self._said.add(text)

    def _conclude(self, found: Audited, *, write: bool = False) -> None:
        """Write what was seen of a step, to what is there of it; a fault in any case, and end the run with it."""
        if not (write or found.faults):
            return
        whole, links = found, {verdict.link for verdict in found.verdicts}
        for before in (one for one in read_audits(self._run)[0] if one.step == found.step):
            kept = [verdict for verdict in before.verdicts if verdict.link not in links]
            whole = attrs.evolve(found, verdicts=[*found.verdicts, *kept], seconds=found.seconds + before.seconds)
        file = self._run / VERDICTS.format(found.step)
        with writing(file):
            file.parent.mkdir(exist_ok=True)
            write_whole(file, json.dumps(attrs.asdict(whole), indent=1) + "\n")
        if found.faults:
            again = "" if script_of(self._run) else f"agentrig audit {self._run} --step {found.step}"
            raise RunStopped(found.words(again), cause="audit")

    def close(self) -> None:
        """End the reward's process, if there is one."""
        self._rebuilt.close()

    def summary(self) -> dict[str, Any]:
        """Return the entry of `summary.json`: links, why others were not looked at, calls, steps, notes, faults."""
        steps, damaged = read_audits(self._run)
        for text in damaged:
            self._warn(text)
        return totals_of(steps)


def totals_of(steps: Sequence[Audited]) -> dict[str, Any]:
    """Return what a run's summary says of its audited steps; see `Auditing.summary`."""
    verdicts = [verdict for one in steps for verdict in one.verdicts]
    looked = {verdict.link for verdict in verdicts if verdict.result != UNSEEN}
    unseen = {v.link: v.detail for v in verdicts if v.link not in looked}
    read: dict[str, list[tuple[int, int]]] = defaultdict(list)  # calls looked at, and of how many
    for verdict in verdicts:
        read[verdict.link] += [verdict.read] if verdict.read is not None else []
    return {
        "links": len(looked),
        "of": len(LINKS),
        "steps": [one.step for one in steps],
        "not_looked_at": unseen,
        "calls": {link: list(map(sum, zip(*pairs, strict=True))) for link, pairs in read.items() if pairs},
        "sampled_otherwise": sum(verdict.otherwise for verdict in verdicts),
        "seconds": sum(one.seconds for one in steps),
        "notes": list(dict.fromkeys(verdict.note for verdict in verdicts if verdict.note)),
        "faults": [f"{fault.link}: {fault.detail}" for one in steps for fault in one.faults],
    }


def checkpoint_fault(checkpoint: Path) -> str:
    """Say that a checkpoint does not hold the weights that it states; '' if it does.

    Raises:
        CannotLook: The run's record does not say which weights these are.
    """
    run, step = checkpoint.absolute().parents[1], checkpoint.name.removeprefix("step-")
    ours = (run / "config.toml").is_file() and (checkpoint / "trainer" / "learner.pt").is_file()
    if not (ours and step.isdecimal()):
        return ""
    from agentrig.audit import auditor, update
    from agentrig.run.past import foreign_metrics

    looking = auditor.Auditor(run, Sources(splits={}, score=None, digest=fingerprint))
    if foreign := foreign_metrics(run, [*looking.record.lines.values()], read_object(run / "progress.json")):
        raise CannotLook(f"{run}/{foreign}")
    found = looking.audit(int(step), links={"weights": update.saved})
    if not (found.faults or looking.record.digests(int(step)).get("weights")):
        raise CannotLook(f"metrics.jsonl has no digest of the weights of step {int(step)}")
    return found.words(f"agentrig audit {run} --step {int(step)}") if found.faults else ""


def faults_of(run: Path) -> str:
    """Return a warning with what a run's audits have found; '' if that is no fault, or nothing is there."""
    found = [f"step {one.step}, {v.link}: {v.detail}" for one in read_audits(run)[0] for v in one.faults]
    more = f" (and {amount(len(found) - 1, 'other fault')})" if len(found) > 1 else ""
    return (
        f"the audit of {run} found a fault, so its model may not be what it states: {found[0]}{more}" if found else ""
    )


def read_audits(run: Path) -> tuple[list[Audited], list[str]]:
    """Return what a run wrote of its audited steps, and what of its folder `audit` cannot be read."""
    folder, found, damaged = run / "audit", list[Audited](), list[str]()
    try:
        if os.path.lexists(folder):
            with reading(folder, "Move away what is there under that name: what the auditor left is lost"):
                os.scandir(folder).close()
    except RunFileError as error:
        damaged.append(str(error))
    for file in sorted(folder.glob("verdicts-*.json")):
        try:
            with reading(file, "Its verdicts are left out"):
                found.append(PLAIN.structure(json.loads(file.read_text("utf-8")), Audited))
        except RunFileError as error:
            damaged.append(str(error))
    return found, damaged


SOURCES: Mapping[str, Sequence[str]] = {
    "tasks": (),
    "reward": (),
    "agent": ("use",),
    "run": (*ROLES, "train_tasks", "correct_at", "reward_budget_s", "plugins", "block"),
}
"""The settings that decide what a run is compared with: sections, and the keys of one that has others too."""


def _of_sources(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `SOURCES`; a key whose value is None is left out, as in a file."""
    found = {name: {k: v for k, v in config.get(name, {}).items() if v is not None} for name in SOURCES}
    return {name: {k: v for k, v in found[name].items() if not keys or k in keys} for name, keys in SOURCES.items()}


class Rebuilt:
    """What a run is compared with: its task set and its reward, built once more from its plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._scorer: Scorer | None = None
        self._earlier: list[tuple[Rebuilt, dict[str, Any], Sources]] = []

    def sources(self, *, seconds: float = 5.0, used: Mapping[str, Mapping[str, str | None]] | None = None) -> Sources:
        """Build what the auditor asks."""

        def under(config: Mapping[str, Any]) -> Sources:
            """Build the same from other settings, once; `now` if these are of other things."""
            if self._plan.resumes != RESUME:  # a script's: its file of an earlier process is gone, and this one's holds
                config = {**config, "run": {**config["run"], "plugins": self._plan.as_dict()["run"]["plugins"]}}
            wanted = _of_sources(config)
            known = [(_of_sources(self._plan.as_dict()), now), *((had, found) for _, had, found in self._earlier)]
            for had, found in known:
                if had == wanted:
                    return found
            earlier = Rebuilt(_plan_of(config))
            self._earlier.append((earlier, wanted, earlier.sources(seconds=seconds)))
            return self._earlier[-1][2]

        now = Sources(
            splits=self._load(),
            score=self.score,
            seconds=seconds,
            used=used or {},
            again=self._load,
            digest=fingerprint,
            weights=getattr(self._plan.components["algorithm"].spec, "trains", "weights") == "weights",
            whole_rows=self._plan.sees_gold,
            under=under,
        )
        return now

    def score(self, task: Task, row: Row) -> Score:
        """Score a recorded answer to a task."""
        if self._scorer is None:
            self._scorer = self._plan.scorer()
        trace = Trace(rollout_id=row.id, spans=tuple(Span(**span) for span in row.spans))
        return self._scorer([(task, Outcome(answer=row.answer, own_reward=row.own_reward), trace)])[0]

    def close(self) -> None:
        """End the rewards' processes, if there are any."""
        for earlier, _, _ in self._earlier:
            earlier.close()
        if self._scorer is not None:
            self._scorer.close()

    def _load(self) -> dict[str, Sequence[Task]]:
        """Load the tasks of each role from the task set itself: what the run does with its rows is what is audited."""
        run = self._plan.run
        loaded: dict[str, Sequence[Task]] = {}
        found: dict[str, Sequence[Task]] = {}
        try:
            tasks = self._plan.build("tasks")
            for role in ROLES:
                split = str(getattr(run, role) or tasks.roles.get(role, ""))
                if split and split not in loaded:
                    who = f"`load` of {self._plan.whose_tasks}"
                    with put_back(who, processes=True), torch_put_back(who):
                        loaded[split] = list(tasks.load(split))
                limit = run.train_tasks if role == "train" else 0  # a measurement's file says of how many it is
                found[role] = loaded[split][: limit or None] if split else ()
        except AgentrigError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(f"{self._plan.whose_tasks}: `load` raised {words_of(error)}{place_of(error)}") from error
        return found


def _plan_of(config: Mapping[str, Any]) -> Plan:
    """Return the plan of settings that a run had before a resume."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(to_toml(config), "utf-8")
        try:
            return resolve(str(file))
        except AgentrigError as error:
            said = str(error).replace(f"{file}: ", "")
            raise ConfigError(f"the settings that the run had before a resume hold no more: {said}") from error

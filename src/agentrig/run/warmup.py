"""A starting model for a user's own tasks: labels, demonstrations by the agent itself, supervised training, a check.

Held-out tasks are read once, to make sure that no labelled task is one of them; nothing is ever trained on them.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs

from agentrig.algorithms import Measurement
from agentrig.demonstrations import StartingModel, StartPlan, Turn, write_demonstrations
from agentrig.errors import AgentrigError, ConfigError, PluginError
from agentrig.observers import StepEnd
from agentrig.plan import Plan
from agentrig.plugins.auto import OWN
from agentrig.plugins.specs import TasksSpec
from agentrig.processes.ends import Interrupted, asked_to_end
from agentrig.rollouts import Rollout
from agentrig.run.demonstration_server import Conversation, demonstrating
from agentrig.run.directory import RunDirectory
from agentrig.run.evaluate import Evaluation, evaluate
from agentrig.run.guards import wrong_in_form
from agentrig.run.metrics import line_of, reason_of
from agentrig.run.splits import load_splits
from agentrig.run.training import train
from agentrig.run.verdict import SOLVED, SOONER, Verdict, judge
from agentrig.settings import structure
from agentrig.tasks import Task, overlap
from agentrig.text import amount
from agentrig.traces import said_in

PAGE = "docs/how-to/laptop.md"
LABELS = 64
"""Training tasks that are demonstrated if nothing else is asked for."""

MEASURED = 64
"""Training tasks that the model is tried on."""

JUDGED = 16
"""Of these, those that the verdict at the end is judged from …"""

ROLLOUTS = 8
"""… by so many rollouts of each, or the run's group size if it is smaller."""

REPEATS = 4
"""A model whose share of right answers on demonstrated tasks is so many times that on others repeats them."""

REJECTED = 0.1
"""Largest share of demonstrations that the reward may reject."""

DIVERGED = "diverged"
"""What a message says of weights that are NaN or infinite, and the cause of a run that stops for them."""

LEARNS = "sft"
"""The algorithm whose run trains a starting model."""

STEPS = 50
"""Passes that have a step of that run each; of more, a step has several."""

STEP = 2048
"""Most demonstrations of a step."""

WARMUP = 0.03
"""Share of its updates over which the learning rate rises."""

TRIALS = 0.2
"""Of the time so far, trials of the model may have taken this share before they are dear …"""

TRIALS_S = 30.0
"""… or so many seconds."""

LATER, LATER_DEAR = 1.25, 2.0
"""The next trial begins after so many times the steps of the last one, and where trials are dear and none had a right
answer. The first begins after one step: the starter learns a small domain in a few passes, an easy one within one."""

NEAR = 0.5
"""From this share of what is enough on, every step is followed by a trial."""

OFTEN, STEPS_OFTEN = 64, 200
"""Where trials may end the training, a step is one optimizer step, and of no more demonstrations than these, unless
these are more steps: a domain may be learned in a few optimizer steps."""

FELL = 0.7
"""A loss of so many times that at the last trial, or less, is followed by a trial too: the accuracy may have jumped."""


@attrs.frozen(kw_only=True)
class Labels:
    """The training tasks of a warm-up.

    Attributes:
        tasks: Those that are demonstrated.
        measured: Training tasks that the model is tried on: others where there are any.
        split: The split that all are from.
        fresh: Whether none of `measured` is demonstrated.
        more: A number of labels to try if these are too few: three times as many, or those that leave enough tasks to
            try the model on; 0 if that is hardly more.
        note: Why fewer are demonstrated than by default; empty if that is not so.
    """

    tasks: Sequence[Task]
    measured: Sequence[Task]
    split: str
    fresh: bool
    more: int = 0
    note: str = ""


@attrs.frozen(kw_only=True)
class Demonstrations:
    """What the agent asked and what it was answered.

    Attributes:
        turns: The calls to learn, in the order of the tasks.
        rollouts: How many rollouts were demonstrated.
        rejected: Those that the reward did not count as correct, which are left out: lines for the user.
    """

    turns: Sequence[Turn]
    rollouts: int
    rejected: Sequence[str] = ()


def guessed(found: Demonstrations) -> float:
    """Return the share of tasks that one and the same reply answers; 0 if none does, or agents ask more than once."""
    if not found.turns or len(found.turns) > found.rollouts:
        return 0.0
    most = max(Counter(said_in(turn.reply.message()) for turn in found.turns).values())
    return most / len(found.turns) if most > 1 else 0.0


def unused_tools(turns: Sequence[Turn]) -> str:
    """Return that calls offer tools and no demonstration calls one, and what to do; '' if it is not so."""
    offered = list(dict.fromkeys(tool["function"]["name"] for turn in turns for tool in turn.tools))
    called = any(turn.reply.tool_calls or any(m.get("tool_calls") for m in turn.messages) for turn in turns)
    return "" if called or not offered else no_call_shown(offered)


def no_call_shown(offered: Sequence[str]) -> str:
    """Return what it means that no demonstration calls the tools of these names, and what to do."""
    return (
        f"the agent's calls offer tools ({', '.join(offered[:3])}{' …' if len(offered) > 3 else ''}), and no "
        "demonstration calls one: the model would learn to guess the answer, and never to call a tool. Let the agent "
        f"or the task set demonstrate the calls too: demonstrate(task, call) ({PAGE})"
    )


def choose_labels(plan: Plan, n: int | None, *, seed: int) -> Labels:
    """Choose training tasks at random.

    Args:
        plan: Its roles say which split is trained on and which ones are held out.
        n: How many; 0 for all; None for `LABELS`, or half of the split if that is fewer.
        seed: Of the choice.

    Raises:
        ConfigError: There are fewer tasks, or some of the chosen ones occur in the validation or report split too.
    """
    splits = load_splits(plan.tasks(), plan.run, who=plan.whose_tasks)
    split, tasks = splits["train"]
    note = ""
    if n is None:
        n = min(LABELS, max(1, len(tasks) // 2))
        half = f"half of its {amount(len(tasks), 'task')}: the model is tried on the others (or give --labels N)"
        note = half if n < LABELS else ""
    if n > len(tasks):
        raise ConfigError(f"--labels {n}: the split {split} has {amount(len(tasks), 'task')}; ask for at most as many")
    places = list(range(len(tasks)))
    random.Random(f"labels {seed}").shuffle(places)
    chosen = sorted(places[: n or len(tasks)])
    labels = [tasks[i] for i in chosen]
    for role in ("report", "validation"):
        name, held_out = splits[role]
        shared = [task.id for _, task in overlap(held_out, labels)]
        if shared:
            raise ConfigError(
                f"{len(shared)} of {len(labels)} labelled tasks occur in the split {name} ({role}) too, for example "
                f"{', '.join(shared[:3])}: accuracy there would be that of tasks whose answers the model has seen.\n"
                f"  Take them out of {split} or of {name}, or name another split: run.{role}=SPLIT"
            )
    others = [tasks[i] for i in places[len(chosen) : len(chosen) + MEASURED]]
    more = min(3 * len(labels), len(tasks) - JUDGED)
    return Labels(
        tasks=labels,
        measured=others or labels[:MEASURED],
        split=split,
        fresh=bool(others),
        more=more if more >= 1.5 * len(labels) else 0,
        note=note,
    )


def check_context(settings: Any, context: int) -> None:
    """Stop before the demonstrations are made when a run could not use a model of this context; 0 is left out.

    Args:
        settings: The algorithm's.
        context: Tokens.

    Raises:
        ConfigError: The run's `max_length` is more.
    """
    wanted = getattr(settings, "max_length", 0)
    if context and context < wanted:
        raise ConfigError(
            f"--context {context} is less than [algorithm] max_length = {wanted}, so no run could use "
            f"the model: give --context {wanted}, or algorithm.max_length=0 here and in the run"
        )


def demonstrate(
    plan: Plan, labels: Sequence[Task], *, repeats: int = 1, gold: str = "", seed: int = 0
) -> Demonstrations:
    """Run the agent on labelled tasks against a server that answers with demonstrations; return the calls.

    Args:
        plan: With the agent and the reward.
        labels: The tasks.
        repeats: How often each is demonstrated; more than once only helps a demonstrator that uses `call.rng`.
        gold: See `Plan.demonstrator`.
        seed: Of the conversations' random numbers.

    Raises:
        ConfigError: Tasks without gold, an agent that does not ask its endpoint, or demonstrations that the reward
            does not count as correct.
        PluginError: The demonstrator, the agent or the reward failed on a task; the first one is named.
    """
    says, who = plan.demonstrator(labels, gold=gold)
    work = [task for task in labels for _ in range(repeats)]
    with demonstrating(work, says, seed=seed) as (endpoints, conversations):
        found = evaluate(plan, tasks=work, endpoint=endpoints, mode="dev", as_mode="train", keep=True)
    pairs = list(zip(found.rollouts, conversations, strict=True))
    _check_failures(pairs, who, plan.components["agent"].spec.name)
    if not any(conversation.turns for _, conversation in pairs):
        raise ConfigError(
            f"agent {plan.components['agent'].spec.name} ended {amount(len(pairs), 'rollout')} without a call to its "
            f"endpoint: there is nothing to demonstrate. The first one: {line_of(pairs[0][0])}\n"
            "  Does it find its files? A runner has only the variables that the agent or runners.environment names "
            "(docs/secrets.md). Does it ask endpoint.base_url? (docs/agents.md)"
        )
    wrong = [line_of(rollout) for rollout, _ in pairs if not rollout.correct]
    if len(wrong) > REJECTED * len(pairs):
        reward = plan.components["reward"].spec.name
        examples = "\n".join(f"  {line}" for line in wrong[:3])
        ask = "Does the agent change what the model answers, or does the reward want another form?"
        form = wrong_in_form([rollout for rollout, _ in pairs])
        raise ConfigError(
            f"the reward {reward} does not count {len(wrong)} of {len(pairs)} demonstrations by {who} as correct:\n"
            f"{examples}\n  A model that learns them would start at that. {form or ask} ({PAGE})"
        )
    turns = [t for r, conversation in pairs if r.correct for t in conversation.turns if t.reply.learn]
    if not turns:
        raise ConfigError(f"{who} marks no reply of {amount(len(pairs), 'rollout')} to be learned: Reply(learn=True)")
    return Demonstrations(turns=turns, rollouts=len(pairs), rejected=wrong)


def _check_failures(pairs: Sequence[tuple[Rollout, Conversation]], who: str, agent: str) -> None:
    """Stop when more rollouts failed than the reward may reject; a demonstrator that failed is named first."""
    failed = [(rollout, conversation) for rollout, conversation in pairs if rollout.failure]
    if len(failed) <= REJECTED * len(pairs):
        return
    said = [(r, c.problem) for r, c in failed if c.problem]
    rollout, problem = said[0] if said else (failed[0][0], "")
    message = problem or f"{rollout.failure}: {reason_of(rollout)}"
    fault = who if problem else f"agent {agent} or its reward"
    raise PluginError(
        f"{len(failed)} of {len(pairs)} demonstrations failed; {fault} on task {rollout.task.id}: {message}"
    )


class _Labelled:
    """The task set of a warm-up's run: no task of it is held out.

    Attributes:
        measures_training: No warning says that tasks of validation are training tasks: all are.
    """

    measures_training = True

    def __init__(self, labels: Labels) -> None:
        self._tasks = {"labels": labels.tasks, "measured": labels.measured}
        self.splits: Sequence[str] = tuple(self._tasks)
        self.roles: Mapping[str, str] = {"train": "labels", "validation": "measured"}
        self.optional = ("validation", "report")

    def load(self, split: str) -> Sequence[Task]:
        """Return the tasks."""
        return self._tasks[split]


@attrs.define
class _Progress:
    """An observer that says once a pass how far a warm-up's run is.

    Attributes:
        log: Called with a line for each pass.
        learned: Called after each optimizer step, and at the end of a step; see `make_start`.
        steps: All of the run.
        updates: Optimizer steps of a step.
        passes: All of the run.
        said: The pass that was said last.
        loss: Of the last step.
        trained: Seconds of the steps that have ended, without trials and audits.
        since: When training went on in this step, by `time.perf_counter`; 0 between two steps, while one is audited.
        tried: Seconds of the trials of the model; those before this step's are in `tried_before`.
        done: Optimizer steps so far.
    """

    log: Callable[[str], None]
    learned: Callable[[int, int, float | None], None]
    steps: int
    updates: int
    passes: float
    said: int = -1
    loss: float = math.inf
    trained: float = 0.0
    since: float = 0.0
    tried: float = 0.0
    tried_before: float = 0.0
    done: int = 0

    def on_update(self, *of_torch: Any) -> None:
        """Count an optimizer step."""
        self.since = self.since or time.perf_counter()
        self.done = min(self.done + 1, self.steps * self.updates)
        self.learned(self.done, self.steps * self.updates, self.spent())

    def spent(self) -> float:
        """Return the seconds of training so far: those that `StartPlan.minutes` limits."""
        return self.trained + (time.perf_counter() - self.since if self.since else 0.0)

    def add_trial(self, seconds: float) -> None:
        """Count the seconds of a trial, which are none of training."""
        self.tried += seconds
        self.since += seconds if self.since else 0.0

    def on_step_end(self, event: StepEnd) -> None:
        """Say the loss."""
        audited = event.metrics["time_s"].get("audit", 0.0)  # of the step before, for which this one waited
        self.trained += event.metrics["step_s"] - audited - (self.tried - self.tried_before)
        self.since, self.tried_before = 0.0, self.tried
        self.learned(self.done, self.steps * self.updates, None)
        figures = event.metrics["algorithm"]
        self.loss = figures["loss"]
        done = self.passes * event.step / self.steps
        if int(done) > self.said:
            self.said = int(done)
            rate = f"{figures['learner_tokens_per_s']:.0f} tokens/s"
            self.log(f"pass {one_decimal(done)}/{self.passes:g} loss {self.loss:.4f} {rate}")


def one_decimal(passes: float) -> str:
    """Return a number of passes for the user, without a decimal of 0."""
    return f"{passes:.1f}".removesuffix(".0")


def check_makes_start(plan: Plan) -> None:
    """Stop when the plan's algorithm makes no starting models.

    Raises:
        ConfigError: It makes none.
    """
    spec: Any = plan.components["algorithm"].spec
    if spec.make_start is None:
        able = [c.spec.name for c in plan.registry.components("algorithm") if getattr(c.spec, "make_start", None)]
        raise ConfigError(
            f"algorithm {spec.name} makes no starting models; let one that does make it: --algorithm "
            f"{able[0] if able else 'NAME (none is installed: agentrig-grpo has one)'}.\n"
            "  Any algorithm can train the directory that it writes"
        )


def make_start(
    plan: Plan,
    wanted: StartPlan,
    labels: Labels,
    turns: Sequence[Turn],
    log: Callable[[str], None] = lambda line: None,
    enough: Callable[[float, Callable[[], Measurement | None]], float] | None = None,
    learned: Callable[[int, int, float | None], None] = lambda done, of, spent_s: None,
) -> StartingModel:
    """Make a starting model: the plan's algorithm chooses one, and a run of `sft` trains it on demonstrations.

    Args:
        plan: With agent, reward and an algorithm that passed `check_makes_start`.
        wanted: How the model is made.
        labels: Its `measured` tasks are those of validation.
        turns: The demonstrations.
        log: Called with a line of progress for each step.
        enough: Asked between two steps: after the first, and again after `LATER` times as many steps; while it says 0,
            after `LATER_DEAR` times if that took more than `TRIALS` of the time so far, and `TRIALS_S`; from `NEAR` on
            after each; and when the loss has fallen to `FELL` times that at the last time. It is given the passes so
            far, and a function that validates the model, and returns the share of what is enough: 1 ends the training.
            Its time does not count.
        learned: Called after each optimizer step, with their number so far, that of all passes, and the seconds so far
            of those that `wanted.minutes` limits; None at the end of a step, which may be audited then.

    Raises:
        ConfigError: A demonstration does not fit the model.
        AgentrigError: The training has diverged, or the run's checks found a fault; no model is written.
        KeyboardInterrupt: A signal ended the training before a step was done and saved, or at once; no model is
            written. After a signal that ended it in order, the model so far is (`StartingModel.interrupted`).
    """
    spec: Any = plan.components["algorithm"].spec
    whole = [turn for turn in turns if turn.reply.content.strip() or turn.reply.tool_calls]
    if not whole:
        raise ConfigError("every demonstrated reply is empty: there is nothing to learn")
    if len(whole) < len(turns):
        log(f"{len(turns) - len(whole)} of {len(turns)} demonstrated replies are empty: they are left out")
    plan.use_hardware()  # before torch is imported: its idle threads must not spin
    made: StartingModel = spec.make_start(plan.configs["algorithm"], wanted, whole)
    with TemporaryDirectory(dir=wanted.directory) as folder:  # goes with it, if the command is killed
        run = _run_of(plan, wanted, made, labels, whole, Path(folder), often=enough is not None)
        settings = run.configs["algorithm"]
        progress = _Progress(log, learned, settings.steps, settings.mini_batches, wanted.passes)
        run.registry.add_observer(progress, "warm-up")
        last, found, loss, begun = 0, 0.0, math.inf, time.perf_counter()

        def ends(step: int, measure: Callable[[], Measurement | None]) -> bool:
            nonlocal last, found, loss
            now = time.perf_counter()
            if progress.spent() >= 60 * wanted.minutes:
                return True
            dear = not found and progress.tried > max(TRIALS_S, TRIALS * (now - begun))
            later = 1.0 if found >= NEAR else LATER_DEAR if dear else LATER
            fell = progress.loss <= FELL * loss
            if enough is None or asked_to_end() or (step < later * last and not fell):
                return False
            last, loss = step, progress.loss
            found = enough(wanted.passes * step / progress.steps, measure)
            progress.add_trial(time.perf_counter() - now)
            return found >= 1

        directory = RunDirectory(Path(folder) / "run")
        try:
            try:
                with _each_update(progress.on_update):
                    train(run, enough=ends, audit_s=60 * wanted.minutes)
            except Interrupted as error:
                if error.at_once or directory.checkpoints.latest()[0] is None:
                    raise
                made = attrs.evolve(made, interrupted=error.number)
            lines = [line["algorithm"] for line in directory.metrics()]
            if not all(isinstance(line["loss"], float) for line in lines):
                raise AgentrigError(f"it has {DIVERGED}: the loss is NaN or infinite")
        except AgentrigError as error:
            if getattr(error, "cause", "") != DIVERGED and DIVERGED not in str(error):  # the server finds it, too
                raise
            less = f"a smaller learning rate than --lr {wanted.lr:g}" if wanted.lr else "a learning rate: --lr 1e-4"
            raise AgentrigError(f"the warm-up has diverged, so no model is written. Give {less}\n  {error}") from error
        except KeyboardInterrupt as error:
            error.args = ("the warm-up was interrupted: no model is written",)  # and not how its run is resumed
            raise
        wall_s = progress.trained
        checkpoint, _ = directory.checkpoints.latest()
        assert checkpoint is not None
        own = shutil.ignore_patterns("trainer", "keep", ".files.json")
        shutil.copytree(checkpoint, wanted.directory, ignore=own, dirs_exist_ok=True)
    updates = round(sum(line["updates"] for line in lines))
    passes = wanted.passes * len(lines) / progress.steps
    losses = tuple(line["loss"] for line in lines)
    return attrs.evolve(made, steps=updates, passes=passes, losses=losses, wall_s=wall_s)


@contextmanager
def _each_update(call: Callable[..., None]) -> Iterator[None]:
    """Call a function after each step of an optimizer of torch: a pass may have many, and the run knows of none."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    hook = register_optimizer_step_post_hook(call)
    try:
        yield
    finally:
        hook.remove()


def _run_of(
    plan: Plan,
    wanted: StartPlan,
    made: StartingModel,
    labels: Labels,
    turns: Sequence[Turn],
    folder: Path,
    *,
    often: bool,
) -> Plan:
    """Return the plan of the run that trains a starting model; a step is a pass, a part of one, or several.

    With `often`, steps are short: trials between them may end the training.
    """
    file = folder / "demonstrations.jsonl"
    write_demonstrations(file, turns)
    found, settings = plan.registry, plan.configs["algorithm"]
    component = found.find("algorithm", LEARNS)
    shown = wanted.passes * len(turns)
    steps = max(min(math.ceil(wanted.passes), STEPS), math.ceil(shown / STEP))
    if often:
        steps = max(steps, min(max(math.ceil(shown / OFTEN), round(wanted.passes * made.updates)), STEPS_OFTEN))
    n = max(1, round(shown / steps))
    updates = max(1, min(n, 1000, round(made.updates * n / len(turns))))
    temperature = float(getattr(settings, "temperature", 1.0))
    keys = {
        "demonstrations": str(file),
        "model": str(wanted.directory),
        "steps": steps,
        "tasks_per_step": n,
        "mini_batches": updates,
        "lr": made.lr,
        "warmup_steps": max(1, round(WARMUP * steps * updates)),
        "lr_scheduler_type": "linear",
        "max_tokens": getattr(settings, "max_tokens", 256),
        "val_temperature": temperature,
        "validate_every": 0,
        "save_every": steps,
    }
    algorithm: Any = structure(component.spec.config, keys, owner=LEARNS, section="algorithm")
    credit = found.find("credit", OWN)
    spec = TasksSpec(name=plan.components["tasks"].spec.name, summary="", build=lambda config: _Labelled(labels))
    hardware = plan.configs["hardware"]
    if hasattr(hardware, "threads"):
        hardware = attrs.evolve(hardware, threads=wanted.threads)
    changed = {"algorithm": component, "credit": credit, "tasks": attrs.evolve(plan.components["tasks"], spec=spec)}
    configs = {"algorithm": algorithm, "credit": credit.spec.config(), "hardware": hardware}
    own = attrs.evolve(
        plan.run, directory=str(folder), name="run", seed=wanted.seed, train="", validation="", report="",
        train_tasks=0, validation_tasks=0, report_tasks=0, second_reward=[], failure_limit=1.0,
    )  # fmt: skip
    return attrs.evolve(
        plan,
        run=own,
        components={**plan.components, **changed},
        configs={**plan.configs, **configs},
        observers=(),
        second_rewards=(),
    )


def check_unsolved(measured: Evaluation, model: str) -> None:
    """Stop when the model that the warm-up should start from already answers the training tasks.

    Raises:
        ConfigError: It does.
    """
    if measured.accuracy is not None and measured.accuracy >= SOLVED:
        raise ConfigError(
            f"{model} already solves these tasks: {measured.accuracy:.1%} of {measured.n} training tasks, sampled. "
            f"There is nothing to warm up, and little to learn: use harder tasks, or train it as it is:\n"
            f"  agentrig train … algorithm.model={model}"
        )


def only_repeats(measured: Evaluation, known: Evaluation | None) -> bool:
    """Return whether a model repeats its demonstrations; see `verdict` for the measurements."""
    rate = known.accuracy or 0.0 if known is not None else 0.0
    return rate >= REPEATS * max(0.05, measured.accuracy or 0.0)


def verdict(
    measured: Evaluation,
    group: int = 8,
    known: Evaluation | None = None,
    *,
    failure_limit: float = 1.0,
    until: float | None = None,
    credit: Any = None,
) -> Verdict:
    """Say whether a model that was warmed up can be trained by reward, and what to do; `agentrig forecast` says it too.

    Args:
        measured: Several sampled answers for each of some training tasks.
        group: Rollouts of one task in a training step.
        known: One sampled answer for each of some demonstrated tasks, if `measured` has none of them.
        failure_limit: See `agentrig.run.verdict.judge`.
        until: The share of right answers at which the warm-up was to end, if one was given.
        credit: See `agentrig.run.verdict.judge`.
    """
    repeats = ""
    cure = (
        "Give more labels (--labels), passes (--passes) or minutes, a larger model (--parameters), or easier tasks; "
        "or a reward with partial credit."
    )
    less = "Give fewer passes (--passes), or raise the temperature (algorithm.temperature)."
    if (measured.accuracy or 0.0) > SOONER and (until is None or until > SOONER):
        less = f"Give fewer passes (--passes), or end sooner: --until {SOONER}."
    if known is not None and only_repeats(measured, known):
        repeats = (
            f"The model repeats its demonstrations: {known.accuracy:.0%} of {known.n} demonstrated tasks are right, "
            f"and {measured.accuracy or 0.0:.0%} of the answers to others. Give more labels (--labels), or "
            "demonstrations that vary more; more passes or optimizer steps of the warm-up do not help."
        )
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in measured.rollouts:
        groups[rollout.group].append(rollout)
    says: Any = {"cure": repeats or cure, "less": repeats or less, "credit": credit}
    found = judge(list(groups.values()), group, failure_limit=failure_limit, **says)
    if found.kind == "good" and repeats:
        message = f"You can train this model by reward, but more labels would help more. {repeats}"
        return attrs.evolve(found, message=message)
    if found.kind == "solved":
        return attrs.evolve(found, message=f"{found.message} Or give fewer labels or passes.")
    return found

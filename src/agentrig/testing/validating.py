"""Validates plugins as `agentrig validate` does: the checks of every component, and a trial of each agent."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import attrs

from agentrig.demonstrations import gold_of
from agentrig.endpoints import Endpoint
from agentrig.errors import AgentrigError, ConfigError, LookupFailed, nearest
from agentrig.figures import gain_words, least_gain
from agentrig.plan import read_run_file
from agentrig.plugins.loading import load
from agentrig.plugins.selecting import check_section
from agentrig.plugins.specs import KINDS
from agentrig.tasks import ROLES, Task
from agentrig.testing.elsewhere import EndedElsewhere, elsewhere
from agentrig.testing.kit import TRIAL, Report, check, declared
from agentrig.testing.play import PlaySubject
from agentrig.testing.reward import RewardSubject
from agentrig.testing.subject import CheckFailed, CheckSkipped, Subject, TriedSubject
from agentrig.testing.tasks import TasksSubject
from agentrig.text import account_of

UNPLAYABLE = {"agent.loads", "agent.starts", "agent.calls-endpoint", "agent.answers", "play.loads", "play.parts"}
"""Checks without which an agent is not played."""

TRIED = ("agent", "reward")
"""Kinds whose checks need other components."""


ORDER = ("recipe", *(kind for kind in KINDS if kind != "recipe"))
"""A misspelled name in a recipe explains what comes after it; a reward needs what its agent's trial has found."""


@attrs.frozen
class Target:
    """A component that can be validated, and who brings it; `file` is '' if that is an installed plugin."""

    file: str
    distribution: str
    plugin: str
    kind: str
    name: str

    @property
    def given(self) -> str:
        """What finds it: its name, or `FILE.py:NAME`."""
        return f"{self.file}:{self.name}" if self.file else self.name


def validated(
    word: str | None,
    *,
    uses: Mapping[str, str],
    settings: Mapping[str, Mapping[str, Any]],
    files: Sequence[str] = (),
    script: str | None = None,
    endpoint: Endpoint | None = None,
    gold: str | None = None,
    shared: Sequence[str] = (),
    limit: int = 12,
    only: Sequence[str] = (),
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run the checks of each component, and a trial of each agent that has tasks and a reward.

    Args:
        word: What names the components; None for the package in the current folder.
        uses: Kind to name: the task set, reward and adapter for agents and rewards that do not bring them.
        settings: Kind to keys, as the sections of a run file; `gateway` too.
        script: What the scripted model says; None for right answers and nonsense.
        gold: The key of the tasks' private part with the right answer; None to find it as `agentrig warmup` does.
        only: Names of checks, with their kind (`agent.sampling`); none for all.
        say: Gets the lines of the reports one by one, each as soon as it is known: some checks take minutes.

    Returns:
        `ok`, `reports` with what each check found, `trials` with the figures of each trial, and `no_gold`: why
        `agentrig warmup` would not know what a right reply is, '' if it would; all as JSON values.

    Raises:
        ConfigError: A section or `shared` that nothing here reads; a check that does not exist; or no tasks for an
            agent or a reward.
    """
    word = word or _here()
    if word.endswith(".toml"):
        raise ConfigError(_of_run_file(word))
    brought = _brought(word, files)
    found = _targets(word, brought)
    every = [each.name for kind in (*KINDS, TRIAL) for each in declared(kind)]
    for name in only:
        if name not in every:
            raise ConfigError(f'there is no check "{name}".{nearest(name, every)} docs/reference/checks.md lists them')
    kinds = {target.kind for target in found}
    known = sorted({*kinds, *(("tasks", "agent", "reward", "adapter", "gateway") if kinds & set(TRIED) else ())})
    for section in settings:
        if section not in known:
            raise ConfigError(
                f"nothing that is validated reads [{section}].{nearest(section, known)} Known: {', '.join(known)}"
            )
    if uses and not kinds & set(TRIED):
        raise ConfigError(
            f"--{next(iter(uses))} is for an agent or a reward, and none is validated. One component of a file is "
            "validated by its name: FILE.py:NAME"
        )
    if shared and "tasks" not in kinds:
        raise ConfigError("--shared is about the tasks of a task set, and none is validated")
    in_files = {(each.kind, each.name): each.given for each in brought if each.file}
    uses = {kind: in_files.get((kind, name), name) for kind, name in uses.items()}
    reports: list[Report] = []
    trials: list[Mapping[str, Any]] = []
    no_gold = ""
    task_sets: dict[str, TasksSubject] = {}
    right: dict[str, dict[str, Any]] = {}  # what trials say of right answers: by reward and tasks, and by tasks

    def chosen(kind: str) -> list[str] | None:
        return [name for name in only if name.startswith(f"{kind}.")] if only else None

    def failed(kind: str, subject: Any, **options: Any) -> set[str]:
        """Run the checks of a kind that are asked for; return the names of those that failed."""
        if chosen(kind) == []:
            return set()
        reports.append(check(kind, subject, only=chosen(kind), raise_failed=False, say=say, **options))
        return {result.check for result in reports[-1].failed}

    sized: list[Any] = []  # the task sets whose sizes were said

    def tell_sizes(tasks: TasksSubject) -> None:
        """Say how many tasks each role has, and which gain so many held-out tasks can show."""
        if only or say is None or tasks.failed or (tasks.given, tasks.settings) in sized:
            return
        sized.append((tasks.given, tasks.settings))
        try:
            sizes = [len(tasks.part(role)[1]) for role in ROLES]
        except Exception:  # a split that the agent's trial does not need: the task set's own checks say it
            return
        worse = " (if no task becomes worse)" if sizes[-1] >= least_gain() else ""
        named = "{} training, {} validation and {} held-out tasks".format(*sizes)
        say(f"{named}. {gain_words(sizes[-1])}{worse}\n")

    unresolved = False  # a recipe: what it says of the other components' tasks may be misspelled
    for target in sorted(found, key=lambda target: ORDER.index(target.kind)):
        kind, keys = target.kind, settings.get(target.kind)
        if kind == "tasks":
            task_sets[target.given] = TasksSubject(kind=kind, given=target.given, settings=keys, shared=shared)
            failed(kind, task_sets[target.given])
            tell_sizes(task_sets[target.given])
            continue
        if kind not in TRIED:
            unresolved |= "recipe.resolves" in failed(kind, target.given, settings=keys)
            continue
        parts = _parts(target, found, uses, settings)
        keys, (tasks, tasks_keys) = parts[kind][1], parts["tasks"]
        own = [each for each in brought if (each.kind, each.plugin) == ("tasks", target.plugin)]
        if not tasks and len(own) != 1 and not only:
            if unresolved:  # its report says which name to mend
                if say:
                    say(f"{kind} {target.given}: not tried, for its tasks are not known until the recipe resolves")
                continue
            raise ConfigError(
                f"say on which tasks to try {target.given}: --tasks NAME, or --tasks FILE.py:NAME.\n"
                "  agentrig plugins lists the installed task sets"
            )
        options: dict[str, Any] = {"tasks": tasks or None, "tasks_settings": tasks_keys}
        if tasks in task_sets and tasks_keys == settings.get("tasks", {}):
            options["tasks"] = task_sets[tasks]
        elif tasks and tasks not in task_sets:
            _load_tasks(target, tasks, tasks_keys)
            with closing(TasksSubject(kind="tasks", given=tasks, settings=tasks_keys)) as loaded:
                tell_sizes(loaded)
        if kind == "reward":
            found_right = right.get(repr((target.given, parts["tasks"])), right.get(repr(parts["tasks"]), {}))
            options |= found_right if gold is None else {"gold": gold}
            failed(kind, target.given, settings=keys, **options)
            continue
        options["gateway"] = settings.get("gateway")
        unplayed = failed(
            kind, target.given, settings=keys, **options, **({} if script is None else {"script": script})
        )
        if not parts["reward"][0] or chosen(TRIAL) == []:
            continue
        if unplayed & UNPLAYABLE:
            if say:
                say(f"{TRIAL} {target.given}: skipped, {' and '.join(sorted(unplayed & UNPLAYABLE))} failed\n")
            continue
        (reward, reward_keys), (adapter, adapter_keys) = parts["reward"], parts["adapter"]
        options |= {"limit": limit, "script": script, "endpoint": endpoint, "step": _step(_recipe(target, found))}
        options["reward"] = RewardSubject(kind="reward", given=reward, settings=reward_keys, gold=gold)
        options["adapter"] = Subject(kind="adapter", given=adapter, settings=adapter_keys)
        trial = PlaySubject(kind=kind, given=target.given, settings=keys, **options)
        with closing(trial), suppress(CheckSkipped):  # its tasks cannot be loaded
            if not failed(TRIAL, trial) & UNPLAYABLE:
                trials.append(trial.figures())
                no_gold = no_gold or _no_gold(trial)
                for of in (repr((reward, parts["tasks"])), repr(parts["tasks"])):
                    right.setdefault(of, _right(trial))
    for task_set in task_sets.values():
        task_set.close()
    said = [{**attrs.asdict(report), "ok": report.ok} for report in reports]
    return {"ok": all(report.ok for report in reports), "reports": said, "trials": trials, "no_gold": no_gold}


def _right(trial: PlaySubject) -> dict[str, Any]:
    """Return the options of a reward's checks that say what a trial has found of right answers."""
    if answers := trial.right_answers:
        rows = [task for task in trial.rows if task.id in answers]
        return {"tasks": rows, "limit": len(rows), "gold": lambda task: answers[task.id]}

    def unknown(task: Task) -> Any:
        raise CheckSkipped(why)

    return {"gold": unknown} if (why := trial.not_gold) else {}


def _no_gold(trial: PlaySubject) -> str:
    """Return the first task whose right answer `agentrig warmup` would not find by itself; '' if it finds all."""
    try:
        for task in trial.rows if trial.demonstrator is None else ():
            gold_of(task)
    except ConfigError as error:
        return str(error).partition("\n")[0]
    return ""


def _load_tasks(target: Target, tasks: str, keys: Mapping[str, Any]) -> None:
    """Load the tasks that a component is tried on; a wrong key of theirs is no fault of the component."""
    try:
        TriedSubject(kind=target.kind, given=target.given, tasks=tasks, tasks_settings=keys).rows  # noqa: B018
    except CheckFailed:
        return  # the component's checks say it
    except Exception as error:
        text = f"the tasks on which to try {target.given} cannot be loaded: {account_of(error)}"
        raise ConfigError(text) from error


def _parts(
    target: Target, found: Sequence[Target], uses: Mapping[str, str], settings: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """Return with what an agent or a reward is tried: what is asked for, else its recipe's, else what is beside it.

    Each part is what finds the component, '' if nothing does, and its keys.
    """
    recipe = _recipe(target, found)
    parts = {}
    for kind in ("tasks", "agent", "reward", "adapter"):
        keys = dict(recipe.get(kind, {}))
        use = keys.pop("use", "")
        beside = [other.given for other in found if other.kind == kind]
        own = next((given for given in beside if _same(given, use)), use) or next(iter(beside), "")
        given = target.given if kind == target.kind else uses.get(kind) or own
        if kind == "adapter" and not given:
            given, keys = "agent-match", {"match": ""}
        elif not _same(given, use):
            keys = {}
        parts[kind] = given, {**keys, **settings.get(kind, {})}
    return parts


def _recipe(target: Target, found: Sequence[Target]) -> Mapping[str, Mapping[str, Any]]:
    """Return the sections of the first recipe that uses the component; without one, none."""
    for other in (other for other in found if other.kind == "recipe"):
        sections: Mapping[str, Mapping[str, Any]] = Subject(kind="recipe", given=other.given).spec.settings
        if _same(target.given, sections.get(target.kind, {}).get("use", "")):
            return sections
    return {}


def _step(recipe: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Return how many rollouts a step of a recipe's algorithm has; None if that is not known."""
    keys = dict(recipe.get("algorithm", {}))
    try:
        config = Subject(kind="algorithm", given=keys.pop("use", ""), settings=keys).config
    except AgentrigError:
        return None  # the recipe's own checks say what is wrong
    tasks, size = (getattr(config, key, None) for key in ("tasks_per_step", "group_size"))
    return tasks * size if isinstance(tasks, int) and isinstance(size, int) else None


def _same(given: str, use: str) -> bool:
    """Whether what finds a component (`NAME`, `FILE.py:NAME`) means the one that a recipe uses (also `OWNER:NAME`)."""
    return bool(use) and given.rpartition(":")[2] == use.rpartition(":")[2]


def _targets(word: str, brought: Sequence[Target]) -> Sequence[Target]:
    """Return the components that a name, a distribution or a file stands for; a name is looked up in files first."""
    in_files = [each for each in brought if each.file and word in (each.file, each.given, each.name)]
    installed = [each for each in brought if not each.file and word in (each.distribution, each.plugin, each.name)]
    if not in_files and not installed:
        known = [*{each.distribution for each in brought}, *(each.name for each in brought)]
        raise LookupFailed(
            f"{word} is no component, no distribution with components, and no file of a plugin.{nearest(word, known)}\n"
            "  agentrig plugins lists what is installed"
        )
    return in_files or installed


def _brought(word: str, files: Sequence[str]) -> list[Target]:
    """Return every component that is installed, or in the file that the word names, or in one of these files."""
    file = word if word.endswith(".py") else word.rpartition(":")[0]
    given = {str(Path(each).resolve()): each for each in (*([file] if file.endswith(".py") else []), *files)}
    try:
        return elsewhere(_listed, given, word)
    except EndedElsewhere as error:
        which = " or ".join(given.values()) or "an installed plugin"
        raise LookupFailed(f"{which} cannot be loaded: {error}") from error


def _of_run_file(file: str) -> str:
    """Say how to validate the agent of a run file."""
    try:
        sections = read_run_file(Path(file))
    except AgentrigError as error:
        return str(error)
    for section in sections.keys() - {"recipe"}:
        check_section(section)
    plugins = "".join(f" --plugin {name}" for name in sections.get("run", {}).get("plugins", ()))
    uses = {kind: sections.get(kind, {}).get("use", f"{kind.upper()}") for kind in ("agent", "tasks", "reward")}
    keys = "".join(f" agent.{key}=…" for key in sections.get("agent", {}) if key != "use")
    return (
        f"{file} is a run file, and validate checks components. For its agent:\n"
        f"  agentrig validate {uses['agent']}{plugins} --tasks {uses['tasks']} --reward {uses['reward']}{keys}\n"
        f"  agentrig dev {file} plays the run's own agent"
    )


def _listed(files: Mapping[str, str], word: str) -> list[Target]:
    """Do in the other process what `_brought` asks for; the files are by their whole paths."""
    registry = load(files=list(files))
    for plugin in registry.plugins:
        if plugin.status == "failed" and (plugin.origin in files or word in (plugin.distribution, plugin.name)):
            raise LookupFailed(f"{files.get(plugin.origin, word)}: {plugin.error}")
    return [
        Target(files.get(plugin.origin, ""), c.distribution, c.plugin, c.kind, c.spec.name)
        for plugin in registry.plugins
        for c in plugin.components
    ]


def _here() -> str:
    """Return the name of the package in the current folder."""
    file = Path("pyproject.toml")
    if not file.is_file():
        raise ConfigError(
            "say what to validate: a component's name, a package, a FILE.py, or run it in a package's folder"
        )
    name = tomllib.loads(file.read_text("utf-8")).get("project", {}).get("name")
    if not isinstance(name, str):
        raise ConfigError("pyproject.toml names no project: say what to validate")
    return name

"""`agentrig warmup`."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from agentrig.cli.options import Number, configured, json_option, make_plan, print_json, typed_again
from agentrig.cli.progress import Progress, progress, reading

HUB = r"[\w.-]+/[\w.-]+"
"""OWNER/NAME, as Hugging Face has a model."""


@click.command()
@configured
@click.option(
    "--labels",
    type=click.IntRange(1),
    metavar="N",
    help="Training tasks whose right answers are demonstrated; 64 by default, or half of a smaller split.",
)
@click.option("--all-labels", is_flag=True, help="Demonstrate every training task.")
@click.option(
    "--model",
    default="",
    metavar="NAME | DIR",
    help="What to start from: `starter`, the default, which copies, looks up and calls tools; `new` for random "
    "weights, the default with --parameters, --tokenizer or --vocabulary; the shipped `mini`, or a directory.",
)
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Where the model goes; models/RECIPE.")
@click.option("--gold", default="", metavar="KEY", help="Key of the tasks' private part to answer every call with.")
@click.option(
    "--repeats",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Demonstrations of each task, for demonstrators that vary them.",
)
@click.option(
    "--tokenizer",
    type=click.Choice(["texts", "bytes"]),
    help="Of a new model: tokens learned from the demonstrations, the default, or one for each byte.",
)
@click.option(
    "--vocabulary",
    type=click.IntRange(300, 1 << 20),
    help="Of a new model's tokenizer: most tokens; 1024 by default.",
)
@click.option(
    "--parameters",
    type=Number(0),
    default=0,
    metavar="N",
    help="Of a new model, about (1e6); chosen by --minutes if it is left out, at most a million.",
)
@click.option(
    "--context",
    type=click.IntRange(0),
    default=0,
    metavar="TOKENS",
    help="Of a new model; twice the longest demonstration if it is left out, at least 512. Of another: a longer one.",
)
@click.option(
    "--minutes",
    type=Number(0, min_open=True),
    default=3.0,
    show_default=True,
    help="Training ends with the step in which this time is over; demonstrating, trying and auditing come on top.",
)
@click.option(
    "--passes",
    type=Number(0, 1e5, min_open=True),
    default=20.0,
    show_default=True,
    help="Passes over the demonstrations.",
)
@click.option(
    "--until",
    type=Number(0, 1, min_open=True),
    metavar="SHARE",
    help="End when that share of sampled answers on training tasks without a label is right (0.2), in two tries of "
    "the same model; tried from the first optimizer step on. While a class of tasks (a slice) is never right, training "
    "goes on, up to a share 0.25 higher. All passes by default.",
)
@click.option("--lr", type=Number(0), default=0.0, metavar="RATE", help="Learning rate; by the model's width.")
@click.option(
    "--tokens-per-batch",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Tokens of one optimizer step: fewer for more, smaller steps; chosen if it is left out.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the labels, the weights and the order.")
@click.option(
    "--threads",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Of torch. More than one is slower on cores that others use.",
)
@click.option("--measure/--no-measure", default=True, help="Try the model on training tasks at the end.")
@json_option("Print what was done as JSON.")
def warmup(
    words: Sequence[str],
    labels: int | None,
    all_labels: bool,
    model: str,
    out: Path | None,
    gold: str,
    repeats: int,
    until: float | None,
    measure: bool,
    as_json: bool,
    seed: int,
    parameters: float,
    tokenizer: str | None,
    vocabulary: int | None,
    **options: Any,
) -> None:
    """Make a small starting model for your own tasks, by supervised training on a few right answers.

    It begins with `starter`, a small model that has learned to copy, to look up and to call tools, and no domain.

    The agent runs on labelled training tasks against a local server that answers with demonstrations, and a model
    learns these answers. Then train it by reward: `agentrig train … algorithm.model=DIR`. Held-out tasks are not used.
    Exit status 1 when training by reward could not start from the model.

    \b
    agentrig warmup my-run.toml --labels 64
    agentrig warmup my-run.toml --plugin my_agent.py --labels 200 --until 0.2 --out models/sorting
    agentrig warmup my-run.toml --labels 500 --parameters 3e5
    """
    from agentrig.errors import ConfigError

    own = {name: options.pop(name) for name in _PLANNED}
    own["threads"] = options.pop("threads")
    asked = {"parameters": int(parameters), "tokenizer": tokenizer, "vocabulary": vocabulary}
    of_new: dict[str, Any] = {name: value for name, value in asked.items() if value}
    model = model or ("new" if of_new else "starter")
    given = typed_again(words, options)
    if of_new and model != "new":
        names = ", ".join(f"--{name}" for name in of_new)
        raise ConfigError(f"{names}: only for a new model, and --model {model} has its own; leave one of them out")
    if any(word.startswith("algorithm.model=") for word in words):
        raise ConfigError("--model names what a warm-up starts from: leave algorithm.model out")
    if model not in ("starter", "new", "mini") and not Path(model).is_dir() and not re.fullmatch(HUB, model):
        raise ConfigError(
            f"--model {model}: there is no such directory; write starter, new, mini or a model's directory"
        )
    plan = make_plan(words, dict(options))
    from agentrig.demonstrations import StartPlan
    from agentrig.run import warmup as run

    run.check_makes_start(plan)
    if model != "new":
        plan = make_plan([*words, f"algorithm.model={model}"], options)
    directory = out or Path("models") / plan.recipe
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        if (directory / "config.json").exists():
            raise ConfigError(
                f"{directory} already has a model. Train it: agentrig train {given} algorithm.model={directory}\n"
                "  Or make another one: remove this, or name another directory: --out DIR"
            )
        raise ConfigError(f"{directory} already exists; remove it, or name another directory: --out DIR")
    with _part_of(directory) as part:
        wanted = StartPlan(directory=part, model=model, seed=seed, **own, **of_new)
        done = _make(
            plan, wanted, 0 if all_labels else labels, directory=directory, gold=gold, repeats=repeats,
            until=until, measured=measure,
        )  # fmt: skip
    again = _again(given, done["more_labels"], directory) if done.get("more_labels") else ""
    if done["ready"]:
        click.echo(next_step(done, f"{given} algorithm.model={directory}", again))
    elif again:
        click.echo(f"next: {again}")
    if as_json:
        print_json(done, indent=2)
    if not done["ready"]:
        raise SystemExit(1)


def _again(given: str, labels: int, directory: Path) -> str:
    """Return the command that makes another model of more labels, with the options that were typed."""
    context, typed = click.get_current_context(), list[str]()
    for option in context.command.params:
        name = option.name or ""
        if name in _MAKES and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            value = context.params[name]
            typed += [option.opts[0], f"{value:g}" if isinstance(value, float) else str(value)]
    out = shlex.join([*typed, "--labels", str(labels), "--out", f"{directory}-{labels}"])
    return f"agentrig warmup {given} {out}"


def next_step(done: Mapping[str, Any], given: str, again: str = "") -> str:
    """Return the last lines: the commands that look at the model and train it, or that it has little left to gain.

    Args:
        again: The command that makes a better model, which comes first; '' for none.
    """
    train = f"agentrig train {given}"
    if again:
        return f"next: {again}\nor train this one: {train}"
    if done.get("verdict", {}).get("kind") != "solved":
        return f"next: agentrig dev {given}\n      agentrig forecast {given}\n      {train}"
    return (
        "next: use harder tasks, and make a model for them. Training on these tasks has little left to gain; to do it "
        f"all the same: {train}"
    )


def why_ended(made: Any, wanted: Any, until: float | None = None) -> str:
    """Return whether `until`, the passes or the minutes ended the training, and how many minutes all passes take here.

    Args:
        until: The share of right answers that was asked for, if it was reached.
    """
    from agentrig.run.warmup import one_decimal

    after = f"the training ended after {one_decimal(made.passes)} of {wanted.passes:g} passes, because"
    if until is not None:
        return f"{after} --until {until:g} was reached, in two tries"
    if made.passes >= wanted.passes:
        return f"{after} no more were asked for (--passes)"
    all_passes = math.ceil(made.wall_s / 60 * wanted.passes / made.passes + 0.5)  # somewhat more: steps differ
    return f"{after} --minutes {wanted.minutes:g} was over; for all passes on this machine: --minutes {all_passes}"


FAR = 0.25
"""An accuracy so much above `--until` leaves less to learn than was asked for."""


def far_past(tried: Sequence[float], until: float, labels: int) -> str:
    """Return that the accuracy jumped far past `until`, and what to do; '' if it did not.

    Args:
        tried: The accuracies of the models that were tried, the last one of the model that is kept.
        labels: How many tasks were demonstrated.
    """
    if tried[-1] < until + FAR:
        return ""
    went = f"to {tried[-1]:.0%} before the first try"
    if len(tried) > 1 and tried[-2] >= until:
        return ""  # it waited for classes that were never right
    if len(tried) > 1:
        went = f"from {tried[-2]:.0%} to {tried[-1]:.0%} between two tries"
    return (
        f"accuracy went {went}, far past --until {until:g}: less is left to learn by reward. "
        f"Use fewer labels: --labels {max(1, labels // 3)}"
    )


def no_better_than_guessing(share: float, accuracy: float, n: int) -> str:
    """Return that a model may only guess and what to do; '' if its accuracy on n tasks is significantly more.

    Args:
        share: Of the demonstrations, those that the most frequent reply answers.
    """
    from agentrig.figures import wilson

    if wilson(accuracy * n, n)[0] > share:
        return ""
    return (
        f"warning: always giving one and the same answer would be right in about {share:.0%} of the tasks, and the "
        f"training ended at {accuracy:.1%}: this model may only guess. Make it again with a higher "
        f"--until, such as {above_guessing(share):g}"
    )


def above_guessing(share: float) -> float:
    """Return an `--until` which a model that only guesses does not reach: guessing is right in that share of tasks."""
    return float(f"{share + (1 - share) / 4:.2g}")


_PLANNED = ("context", "minutes", "passes", "lr", "tokens_per_batch")
"""Options that go to the plan of the warm-up as they are."""

_MAKES = (
    *_PLANNED, "model", "gold", "repeats", "until", "seed", "parameters", "tokenizer", "vocabulary", "threads",
)  # fmt: skip
"""Options that say how a model is made, but not of how many labels."""


ASKS_WHY = 0.5
"""Below this share of right answers on other training tasks, the demonstrated ones are tried too."""


@contextmanager
def _part_of(directory: Path) -> Iterator[Path]:
    """Give a folder beside a model's directory, to be renamed when the model is whole; an unfinished one is removed."""
    part = directory.absolute().with_name(f".{directory.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a killed command
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _make(
    plan: Any,
    wanted: Any,
    n: int | None,
    *,
    directory: Path,
    gold: str,
    repeats: int,
    until: float | None,
    measured: bool,
) -> dict[str, Any]:
    """Make the model, print each stage, and return what was done; also written to the directory's `warmup.json`."""
    import attrs

    from agentrig.figures import amount
    from agentrig.processes.ends import Interrupted, asked_to_end
    from agentrig.run import warmup as run
    from agentrig.run.evaluate import evaluate
    from agentrig.run.files import write_whole
    from agentrig.run.splits import WARM_UP, labelled
    from agentrig.run.verdict import never_right
    from agentrig.tasks import input_key

    settings = plan.configs["algorithm"]
    temperature = float(getattr(settings, "temperature", 1.0))
    sampling: dict[str, Any] = {"mode": "dev", "as_mode": "train", "temperature": temperature}

    def measure(tasks: Sequence[Any], model: Path | None, which: str, n: int = 1) -> Any:
        """Sample rollouts of training tasks, at the temperature of training; 1 where it has none."""
        with progress(n * len(tasks), where=f"on {which}, sampled") as shown:
            told: dict[str, Any] = {"ended": shown, "begun": shown.begin}
            return evaluate(plan, tasks=tasks, checkpoint=model, n=n, keep=True, **told, **sampling)

    run.check_context(settings, wanted.context)
    with reading("the tasks"):
        labels = run.choose_labels(plan, n, seed=wanted.seed)
        plan.demonstrator(labels.tasks, gold=gold)  # before anything takes long
    where = "training tasks without a label" if labels.fresh else "labelled tasks (no others are left)"
    note = f", {labels.note}" if labels.note else ""
    click.echo(f"labels: {amount(len(labels.tasks), 'task')} of the split {labels.split}{note}")
    seen = labelled(wanted.model).union(map(input_key, labels.tasks))  # ids may name a split, which shares decide
    done: dict[str, Any] = {"labels": [t.id for t in labels.tasks], "split": labels.split, "ready": True}
    done["inputs"] = sorted(seen)
    if measured and wanted.model != "new" and not wanted.context:  # its own context may be too short for the agent
        before = measure(labels.measured, None, where)
        run.check_unsolved(before, wanted.model)
        done["before"] = before.as_dict()
        click.echo(_measured(f"{wanted.model} before the warm-up", before, where))
    found = run.demonstrate(plan, labels.tasks, repeats=repeats, gold=gold, seed=wanted.seed)
    click.echo(f"demonstrations: {amount(found.rollouts, 'rollout')}, {len(found.turns)} replies to learn")
    for line in found.rejected[:3]:
        click.echo(f"  left out, the reward does not count it as correct: {line}")
    if unused := run.unused_tools(found.turns):
        click.echo(f"warning: {unused}")
    share = run.guessed(found)
    if until is not None and share >= until:
        click.echo(
            f"warning: one and the same reply is right in {share:.0%} of the demonstrations, so a model that only "
            f"guesses reaches --until {until:g}: give a higher --until, such as {above_guessing(share):g}"
        )
    tried: list[tuple[float, int]] = []  # accuracy, and of how many tasks: the last try of each model
    tries, reached, never = 0, False, ""

    shown: Progress
    steps, of_steps, spent_s = 0, 0, 0.0

    def learning() -> str:
        if not of_steps:  # these seconds are of no limit
            return "learning the demonstrations, starting and the first optimizer step"
        passes = run.one_decimal(wanted.passes * steps / of_steps)
        return (
            f"learning the demonstrations, optimizer step {steps} of {of_steps} done, pass {passes} of "
            f"{wanted.passes:g}; of {60 * wanted.minutes:.0f} s (--minutes)"
        )

    def wait(what: str, since_s: float | None = None) -> None:
        nonlocal shown
        waiting.close()
        shown = waiting.enter_context(progress(0, what))
        shown.tell_what(what, since_s)

    def say(line: str, then: str = "") -> None:
        waiting.close()
        click.echo(f"  {line}")
        if then or reached:
            wait(then or "checking the last pass and saving the model")
        else:
            wait(learning(), spent_s)

    def learned(done: int, of: int, seconds: float | None) -> None:
        nonlocal steps, of_steps, spent_s
        if seconds is None:
            shown.tell_what(f"optimizer step {done} of {of} done; its check, and the next step", 0.0)
            return
        steps, of_steps, spent_s = done, of, seconds
        shown.tell_what(learning(), spent_s)

    def enough(done: float, measured: Callable[[], Any]) -> float:
        """Try the model, and once more if it does well: of many tries, the best one is a lucky one."""
        nonlocal tries, reached, never
        assert until is not None
        of = amount(len(labels.measured), "training task")
        say(f"trying the model of pass {run.one_decimal(done)} on {of} …", "trying the model")
        found, tries = measured(), tries + 1
        enough_right = (found.accuracy or 0.0) >= until
        never = never_right(found.classes, advice="") if enough_right and found.accuracy < until + FAR else ""
        if not enough_right or asked_to_end():
            say(_measured("so far", found, where))
        elif never:
            say(f"{_measured('so far', found, where)}; {never} So the training goes on, past --until {until:g}")
        else:
            again = "; one try may be lucky, so the same model is tried again …"
            say(_measured("so far", found, where) + again, "trying the model again")
            found, tries = measured(), tries + 1
            reached = (found.accuracy or 0.0) >= until
            goes_on = "" if reached else f"; less than --until {until:g}, so the training goes on"
            say(_measured("again", found, where) + goes_on)
        tried.append((found.accuracy or 0.0, found.n))
        return run.NEAR if never else tried[-1][0] / until

    start, asked = time.monotonic(), enough if until is not None else None
    with ExitStack() as waiting:  # until the next line of the training
        wait(learning())
        made = run.make_start(plan, wanted, labels, found.turns, say, asked, learned)
    whole = time.monotonic() - start
    os.replace(wanted.directory, directory)
    made = attrs.evolve(made, directory=directory)
    done |= {"rejected": len(found.rejected), "turns": len(found.turns)}
    done["model"] = {**attrs.asdict(made), "directory": str(made.directory)}
    with_tries = f" ({whole:.0f} s with the model tried {amount(tries, 'time')})" if tried else ""
    click.echo(
        f"{made.directory}: {made.parameters:,} parameters, {made.vocabulary} tokens, context {made.context}; "
        f"{amount(made.steps, 'optimizer step')} in {made.wall_s:.0f} s{with_tries}, loss {made.losses[-1]:.3f}"
    )
    if made.interrupted:
        write_whole(directory / WARM_UP, json.dumps(done, indent=2) + "\n")
        so_far = f"pass {run.one_decimal(made.passes)} of {wanted.passes:g}, is in {directory}, and was not measured"
        raise Interrupted(made.interrupted, f"the warm-up was interrupted: its model so far, of {so_far}")
    lacks = "not reached" if not never else "reached, but not with a right answer in each class of tasks"
    unreached = "" if until is None or reached else f"--until {until:g} was {lacks}: "
    click.echo(f"{unreached}{why_ended(made, wanted, until if reached else None)}")
    accuracies = [accuracy for accuracy, _ in tried]
    if until is not None and tried and (far := far_past(accuracies, until, len(labels.tasks))):
        click.echo(far)
    limit = getattr(settings, "max_tokens", None)
    if limit is not None and limit < made.longest_reply:
        click.echo(
            f"warning: the longest demonstrated reply has {made.longest_reply} tokens, and algorithm.max_tokens = "
            f"{limit} cuts it: train with algorithm.max_tokens={made.longest_reply + 8}"
        )
    if measured:
        group, limit = getattr(settings, "group_size", 8), plan.run.failure_limit
        judged_on, each = labels.measured[: run.JUDGED], min(group, run.ROLLOUTS)
        if each > 1:
            click.echo(f"  trying the model with {each} answers to each of {len(judged_on)} {where}, as in training …")
        after = measure(judged_on, made.directory, where, each)
        done["after"] = after.as_dict()
        known = None
        if labels.fresh and after.accuracy is not None and after.accuracy < ASKS_WHY:
            click.echo(
                "  trying it on the labelled tasks too, to find out whether it only repeats its demonstrations …"
            )
            known = measure(labels.tasks[: run.MEASURED], made.directory, "labelled tasks")
            done["known"] = known.as_dict()
        click.echo(_measured(f"a run begins, sampled at temperature {temperature:g}, with", after, where))
        if after.accuracy is not None:
            fewer = ""
            if tried and len(judged_on) < len(labels.measured):
                fewer = f", on {len(judged_on)} of the {len(labels.measured)} tasks of the tries"
            click.echo(
                f"  these are sampled answers{fewer}; greedy answers, which `agentrig train` measures held-out tasks "
                "by, may be right more or less often"
            )
        if not labels.fresh:
            click.echo(
                "warning: all training tasks were demonstrated, so this does not tell what the model can do from what "
                "it remembers: leave some without a label (--labels N)"
            )
        judged = run.verdict(after, group, known, failure_limit=limit, until=until, credit=plan.configs["credit"])
        if run.only_repeats(after, known) and judged.kind in ("good", "hopeless"):
            done["more_labels"] = labels.more
        done |= {"ready": judged.kind in ("good", "solved"), "verdict": attrs.asdict(judged)}
        click.echo(judged.message)
    if reached and (guess := no_better_than_guessing(share, *tried[-1])):
        click.echo(guess)
    write_whole(directory / WARM_UP, json.dumps(done, indent=2) + "\n")
    return done


def _measured(when: str, found: Any, where: str) -> str:
    """Return how many sampled answers were right, and of which tasks."""
    from agentrig.figures import wilson
    from agentrig.run.metrics import failure_lines

    if found.accuracy is None:
        why = failure_lines(getattr(found, "reasons", {}))
        lines = [f"{when}: no rollout was scored", *why]
        return "\n  ".join(lines)
    # the answers to one task are alike, so a task counts once; a trial of the model has one answer to each
    n = len({rollout.group for rollout in getattr(found, "rollouts", ())}) or found.n
    low, high = wilson(found.accuracy * n, n)
    right = f"{found.accuracy:.1%} of {found.n} sampled answers to {n} {where} are right (95%: {low:.0%} to {high:.0%})"
    return f"{when}: {right}, mean reward {found.reward:.3g}"

"""`agentrig forecast`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentrig.cli.options import configured, json_option, make_plan, print_json
from agentrig.cli.progress import STARTING, progress
from agentrig.errors import AgentrigError, RunStopped
from agentrig.figures import amount, counted, duration, gain_words, percent, share_in_points
from agentrig.text import printable

if TYPE_CHECKING:
    from agentrig.run.forecast import Trial
    from agentrig.view.prices import Prices


@click.command()
@configured
@click.option(
    "--limit",
    type=click.IntRange(1),
    metavar="N",
    help="How many tasks; by default those of a step, in at most 256 rollouts.",
)
@click.option("--rollouts", type=click.IntRange(1, 1024), metavar="N", help="Rollouts of each; the run's group size.")
@click.option(
    "--prices",
    metavar="FILE.toml",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="What tokens and machines cost, as for `agentrig compare`.",
)
@json_option("Print the figures as JSON.")
def forecast(
    words: Sequence[str], limit: int | None, rollouts: int | None, prices: Path | None, as_json: bool, **options: Any
) -> None:
    """Say whether a recipe's model can learn from its tasks, and what a run takes; nothing is trained or kept.

    A few training tasks are rolled out as in training. pass@k is how likely at least one of k rollouts of a task is
    correct. Reinforcement learning learns from groups (the rollouts of one task) whose rewards differ. One update is
    measured on a learner that is thrown away. Exit status 1 if the verdict is not "good". Ctrl-C ends it and shows
    what is known so far.

    \b
    agentrig forecast mini
    agentrig forecast my-run.toml --limit 64 --rollouts 8 algorithm.temperature=1.2
    agentrig forecast my-run.toml --prices prices.toml
    """
    from agentrig.run.forecast import Trial
    from agentrig.view.prices import read_prices

    table = None if prices is None else read_prices(prices)
    plan = make_plan(words, options)
    trial = Trial.of(plan, tasks=limit or 0, rollouts=rollouts or 0)
    plan.use_hardware()
    plan.check_algorithm()
    click.echo(f"{amount(trial.expected, 'rollout')}: {STARTING} …", err=True)
    ended: BaseException | None = None
    try:
        with progress(trial.expected, where="as in training, sampled") as shown:
            trial.roll_out(shown, shown.begin)
        with progress(0, "measuring one update of a learner that is thrown away, then the verdict"):
            trial.update()
    except (AgentrigError, KeyboardInterrupt) as error:
        if not trial.groups or (isinstance(error, RunStopped) and not trial.complete):
            raise
        ended = error
    found = trial.forecast()
    if table is not None:
        _add_costs(found, trial, table)
    if as_json:
        print_json(found, indent=2)
    else:
        for line in _lines(found):
            click.echo(printable(line))
    if ended is not None:
        raise ended
    if found["verdict"]["kind"] != "good":
        raise SystemExit(1)


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a forecast."""
    from agentrig.device_memory import in_gib
    from agentrig.run.metrics import failure_lines

    n, groups, each, step, gain = (found[k] for k in ("rollouts_per_task", "groups", "per_rollout", "step", "gain"))
    sampled = f"temperature {found['sampling']['temperature']:g}"
    so_far = "" if found["complete"] else "so far: "
    yield f"{so_far}{_played(found)}, {amount(n, 'rollout')} each, {sampled}"
    shown = [k for k in range(1, n + 1) if k == n or k & (k - 1) == 0]  # the powers of 2
    yield "  ".join(f"pass@{k} {percent(found['pass_at_k'][str(k)])}%" for k in shown)
    low, high = groups["ci95"]
    by_calls = " in rewards of calls" if groups["by_calls"] else ""
    differ = f"groups that differ{by_calls}: {groups['differ']} of {groups['n']}"
    if groups["n"]:
        differ += f", {groups['differ'] / groups['n']:.0%} (95%: {low:.0%} to {high:.0%})"
        if n != groups["size"] > 1 < n:
            word = "at least " if n < groups["size"] else ""
            differ += f"; {word}about {groups['share']:.0%} with {groups['size']} rollouts a task, as in the run"
    if groups["taught"] not in (None, groups["differ"]):
        differ += f"; the run's credit learns from {groups['taught']}"
    yield differ
    yield f"failures: {counted(found['failures']) if found['failures'] else 'none'}"
    yield from (f"  {line}" for line in failure_lines(found["reasons"]))
    yield (
        f"a rollout: {each['calls']:.1f} calls ({each['trained_calls']:.1f} trained), {each['prompt_tokens']:.0f} "
        f"tokens of prompts ({each['trained_prompt_tokens']:.0f}), {each['response_tokens']:.0f} sampled "
        f"({each['trained_response_tokens']:.0f})"
    )
    if step["rollout_s"] is not None:
        update = "not known" if step["update_s"] is None else f"about {duration(step['update_s'])}"
        rollouts = _between(step["least_rollout_s"], step["rollout_s"])
        yield f"a step: rollouts {rollouts}, update {update} ({step['updated']})"
    if step["peak_bytes"]:
        yield f"memory needed: {in_gib(step['peak_bytes'])}, the most that this process had, with the update"
    if step["memory"]:
        yield step["memory"]
    if found["run"]["seconds"] is not None:
        without = "" if step["update_s"] is not None else ", without updates"
        least, most, parts = (found["run"][key] for key in ("least_seconds", "seconds", "parts"))
        took = f"{amount(found['run']['steps'], 'step')}, {_between(least, most)}"
        yield f"a run: {took}{without}{_cost(found, 'run')}"
        audits = f", audits of the first steps {duration(parts['audits_s'])}" if parts["audits_s"] else ""
        measured = f"{amount(parts['measured'], 'measured answer')} {duration(parts['measured_s'])}"
        yield (
            f"  {'at most' if least < most else 'in it'}: start {duration(parts['start_s'])}, "
            f"steps {duration(parts['steps_s'])}, {measured}{audits}; saving and the report come on top"
        )
        if step["least_rollout_s"] < step["rollout_s"]:
            yield "  few rollouts say it no better: the server was new, and threads were idle (more tasks: --limit)"
    if "cost" in found["run"] and (lacking := found["run"]["cost"]["no_price"]):
        yield f"  no price for: {'; '.join(lacking)}"
    yield from _gain(found, gain)
    yield f"verdict: {found['verdict']['kind']}. {found['verdict']['message']}"


def _played(found: dict[str, Any]) -> str:
    """Return which tasks were rolled out, in words: tasks without a label tell what the model can do by itself."""
    played, labels, of = amount(found["tasks"], "task"), found["labels"], found["split_tasks"]
    if not labels:
        return f"{played} of split {found['split']}"
    if labels == of:
        return f"{played} of split {found['split']}, which are all labels of the model: it may know them by heart"
    return f"{played} without a label, of split {found['split']} ({labels} of its {of} tasks are the model's labels)"


def _between(least_s: float, most_s: float) -> str:
    """Return a time in words: `about 3 min`, or `4 min to 15 min`."""
    least, most = duration(least_s), duration(most_s)
    return f"about {most}" if least == most else f"{least} to {most}"


def _add_costs(found: dict[str, Any], trial: Trial, prices: Prices) -> None:
    """Add what a run costs, and what it costs until a gain could be significant, if the time is known."""
    from agentrig.view.comparison import usage_by_name
    from agentrig.view.prices import priced
    from agentrig.view.related import origin

    model = origin(str(getattr(trial.plan.configs["algorithm"], "model", "")), Path(trial.plan.run.directory))
    machine, seen = trial.machine(), len(trial.rollouts)
    for of in (found["run"], found["gain"]):
        if of["seconds"] is not None:
            used = {key: count * of["rollouts"] / seen for key, count in trial.usage.items()}
            row = {"usage": usage_by_name(used, model), "machine": machine, "wall_s": of["seconds"]}
            of["cost"] = {"currency": prices.currency, **priced(row, prices)}


def _cost(found: dict[str, Any], of: str) -> str:
    """Return what `run` or `gain` costs, as the end of a line; '' if it is not known."""
    from agentrig.view.comparison import money

    cost = found[of].get("cost", {})
    part = next((key for key in ("total", "tokens", "machine") if cost.get(key) is not None), None)
    if part is None:
        return ""
    what = {"total": "", "tokens": " for its tokens", "machine": " for its machine"}[part]
    most = "at most " if found[of]["least_seconds"] < found[of]["seconds"] and part != "tokens" else ""
    return f", {most}{money(cost[part])}{' ' if cost['currency'] else ''}{cost['currency']}{what}"


def _gain(found: dict[str, Any], gain: dict[str, Any]) -> Iterator[str]:
    """Yield what a gain takes to be significant."""
    n, least, more, once = (
        gain["held_out"],
        gain["least_tasks"],
        gain["least_tasks_with_worse"],
        found["pass_at_k"]["1"],
    )
    test = "(exact sign test, p < 0.05)"
    if n < least:
        yield f"no gain can be significant on {n} held-out tasks {test}: use at least {least}"
        return
    if gain["no_room"]:
        if gain["no_room"] != found["verdict"]["message"]:
            yield f"no gain can be significant {test}: {gain['no_room'].removesuffix('.')}"
        return
    wrong = n if gain["start"] is None else n - round(gain["start"] * n)
    worse = ""
    if gain["worse"] and more + gain["worse"] <= wrong:
        worse = f", or from {share_in_points(more, n)} if {amount(gain['worse'], 'task')} may become worse"
    yield f"{gain_words(n)} (if no task becomes worse{worse}; exact sign test, p < 0.05)"
    if gain["start"] is not None:
        yield f"  {percent(gain['start'])}% of them are right before training, measured as a run does it"
    elif once is not None:
        yield "  how many are right before training is not measured: greedy answers may be better than pass@1"
    if found["verdict"]["kind"] != "good" or gain["steps"] is None:
        return
    if gain["enough"] is not None and gain["enough"] > n:
        yield (
            f"  {n} are too few to show what this model may gain, from pass@1 to pass@{found['rollouts_per_task']}: "
            f"use at least {gain['enough']} held-out tasks"
        )
        return
    when = f"after about {amount(gain['steps'], 'step')}"
    if gain["seconds"] is not None:
        when += f", {_between(gain['least_seconds'], gain['seconds'])}{_cost(found, 'gain')}"
    if gain["steps"] > found["run"]["steps"]:
        when = f"only after more than {amount(found['run']['steps'], 'step')}"
    yield (
        f"  a run would show such a gain {when}, if it moved pass@1 to pass@{found['rollouts_per_task']} in even "
        "steps: how fast a model really learns can't be known before"
    )

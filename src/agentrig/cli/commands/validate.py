"""`agentrig validate`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from agentrig.cli.options import json_option, measured_server, print_json, stdout_to_stderr
from agentrig.text import printable

GUESSED = 0.1
"""From this share of right answers by guessing on, a model that is right in 20% of the tasks may only guess."""


@click.command()
@click.argument("words", nargs=-1, metavar="[NAME | PACKAGE | FILE.py] [section.key=value …]")
@click.option("--plugin", "files", multiple=True, metavar="FILE.py", help="A Python file that is a plugin too.")
@click.option(
    "--tasks", metavar="NAME", help="The task set for an agent or a reward, or FILE.py:NAME; else its plugin's."
)
@click.option("--reward", metavar="NAME", help="The reward for an agent's trial, or FILE.py:NAME; else its plugin's.")
@click.option("--adapter", metavar="NAME", help="The adapter for the trial; by default all calls are kept.")
@click.option("--script", metavar="TEXT", help="What the scripted model says; by default right answers and nonsense.")
@click.option("--endpoint", metavar="URL", help="Play the trial with a real model: an OpenAI-compatible server (…/v1).")
@click.option("--model", metavar="NAME", help="The server's model; its first by default.")
@click.option("--gold", metavar="KEY", help="Key of the tasks' private part with the right answer.")
@click.option(
    "--shared", multiple=True, metavar="KEY", help="A private key that the agent may know, or `input.KEY` of its tools."
)
@click.option("--limit", type=click.IntRange(1, 1000), default=12, show_default=True, help="Tasks of a trial.")
@click.option("--only", multiple=True, metavar="CHECK", help="Run only this check, and what it needs.")
@json_option("Print the results as JSON.")
def validate(
    words: Sequence[str],
    files: Sequence[str],
    script: str | None,
    endpoint: str | None,
    model: str | None,
    gold: str | None,
    shared: Sequence[str],
    limit: int,
    only: Sequence[str],
    as_json: bool,
    **uses: str | None,
) -> None:
    """Check what a plugin brings, and play its agent on a dozen tasks; nothing is learned.

    Without a name it takes the package in the current folder. Exit status 0 only if no check failed.

    \b
    agentrig validate my_agent.py --tasks mini-sql --reward spider-exec
    agentrig validate my-agent --tasks my-tasks --reward my-reward
    agentrig validate my_agent.py --tasks my_tasks.py:words --reward my_tasks.py:equal gateway.use=on
    agentrig validate agentrig-spider --json
    """
    if not as_json:
        click.echo("loading what is to be checked …", err=True)
    from agentrig.plan import parse_override
    from agentrig.processes.scratch import temporary_files
    from agentrig.testing.validating import validated

    word = words[0] if words and "=" not in words[0] else None
    settings: dict[str, dict[str, Any]] = {}
    for text in words[1:] if word else words:
        section, key, value = parse_override(text)
        settings.setdefault(section, {})[key] = value
    with temporary_files(), stdout_to_stderr() as stdout:
        found = validated(
            word,
            uses={kind: name for kind, name in uses.items() if name},
            settings=settings,
            files=files,
            script=script,
            endpoint=measured_server(endpoint, model, None) if endpoint or model else None,
            gold=gold,
            shared=shared,
            limit=limit,
            only=only,
            say=None if as_json else lambda text: click.echo(printable(text), file=stdout),
        )
    if as_json:
        print_json(found, indent=2)
    else:
        for figures in found["trials"]:
            click.echo(printable(_shown(figures, scripted=not (endpoint or model))))
        click.echo(printable(_verdict(found, word, files, gold=gold)))
    if not found["ok"]:
        raise SystemExit(1)


def _guessed(trials: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of right answers that a model which always says the same may reach."""
    return max((figures["most_frequent_answer"] for figures in trials), default=0.0)


def _verdict(found: Mapping[str, Any], word: str | None, files: Sequence[str], *, gold: str | None = None) -> str:
    """Return the last line: which checks failed, or that none did and what is next.

    Args:
        found: What `agentrig.testing.validating.validated` returned.
        gold: The key of the right answer, if it was named.
    """
    from agentrig.cli.commands.warmup import above_guessing
    from agentrig.doctor.content import is_folder
    from agentrig.plan import FEW_LABELS, warmup_command
    from agentrig.testing.subject import Subject

    reports, guessed = found["reports"], _guessed(found["trials"])
    results = [result for report in reports for result in report["results"]]
    failed = [r["check"] for r in results if r["status"] == "failed"]
    if failed:
        return f"{len(failed)} failed: {', '.join(dict.fromkeys(failed))}"
    skipped = sum(r["status"] == "skipped" for r in results)
    passed = f"all others passed, {skipped} skipped" if skipped else "all passed"
    recipe = next((report["subject"] for report in reports if report["kind"] == "recipe"), "")
    if not recipe:
        return passed
    own = [file for file in (re.sub(r"(?<=\.py):.*", "", word or ""), *files) if file.endswith(".py")]
    words = [recipe.rpartition(":")[2], *(part for file in own for part in ("--plugin", file))]
    name = shlex.join(words)
    settings = Subject(kind="recipe", given=recipe).spec.settings
    model = str(settings.get("algorithm", {}).get("model", ""))
    absent = is_folder(model) and not (Path(model).expanduser() / "config.json").is_file()
    if not absent and any("model" in settings.get(section, {}) for section in ("algorithm", "server")):
        return f"{passed}; next: agentrig train {name}"
    own_model = f"with one of yours: agentrig train {name} algorithm.model=DIR"
    if found["no_gold"] and gold is None:
        return (
            f"{passed}; next: say what a right answer is. {found['no_gold']} Name one key: agentrig validate … --gold "
            "KEY. Or, for an answer made of several keys, write AgentSpec(demonstrate=...) (docs/how-to/laptop.md). "
            f"Then agentrig warmup can make a small model; {own_model}"
        )
    until, above = 0.2, ""
    if guessed >= GUESSED:
        until = above_guessing(guessed)
        above = f"; always the same answer would be right in {guessed:.0%} of the tasks"
    named = ["--gold", gold] if found["no_gold"] and gold else []
    out = model if absent and model != str(Path("models") / words[0]) else ""
    return (
        f"{passed}; next: {warmup_command([*words, *named], until=until, out=out)} (makes a small model{above}; for "
        f"easy tasks add {FEW_LABELS}; {own_model})"
    )


def _shown(figures: Mapping[str, Any], *, scripted: bool) -> str:
    """Return the figures of a trial as lines."""
    lines = [f"What would be trained of {figures['agent']}"]
    for name, value in figures.items():
        if name != "agent" and list(value if isinstance(value, Mapping) else ()) != ["(no node)"]:
            if isinstance(value, Mapping):
                shown = (f"{k} {'not scored' if v is None else v}" for k, v in value.items())
                value = ", ".join(shown) or "none"
            if name == "most_frequent_answer":  # a bare number could be a reward
                value = f"right in {value:.0%} of the tasks" if value else "not known, or all right answers differ"
            lines.append(f"  {name.replace('_', ' '):<28} {value}")
    if scripted:
        lines.append("  A token is a byte here; a model's tokenizer makes fewer: agentrig dev shows them")
    return "\n".join(lines)

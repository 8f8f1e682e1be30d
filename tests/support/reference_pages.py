"""Makes the pages of docs/reference/ from the code: every command, every key, the index of the API.

`python tests/support/reference.py` writes them, and a test compares them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {"agentrig", *(folder.name for folder in ROOT.glob("plugins/agentrig-*"))}

MODULES = (
    "tasks", "agents", "endpoints", "rewards", "traces", "adapters", "rollouts", "algorithms", "learners",
    "credit", "servers", "pools", "demonstrations",
    "ledger", "observers", "findings", "hardware.contract", "hardware.memory", "figures", "settings", "secrets",
    "errors", "plugins.specs", "plugins.hookspecs", "plan",
)  # fmt: skip
"""What plugins import, in the order of the API page; the rest is machinery."""


def cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def rows(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, and an empty one."""
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for line in lines:
        yield f"| {' | '.join(map(cell, line))} |"
    yield ""


# ---------------------------------------------------------------------------------------------------- the command line


def walk(command: click.Command, parent: click.Context | None, name: str) -> Iterator[tuple[click.Command, Any]]:
    """Yield a command and those below it, each with its context."""
    command._help_option = None  # click keeps the one of the first context that asked, whose names may be others
    context = click.Context(command, info_name=name, parent=parent, **command.context_settings)
    yield command, context
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from walk(found, context, below)


def prose(command: click.Command) -> Iterator[str]:
    """Yield a command's help: paragraphs, and its examples as a block."""
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):
            yield from ("```text", paragraph.removeprefix("\b\n"), "```", "")
        else:
            yield from (" ".join(paragraph.split()), "")


def options(command: click.Command, context: click.Context) -> list[tuple[str, str]]:
    """Return the options of a command, each with its meaning; ranges and defaults as `--help` states them."""
    records = (p.get_help_record(context) for p in command.get_params(context) if isinstance(p, click.Option))
    return [(f"`{record[0]}`", record[1]) for record in records if record is not None]


def command_line() -> str:
    from agentrig.cli.entry import main

    lines = [
        "# Command line",
        "",
        "Every command prints this with `--help`. The page is made from the code; a test fails when the two differ.",
        "",
    ]
    for command, context in walk(main, None, "agentrig"):
        arguments = " ".join(p.make_metavar(context) for p in command.params if isinstance(p, click.Argument))
        lines += [f"## `{context.command_path}`", "", *prose(command)]
        if arguments:
            lines += [f"Arguments: `{arguments}`", ""]
        lines += rows(("option", "meaning"), options(command, context))
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- every key


def keys(cls: type) -> list[tuple[str, str, str, str, str]]:
    """Return name, type, default, range and meaning of every key of a config class; a key without words is an error."""
    from agentrig.cli.commands.plugins import as_written, settings_of

    found = []
    for name, key in settings_of(cls).items():
        if not key["help"]:
            raise ValueError(f"{cls.__name__}.{name} has no help: declare it by agentrig.setting")
        default = as_written(key["default"])
        code = default if default in ("none", "required") else f"`{default}`"
        choices = key["range"].removeprefix("one of ").split(", ")
        values = ", ".join(f"`{c}`" for c in choices) if key["range"].startswith("one of ") else key["range"]
        found.append((f"`{name}`", key["type"], code, values, str(key["help"])))
    return found


def components() -> Mapping[str, Sequence[Any]]:
    """Return the components that agentrig's own distributions bring, by kind."""
    from agentrig.plugins.loading import load
    from agentrig.plugins.specs import KINDS

    registry, kinds = load(), [kind for kind in KINDS if kind != "recipe"]
    found = {kind: [c for c in registry.components(kind) if c.distribution in DISTRIBUTIONS] for kind in kinds}
    return {kind: sorted(those, key=lambda c: (c.distribution, c.spec.name)) for kind, those in found.items()}


def configuration() -> str:
    from agentrig.plan import OWN_SECTIONS
    from agentrig.plugins.observing import TRACKERS, section_of
    from agentrig.trackers import TrackerConfig

    head = ("key", "type", "default", "range", "meaning")
    lines = [
        "# Configuration keys",
        "",
        "A run file is TOML, with one section for the run and one for each kind of component. A",
        "section's `use` names the component; the other keys belong to that component. On the command line, write",
        "`section.key=value`. An unknown key, a wrong type or a value out of range is an error that names the cure.",
        "`[observer]` and `[trackers]` may name several: `use = [NAMES]`, and a table `[observer.NAME]` or",
        "`[trackers.NAME]` for the keys of each.",
        "",
        "This page is made from the code; a test fails when the two differ. `agentrig plugins show NAME` prints the",
        "keys of any component, those of other people's plugins included.",
        "",
    ]
    for name in ("run", "gateway"):
        lines += [f"## `[{name}]`", "", *rows(head, keys(OWN_SECTIONS[name]))]
    found = components()
    trackers = [c for c in found["observer"] if section_of(c) == TRACKERS]
    found["observer"] = [c for c in found["observer"] if c not in trackers]
    for kind, those in {**found, TRACKERS: trackers}.items():
        common = {**OWN_SECTIONS, TRACKERS: TrackerConfig}.get(kind)
        shared = keys(common) if common is not None else []
        lines += [f"## `[{kind}]`", "", *(["All of them have these keys.", "", *rows(head, shared)] if shared else [])]
        lines += [] if those else [f"agentrig itself has no component of this kind; plugins register {kind}s.", ""]
        for component in those:
            spec = component.spec
            lines += [f'### `use = "{spec.name}"`', "", f"{spec.summary} From `{component.distribution}`.", ""]
            table = [row for row in keys(spec.config) if row not in shared]
            lines += rows(head, table) if table else ["No keys of its own." if shared else "No keys.", ""]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------ the API


def api() -> str:
    """Return the page whose directives mkdocstrings turns into the API."""
    read = 'In a checkout, Python shows a text: `python -c "import agentrig; help(agentrig.Trace)"`.'
    lines = ["# API", "", f"What plugins import. {read}", ""]
    lines += ["The names that most plugins need are in `agentrig` itself:", ""]
    import agentrig

    names = sorted(name for name in agentrig.__all__ if not name.startswith("_"))
    lines += [", ".join(f"`{name}`" for name in names) + ".", ""]
    for module in MODULES:
        lines += [f"::: agentrig.{module}", ""]
    lines += ["::: agentrig_lightning", ""]
    return "\n".join(lines)


def kit() -> str:
    """Return the page of the kit's checks."""
    from reference import described

    from agentrig.plugins.specs import KINDS
    from agentrig.testing.kit import TRIAL, declared, options_of, subject_class

    lines = [
        "# Checks of the kit",
        "",
        "Every check of `agentrig.testing`, why it matters, and what to do if it fails. A failure says the same, and",
        "what was seen. [Publish a plugin](../tutorials/publish-it.md#the-kit) says how to run them. This",
        "page is made from the code.",
        "",
    ]
    for kind in (*KINDS, TRIAL):
        own = kind in KINDS
        how = f'check("{kind}", subject, settings=..., only=..., OPTION=...)' if own else "agentrig validate"
        lines += [f"## {kind}", "", f"`{how}`", ""]
        lines += rows(
            ("check", "why it matters", "what to do"), [(f"`{c.name}`", c.why, c.cure) for c in declared(kind)]
        )
        options = {n: t for cls in reversed(subject_class(kind).__mro__) for n, t in described(cls).items()}
        named = [(f"`{name}`", options[name]) for name in options_of(kind)]
        lines += rows(("option", "meaning"), named) if own and named else []
    return "\n".join(lines)


PAGES = {
    ROOT / "docs" / "reference" / "checks.md": kit,
    ROOT / "docs" / "reference" / "command-line.md": command_line,
    ROOT / "docs" / "reference" / "configuration.md": configuration,
    ROOT / "docs" / "reference" / "api.md": api,
}
"""Page to what makes it."""

"""The templates in `agentrig/templates/`: one skeleton of a package, and for each kind a component that works."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from string import Template as StringTemplate
from textwrap import fill

import attrs

import agentrig
from agentrig.errors import ConfigError, nearest
from agentrig.plan import FEW_LABELS, warmup_command

FOLDER = Path(agentrig.__file__).parent / "templates"
"""Where the templates are: `FOLDER/KIND` has source and tests of a kind, `FOLDER/common` what all packages get."""

FILLED = ".template"
"""The end of the names of files in `common` that have fields such as `$name`."""

SPIDER = "agentrig-spider"

DOMAIN = "domain"
"""What `agentrig new` calls tasks, agent, reward, demonstrator and recipe in one package."""


@attrs.frozen(kw_only=True)
class Template:
    """The template of one kind.

    Attributes:
        kind: What `agentrig new` calls it, and its folder.
        says: What it is, for README; the words before the first colon are the package's description.
        edit: What to replace, for README.
        name: The name of its component; its distribution is `agentrig-NAME` and its module `agentrig_NAME`.
        use: How a run uses the component: what follows `agentrig train`, with `{kind}` and `{name}`.
        environment: What a shell sets in front of that command, with a space at the end; '' for nothing.
        beside: The components of others that `agentrig validate` needs to check it: what follows its name.
        contract: The checks that its tests run, as Python, with `{name}` and `{kind}`.
        warmup: Options of the warm-up that makes the model this command starts from; None if it needs none.
        requires: Distributions that it needs beside agentrig and attrs.
        tests_require: Those that its tests need beside pytest.
        sql: Whether its example is of SQL tasks.
    """

    kind: str
    name: str
    says: str
    edit: str
    use: str = "mini --{kind} {name}"
    environment: str = ""
    beside: str = ""
    contract: str = 'checks("{kind}", "{name}")'
    warmup: str | None = None
    requires: Sequence[str] = ()
    tests_require: Sequence[str] = ()
    sql: bool = False

    @property
    def folder(self) -> Path:
        """Where its source and its tests are."""
        return FOLDER / self.kind

    def files(self, name: str) -> dict[str, str]:
        """Return the text of each file of a package by its path, with this name in the place of the template's own."""

        def renamed(text: str) -> str:
            return text.replace(self.name, name).replace(snake(self.name), snake(name))

        fields = {
            "name": name,
            "module": snake(name),
            "kind": self.kind,
            "says": fill(renamed(self.says), 120),
            "description": self.says.partition(":")[0] + ".",
            "edit": fill(renamed(self.edit.format(name=name)), 120),
            "checks": self.contract.format(kind=self.kind, name=name),
            "commands": "\n".join(command for command, _ in self.commands(name)),
            "dependencies": _listed("agentrig", "attrs>=24.2", *self.requires),
            "test": _listed("pytest>=8", *self.tests_require),
        }
        found = {"LICENSE": distribution("agentrig").read_text("licenses/LICENSE") or ""}
        for path, text in _texts(FOLDER / "common"):
            filled = StringTemplate(text).substitute(fields) if path.endswith(FILLED) else text
            found[path.removesuffix(FILLED)] = filled
        return found | {renamed(path): renamed(text) for path, text in _texts(self.folder)}

    def commands(self, name: str, *, file: Path | None = None) -> list[tuple[str, str]]:
        """Return the commands that train with what is made from it, in a package or in a file, and why."""
        more = f" --plugin {file}" if file else ""
        found = []
        if self.warmup is not None:
            made = warmup_command([name, *self.warmup.split(), *shlex.split(more)])
            found = [(made, "makes its starting model; few labels, for easy tasks")]
        return [
            *found,
            (f"{self.environment}agentrig train {self.use.format(kind=self.kind, name=name)}{more}", "trains with it"),
        ]

    def validation(self, file: Path) -> str:
        """Return the command that runs the kit's checks on a component in a file."""
        return f"{self.environment}agentrig validate {file}{self.beside and f' {self.beside}'}"


def _texts(folder: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(folder.rglob("*")):
        if file.is_file() and "cache" not in str(file.relative_to(folder)):
            yield str(file.relative_to(folder)), file.read_text("utf-8")


def _listed(*requirements: str) -> str:
    """Return requirements as a list of TOML; those of agentrig's series with its versions."""
    major, minor = agentrig.__version__.split(".")[:2]
    versions = f">={agentrig.__version__},<{major}.{int(minor) + 1}"
    return json.dumps([f"{r}{versions}" if r.startswith("agentrig") else r for r in requirements], indent=4)


def source_of(name: str) -> Path:
    """Return the source file of the package of a component."""
    return Path("src", f"agentrig_{snake(name)}", "__init__.py")


def snake(name: str) -> str:
    """Return a component's name as Python writes it."""
    return name.replace("-", "_")


TEMPLATES: Mapping[str, Template] = {
    t.kind: t
    for t in (
        Template(
            kind="tasks",
            name="car-dealers",
            sql=True,
            says="A task set for agentrig: questions about a small database, each with the query that answers it. The "
            "agent gets the question and the database, only the reward gets the query.",
            edit="Replace `QUESTIONS` and `write_database` by your own data.",
        ),
        Template(
            kind="agent",
            name="one-shot",
            sql=True,
            says="An agent for agentrig: it asks the model once for the SQL of a question, with the OpenAI SDK.",
            edit="Replace what `Agent.__call__` does: call the model as often as you like, in named spans, with "
            "`endpoint.sampling` each time.",
            beside="--tasks mini-sql --reward spider-exec",
            contract='checks("agent", "{name}", tasks="mini-sql")',
            requires=("openai>=2",),
            tests_require=(SPIDER,),
        ),
        Template(
            kind="reward",
            name="partial-credit",
            sql=True,
            says="A reward for agentrig: 1 for a query with the right result, a little for one that runs.",
            edit="Replace what `Reward.__call__` does.",
            beside="--tasks mini-sql",
            contract='checks("reward", "{name}", tasks="mini-sql")',
            requires=(SPIDER,),
        ),
        Template(
            kind="adapter",
            name="last-calls",
            says="An adapter for agentrig: it trains the last calls of a rollout.",
            edit="Replace what `LastCalls._kept` selects.",
        ),
        Template(
            kind="algorithm",
            name="bounded-worths",
            says="An algorithm for agentrig: `grpo`, with a learner that bounds what a call can be worth.",
            edit="`pytest` trains small models for about a minute; `pytest -m slow` makes the further runs that the "
            "longer checks need. Replace what the learner does.",
            requires=("agentrig-grpo",),
        ),
        Template(
            kind="credit",
            name="upper-share",
            says="A credit for agentrig: it imitates the best rollouts of each group.",
            edit="Replace what the credit yields: what each rollout or call is worth.",
        ),
        Template(
            kind="server",
            name="timed-server",
            says="A model server for agentrig: the embedded one, and a record of how long each transfer takes.",
            edit="Replace `TimedServer`; `examples/agentrig-file-server` in agentrig's repository has its own engine.",
            requires=("agentrig-grpo",),
        ),
        Template(
            kind="runners",
            name="gentle-runners",
            says="Runners for agentrig: processes of this machine with a lower priority, so that you can go on working "
            "on it.",
            edit="Replace `GentlePool`.",
            contract='checks("runners", "{name}", settings={{"nice": 1}})',
        ),
        Template(
            kind="hardware",
            name="fake-accelerator",
            says="Hardware for agentrig: an accelerator that is really the CPU. `FAKE_ACCELERATORS` is the number of "
            "devices, none by default. A value that is not a number makes it a broken accelerator: `--hardware auto` "
            "then stops, and never falls back to the CPU.",
            edit="Replace what `probe` looks at, and the names of the device.",
            environment="FAKE_ACCELERATORS=2 ",
        ),
        Template(
            kind="observer",
            name="hard-tasks",
            says="An observer for agentrig: it writes which tasks the agent solved least often, to `hard_tasks.json` "
            "in the run directory.",
            edit="Replace what the methods `on_…` do.",
        ),
        Template(
            kind="recipe",
            name="five-minutes",
            says="A recipe for agentrig: the reference agent on small databases, with fewer steps and larger groups "
            "than `mini`.",
            edit="Replace the sections of `SETTINGS`: `agentrig plugins show NAME` lists the keys of a component.",
            use="{name}",
            requires=("agentrig-agent-match", "agentrig-grpo", "agentrig-langgraph-sql", SPIDER),
        ),
        Template(
            kind=DOMAIN,
            name="order-desk",
            says="A domain for agentrig: tasks, an agent that calls two tools, a reward with partial credit, a "
            "demonstrator and a recipe.",
            edit="Replace the parts one after the other, from the top of the source file down. `agentrig validate "
            "{name}` plays what the demonstrator says; `agentrig dev {name}` shows what a model does.",
            use="{name}",
            contract='[*checks("tasks", "{name}"), *checks("agent", "{name}"), *checks("reward", "{name}")]',
            warmup=FEW_LABELS,
            requires=("agentrig-agent-match", "agentrig-grpo", "openai>=2"),
        ),
    )
}
"""What `agentrig new` makes: every kind, in the order of a run file's sections, and a domain."""


def copy(template: Template, name: str, target: Path) -> None:
    """Copy a template to a folder that does not exist yet, or its source to a `FILE.py`; an error leaves nothing.

    Raises:
        ConfigError: There is something of that name, even a broken link; or it can't be written.
    """
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists already: use another name, or delete it. Nothing is overwritten")
    parent = target.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".agentrig-new-", dir=parent) as folder:
            made = Path(folder) / "package"
            for path, text in template.files(name).items():
                (made / path).parent.mkdir(parents=True, exist_ok=True)
                (made / path).write_text(text, "utf-8")
            if target.suffix == ".py":
                os.link(made / source_of(name), target)  # unlike a rename it fails if somebody has just made the file
            else:
                os.rename(made, target)
    except OSError as error:
        raise ConfigError(f"{parent} can't be written: {error.strerror or error}") from error


def template_of(kind: str) -> Template:
    """Return the template of a kind.

    Raises:
        ConfigError: There is none; the message has the kinds and the nearest one.
    """
    if kind not in TEMPLATES:
        raise ConfigError(f'there is no kind "{kind}".{nearest(kind, TEMPLATES)} The kinds are: {", ".join(TEMPLATES)}')
    return TEMPLATES[kind]

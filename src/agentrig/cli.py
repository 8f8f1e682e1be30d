"""The command line; every command imports what it needs when it runs."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

from agentrig.ends import Interrupted, handling, interrupt, leave
from agentrig.errors import AgentrigError, nearest

if TYPE_CHECKING:
    from agentrig.config import Plan
    from agentrig.plugins import Component, Registry

F = TypeVar("F", bound=Callable[..., Any])

KINDS = ("tasks", "agent", "reward", "adapter", "algorithm", "hardware")


class NearestGroup(click.Group):
    """Names the nearest command when there is none of the name that was given."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Look a command up."""
        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known:
            ctx.fail(f'there is no command "{args[0]}".{nearest(args[0], known)} Commands: {", ".join(known)}')
        return super().resolve_command(ctx, args)


class Group(NearestGroup):
    """Prints agentrig's own errors without a traceback, and brings commands of other modules lazily."""

    lazy: ClassVar[dict[str, tuple[str, str]]] = {
        "doctor": ("agentrig.doctor:doctor", "Find what would keep a recipe from running here."),
    }
    """Command to where it lives and its line in the list of commands, which needs no import then."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which a newcomer meets them."""
        order = ["train", "dev", "eval", "plugins", "doctor", "data", "report"]
        return [*order, *sorted(set(super().list_commands(ctx)) - set(order))]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return a command, importing its module if it lives in its own."""
        if name in self.lazy and name not in self.commands:
            from importlib import import_module, util

            module, _, attribute = self.lazy[name][0].partition(":")
            if util.find_spec(module) is not None:
                self.add_command(getattr(import_module(module), attribute), name)
        return super().get_command(ctx, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands; a lazy one is not imported for that."""
        rows = []
        for name in self.list_commands(ctx):
            command = None if name in self.lazy else self.get_command(ctx, name)
            rows.append((name, command.get_short_help_str(formatter.width - 20) if command else self.lazy[name][1]))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; errors that a user can mend end in exit status 1, signals in 128 plus their number."""
        try:
            with handling(interrupt):
                return super().invoke(ctx)
        except AgentrigError as error:
            from agentrig.text import storable

            click.echo(f"agentrig: {storable(str(error))}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt as error:
            click.echo(f"agentrig: {str(error) or 'interrupted'}", err=True)
            status = error.exit_status if isinstance(error, Interrupted) else 130
            if isinstance(error, Interrupted) and error.abandoned:
                leave(status)
            ctx.exit(status)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="agentrig", prog_name="agentrig")
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
def main(verbose: bool) -> None:
    """Train the model inside an LLM agent by reinforcement learning.

    \b
    agentrig train                    train the reference agent on this machine
    agentrig train mini --reward my-reward algorithm.lr=1e-4
    agentrig plugins                  what can be swapped, and what for
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a model said is shown on a terminal of any encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("agentrig").setLevel(logging.DEBUG if verbose else logging.INFO)
    for noisy in ("httpx", "httpcore", "matplotlib", "asyncio", "openai", "PIL"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def configured(command: F) -> F:
    """Add the arguments that pick and change a configuration."""
    for kind in reversed(KINDS):
        command = click.option(f"--{kind}", metavar="NAME", help=f"Use this {kind}.")(command)
    command = click.option(
        "--plugin", "files", multiple=True, metavar="FILE.py", help="A Python file that is a plugin too."
    )(command)
    command = click.option("--strict-plugins", is_flag=True, help="Stop if any plugin fails to load.")(command)
    command = click.option("--active-agent", metavar="REGEX", help="Short for adapter.match=REGEX.")(command)
    return click.argument("words", nargs=-1, metavar="[RECIPE | FILE.toml] [section.key=value …]")(command)


def asked(words: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `agentrig.config.resolve` that a command's words and options stand for.

    Takes what `configured` added out of `options`.
    """
    source = words[0] if words and "=" not in words[0] else None
    overrides = list(words[1:] if source else words)
    active = options.pop("active_agent")
    if active is not None:
        overrides.append(f"adapter.match={active}")
    uses = {kind: options.pop(kind) for kind in KINDS}
    return {
        "source": source,
        "overrides": overrides,
        "uses": uses,
        "files": options.pop("files"),
        "strict_plugins": options.pop("strict_plugins"),
    }


@contextmanager
def stdout_to_stderr(do: bool = True) -> Iterator[None]:
    """Send what is printed meanwhile, here or by processes that start, to stderr: a command's output stands alone."""
    if not do:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 1)
        os.close(kept)


def make_plan(words: Sequence[str], options: dict[str, Any]) -> Plan:
    """Resolve the configuration of a command; takes its options out of `options`."""
    from agentrig.config import resolve

    with stdout_to_stderr():
        plan = resolve(**asked(words, options))
    warn_of_failures(plan.registry)
    return plan


def warn_of_failures(registry: Registry) -> None:
    """Say which plugins failed to load, in one line each."""
    for plugin in registry.plugins:
        if plugin.status == "failed":
            click.echo(f"agentrig: warning: plugin {plugin.name} failed to load: {plugin.error}", err=True)


@main.command()
@configured
@click.option("--resume", type=click.Path(path_type=Path), metavar="RUN", help="Go on with a run directory.")
@click.option(
    "--from-step", type=click.IntRange(min=1), metavar="N", help="With --resume: from the checkpoint of step N."
)
@click.option("--json", "as_json", is_flag=True, help="Print summary.json at the end, and no display.")
@click.option("--yes", is_flag=True, help="Stop what stands in the way (a stale Ray cluster) without asking.")
def train(
    words: Sequence[str], resume: Path | None, from_step: int | None, as_json: bool, yes: bool, **options: Any
) -> None:
    """Train, with the recipe `mini` unless another is named.

    \b
    agentrig train
    agentrig train mini algorithm.steps=20 run.seed=1 --reward spider-exec-strict
    agentrig train my-run.toml --plugin my_agent.py
    agentrig train --resume runs/mini-20260101-120000
    agentrig train --resume runs/mini-20260101-120000 --from-step 20
    """
    from agentrig import run
    from agentrig.errors import ConfigError

    if yes:
        os.environ["AGENTRIG_YES"] = "1"
    if from_step is not None and resume is None:
        raise ConfigError("--from-step says where a resumed run goes on: it needs --resume RUN")
    if resume is not None:
        source = words[0] if words and "=" not in words[0] else None
        if source or any(options[k] for k in (*KINDS, "files", "active_agent", "strict_plugins")):
            raise ConfigError(
                "a resumed run keeps its configuration; only section.key=value may be given with --resume"
            )
        plan = run.resume_plan(resume, overrides=words, from_step=from_step)
    else:
        plan = make_plan(words, options)
    if not as_json:
        from agentrig.display import LiveDisplay

        plan.registry.add_observer(LiveDisplay(), "display")
    with stdout_to_stderr(as_json):
        summary = run.train(plan, resume=resume, from_step=from_step)
    if as_json:
        click.echo(json.dumps(summary, indent=2))


def model_options(command: F) -> F:
    """Add the options that name a model: a checkpoint, or a server."""
    command = click.option("--endpoint", metavar="URL", help="An OpenAI-compatible server (…/v1).")(command)
    command = click.option("--model", metavar="NAME", help="The server's model; its first by default.")(command)
    return click.option(
        "--checkpoint", type=click.Path(path_type=Path), metavar="DIR", help="A checkpoint, or a run directory."
    )(command)


def measured_server(endpoint: str | None, model: str | None, checkpoint: Path | None) -> Any:
    """Return the server that `model_options` name, or that the environment does; None for the algorithm's own."""
    from agentrig.errors import ConfigError
    from agentrig.evaluate import environment_endpoint

    if checkpoint is not None and (endpoint or model):
        raise ConfigError("--checkpoint is served by the run's algorithm: it goes with neither --endpoint nor --model")
    server = None if checkpoint else environment_endpoint(endpoint, model=model)
    if model and server is None:
        raise ConfigError("--model names a model of a server: name that too, by --endpoint or OPENAI_BASE_URL")
    return server


def find_checkpoint(path: Path | None) -> Path | None:
    """Return the checkpoint directory for what the user named: itself, or a run's latest."""
    from agentrig.errors import ConfigError
    from agentrig.rundir import RunDirectory

    if path is None:
        return None
    if (path / "config.json").is_file():
        return path
    if (path / "checkpoints").is_dir():
        latest, _ = RunDirectory(path).latest_checkpoint()
        if latest is not None:
            return latest
    raise ConfigError(f"{path} is neither a Hugging Face directory (config.json) nor a run directory with a checkpoint")


@main.command("eval")
@configured
@model_options
@click.option("--split", metavar="NAME", help="The split to measure; the report split by default.")
@click.option("--limit", type=click.IntRange(min=0), default=0, help="Only the first n tasks; 0 for all.")
@click.option("--temperature", type=click.FloatRange(min=0), help="Sampling temperature; by default the run's, or 0.")
@click.option("--save", type=click.Path(path_type=Path), metavar="FILE.jsonl", help="Write every prediction there.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def eval_(
    words: Sequence[str],
    endpoint: str | None,
    model: str | None,
    checkpoint: Path | None,
    split: str | None,
    limit: int,
    temperature: float | None,
    save: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure a model through an agent: accuracy, its 95% interval, mean reward, a table per database.

    \b
    agentrig eval mini --checkpoint runs/mini-20260101-120000
    agentrig eval spider --endpoint http://127.0.0.1:8000/v1 --save predictions.jsonl --json
    """
    from agentrig.evaluate import eval_tasks, evaluate, prediction
    from agentrig.text import json_text

    plan = make_plan(words, options)
    server = measured_server(endpoint, model, checkpoint)
    checkpoint = find_checkpoint(checkpoint)
    name, tasks = eval_tasks(plan, split, limit)
    where = server.base_url if server else str(checkpoint or "the starting model")
    click.echo(f"{len(tasks)} tasks of split {name}, model: {where}", err=True)
    with stdout_to_stderr(as_json), open(save, "w", encoding="utf-8") if save else open_nothing() as file:

        def each(rollout: Any) -> None:
            if file is not None:
                file.write(json_text(prediction(rollout)) + "\n")

        found = evaluate(
            plan,
            tasks=tasks,
            endpoint=server,
            checkpoint=checkpoint,
            temperature=temperature,
            each=each,
        )
    if as_json:
        click.echo(json.dumps(found.as_dict()))
        return
    for database, (right, n) in found.databases.items():
        click.echo(f"{database:<40} {right:>4} of {n:<4} {right / n:7.1%}")
    if found.accuracy is not None and found.ci95 is not None:
        click.echo(f"accuracy {found.accuracy:.1%}  (95%: {found.ci95[0]:.1%} to {found.ci95[1]:.1%}, n = {found.n})")
        click.echo(f"mean reward {found.reward:.4g}")
    failures = ", ".join(f"{count} x {kind}" for kind, count in found.failures.items())
    click.echo(f"failures: {failures or 'none'}; {found.wall_s:.1f} s, {found.rollouts_per_s:.1f} rollouts/s")


def open_nothing() -> Any:
    """Return a context that yields None, where a file might have been."""
    from contextlib import nullcontext

    return nullcontext(None)


@main.command()
@configured
@model_options
@click.option("--tasks-n", type=click.IntRange(1, 10), default=3, show_default=True, help="How many tasks.")
@click.option("--split", metavar="NAME", help="Which split; the validation split by default.")
@click.option("--json", "as_json", is_flag=True, help="Print the rollouts with their spans as JSON.")
def dev(
    words: Sequence[str],
    endpoint: str | None,
    model: str | None,
    checkpoint: Path | None,
    tasks_n: int,
    split: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run an agent on a few tasks and show every span; nothing is learned.

    Exit status 1 when a rollout failed.

    \b
    agentrig dev mini
    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 agentrig dev spider --tasks-n 5
    """
    from agentrig.checks import unseen_calls
    from agentrig.evaluate import eval_tasks, evaluate
    from agentrig.rundir import row_of

    plan = make_plan(words, options)
    server = measured_server(endpoint, model, checkpoint)
    _, tasks = eval_tasks(plan, split, tasks_n, role="validation")
    checkpoint = find_checkpoint(checkpoint)
    with stdout_to_stderr(as_json):
        found = evaluate(plan, tasks=tasks, endpoint=server, checkpoint=checkpoint, mode="dev", keep=True)
    if as_json:
        click.echo(json.dumps([row_of(r) for r in found.rollouts], indent=2))
    else:
        from rich.console import Console

        from agentrig.display import span_tree

        console = Console()
        for rollout in found.rollouts:
            console.print(span_tree(rollout))
    unseen = unseen_calls(found.rollouts)
    if unseen:
        click.echo(f"agentrig: warning: {unseen}", err=True)
    if any(rollout.failure for rollout in found.rollouts):
        raise SystemExit(1)


@main.group("plugins", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.option("--plugin", "files", multiple=True, metavar="FILE.py", help="A Python file that is a plugin too.")
@click.option("--strict-plugins", is_flag=True, help="Stop if any plugin fails to load.")
@click.pass_context
def plugins_(ctx: click.Context, as_json: bool, files: Sequence[str], strict_plugins: bool) -> None:
    """List the plugins: distribution, version, status, and what each brings.

    \b
    agentrig plugins
    agentrig plugins --json
    agentrig plugins show langgraph-sql --graph
    """
    from agentrig.plugins import load

    with stdout_to_stderr():
        registry = load(files=files, strict=strict_plugins)
    ctx.obj = registry
    if ctx.invoked_subcommand is not None:
        return
    if as_json:
        click.echo(json.dumps([p.as_dict() for p in registry.plugins], indent=2))
    else:
        for plugin in registry.plugins:
            click.echo(f"{plugin.distribution} {plugin.version}  {plugin.status}  ({plugin.origin})")
            if plugin.error:
                click.echo(f"    {plugin.error}")
            for c in plugin.components:
                click.echo(f"    {c.kind:<10} {c.spec.name:<24} {c.spec.summary}")
    registry.check()


@plugins_.command("show")
@click.argument("name")
@click.option("--kind", help="Which kind (agent, reward, …, section), when several share the name.")
@click.option("--graph", is_flag=True, help="Print the agent's graph as Mermaid text.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.pass_obj
def show(registry: Registry, name: str, kind: str | None, graph: bool, as_json: bool) -> None:
    """Show a component, or a section of a run file (run, runners): its settings with their defaults.

    \b
    agentrig plugins show grpo
    agentrig plugins show runners
    agentrig plugins show langgraph-sql --graph
    """
    from agentrig.config import OWN_SECTIONS, to_toml
    from agentrig.errors import LookupFailed, nearest
    from agentrig.specs import KINDS as SPECS

    everything = [c for k in SPECS for c in registry.components(k)]
    hits = [c for c in everything if c.answers_to(name) and kind in (None, c.kind)]
    sections = {n: cls for n, cls in OWN_SECTIONS.items() if n == name and kind in (None, "section")}
    if not hits and not sections:
        known = [*OWN_SECTIONS, *(c.spec.name for c in everything)]
        raise LookupFailed(f'there is no component called "{name}".{nearest(name, known)}')
    if graph:
        spec: Any = hits[0].spec if hits else None
        if getattr(spec, "graph", None) is None:
            raise LookupFailed(f"{hits[0].kind if hits else 'section'} {name} has no graph to show")
        click.echo(spec.graph(spec.config()))
        return
    described = [_described("section", n, cls.__doc__ or "", None, _settings(cls)) for n, cls in sections.items()]
    for c in hits:
        settings = _plain(c.spec.settings) if c.kind == "recipe" else _settings(c.spec.config)  # type: ignore[attr-defined]
        described.append(_described(c.kind, c.spec.name, c.spec.summary, c, settings))
    if as_json:
        click.echo(json.dumps(described, indent=2, default=str))
        return
    for d in described:
        click.echo(f"{d['kind']} {d['name']}  ({d['distribution']} {d['version']})\n  {d['summary']}")
        if d["kind"] == "recipe":
            click.echo("\n" + to_toml(d["settings"]))
            continue
        for key, s in d["settings"].items():
            click.echo(f"    {key} = {_as_written(s['default'])}  ({s['type']})  {s['help']}")


def _described(kind: str, name: str, summary: str, component: Component | None, settings: Any) -> dict[str, Any]:
    """Return the entry of `plugins show --json`; what is of no component is agentrig's own."""
    from agentrig import __version__

    distribution = component.distribution if component else "agentrig"
    version = component.version if component else __version__
    return {
        "kind": kind,
        "name": name,
        "summary": summary.partition("\n")[0],
        "distribution": distribution,
        "version": version,
        "settings": settings,
    }


def _settings(config: type) -> dict[str, dict[str, Any]]:
    """Return the keys of a config class: type, default and help of each."""
    import attrs

    return {
        f.name: {
            "type": getattr(f.type, "__name__", str(f.type)),
            "default": _default(f.default),
            "help": f.metadata.get("help", ""),
        }
        for f in attrs.fields(attrs.resolve_types(config))
    }


def _as_written(default: Any) -> str:
    """Return a default as a run file has it, so that it can be pasted."""
    if isinstance(default, bool):
        return str(default).lower()
    return json.dumps(default) if isinstance(default, str) and default != "required" else repr(default)


def _plain(value: Any) -> Any:
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _default(default: Any) -> Any:
    import attrs

    if default is attrs.NOTHING:
        return "required"
    return default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]


@main.command()
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("target", type=click.Path(path_type=Path))
def export(run: Path, target: Path) -> None:
    """Copy a run's latest checkpoint as a Hugging Face directory that vLLM and transformers load.

    \b
    agentrig export runs/mini-20260101-120000 my-model
    """
    import shutil

    from agentrig.errors import ConfigError

    checkpoint = find_checkpoint(run)
    if target.exists():
        raise ConfigError(f"{target} is there already")
    shutil.copytree(str(checkpoint), target, ignore=shutil.ignore_patterns("trainer", "keep", ".files.json"))
    click.echo(f"{checkpoint} -> {target}")


class DataGroup(NearestGroup):
    """One command for each task set that has something to convert, and the tools that task sets bring.

    A name that two plugins claim is listed as `distribution:name`.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, from the plugins that are there."""
        return sorted(self._found())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return a command; None makes click name the nearest."""
        make = self._found().get(name)
        return make() if make is not None else None

    def _found(self) -> dict[str, Callable[[], click.Command]]:
        from agentrig.plugins import load

        found: dict[str, Callable[[], click.Command]] = {}
        registry = load()
        for component in registry.components("tasks"):
            spec: Any = component.spec
            if spec.convert is not None:
                found[registry.reference(component)] = partial(convert_command, spec)
            for tool, make in spec.tools.items():
                found[tool if tool not in found else f"{component.distribution}:{tool}"] = make
        return found


def convert_command(spec: Any) -> click.Command:
    """Return the command that converts an official download of a task set."""
    says = f"Make the files of {spec.name} from an official download, or check them."

    @click.command(spec.name, help=f"{says}\n\n\b\nagentrig data {spec.name} --from download.zip")
    @click.option("--from", "source", required=True, metavar="DIR_OR_ZIP", help="The download, or files to check.")
    @click.option("--to", "target", metavar="DIR", help="Where to write; beside the download by default.")
    def convert(source: str, target: str | None) -> None:
        click.echo(spec.convert(source, target))

    return convert


@main.group(cls=DataGroup)
def data() -> None:
    """Make the files of a task set from an official download, or work on its databases.

    \b
    agentrig data spider --from spider.zip --to ~/data/spider
    """


@main.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--out", type=click.Path(path_type=Path), help="Where to write the page; the first run by default.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def report(runs: Sequence[Path], out: Path | None, as_json: bool) -> None:
    """Rebuild the report of a run, or compare several.

    \b
    agentrig report runs/mini-20260101-120000
    agentrig report runs/one runs/other --out comparison.html
    """
    from agentrig.report import build_report, compare, compare_text

    page = build_report(list(runs), out)
    if as_json:
        click.echo(json.dumps({"report": str(page), "runs": compare(list(runs))}, indent=2, default=str))
        return
    click.echo(compare_text(list(runs)))
    click.echo(f"report: {page}")


if __name__ == "__main__":
    sys.exit(main())

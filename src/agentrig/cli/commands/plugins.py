"""`agentrig plugins`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from agentrig.cli.groups import NearestGroup
from agentrig.cli.options import json_option, print_json, stdout_to_stderr
from agentrig.errors import LookupFailed, nearest
from agentrig.text import printable

if TYPE_CHECKING:
    from agentrig.plugins.registry import PluginInfo, Registry


@click.group("plugins", cls=NearestGroup, invoke_without_command=True)
@json_option("Print as JSON.")
@click.option("--plugin", "files", multiple=True, metavar="FILE.py", help="A Python file that is a plugin too.")
@click.option("--strict-plugins", is_flag=True, help="Stop if any plugin fails to load.")
@click.pass_context
def plugins_(ctx: click.Context, as_json: bool, files: Sequence[str], strict_plugins: bool) -> None:
    """List the components by kind, and the plugins that bring them: version, status, origin.

    \b
    agentrig plugins
    agentrig plugins --json
    agentrig plugins show langgraph-sql --graph
    """
    from agentrig.plugins.loading import load
    from agentrig.plugins.specs import KINDS

    with stdout_to_stderr():
        registry = load(files=files, strict=strict_plugins)
    ctx.obj = registry
    if ctx.invoked_subcommand is not None:
        return
    if as_json:
        print_json([p.as_dict() for p in registry.plugins], indent=2)
    else:
        for kind in KINDS:
            _print_kind(registry, kind)
        click.echo("plugins")
        alike: dict[tuple[str, str, str | None], list[str]] = {}  # a distribution may bring several
        for plugin in registry.plugins:
            where = f"plugin {plugin.name}" if plugin.distribution == "file" else plugin.origin
            where = where.removeprefix(f"{plugin.distribution}.")
            alike.setdefault((plugin.source, plugin.status, plugin.error), []).append(where)
        for (source, status, error), places in alike.items():
            said = f"\n        {printable(error)}" if error else ""
            click.echo(f"    {source}  {status}  ({', '.join(places)}){said}")
    registry.check()


def _print_kind(registry: Registry, kind: str) -> None:
    from agentrig.plugins.specs import PURPOSES

    components = registry.components(kind)
    if components:
        click.echo(f"{kind}: {PURPOSES[kind]}")
    width = max((len(c.spec.name) for c in components), default=0)
    for c in components:
        click.echo(printable(f"    {c.spec.name:<{width}}  {c.spec.summary}  ({c.distribution})"))


def _print_plugin(plugin: PluginInfo) -> None:
    where = f"plugin {plugin.name}" if plugin.distribution == "file" else plugin.origin
    click.echo(f"{plugin.source}  {plugin.status}  ({where})")
    if plugin.error:
        click.echo(printable(f"    {plugin.error}"))
    if plugin.observes:
        click.echo(f"    {'hooks':<10} {', '.join(plugin.observes)}")
    for c in plugin.components:
        click.echo(printable(f"    {c.kind:<10} {c.spec.name:<24} {c.spec.summary}"))


@plugins_.command("show")
@click.argument("name")
@click.option("--kind", help="Which kind (agent, reward, …, section), when several share the name.")
@click.option("--graph", is_flag=True, help="Print the agent's graph as Mermaid text.")
@click.option("--plugin", "files", multiple=True, metavar="FILE.py", help="A Python file that is a plugin too.")
@json_option("Print as JSON.")
@click.pass_context
def show(ctx: click.Context, name: str, kind: str | None, graph: bool, files: Sequence[str], as_json: bool) -> None:
    """Show a component, a section of a run file (run, runners, gateway), a kind, or a plugin.

    Of a component or section: each key with its type, default, range and meaning, those that recipes set first; of a
    component also where it comes from. Of a kind: its components. Of a plugin: its status and its components.

    \b
    agentrig plugins show grpo
    agentrig plugins show credit
    agentrig plugins show agentrig-grpo
    agentrig plugins show runners
    agentrig plugins show langgraph-sql --graph
    """
    from agentrig.plan import OWN_SECTIONS, to_toml
    from agentrig.plugins.loading import load
    from agentrig.plugins.specs import KINDS as SPECS

    registry: Registry = ctx.obj
    assert ctx.parent is not None
    of_group = ctx.parent.params
    as_json = as_json or of_group["as_json"]
    if files:
        with stdout_to_stderr():
            registry = load(files=[*of_group["files"], *files], strict=of_group["strict_plugins"])
    everything = [c for k in SPECS for c in registry.components(k)]
    hits = [c for c in everything if c.answers_to(name) and kind in (None, c.kind)]
    sections = {n: cls for n, cls in OWN_SECTIONS.items() if n == name and kind in (None, "section")}
    plugins = [] if hits or sections or kind else [p for p in registry.plugins if name in (p.name, p.distribution)]
    if plugins and not graph:
        if as_json:
            print_json([p.as_dict() for p in plugins], indent=2)
        for plugin in () if as_json else plugins:
            _print_plugin(plugin)
        return
    if name in SPECS and not (hits or sections or kind or graph):
        hits = registry.components(name)
        if hits and not as_json:
            _print_kind(registry, name)
            click.echo(f"The keys of one: agentrig plugins show NAME --kind {name}")
            return
    other = [c.kind for c in everything if c.answers_to(name)] + ["section"] * (name in OWN_SECTIONS)
    if not hits and not sections and kind and other:
        named = " and ".join(dict.fromkeys(other))
        raise LookupFailed(
            f"{name} is of the kind {named}, not {kind}:\n  agentrig plugins show {name} --kind {other[0]}"
        )
    if not hits and not sections:
        known = [*OWN_SECTIONS, *SPECS, *(c.spec.name for c in everything), *(p.distribution for p in registry.plugins)]
        close = nearest(name, known)
        raise LookupFailed(f'there is no component called "{name}".{close}\n  agentrig plugins lists them')
    if graph:
        spec: Any = hits[0].spec if hits else None
        if getattr(spec, "graph", None) is None:
            raise LookupFailed(f"{hits[0].kind if hits else 'section'} {name} has no graph to show")
        click.echo(spec.graph(spec.config()))
        return
    described = [_described("section", n, cls.__doc__ or "", None, settings_of(cls)) for n, cls in sections.items()]
    for c in hits:
        settings = _plain(c.spec.settings) if c.kind == "recipe" else settings_of(c.spec.config)  # type: ignore[attr-defined]
        plugin = next(p for p in registry.plugins if p.name == c.plugin)
        of = _described(c.kind, c.spec.name, c.spec.summary, plugin, settings)
        described.append(of | ({"credit": c.spec.credit} if c.kind == "algorithm" else {}))  # type: ignore[attr-defined]
    if as_json:
        print_json(described, indent=2, default=str)
        return
    for d in described:
        source = d["origin"] if d["distribution"] == "file" else f"{d['distribution']} {d['version']}"
        click.echo(printable(f"{d['kind']} {d['name']}  ({source})\n  {d['summary']}"))
        if d["plugin"]:
            click.echo(f"  from plugin {d['plugin']} ({d['origin']})")
        if d.get("credit"):
            click.echo(f"  its credit, if a run names none (--credit NAME): {d['credit']}")
        if d["kind"] == "recipe":
            click.echo("\n" + to_toml(d["settings"]))
            continue
        section = d["kind"] if d["kind"] != "section" else d["name"]
        tables = [c.spec.settings.get(section, {}) for c in registry.components("recipe")]  # type: ignore[attr-defined]
        first = Counter(key for table in tables if table.get("use", d["name"]) == d["name"] for key in table)
        for key, s in sorted(
            d["settings"].items(), key=lambda item: (item[1]["default"] != "required", -first[item[0]])
        ):
            values = f", {s['range']}" if s["range"] else ""
            click.echo(printable(f"    {key} = {as_written(s['default'])}  ({s['type']}{values})  {s['help']}"))


def _described(kind: str, name: str, summary: str, plugin: PluginInfo | None, settings: Any) -> dict[str, Any]:
    """Return the entry of `plugins show --json`; an entry without a plugin belongs to agentrig."""
    from agentrig import __version__

    distribution = plugin.distribution if plugin else "agentrig"
    version = plugin.version if plugin else __version__
    return {
        "kind": kind,
        "name": name,
        "summary": summary.partition("\n")[0],
        "distribution": distribution,
        "version": version,
        "plugin": plugin.name if plugin else None,
        "origin": plugin.origin if plugin else None,
        "settings": settings,
    }


def settings_of(config: type) -> dict[str, dict[str, Any]]:
    """Return the keys of a config class: type, default ("required" for none), range and help of each."""
    import attrs

    from agentrig.settings import type_words

    found = {}
    for field in attrs.fields(attrs.resolve_types(config)):
        default = field.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default = default.factory()
        found[field.name] = {
            "type": type_words(field.type),
            "default": "required" if default is attrs.NOTHING else default,
            "range": _range(field.metadata),
            "help": field.metadata.get("help", ""),
        }
    return found


def _range(metadata: Mapping[Any, Any]) -> str:
    """Return the values that a key takes: its choices, or its bounds; '' for any of its type."""
    if metadata.get("choices") is not None:
        return "one of " + ", ".join(map(str, metadata["choices"]))
    return ", ".join(f"{sign} {bound}" for sign, bound in metadata.get("bounds", {}).items())


def as_written(default: Any) -> str:
    """Return a default as a run file has it, so that it can be pasted there."""
    if default is None or default == "required":
        return "none" if default is None else default
    return json.dumps(list(default) if isinstance(default, tuple) else default)


def _plain(value: Any) -> Any:
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value

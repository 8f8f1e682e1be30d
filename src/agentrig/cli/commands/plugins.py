"""`agentrig plugins`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from agentrig.cli.groups import NearestGroup
from agentrig.cli.options import stdout_to_stderr
from agentrig.errors import nearest

if TYPE_CHECKING:
    from agentrig.plugins.components import Component
    from agentrig.plugins.registry import Registry


@click.group("plugins", cls=NearestGroup, invoke_without_command=True)
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
    from agentrig.plugins.loading import load

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
            if plugin.observes:
                click.echo(f"    {'hooks':<10} {', '.join(plugin.observes)}")
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
    from agentrig.errors import LookupFailed
    from agentrig.plan import OWN_SECTIONS, to_toml
    from agentrig.plugins.specs import KINDS as SPECS

    everything = [c for k in SPECS for c in registry.components(k)]
    hits = [c for c in everything if c.answers_to(name) and kind in (None, c.kind)]
    sections = {n: cls for n, cls in OWN_SECTIONS.items() if n == name and kind in (None, "section")}
    if not hits and not sections:
        known = [*OWN_SECTIONS, *(c.spec.name for c in everything)]
        close = nearest(name, known)
        raise LookupFailed(f'there is no component called "{name}".{close}\n  agentrig plugins lists them')
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
    """Return the entry of `plugins show --json`; an entry without a component belongs to agentrig."""
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
    """Return a default in TOML, so that it can be pasted into a run file."""
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

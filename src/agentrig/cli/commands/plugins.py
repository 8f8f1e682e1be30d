"""`agentrig plugins`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from agentrig.cli.groups import NearestGroup
from agentrig.cli.options import stdout_to_stderr
from agentrig.errors import LookupFailed, nearest

if TYPE_CHECKING:
    from agentrig.plugins.components import PluginInfo
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
    agentrig plugins search reward
    """
    from agentrig.plugins.loading import load

    with stdout_to_stderr():
        registry = load(files=files, strict=strict_plugins, retry=ctx.invoked_subcommand is None)
    ctx.obj = registry
    if ctx.invoked_subcommand is not None:
        return
    if as_json:
        click.echo(json.dumps([p.as_dict() for p in registry.plugins], indent=2))
    else:
        for plugin in registry.plugins:
            _print_plugin(plugin)
    registry.check()


def _print_plugin(plugin: PluginInfo) -> None:
    click.echo(f"{plugin.distribution} {plugin.version}  {plugin.status}  ({plugin.origin})")
    if plugin.error:
        click.echo(f"    {plugin.error}")
    if plugin.warning:
        click.echo(f"    warning: {plugin.warning}")
    if plugin.observes:
        click.echo(f"    {'hooks':<10} {', '.join(plugin.observes)}")
    for c in plugin.components:
        click.echo(f"    {c.kind:<10} {c.spec.name:<24} {c.spec.summary}")


@plugins_.command("search")
@click.argument("words", nargs=-1, required=True, metavar="WORD …")
@click.option("--refresh", is_flag=True, help="Ask the package registry first, and keep the new index.")
@click.option("--index", metavar="URL", help="With --refresh: another registry than https://pypi.org.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.pass_obj
def search_(registry: Registry, words: Sequence[str], refresh: bool, index: str | None, as_json: bool) -> None:
    """Search published plugins: those with every word in name, summary or keywords.

    The index ships with agentrig. `--refresh` makes a new one of the packages that have `agentrig` in their name and
    among their keywords. Exit status 1 if nothing is found.

    \b
    agentrig plugins search reward
    agentrig plugins search sql --refresh
    """
    from packaging.utils import canonicalize_name

    from agentrig.errors import ConfigError
    from agentrig.plugins import index as published

    if index is not None and not refresh:
        raise ConfigError("--index needs --refresh: without it no registry is asked")
    content = published.refresh(index or published.REGISTRY) if refresh else published.read()
    installed = {canonicalize_name(p.distribution): p.version for p in registry.plugins}
    found = [{**e, "installed": installed.get(canonicalize_name(e["name"]))} for e in published.search(content, words)]
    if as_json:
        click.echo(json.dumps(found, indent=2))
    for entry in () if as_json else found:
        have = f"  (installed: {entry['installed']})" if entry["installed"] else ""
        click.echo(f"{entry['name']} {entry['version']}{have}\n    {entry['summary']}")
        click.echo(f"    agentrig{entry['agentrig'] or ': no range declared'}  {entry['home']}".rstrip())
    if not found:
        newer = "" if refresh else "\n  --refresh asks the registry for plugins that are newer than this index"
        raise LookupFailed(f'no plugin with "{" ".join(words)}" in the index of {content["made"]}.{newer}')


@plugins_.command("show")
@click.argument("name")
@click.option("--kind", help="Which kind (agent, reward, …, section), when several share the name.")
@click.option("--graph", is_flag=True, help="Print the agent's graph as Mermaid text.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.pass_obj
def show(registry: Registry, name: str, kind: str | None, graph: bool, as_json: bool) -> None:
    """Show a component, a section of a run file (run, runners, plugins), or a plugin.

    Of a component or section: each key with its type, default, range and meaning; of a component also where it comes
    from, and the range of agentrig that its distribution declares. Of a plugin: its status and its components.

    \b
    agentrig plugins show grpo
    agentrig plugins show agentrig-grpo
    agentrig plugins show runners
    agentrig plugins show langgraph-sql --graph
    """
    from agentrig.plan import OWN_SECTIONS, to_toml
    from agentrig.plugins.specs import KINDS as SPECS

    everything = [c for k in SPECS for c in registry.components(k)]
    hits = [c for c in everything if c.answers_to(name) and kind in (None, c.kind)]
    sections = {n: cls for n, cls in OWN_SECTIONS.items() if n == name and kind in (None, "section")}
    plugins = [] if hits or sections or kind else [p for p in registry.plugins if name in (p.name, p.distribution)]
    if plugins and not graph:
        if as_json:
            click.echo(json.dumps([p.as_dict() for p in plugins], indent=2))
        for plugin in () if as_json else plugins:
            _print_plugin(plugin)
            click.echo(f"    made for agentrig{plugin.declared or ': no range declared'}")
        return
    if not hits and not sections:
        known = [*OWN_SECTIONS, *(c.spec.name for c in everything), *(p.distribution for p in registry.plugins)]
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
        plugin = next(p for p in registry.plugins if p.name == c.plugin)
        described.append(_described(c.kind, c.spec.name, c.spec.summary, plugin, settings))
    if as_json:
        click.echo(json.dumps(described, indent=2, default=str))
        return
    for d in described:
        click.echo(f"{d['kind']} {d['name']}  ({d['distribution']} {d['version']})\n  {d['summary']}")
        if d["plugin"]:
            made_for = f"made for agentrig{d['agentrig']}" if d["agentrig"] else "declares no range of agentrig"
            click.echo(f"  from plugin {d['plugin']} ({d['origin']}); {made_for}")
        if d["kind"] == "recipe":
            click.echo("\n" + to_toml(d["settings"]))
            continue
        for key, s in d["settings"].items():
            values = f", {s['range']}" if s["range"] else ""
            click.echo(f"    {key} = {_as_written(s['default'])}  ({s['type']}{values})  {s['help']}")


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
        "agentrig": plugin.declared or None if plugin else None,
        "settings": settings,
    }


def _settings(config: type) -> dict[str, dict[str, Any]]:
    """Return the keys of a config class: type, default, range and help of each."""
    import attrs

    return {
        f.name: {
            "type": getattr(f.type, "__name__", str(f.type)),
            "default": _default(f.default),
            "range": _range(f.metadata),
            "help": f.metadata.get("help", ""),
        }
        for f in attrs.fields(attrs.resolve_types(config))
    }


def _range(metadata: Mapping[Any, Any]) -> str:
    """Return the values that a key takes: its choices, or its bounds; '' for any of its type."""
    if metadata.get("choices") is not None:
        return "one of " + ", ".join(map(str, metadata["choices"]))
    return ", ".join(f"{sign} {bound}" for sign, bound in metadata.get("bounds", {}).items())


def _as_written(default: Any) -> str:
    """Return a default in TOML, so that it can be pasted into a run file."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, str):
        return default if default == "required" else json.dumps(default)
    return repr(default)


def _plain(value: Any) -> Any:
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _default(default: Any) -> Any:
    import attrs

    if default is attrs.NOTHING:
        return "required"
    return default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]

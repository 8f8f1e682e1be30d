"""Plans: a recipe, a run file and overrides, merged into one checked configuration."""

from __future__ import annotations

import contextlib
import json
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.errors import ConfigError, LookupFailed, PluginError, nearest
from agentrig.gateway.settings import GatewaySettings
from agentrig.plugins import auto, composing, observing
from agentrig.plugins.building import built
from agentrig.plugins.specs import RUN_KINDS
from agentrig.pools import RunnerSettings as RunnerSettings
from agentrig.prompting import checked
from agentrig.refusals import Learning, refuses_replies
from agentrig.rows import utf8_text
from agentrig.secrets import sources
from agentrig.settings import check_any, meant, meant_in_file, setting, structure
from agentrig.text import read_text

if TYPE_CHECKING:
    from agentrig.plugins.registry import Component, Registry


@attrs.frozen(kw_only=True)
class RunSettings:
    """Section `[run]`: settings of the run itself."""

    name: str = setting("", help="the run directory's name; empty for RECIPE-DATE-TIME")
    directory: str = setting("runs", help="the folder for run directories")
    seed: int = setting(0, help="seed of every random stream", ge=0)
    train: str = setting("", help="the training split; empty for the task set's default")
    validation: str = setting("", help="the split to measure during training; empty for the task set's default")
    report: str = setting("", help="the held-out split for summary.json; empty for the task set's default")
    train_tasks: int = setting(0, help="use only the first n training tasks; 0 for all", ge=0)
    validation_tasks: int = setting(0, help="use only the first n validation tasks; 0 for all", ge=0)
    report_tasks: int = setting(0, help="use only the first n report tasks; 0 for all", ge=0)
    failure_limit: float = setting(
        0.25, help="largest share of a step's rollouts that may fail before the run stops", ge=0, le=1
    )
    reward_budget_s: float = setting(10.0, help="seconds a reward may take for one outcome", gt=0)
    reward_process: bool = setting(
        False,
        help="let the reward judge in processes, which can be ended; true by itself once it did not end in its budget",
    )
    correct_at: float | None = setting(
        None, help="an answer counts as correct if its reward is at least this; by default the reward decides"
    )
    second_reward: list[str] = setting(
        list,
        one=True,
        help="rewards that are logged at every step beside the trained one; their keys are in [second_reward.NAME]",
    )
    delivery: bool = setting(
        True, help="after every transfer of weights, prove that the model's server answers with them"
    )
    audit: bool = setting(
        True, help="check the first steps, and some later ones, with code that shares nothing with the trainer"
    )
    block: list[str] = setting(list, help="plugins or distributions that are not loaded")
    plugins: list[str] = setting(list, help="Python files that are plugins too, relative to the run file")


MATCHING = "agent-match"
"""The adapter of a run that names none; it then trains every call of the agent."""

RESUME = "agentrig train --resume {run}"
"""Resumes a run."""


def resume_command(resumes: str, directory: Path, setting: str = "") -> str:
    """Return the command that resumes the run of a directory.

    Args:
        resumes: `Plan.resumes`.
        directory: The run directory.
        setting: One more setting, `section.key=value`.
    """
    more = f" {'' if resumes == RESUME else '--set '}{setting}" if setting else ""
    return resumes.replace("{run}", f"{directory}{more}")


def script_of(directory: Path) -> str:
    """Return the command that resumes the run of a script, '' for another run.

    Only the process of the script has the run's agent, tasks, adapter and algorithm.
    """
    resumes: Any = RESUME
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        resumes = json.loads(read_text(directory / "manifest.json")).get("resumes", RESUME)
    return "" if resumes == RESUME else resume_command(str(resumes), directory)


@attrs.frozen(kw_only=True)
class Plan:
    """A complete, checked configuration of a run.

    Attributes:
        recipe: The recipe's name or the run file's stem.
        components: Kind to the selected component. Hardware `auto` is resolved on first access, here or in
            `configs`, so that commands that need no hardware run without any.
        configs: Kind to that component's config object. Server `auto` is resolved as hardware `auto` is.
        runners: The config object of the kind `runners`; a command may have changed it.
        reasons: Kind to why `auto` chose this component, for those that it chose and gives a reason for.
        observers: The observers that `[observer]` and `[trackers]` name, each with its config object, in that order.
        second_rewards: The rewards that `run.second_reward` names, each with its config object, in that order.
        gateway: Section `[gateway]`.
        prompts: The agent's prompts in force, name to template: its own, with those of `[prompts]` in their place.
        resumes: The command that resumes the run, with `{run}` for its directory.
    """

    recipe: str
    run: RunSettings
    runners: RunnerSettings
    components: Mapping[str, Component]
    configs: Mapping[str, Any]
    registry: Registry
    reasons: Mapping[str, str] = attrs.field(factory=dict)
    observers: observing.Observers = ()
    second_rewards: Sequence[tuple[Component, Any]] = ()
    gateway: GatewaySettings = GatewaySettings()
    prompts: Mapping[str, str] = attrs.field(factory=dict)
    resumes: str = RESUME

    @property
    def uses_gateway(self) -> bool:
        """Whether agents call the model through the gateway."""
        if self.gateway.use == "auto":
            return bool(self.gateway.models) or getattr(self.components["agent"].spec, "calls", "tap") == "gateway"
        return self.gateway.use == "on"

    @property
    def sees_gold(self) -> bool:
        """Whether the agent gets whole rows, with their gold columns."""
        spec: Any = self.components["agent"].spec
        return bool(spec.whole_rows)

    @property
    def whose_tasks(self) -> str:
        """The task set, for messages about its rows."""
        return f"task set {self.components['tasks'].spec.name}"

    def build(self, kind: str) -> Any:
        """Build the selected component of a kind; its heavy imports happen here.

        Raises:
            agentrig.errors.PluginError: Its `build` failed; the message names the plugin's file and line.
        """
        if kind == "reward":
            return composing.build(self.components["reward"], self.config("reward"), self.registry)[0]
        return built(self.components[kind], self.config(kind))

    def config(self, kind: str) -> Any:
        """Return the config object of the selected component of a kind."""
        return self.runners if kind == "runners" else self.configs[kind]

    def start_observers(self) -> None:
        """Build the observers that the plan names, and let its registry notify them.

        Raises:
            agentrig.errors.PluginError: One cannot be built, or used; the message names the plugin's file and line.
        """
        for name, observer in observing.build_observers(self.observers).items():
            self.registry.add_observer(observer, name)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the sections and keys of a run file, with every default filled in."""
        sections: dict[str, dict[str, Any]] = {"run": attrs.asdict(self.run)}
        for kind in RUN_KINDS:
            use = self.registry.reference(self.components[kind])
            sections[kind] = {"use": use, **sources(attrs.asdict(self.config(kind)))}
        sections["gateway"] = attrs.asdict(self.gateway)
        if self.prompts:
            sections["prompts"] = dict(self.prompts)
        sections |= observing.written(self.observers, self.registry)
        named = {self.registry.reference(c): sources(attrs.asdict(config)) for c, config in self.second_rewards}
        if any(named.values()):
            sections[composing.SECOND] = {name: keys for name, keys in named.items() if keys}
        return sections


OWN_SECTIONS: Mapping[str, type] = {
    "run": RunSettings,
    "runners": RunnerSettings,
    "gateway": GatewaySettings,
}
"""The sections with keys of agentrig's own; `[runners]` also has those of the runners that it names."""

SECTIONS = ("run", *RUN_KINDS, "gateway", "prompts", *observing.SECTIONS, composing.SECOND)


def to_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return sections as TOML text; keys whose value is None are left out (TOML has no null)."""
    import tomlkit  # imported here because every command imports this module and few need tomlkit

    document = tomlkit.document()
    for name, keys in sections.items():
        document.add(name, _toml_value(keys))
    return tomlkit.dumps(document)


def _toml_value(value: Any) -> Any:
    if isinstance(value, str) and "\n" in value and "\r" not in value:  # a reader would drop the carriage returns
        from tomlkit import string

        return string(value, multiline=True)
    if isinstance(value, Mapping):
        return {k: _toml_value(v) for k, v in value.items() if v is not None}
    return [_toml_value(v) for v in value] if isinstance(value, list | tuple) else value


def read_run_file(path: Path) -> dict[str, Any]:
    """Read a TOML run file: sections, and optionally `recipe = "name"` as its base.

    Raises:
        AgentrigError: No such file, not UTF-8, or not TOML; the message says where.
    """
    text = ""
    try:
        text = utf8_text(path)
        data = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no run file {path} (looked in {Path.cwd()}).\n  Give its path, or a recipe's name without .toml"
        ) from None
    except IsADirectoryError:
        if not (path / "config.toml").is_file():
            raise ConfigError(f"{path} is a folder; give a recipe's name or a run file") from None
        raise ConfigError(
            f"{path} is a run directory, not a run file. To continue it: agentrig train --resume {path}\n"
            f"  To measure or try its model: agentrig eval (or dev) RECIPE --checkpoint {path}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}{meant_in_file(text, error)}") from None
    files = data.get("run", {}).get("plugins", []) if isinstance(data.get("run"), dict) else []
    if isinstance(files, list) and files and all(isinstance(f, str) for f in files):
        data["run"]["plugins"] = [str((path.parent / f).resolve()) for f in files]
    return data


def parse_override(text: str) -> tuple[str, str, Any]:
    """Split `section.key=value`; the value is read as TOML (`3e-4`, `true`, `[1, 2]`), else as text.

    A key with dots, `section.table.rest.of.it=value`, sets `rest.of.it` in the table of that name.

    Raises:
        ConfigError: The text does not have that form, or there is no such section.
    """
    left, equals, right = text.partition("=")
    section, dot, key = left.strip().partition(".")
    if not (equals and dot and key):
        raise ConfigError(f'"{text}" is not an override; write section.key=value, for example algorithm.lr=3e-4')
    _check_section(section)
    try:
        read = tomllib.loads(f"x = {right}")
    except tomllib.TOMLDecodeError:
        read = {}
    if right.strip() in ("None", "null"):
        raise ConfigError(
            f"{text}: {right.strip()} is no value. Write {left.strip()}= for an empty text, leave the key out for its "
            f"default, or quote the text: '{left.strip()}=\"{right.strip()}\"'"
        )
    value = read["x"] if len(read) == 1 else right  # more than one key: multi-line text that looks like TOML
    table, nested, inner = key.partition(".")
    return (section, table, {inner: value}) if nested else (section, key, value)


def _check_section(section: str) -> None:
    if section not in SECTIONS:
        raise ConfigError(
            f'there is no section "{section}".{nearest(section, SECTIONS)} Sections: {", ".join(SECTIONS)}'
        )


def resolve(
    source: str | None = None,
    *,
    overrides: Sequence[str] = (),
    uses: Mapping[str, str | None] | None = None,
    observers: Sequence[str] = (),
    trackers: Sequence[str] = (),
    files: Sequence[str] = (),
    prompts: Mapping[str, Any] | None = None,
    strict_plugins: bool = False,
) -> Plan:
    """Merge a recipe or run file and the command-line options into a checked plan.

    Args:
        source: A recipe's name or a run file's path (`.toml`); None for the recipe `mini`.
        overrides: `section.key=value`, applied last.
        uses: Kind to component name, as in `--reward NAME`. If you choose another component than the
            recipe, the recipe's keys of that section hold as far as both have them from one settings class.
        observers: Observers to use, in addition to those of the recipe or run file.
        trackers: Trackers to use, in addition to those of the recipe or run file.
        files: Plugin files, in addition to those of the run file.
        prompts: Prompts in the place of those of the run file.
        strict_plugins: Raise for the first plugin that fails to load.

    Raises:
        ConfigError, LookupFailed, PluginError: The message names the key, the plugin and the nearest valid name.
    """
    from agentrig.plugins.loading import load

    # Read: the run file, the overrides, the plugins.
    name = source or "mini"
    base, own = _read_source(name)
    parsed = [parse_override(o) for o in overrides]
    # `use` first: a new component drops keys that only the old one has, and a new algorithm those of server and credit.
    parsed.sort(key=lambda override: (override[1] != "use", override[0] != "algorithm"))
    wanted = {**own.get("run", {}), **{key: value for section, key, value in parsed if section == "run"}}
    # A run's config.toml names its plugin files; one that is given again is the same plugin.
    needed = list({str(Path(file).resolve()): file for file in [*_strings(wanted, "plugins"), *files]}.values())
    try:
        registry = load(block=_strings(wanted, "block"), files=needed, strict=strict_plugins)
    except PluginError as error:
        directory = Path(name).parent
        if name.endswith(".toml") and not all(Path(file).is_file() for file in needed) and script_of(directory):
            raise ConfigError(
                f"{name} is of the run of a script: only the script has its agent and its tasks. To measure or to try "
                f"the model, export it (agentrig export {directory} my-model) and give it to the script"
            ) from error
        raise

    # Merge: each source over the one before.
    merged: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for settings in (
        _own_first(registry.find("recipe", base), registry) if base else {},
        own,
        *({kind: {"use": uses[kind]}} for kind in RUN_KINDS if uses and uses.get(kind) is not None),
        {"prompts": prompts or {}},
        *({section: {key: value}} for section, key, value in parsed),
    ):
        _merge(merged, settings, registry)
    overridden = any((section, key) == ("run", "plugins") for section, key, _ in parsed)
    if files or overridden:  # absolute, so that a resumed run finds them from any folder
        own_files = _strings(merged["run"], "plugins")
        own_files = [str(Path(f).resolve()) for f in own_files] if overridden else own_files
        merged["run"]["plugins"] = [*own_files, *(str(Path(f).resolve()) for f in files)]
    for section, names in ((observing.SECTION, observers), (observing.TRACKERS, trackers)):
        if names:
            merged[section]["use"] = list(dict.fromkeys([*observing.used(merged[section], section), *names]))

    # Select: a component of each kind, and its config object. `auto` waits until it is asked for.
    elsewhere = partial(_elsewhere, merged=merged, registry=registry)
    run = structure(RunSettings, merged["run"], owner="a run", section="run", elsewhere=elsewhere)
    gateway = structure(GatewaySettings, merged["gateway"], owner="a run", section="gateway", elsewhere=elsewhere)
    second = composing.second_rewards(run.second_reward, merged[composing.SECOND], registry, elsewhere)
    components, configs, reasons = _select(merged, registry, elsewhere)
    composing.parts_of(components["reward"], configs["reward"], registry)

    # Check what only makes sense together.
    agent: Any = components["agent"].spec
    _check_gateway(gateway, agent)
    return Plan(
        recipe=_recipe_name(name),
        run=run,
        runners=configs["runners"],
        components=components,
        configs=configs,
        registry=registry,
        reasons=reasons,
        observers=tuple(
            found for s in observing.SECTIONS for found in observing.selected(merged[s], registry, elsewhere, s)
        ),
        second_rewards=second,
        gateway=gateway,
        prompts=checked(merged["prompts"], agent.declared(configs["agent"]), agent=agent.name),
    )


def _is_file(source: str) -> bool:
    return source.endswith(".toml") or "/" in source


def _recipe_name(source: str) -> str:
    """Return a recipe's name, a run file's stem, or the recipe of the run that a `config.toml` is of."""
    path = Path(source)
    if path.name == "config.toml":
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(read_text(path.with_name("manifest.json")))["recipe"])
    return _plain_name(path.stem if _is_file(source) else source)


def _read_source(name: str) -> tuple[str, dict[str, Any]]:
    """Return the recipe that a run begins with, '' for none, and the sections of its run file."""
    if name.endswith(".py"):
        from agentrig.plugins.loading import load

        own: dict[str, str] = {}
        with contextlib.suppress(PluginError):
            file = load(files=[name]).plugins[-1]  # installed ones come first
            own = {c.kind: c.spec.name for c in file.components}
        words = [own.get("recipe", "mini"), "--plugin", name]
        words += [] if "recipe" in own else ["--agent", own.get("agent", "NAME")]
        raise ConfigError(
            f"{name} is Python and no run file; in its place, name a recipe, and give the file as a plugin:\n"
            f"  {shlex.join(words)}"
        )
    if not _is_file(name):
        return name, {}
    own = read_run_file(Path(name))
    base = own.pop("recipe", "")
    if not isinstance(base, str):
        raise ConfigError(f'recipe = {base!r:.80} must be text: write recipe = "mini"')
    for section in own:
        _check_section(section)
        if not isinstance(own[section], dict):
            raise ConfigError(f'"{section}" must be a section: write [{section}] and its keys below it')
    return base, own


def _select(
    merged: Mapping[str, Mapping[str, Any]], registry: Registry, elsewhere: Callable[[str], str]
) -> tuple[Deferred, Deferred, Deferred]:
    """Return component, config object and the reason of `auto`, by kind; `auto` is resolved on first access."""

    def select(kind: str, use: str, keys: Mapping[str, Any]) -> tuple[Component, Any]:
        component = registry.find(kind, use)
        owner = f"{use} ({component.source})"

        def others(key: str) -> str:
            return elsewhere(key) or _of_another(component, key, registry)

        try:
            return component, structure(component.spec.config, keys, owner=owner, section=kind, elsewhere=others)
        except ConfigError:
            if kind == "algorithm":  # whose limits need not be mended if the loss can't be the credit's
                _check_loss(component.spec.name, keys, merged["credit"], registry)
            raise

    components: dict[str, Component] = {}
    configs: dict[str, Any] = {}
    auto_keys: dict[str, dict[str, Any]] = {}
    for kind in RUN_KINDS:
        keys = dict(merged[kind])
        use = keys.pop("use", "auto" if kind in ("credit", "hardware", "server", "runners") else None)
        if kind == "adapter" and use is None and any(c.answers_to(MATCHING) for c in registry.components(kind)):
            use, keys = MATCHING, {"match": "", **keys}
        if not isinstance(use, str):
            names = ", ".join(c.spec.name for c in registry.components(kind))
            wrong = "does not say what to use" if use is None else f"use = {use!r:.80} must be text"
            raise ConfigError(f'[{kind}] {wrong}; write use = "NAME" with one of: {names or "none"}')
        if kind in auto.NOUNS:
            use = auto.used_by(registry, components["algorithm"], kind, use, keys)
        if kind in ("hardware", "server") and use == "auto":
            auto_keys[kind] = keys
        else:
            components[kind], configs[kind] = select(kind, use, keys)
    algorithm = components["algorithm"]
    for kind, owner, able in (
        ("hardware", f"no hardware for {algorithm.spec.name}", auto.able(registry, algorithm)),
        ("server", "no server that `auto` selects from", auto.ranked_servers(registry)),
    ):
        classes, keys = [c.spec.config for c in able], auto_keys.get(kind, {})
        check_any(classes, keys, owner=owner, section=kind, elsewhere=elsewhere)

    @cache
    def chosen(kind: str) -> tuple[Component, Any, str]:
        why = ""
        if kind == "hardware":
            name = auto.auto_hardware(registry, components["algorithm"])
        else:
            hardware = built(selected["hardware"], settings["hardware"])
            component, why = auto.auto_server(registry, hardware, auto_keys[kind])
            name = registry.reference(component)
        return *select(kind, name, auto_keys[kind]), why

    def later(n: int) -> dict[str, Callable[[], Any]]:
        return {kind: lambda kind=kind: chosen(kind)[n] for kind in auto_keys}  # type: ignore[misc]

    selected, settings, reasons = Deferred(components, later(0)), Deferred(configs, later(1)), later(2)
    reasons.pop("hardware", None)  # `auto` gives none
    return selected, settings, Deferred({}, reasons)


def _check_loss(algorithm: str, keys: Mapping[str, Any], credit: Mapping[str, Any], registry: Registry) -> None:
    """Raise if the credit that a plan names has no meaning with the loss that it names."""
    why = refuses_replies(None, Learning(loss=str(keys.get("loss", ""))))
    for found in registry.components("credit") if why else ():
        spec: Any = found.spec
        if spec.refuses is refuses_replies and found.answers_to(str(credit.get("use"))):
            raise ConfigError(f"[credit] {spec.name} with the algorithm {algorithm}: {why}")


def _check_gateway(gateway: GatewaySettings, agent: Any) -> None:
    """Raise if the gateway is off, and something needs it."""
    if gateway.use == "off" and gateway.models:
        raise ConfigError('[gateway] use = "off", but [gateway.models] names models that only the gateway can reach')
    if gateway.use == "off" and getattr(agent, "calls", "tap") == "gateway":
        raise ConfigError(
            f'[gateway] use = "off", but the calls of agent {agent.name} leave the runner\'s process: without the '
            'gateway nobody records them. Leave it out: "auto" starts the gateway'
        )


def _elsewhere(key: str, merged: Mapping[str, Mapping[str, Any]], registry: Registry) -> str:
    """Return ` It is a key of [SECTION]: write SECTION.key.`, for each section of this plan that has it, or ''."""
    classes = {section: [cls] for section, cls in OWN_SECTIONS.items()}
    for kind in RUN_KINDS:
        use = _plain_name(merged[kind].get("use", "auto"))  # `auto`: any of its kind
        if kind == "runners" and use == "auto":
            use = auto.PROCESSES
        if kind == "credit" and use == "auto":
            named = _plain_name(merged["algorithm"].get("use", ""))
            specs: list[Any] = [c.spec for c in registry.components("algorithm")]
            use = next((spec.credit for spec in specs if spec.name == named), "") or auto.OWN
        found_here = [c for c in registry.components(kind) if use in (c.spec.name, "auto")]
        classes[kind] = [c.spec.config for c in found_here]
        if kind == "algorithm" and not any(getattr(c.spec, "server", False) for c in found_here):
            merged = {**merged, "server": {"use": auto.OWN}}
    in_use = {_plain_name(name) for s in observing.SECTIONS for name in observing.used(merged[s], s)}
    for c in registry.components(observing.SECTION):
        if c.spec.name in in_use:
            classes[f"{observing.section_of(c)}.{c.spec.name}"] = [c.spec.config]
    found: dict[str, str] = {}
    for section, configs in classes.items():
        for config in configs:
            if key in attrs.fields_dict(config):
                found[section] = f"{section}.{key}"
    sections, keys = " and ".join(f"[{s}]" for s in found), " or ".join(found.values())
    return f" It is a key of {sections}: write {keys}." if found else ""


def keys_called(name: str) -> list[str]:
    """Return the keys with this name, `section.key`, of a run's own sections and of every installed component."""
    from agentrig.plugins.loading import load

    registry = load()
    classes = [*OWN_SECTIONS.items()]
    classes += [(kind, c.spec.config) for kind in RUN_KINDS for c in registry.components(kind)]
    return list(dict.fromkeys(f"{section}.{name}" for section, config in classes if name in attrs.fields_dict(config)))


def _of_another(component: Component, key: str, registry: Registry) -> str:
    """Return ` It is a key of NAME.` for other components of its kind which have it, or ''.

    The only one is offered instead, unless it is an algorithm that trains something else.
    """
    found: list[Any] = [c.spec for c in registry.components(component.kind) if key in attrs.fields_dict(c.spec.config)]
    if not found:
        return ""
    *names, last = [spec.name for spec in found]
    trains = {getattr(spec, "trains", "") for spec in (*found, component.spec)}
    selects = "" if names or len(trains) > 1 else f": {component.kind}.use={last} selects it"
    return f" It is a key of {', '.join(names)}{' and ' if names else ''}{last}{selects}."


def _strings(keys: Mapping[str, Any], key: str) -> list[str]:
    value = keys.get(key, [])
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ConfigError(f"[run] {key} = {value!r} must be a list of strings{meant(value, list[str], f'run.{key}')}")
    return value


def _plain_name(use: Any) -> str:
    """Return `name` of `distribution:name`."""
    return str(use).rpartition(":")[2]


def _own_first(recipe: Component, registry: Registry) -> dict[str, dict[str, Any]]:
    """Return a recipe's settings; a name that several plugins bring means the one of the recipe's own package."""

    def own(kind: str, name: Any) -> Any:
        if isinstance(name, list):
            return [own(kind, each) for each in name]
        return registry.nearby(kind, name, recipe) if isinstance(name, str) else name

    spec: Any = recipe.spec
    settings = {section: dict(keys) for section, keys in spec.settings.items()}
    for section, keys in settings.items():
        if "use" in keys:
            keys["use"] = own(observing.SECTION if section == observing.TRACKERS else section, keys["use"])
    if composing.SECOND in settings.get("run", {}):
        settings["run"][composing.SECOND] = own("reward", settings["run"][composing.SECOND])
    parts = settings.get("reward", {}).get("parts")
    if isinstance(parts, Mapping):
        tables = {name: keys if isinstance(keys, Mapping) else {"weight": keys} for name, keys in parts.items()}
        meant = {name: own("reward", table.get("use", name)) for name, table in tables.items()}
        settings["reward"]["parts"] = {
            name: keys if meant[name] == name else {**tables[name], "use": meant[name]} for name, keys in parts.items()
        }
    return settings


def _merge(into: dict[str, dict[str, Any]], more: Mapping[str, Mapping[str, Any]], registry: Registry) -> None:
    def common(section: str) -> Mapping[str, Any] | None:
        """Return what a former component's settings and a new one's have from one class; None for the same component.

        That class is the nearest that both derive from.
        """
        old, new = into[section].get("use"), more[section].get("use")
        names = str(old), str(new)
        known = registry.components(section)
        if None in (old, new) or old == new or any(all(map(c.answers_to, names)) for c in known):
            return None
        if section == "runners":
            return attrs.fields_dict(RunnerSettings)  # the keys of all runners
        try:
            first, second = (getattr(registry.find(section, name).spec.config, "__mro__", ()) for name in names)
        except LookupFailed:
            return {}  # told when the component is built
        shared = next((c for c in second if c in first and attrs.has(c)), None)
        return attrs.fields_dict(shared) if shared is not None else {}

    shared = {section: common(section) for section in more if section in RUN_KINDS}
    if shared.get("agent") is not None:
        into["prompts"] = {}  # the former agent's
    if shared.get("algorithm") == {}:
        into["server"], into["credit"] = {}, {}  # the former algorithm's
    elif shared.get("algorithm") is not None and not _takes_credit(more["algorithm"]["use"], registry):
        into["credit"] = {}
    for section, keys in more.items():
        _check_section(section)
        if section in observing.SECTIONS:
            observing.merge(into[section], keys, section)
            continue
        if (kept := shared.get(section)) is not None:
            into[section] = {key: value for key, value in into[section].items() if key in kept}
        for key, value in keys.items():
            old = into[section].get(key)
            into[section][key] = {**old, **value} if isinstance(value, Mapping) and isinstance(old, Mapping) else value


def _takes_credit(name: Any, registry: Registry) -> bool:
    try:
        return bool(getattr(registry.find("algorithm", str(name)).spec, "credit", ""))
    except LookupFailed:
        return True  # told when the component is built


class Deferred(Mapping[str, Any]):
    """A read-only mapping; each of its deferred values is computed once, on first access.

    Args:
        known: The values that are already known.
        later: Key to a function without arguments that computes its value. If it raises, the exception goes to the
            caller, and the next access calls the function again.
    """

    def __init__(self, known: Mapping[str, Any], later: Mapping[str, Callable[[], Any]]) -> None:
        self._known, self._later = dict(known), dict(later)

    def __getitem__(self, key: str) -> Any:
        if key in self._later:
            self._known[key] = self._later[key]()
            del self._later[key]
        return self._known[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._known, *self._later])

    def __len__(self) -> int:
        return len(self._known) + len(self._later)

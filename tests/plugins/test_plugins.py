"""Plugins are found by entry point, broken ones are isolated, conflicts and misspellings are named."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from distributions import describe, install, reward_source
from model_server import ModelServer

from agentrig import hookimpl
from agentrig.cli.entry import main
from agentrig.errors import LookupFailed, PluginError
from agentrig.plugins.loading import load
from agentrig.plugins.registry import Registry


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for distributions, on the path for the length of a test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", "") and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def status(registry: Registry, name: str) -> str:
    return next(p.status for p in registry.plugins if p.name == name)


def error(registry: Registry, name: str) -> str:
    return next(p.error or p.status for p in registry.plugins if p.name == name)


def test_a_distribution_is_found_by_its_entry_point_as_the_core_is(site: Path) -> None:
    install(site, "toy-good", reward_source("good"))
    registry = load()
    component = registry.find("reward", "good")
    assert (component.distribution, component.version, component.plugin) == ("toy-good", "1.2", "toy-good")
    for kind, name in (("reward", "own"), ("hardware", "cpu")):
        component = registry.find(kind, name)
        assert (component.distribution, component.plugin) == ("agentrig", "core")


HEAD = "from agentrig import AgentSpec, RecipeSpec, RewardSpec, hookimpl\n@hookimpl\n"
REWARDS = f"{HEAD}def register_rewards(): "
SPEC = "RewardSpec(name='x', summary='', build=print)"
BROKEN = {
    "import no_such_library": "ModuleNotFoundError: No module named 'no_such_library' (toy_broken.py:1 in <module>)",
    "def broken(:": "(toy_broken.py, line 1): def broken(:",
    "raise SystemError('at import')": "SystemError: at import",
    "raise SystemExit('good bye')": "good bye",
    "def f():\n    {}['x']\nf()": "KeyError: 'x' (toy_broken.py:2 in f)",
    f"{HEAD}def register_reward(): return []": 'unknown hook "register_reward". Did you mean "register_rewards"?',
    f"{REWARDS}raise KeyError('lost')": "KeyError: 'lost'",
    f"{REWARDS}yield 'a string'": "gave a str; it must give RewardSpec objects",
    f"{REWARDS}pass": "register_rewards (toy_broken.py:2) returned None; write `yield RewardSpec(",
    f"{REWARDS}return {SPEC}": "returned one RewardSpec by itself; write `yield RewardSpec(",
    f"{REWARDS}return 7": "returned 7; write",
    f"{REWARDS}return {{'x': print}}": "returned {'x': <built-in function print>}; write",
    f"{HEAD}def register_rewards(x): return []": (
        "failed to load: register_rewards takes no arguments; it is defined as register_rewards(x)"
    ),
    f"{HEAD}def on_step_end(event, more): pass": (
        "on_step_end takes only event; it is defined as on_step_end(event, more)"
    ),
    f"{HEAD}def register_agents(): yield {SPEC}": "must give AgentSpec objects; that belongs into register_rewards",
    f"{REWARDS}yield {SPEC}; yield {SPEC}": 'brings two components called "x"; rename one',
    f"{REWARDS}yield {SPEC.replace('x', 'My Reward', 1)}": (
        "the name 'My Reward' must be lower-case letters, digits and single hyphens: write name=\"my-reward\" "
        "(toy_broken.py:3 in register_rewards)"
    ),
    f"{REWARDS}yield RewardSpec(name=None, summary='', build=print)": "the name None must be lower",
    f"{REWARDS}yield {SPEC.replace('print', '3')}": "build must be a function",
    f"{REWARDS}yield {SPEC.replace('print', 'print, config=dict')}": "config must be an attrs class",
    f"{REWARDS}yield {SPEC.replace(repr(''), '0')}": "summary must be text, not 0",
    f"{REWARDS}yield RewardSpec(name='x', build=print)": "argument: 'summary' (toy_broken.py:3",
    f"{REWARDS}yield {SPEC.replace('name', 'nmae')}": (
        "got an unexpected keyword argument 'nmae'. Did you mean \"name\"? (toy_broken.py:3 in register_rewards)"
    ),
    f"{HEAD}def register_recipes(): yield RecipeSpec(name='x', summary='', settings={{'tasks': 'mini-sql'}})": (
        "RecipeSpec x: tasks is 'mini-sql'; settings are sections with keys"
    ),
    f"{reward_source('half')}@hookimpl\ndef register_agents(): raise ValueError('half way')": "ValueError: half way",
}
"""The module of a plugin, and what its error has."""


@pytest.mark.parametrize("source", BROKEN)
def test_a_broken_plugin_is_isolated_named_and_registers_nothing(site: Path, source: str) -> None:
    install(site, "toy-broken", f"{source}\n")
    install(site, "toy-good", reward_source("good"))
    registry = load()
    assert status(registry, "toy-broken") == "failed"
    assert registry.find("reward", "good")
    with pytest.raises(LookupFailed) as caught:
        registry.find("reward", "half")
    message = str(caught.value)
    assert "plugin toy-broken (toy-broken 1.2) failed to load" in message
    assert BROKEN[source] in message
    assert "Attribute(" not in message
    with pytest.raises(PluginError, match=r"plugin toy-broken \(toy-broken 1.2, toy_broken\) failed to load"):
        load(strict=True)


def test_a_name_of_two_plugins_is_selected_by_its_distribution(site: Path) -> None:
    install(site, "toy-one", reward_source("twin"))
    install(site, "toy-other", reward_source("twin"), point="elsewhere")
    install(site, "toy-third", reward_source("single"))
    registry = load()
    for asked, found in (("toy-one:twin", "toy-one"), ("toy-other:twin", "toy-other"), ("elsewhere:twin", "toy-other")):
        component = registry.find("reward", asked)
        assert component.distribution == found
        assert registry.find("reward", registry.reference(component)) is component
    assert registry.reference(registry.find("reward", "toy-third:single")) == "single"
    with pytest.raises(LookupFailed, match='there is no reward called "toy-third:twin"'):
        registry.find("reward", "toy-third:twin")


def test_a_name_conflict_stops_only_runs_that_use_the_name(site: Path, toy_file: str, model: ModelServer) -> None:
    """The run's config.toml names the component in a form that a resumed run finds."""
    from agentrig.plan import resolve, to_toml

    for name in ("toy-one", "toy-other"):
        source = reward_source("twin", more="\n\n@hookimpl\ndef register_recipes():\n    yield RecipeSpec(name='toy',")
        source = source.replace("import RewardSpec", "import RecipeSpec, RewardSpec")
        install(site, name, source + " summary='', settings={'run': {'seed': 7}})\n")
    given = {"files": [toy_file], "overrides": ["algorithm.endpoint=http://127.0.0.1:9/v1"]}
    with pytest.raises(PluginError, match='3 plugins bring a recipe called "toy"'):
        resolve("toy", **given)  # type: ignore[arg-type]
    plan = resolve("toy_plugin:toy", **given)  # type: ignore[arg-type]
    assert (plan.recipe, plan.components["reward"].spec.name) == ("toy", "toy-parity")
    for wish, second in (("twin", ""), ("toy-parity", "twin")):
        words = [*given["overrides"], f"run.second_reward={second}"]
        with pytest.raises(PluginError, match='two plugins bring a reward called "twin"'):
            resolve("toy_plugin:toy", overrides=words, files=[toy_file], uses={"reward": wish})
    words = [*given["overrides"], "run.second_reward=toy-one:twin"]
    plan = resolve("toy_plugin:toy", overrides=words, files=[toy_file], uses={"reward": "toy-other:twin"})
    assert plan.components["reward"].distribution == "toy-other"
    (site / "config.toml").write_text(to_toml(plan.as_dict()))
    assert resolve(str(site / "config.toml")).components["reward"].distribution == "toy-other"

    words = ["toy_plugin:toy", "--plugin", toy_file, "--endpoint", model.url, "--limit", "2", "--json"]
    done = CliRunner().invoke(main, ["eval", *words, "--reward", "toy-one:twin"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["accuracy"] == 1.0


def test_a_recipes_names_resolve_to_its_own_package_first(site: Path, toy_file: str) -> None:
    """Another package's components of the same names don't break it, and a user's choice of them drops its keys."""
    from agentrig.plan import resolve, to_toml

    names = """
import attrs
from agentrig import ObserverSpec, RecipeSpec, RewardSpec, Score, hookimpl, setting

@attrs.frozen(kw_only=True)
class Config:
    most: float = setting(1.0, help="the value of a right answer")

@hookimpl
def register_rewards():
    for name in ("twin", "second"):
        yield RewardSpec(name=name, summary="", config=Config, build=lambda c: lambda t, o, b: Score.ok(c.most))

class Watcher:
    def on_run_end(self, event):
        pass

@hookimpl
def register_observers():
    yield ObserverSpec(name="watcher", summary="", build=lambda c: Watcher())
    yield ObserverSpec(name="tracker", summary="", tracker=True, build=lambda c: Watcher())
"""
    recipes = """
@hookimpl
def register_recipes():
    more = {
        "run": {"second_reward": ["second"]}, "second_reward": {"second": {"most": 3.0}},
        "observer": {"use": "watcher"}, "trackers": {"use": ["tracker"]}, "tasks": {"use": "toy-tasks"},
        "agent": {"use": "toy"}, "adapter": {"use": "toy-match"}, "algorithm": {"use": "toy-number", "endpoint": "http://127.0.0.1:9/v1"},
    }
    yield RecipeSpec(name="mine", summary="", settings={"reward": {"use": "twin", "most": 2.0}, **more})
    parts = {"twin": 0.5, "other": {"use": "second", "weight": 0.5}, "toy-parity": 1.0}
    yield RecipeSpec(name="sum", summary="", settings={"reward": {"use": "weighted", "parts": parts}, **more})
"""
    install(site, "toy-one", names + recipes)
    install(site, "toy-other", names)
    plan = resolve("mine", files=[toy_file])
    chosen = [plan.components["reward"], *(c for c, _ in plan.second_rewards), *(c for c, _ in plan.observers)]
    assert [(c.spec.name, c.distribution) for c in chosen] == [
        (name, "toy-one") for name in ("twin", "second", "watcher", "tracker")
    ]
    assert (plan.config("reward").most, plan.second_rewards[0][1].most) == (2.0, 3.0)
    (site / "config.toml").write_text(to_toml(plan.as_dict()))
    again = resolve(str(site / "config.toml"))
    assert again.as_dict() == plan.as_dict()

    weighted = resolve("sum", files=[toy_file]).config("reward").parts
    assert weighted == {
        "twin": {"use": "toy-one:twin", "weight": 0.5},
        "other": {"use": "toy-one:second", "weight": 0.5},
        "toy-parity": 1.0,
    }

    same = resolve("mine", files=[toy_file], uses={"reward": "toy-one:twin"})
    other = resolve("mine", files=[toy_file], uses={"reward": "toy-other:twin"})
    assert (same.config("reward").most, other.config("reward").most) == (2.0, 1.0)
    assert other.components["reward"].distribution == "toy-other"
    with pytest.raises(PluginError, match="--reward toy-one:twin or --reward toy-other:twin"):
        resolve("mine", files=[toy_file], uses={"reward": "twin"})


@pytest.mark.slow
def test_an_agent_of_a_shared_name_reaches_the_runners(site: Path, toy_file: str, model: ModelServer) -> None:
    for name, answer in (("toy-one", "odd"), ("toy-other", "even")):
        install(
            site,
            name,
            "from agentrig import AgentSpec, hookimpl\n\n\n@hookimpl\ndef register_agents():\n"
            f"    yield AgentSpec(name='twin', summary='', build=lambda c: lambda task, endpoint: {answer!r})\n",
        )
    words = ["eval", "toy", "--plugin", toy_file, "--endpoint", model.url, "--limit", "2", "--agent", "toy-other:twin"]
    command = [sys.executable, "-m", "agentrig", *words, "--json", "--save", str(site / "answers.jsonl")]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line)["answer"] for line in (site / "answers.jsonl").read_text().splitlines()]
    assert answers == ["even", "even"]


def test_a_name_conflict_sets_the_exit_status_of_plugins(site: Path) -> None:
    install(site, "toy-one", reward_source("twin"))
    install(site, "toy-other", reward_source("twin"), version="3.4")
    for words in (["plugins"], ["plugins", "--json"]):
        listed = CliRunner().invoke(main, words)
        assert listed.exit_code == 1
        for part in (
            'two plugins bring a reward called "twin"', "toy-one 1.2", "toy-other 3.4", "[run] in a run file",
            "--reward toy-one:twin or --reward toy-other:twin.", "AGENTRIG_BLOCK=toy-one or AGENTRIG_BLOCK=toy-other",
        ):  # fmt: skip
            assert part in " ".join(listed.stderr.split())
    assert {p["distribution"] for p in json.loads(listed.stdout)} >= {"toy-one", "toy-other", "agentrig"}


def test_task_sets_that_share_a_name_have_data_commands(site: Path) -> None:
    for name in ("toy-one", "toy-other"):
        install(
            site,
            name,
            "from agentrig import TasksSpec, hookimpl\n\n\n@hookimpl\ndef register_tasks():\n"
            f"    yield TasksSpec(name='twin', summary='', build=print, convert=lambda s, t: '{name} of ' + s)\n",
        )
    for asked in ("toy-one", "toy-other"):
        done = CliRunner().invoke(main, ["data", f"{asked}:twin", "--from", "x.zip"])
        assert (done.exit_code, done.stdout) == (0, f"{asked} of x.zip\n")
    unclear = CliRunner().invoke(main, ["data", "twin", "--from", "x.zip"])
    assert (unclear.exit_code, 'two plugins bring a task set called "twin"' in unclear.stderr) == (1, True), (
        unclear.output
    )
    spider = CliRunner().invoke(main, ["data", "agentrig-spider:spider", "--help"])
    assert (spider.exit_code, "agentrig data spider --from" in spider.stdout) == (0, True), spider.output


@pytest.mark.parametrize("how", ["variable", "argument", "distribution"])
def test_a_blocked_plugin_is_never_imported(site: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    install(site, "toy-dist", "raise AssertionError('imported')\n", point="toy-point")
    if how == "variable":
        monkeypatch.setenv("AGENTRIG_BLOCK", "something-else, toy-point")
    registry = load(block={"argument": ["toy-point"], "distribution": ["toy-dist"]}.get(how, []))
    assert status(registry, "toy-point") == "blocked"
    assert "toy_dist" not in sys.modules
    with pytest.raises(LookupFailed, match=r"plugin toy-point \(toy-dist 1.2\) is blocked"):
        registry.find("reward", "any")


def test_a_run_file_blocks(site: Path) -> None:
    from agentrig.plan import resolve

    install(site, "toy-blocked", "raise AssertionError('imported')\n")
    file = site / "run.toml"
    file.write_text('[run]\nblock = ["toy-blocked"]\n[reward]\nuse = "toy-reward"\n')
    with pytest.raises(Exception, match="does not say what to use"):
        resolve(str(file))
    assert "toy_blocked" not in sys.modules


def test_a_file_without_a_hook_is_no_plugin(tmp_path: Path) -> None:
    file = tmp_path / "mine_without_hook.py"
    file.write_text("def build():\n    return []\n")
    with pytest.raises(PluginError, match=r"mine_without_hook .* it has no hook: is `@hookimpl` missing"):
        load(files=[file])


def test_a_function_named_like_a_hook_without_the_mark_is_named(tmp_path: Path) -> None:
    file = tmp_path / "m1.py"
    marked = "from agentrig import hookimpl\n\n@hookimpl\ndef register_tasks():\n    return []\n"
    file.write_text(f"{marked}\ndef register_agents():\n    return []\n")
    with pytest.raises(PluginError, match=r"m1\.py has register_agents without @hookimpl; write `@hookimpl` in"):
        load(files=[file])
    result = CliRunner().invoke(main, ["validate", str(file)])
    assert result.exit_code == 1
    assert "m1.py has register_agents without @hookimpl" in " ".join(result.stderr.split())
    (tmp_path / "shared_hooks.py").write_text("def on_step_end(event):\n    pass\n")
    file = tmp_path / "imports_one.py"
    file.write_text(f"from shared_hooks import on_step_end\n{marked}")
    assert load(files=[file])


def test_a_file_is_a_plugin(site: Path) -> None:
    file = site / "mine.py"
    file.write_text(reward_source("mine"))
    registry = load(files=[file])
    component = registry.find("reward", "mine")
    assert (component.plugin, component.distribution) == ("mine", "file")
    assert next(p.origin for p in registry.plugins if p.name == "mine") == str(file)
    for words in (["show", "mine", "--plugin", str(file)], ["--plugin", str(file), "show", "mine"]):
        assert CliRunner().invoke(main, ["plugins", *words]).stdout.startswith("reward mine")


def test_two_files_of_one_name_are_both_read(site: Path) -> None:
    for folder, reward in (("a", "first"), ("b", "second")):
        (site / folder).mkdir()
        (site / folder / "same.py").write_text(reward_source(reward))
        assert load(files=[site / folder / "same.py"]).find("reward", reward)
    one, other = (site / folder / "same.py" for folder in "ab")
    said = f'plugin same (file {other}) failed to load: the file {one} is also called "same"; rename one of the files'
    with pytest.raises(PluginError, match=f"^{re.escape(said)}$"):
        load(files=[one, other])
    assert [p.name for p in load(files=[one, site / "b" / ".." / "a" / "same.py"]).plugins].count("same") == 1
    one = one.rename(site / "core.py")
    with pytest.raises(PluginError, match=r'the plugin of agentrig is also called "core"; rename the file$'):
        load(files=[one])


class _Loud:
    def __init__(self) -> None:
        self.heard: list[object] = []

    @hookimpl
    def on_step_end(self, event: object) -> None:
        self.heard.append(event)
        raise RuntimeError("the tracker is offline")


class _Quiet:
    def __init__(self) -> None:
        self.heard: list[object] = []

    @hookimpl
    def on_step_end(self, event: object) -> None:
        self.heard.append(event)


def test_an_observer_that_raises_is_logged_counted_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    registry = load()
    before, loud, after = _Quiet(), _Loud(), _Quiet()
    for name, observer in (("before", before), ("loud", loud), ("after", after)):
        registry.add_observer(observer, name)
    with caplog.at_level(logging.ERROR):
        registry.notify("on_step_end", event=1)
        registry.notify("on_step_end", event=2)
    assert before.heard == loud.heard == after.heard == [1, 2]
    assert registry.observer_errors == {"loud": 2}
    assert [r.getMessage() for r in caplog.records] == ["observer loud failed in on_step_end"]


def test_the_json_of_plugins_has_its_fixed_shape(site: Path) -> None:
    install(site, "toy-good", reward_source("good"))
    install(site, "toy-broken", "import no_such_library\n")
    result = CliRunner().invoke(main, ["plugins", "--json"])
    listed = {p["distribution"]: p for p in json.loads(result.stdout)}
    for plugin in listed.values():
        assert {"distribution", "version", "status", "origin", "error", "components"} <= set(plugin)
    good, broken = listed["toy-good"], listed["toy-broken"]
    assert good["components"] == [{"kind": "reward", "name": "good", "summary": "One."}]
    assert (good["version"], good["status"], good["origin"], good["error"]) == ("1.2", "ok", "toy_good", None)
    assert broken["status"] == "failed"
    assert "no_such_library" in broken["error"]
    assert broken["components"] == []


def test_the_command_warns_of_a_broken_plugin_and_goes_on(site: Path, toy_file: str) -> None:
    install(site, "toy-broken", "import no_such_library\n")
    listed = CliRunner().invoke(main, ["plugins"])
    assert listed.exit_code == 0
    assert "no_such_library" in listed.stdout
    assert listed.stdout.count("\n    agentrig 0") == 1, "its three plugins are one line"
    strict = CliRunner().invoke(main, ["plugins", "--strict-plugins"])
    assert strict.exit_code == 1
    assert "toy-broken" in strict.stderr


def test_two_entry_points_of_one_name_do_not_hide_each_other(site: Path) -> None:
    install(site, "toy-one", reward_source("first"), point="same")
    install(site, "toy-two", reward_source("second"), point="same")
    registry = load()
    states = {p.distribution: p.status for p in registry.plugins if p.name == "same"}
    assert sorted(states.values()) == ["failed", "ok"]
    error = next(p.error for p in registry.plugins if p.name == "same" and p.status == "failed")
    assert error == 'another plugin is also called "same"; rename one of the entry points'
    assert len([c for c in registry.components("reward") if c.spec.name in ("first", "second")]) == 1


def test_entry_points_that_are_not_utf_8_fail_alone(site: Path) -> None:
    install(site, "toy-good", reward_source("good"))
    describe(site, "toy-latin", "1.2", points="[agentrig]\n")
    (site / "toy_latin-1.2.dist-info" / "entry_points.txt").write_bytes("[agentrig]\nthé = x\n".encode("latin-1"))
    registry = load()
    assert (status(registry, "toy-latin"), status(registry, "toy-good")) == ("failed", "ok")
    assert status(registry, "core") == "ok"
    (plugin,) = (p for p in registry.plugins if p.name == "toy-latin")
    assert plugin.error == "its entry_points.txt is not UTF-8 (byte 13): reinstall toy-latin, or remove it"


def test_an_async_hook_is_named_without_a_warning_of_python(tmp_path: Path) -> None:
    file = tmp_path / "waits.py"
    file.write_text("from agentrig import hookimpl\n@hookimpl\nasync def register_rewards():\n    return []\n")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(PluginError, match=r"register_rewards .*returned <coroutine"):
            load(files=[file])
        gc.collect()
    assert not [w for w in warned if "never awaited" in str(w.message)]


HANGS = """
import signal, sys
from importlib.metadata import entry_points
from agentrig.plugins import loading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
loading.SLOW_S = 0.5
others = [p.name for p in entry_points(group="agentrig") if not p.name.startswith("toy-")]  # they may take longer
loading.load(block=others, files=sys.argv[1:])"""


@pytest.mark.parametrize(
    ("named", "told", "cure"),
    [
        (False, "; AGENTRIG_BLOCK=toy-sleep leaves it out\n", "; AGENTRIG_BLOCK=toy-sleep leaves it out\n"),
        (True, "; Ctrl-C ends it\n", "\n"),
    ],
    ids=["installed", "a file that the command names"],
)
def test_a_plugin_that_hangs_shows_where_and_ctrl_c_names_it(site: Path, named: bool, told: str, cure: str) -> None:
    """One line says so, once; the command goes on waiting, for the plugin may only be slow."""
    hangs, file = "import time\n\ntime.sleep(600)\n", site / "toy_sleep.py"
    if named:
        file.write_text(hangs)
    else:
        install(site, "toy-sleep", hangs)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", HANGS, *([str(file)] if named else [])]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stderr is not None
            line = child.stderr.readline()
            assert child.poll() is None
            child.send_signal(signal.SIGINT)
            rest = child.stderr.read()
        finally:
            child.kill()
    name, origin = ("toy_sleep", file) if named else ("toy-sleep", "toy_sleep")
    assert line == f"still importing plugin {name} ({origin}) after 0.5 s, now at {file}:3{told}"
    assert f"KeyboardInterrupt: interrupted while plugin {name} was loading (toy_sleep.py:3 in <module>){cure}" in rest


@pytest.mark.slow
def test_a_plugin_that_is_slow_is_loaded_and_later_code_is_not_interrupted(site: Path) -> None:
    install(site, "toy-slow", "import time\ntime.sleep(1)\n" + reward_source("slow"))
    code = f"{HANGS}.find('reward', 'slow')\nprint('LOADED', file=sys.stderr, flush=True)\nimport time; time.sleep(1)\n"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    loading, _, later = done.stderr.partition("LOADED")
    assert "toy_slow.py" in loading
    assert "Timeout" not in later


@pytest.mark.slow
def test_a_plugin_that_crashes_the_interpreter_shows_where(site: Path) -> None:
    install(site, "toy-crash", "import os\n\nos.abort()\n")
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "agentrig", "plugins"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT
    assert f'"{site}/toy_crash.py", line 3 in <module>' in done.stderr
    blocked = {**environment, "AGENTRIG_BLOCK": "toy-crash"}
    assert subprocess.run(command, env=blocked, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("toy_module:plugin", "AttributeError: module 'toy_module' has no attribute 'plugin'"),
        ("toy_modul", "ModuleNotFoundError: No module named 'toy_modul'"),
    ],
)
def test_an_entry_point_and_a_module_that_disagree(site: Path, point: str, said: str) -> None:
    install(site, "toy-module", "")
    (site / "toy_module-1.2.dist-info" / "entry_points.txt").write_text(f"[agentrig]\ntoy-module = {point}\n")
    found = error(load(), "toy-module")
    assert found.startswith(f'{said}. The entry point says "{point}", and the package lacks it')


@pytest.mark.parametrize("point", ["not a module!", "", "toy_module:"])
def test_an_entry_point_that_is_no_name(site: Path, point: str) -> None:
    install(site, "toy-module", "")
    (site / "toy_module-1.2.dist-info" / "entry_points.txt").write_text(f"[agentrig]\ntoy-module = {point}\n")
    assert error(load(), "toy-module") == f'the entry point "{point}" is no module name'


def test_two_entry_points_of_one_module(site: Path) -> None:
    install(site, "toy-twice", reward_source("twice"))
    points = "[agentrig]\ntoy-again = toy_twice\ntoy-twice = toy_twice\n"
    (site / "toy_twice-1.2.dist-info" / "entry_points.txt").write_text(points)
    registry = load()
    assert registry.find("reward", "twice").plugin == "toy-again"
    assert error(registry, "toy-twice") == (
        'it is the same object as plugin "toy-again" (toy_twice); leave one entry point out'
    )


PATCHES = """
import json, math
json.load, math.isfinite = (lambda file: {}), (lambda x: True)
"""
RECORDS = """
import functools, json


def recorded(call):
    @functools.wraps(call)
    def wrapper(*args, **more): return call(*args, **more)
    return wrapper

json.load = recorded(json.load)
"""


@pytest.mark.parametrize(("source", "found"), [(PATCHES, True), (RECORDS, False)])
@pytest.mark.parametrize("how", ["file", "package"])
def test_a_plugin_that_replaces_functions_of_python_on_import_is_named_once(
    source: str, found: bool, how: str, site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`math.isfinite = lambda x: True` in a reward's file: the run's own statistics called it."""
    for owner, name in ((json, "load"), (math, "isfinite")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    before, source = json.load, source + reward_source("patches")
    folder = site / "lib" / "site-packages"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(folder)
    file = folder / f"patches_{how}_{found}.py"
    if how == "package":
        install(folder, "toy-patches", source)
    else:
        file.write_text(source)
    for _ in range(2):
        load(files=[file] if how == "file" else [])
    assert json.load is not before  # some libraries do so on purpose
    said = [r.getMessage() for r in caplog.records if "replaced" in r.getMessage()]
    assert len(said) == found
    name, origin = ("toy-patches", "toy_patches") if how == "package" else (file.stem, str(file))
    start = f"plugin {name} ({origin}) replaced json.load, math.isfinite of the interpreter when it was imported: all"
    assert all(each.startswith(start) for each in said)


def test_a_package_without_an_entry_point_is_named_when_its_component_is_missed(site: Path) -> None:
    install(site, "toy-plain", reward_source("plain"), plugin=False, requires=["agentrig>=0.2"])
    with pytest.raises(LookupFailed) as caught:
        load().find("reward", "plain")
    assert (
        'package toy-plain 1.2 requires agentrig, and is no plugin: it has no entry point in the group "agentrig". '
        "Add [project.entry-points.agentrig] to its pyproject.toml, and install it again"
    ) in str(caught.value)


def test_show_names_keys_ranges_and_origin(site: Path) -> None:
    source = reward_source("shown").replace("summary='One.'", "summary='One.', config=Config")
    more = (
        "import attrs\nfrom agentrig import setting\n\n@attrs.frozen(kw_only=True)\nclass Config:\n"
        "    share: float = setting(0.5, help='the share', gt=0, le=1)\n"
        "    how: str = setting('a', help='how', choices=('a', 'b'))\n"
        "    path: str = setting(help='where')\n"
    )
    install(site, "toy-shown", more + source)
    printed = CliRunner().invoke(main, ["plugins", "show", "shown"]).stdout.splitlines()
    assert printed == [
        "reward shown  (toy-shown 1.2)",
        "  One.",
        "  from plugin toy-shown (toy_shown)",
        "    path = required  (text)  where",
        "    share = 0.5  (a number, > 0, <= 1)  the share",
        '    how = "a"  (text, one of a, b)  how',
    ]
    (shown,) = json.loads(CliRunner().invoke(main, ["plugins", "show", "shown", "--json"]).stdout)
    assert (shown["plugin"], shown["origin"]) == ("toy-shown", "toy_shown")
    assert shown["settings"]["share"]["range"] == "> 0, <= 1"
    plugin = CliRunner().invoke(main, ["plugins", "show", "toy-shown"]).stdout
    assert "reward     shown" in plugin

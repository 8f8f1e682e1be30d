"""Plugins that would end or hold up every command: tried in a process of their own, named, and left out."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributions import install, reward_source

from agentrig.errors import LookupFailed, PluginError
from agentrig.plugins import caches, trial
from agentrig.plugins.loading import load
from agentrig.plugins.registry import Registry
from agentrig.plugins.unnamed import acts_unnamed


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for distributions, on the path for the length of a test; with a cache folder of its own."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("AGENTRIG_CACHE", str(tmp_path / "cache"))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith(("toy_", "agentrig_file_toy")):
            del sys.modules[name]


def error(registry: Registry, name: str) -> str:
    (plugin,) = [p for p in registry.plugins if p.name == name]
    return plugin.error or plugin.status


LETHAL = {
    "toy-exit": ("import os\nos._exit(3)\n", "its import calls os._exit(3) (toy_exit.py:2 in <module>)"),
    "toy-segv": (
        "import ctypes\ndef crash():\n    ctypes.string_at(0)\ncrash()\n",
        "its import crashes the interpreter (SIGSEGV) (toy_segv.py:3 in crash)",
    ),
    "toy-sleep": (
        "import time\ntime.sleep(600)\n",
        "its import did not end within 1.5 s (toy_sleep.py:2 in <module>)",
    ),
    "toy-hook": (
        reward_source("hook").replace("    yield", "    import os; os._exit(0)\n    yield"),
        "its register_rewards calls os._exit(0) (toy_hook.py:6 in register_rewards), which would end every command",
    ),
}
"""Plugins that end the interpreter or never return, and the start of each message."""


def test_plugins_that_end_or_hold_up_the_interpreter_are_named_and_left_out(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Verdicts are kept; a plugin that changed is tried again, and so are refused ones if that is asked for."""
    for name, (source, _) in LETHAL.items():
        install(site, name, source)
    install(site, "toy-good", reward_source("good"))
    install(site, "toy-loud", "import sys\nprint('at import')\nsys.exit(4)\n")
    monkeypatch.setattr(trial, "SLOW_S", 0.4)
    monkeypatch.setattr(trial, "LONGEST_S", 1.5)
    with caplog.at_level(logging.WARNING):
        registry = load()
    for name, (_, said) in LETHAL.items():
        assert error(registry, name).startswith(said)
        cure = f"Mend it, uninstall it (pip uninstall {name}) or block it (AGENTRIG_BLOCK={name})"
        assert cure in error(registry, name)
        assert name.replace("-", "_") not in sys.modules
    assert registry.find("reward", "good")
    assert error(registry, "toy-loud") == "SystemExit: 4 (toy_loud.py:3 in <module>)"
    assert error(registry, "core") == "ok"
    assert "plugin toy-sleep: its import has not ended after 0.4 s (toy_sleep.py:2 in <module>)" in caplog.text
    with pytest.raises(LookupFailed, match=r"plugin toy-segv \(toy-segv 1.2\) failed to load: its import crashes"):
        registry.find("reward", "other")

    tried: list[str] = []
    real = trial._child
    monkeypatch.setattr(
        trial, "_child", lambda todo, **more: [tried.extend(name for name, _ in todo), real(todo, **more)][1]
    )
    assert error(load(), "toy-exit").startswith(LETHAL["toy-exit"][1])
    assert tried in ([], ["toy-loud"])  # it is not in sys.modules, and was not refused
    (site / "toy_exit.py").write_text(reward_source("mended"))
    install(site, "toy-more", reward_source("more"))
    assert load().find("reward", "mended")
    assert set(tried) <= {"toy-exit", "toy-more", "toy-loud"}
    tried.clear()
    load(block=["toy-sleep"], retry=True)
    assert {"toy-segv", "toy-hook"} <= set(tried)
    assert "toy-sleep" not in tried


def test_a_crash_that_does_not_come_again_is_not_held_against_the_plugin(site: Path, tmp_path: Path) -> None:
    once = f"import os, pathlib\nmark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
    once += "if not mark.exists():\n    mark.touch()\n    os.abort()\n"
    install(site, "toy-once", once + reward_source("once"))
    install(site, "toy-good", reward_source("good"))
    registry = load()
    assert (tmp_path / "mark").exists()
    assert error(registry, "toy-once") == "ok"
    assert registry.find("reward", "once")
    assert registry.find("reward", "good")


def test_a_file_that_ends_the_interpreter_ends_its_command_with_words(site: Path, tmp_path: Path) -> None:
    """Whole commands: the plugin in its file, and one in a distribution that other commands do without."""
    install(site, "toy-exit", LETHAL["toy-exit"][0])
    install(site, "toy-good", reward_source("good"))
    (tmp_path / "toy_mine.py").write_text("import os\n\nos.abort()\n")
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "agentrig", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)

    mine = run("plugins", "--plugin", "toy_mine.py")
    assert mine.returncode == 1
    assert "agentrig: plugin toy_mine (file -, toy_mine.py) failed to load: its import crashes the inter" in mine.stderr
    assert "(SIGABRT) (toy_mine.py:3 in <module>)" in mine.stderr
    shown = run("plugins", "show", "good", "--json")
    assert (shown.returncode, json.loads(shown.stdout)[0]["name"]) == (0, "good")
    assert shown.stderr == ""  # the broken plugin is not named where it does not matter
    assert "its import calls os._exit(3)" in run("plugins").stdout


def test_a_plugin_that_prints_leaves_a_commands_output_alone(site: Path) -> None:
    from click.testing import CliRunner

    from agentrig.cli.entry import main

    install(site, "toy-loud", "print('at import')\n" + reward_source("loud", more="print('again')\n"))
    done = CliRunner().invoke(main, ["plugins", "--json"])
    assert "toy-loud" in {p["name"] for p in json.loads(done.stdout)}


def test_a_cache_that_cannot_be_used_is_no_error(site: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    install(site, "toy-exit", LETHAL["toy-exit"][0])
    assert error(load(), "toy-exit").startswith("its import calls os._exit(3)")
    (tmp_path / "cache").unlink()
    caches.write(caches.folder() / f"tried-{trial._environment()}.json", '["damaged"')
    assert error(load(), "toy-exit").startswith("its import calls os._exit(3)")


def test_runners_get_no_plugin_that_would_end_them(site: Path, toy_file: str) -> None:
    from agentrig.plan import resolve
    from agentrig.run.setup import agent_plan

    install(site, "toy-exit", LETHAL["toy-exit"][0])
    assert agent_plan(resolve("toy", files=[toy_file])).block == ("toy-exit",)


@pytest.mark.parametrize(
    ("point", "source", "said"),
    [
        (
            "toy_module:plugin",
            "",
            "AttributeError: module 'toy_module' has no attribute 'plugin'. The entry point says "
            '"toy_module:plugin", and the package lacks it',
        ),
        (
            "toy_modul",
            "",
            "ModuleNotFoundError: No module named 'toy_modul'. The entry point says \"toy_modul\", and the package",
        ),
        ("toy_module", "import toy_lost\n", "ModuleNotFoundError: No module named 'toy_lost' (toy_module.py:1 in <mod"),
        ("toy_module", "def f():\n    {}['x']\nf()\n", "KeyError: 'x' (toy_module.py:2 in f)"),
    ],
)
def test_an_entry_point_and_a_module_that_disagree(site: Path, point: str, source: str, said: str) -> None:
    install(site, "toy-module", source)
    (site / "toy_module-1.2.dist-info" / "entry_points.txt").write_text(f"[agentrig]\ntoy-module = {point}\n")
    found = error(load(), "toy-module")
    assert found.startswith(said)
    assert ("The entry point says" in found) == ("The entry point says" in said)


def test_two_entry_points_of_one_module(site: Path) -> None:
    install(site, "toy-twice", reward_source("twice"))
    points = "[agentrig]\ntoy-again = toy_twice\ntoy-twice = toy_twice\n"
    (site / "toy_twice-1.2.dist-info" / "entry_points.txt").write_text(points)
    registry = load()
    assert registry.find("reward", "twice").plugin == "toy-again"
    assert error(registry, "toy-twice") == (
        'it is the same object as plugin "toy-again" (toy_twice); leave one entry point out'
    )


def test_a_package_without_an_entry_point_is_named_when_its_component_is_missed(site: Path) -> None:
    install(site, "toy-plain", reward_source("plain"), plugin=False, requires=["agentrig>=0.2"])
    with pytest.raises(LookupFailed) as caught:
        load().find("reward", "plain")
    assert (
        'package toy-plain 1.2 requires agentrig, and is no plugin: it has no entry point in the group "agentrig". '
        "Add [project.entry-points.agentrig] to its pyproject.toml, and install it again"
    ) in str(caught.value)


def test_a_hook_without_an_end_and_a_summary_that_is_no_text(site: Path) -> None:
    forever = (
        "    i = 0\n    while True:\n        i += 1\n        yield RewardSpec(name=f'r{i}', summary='', build=print)\n"
    )
    head = "from agentrig import RewardSpec, hookimpl\n@hookimpl\ndef register_rewards():\n"
    install(site, "toy-endless", head + forever)
    install(site, "toy-rubbish", head + "    yield RewardSpec(name='x', summary=b'\\0', build=print)\n")
    registry = load()
    said = "register_rewards gave more than 1000 components: does it ever end? (toy_endless.py:2)"
    assert error(registry, "toy-endless") == said
    assert "summary must be text, not b'\\x00'" in error(registry, "toy-rubbish")


@pytest.mark.parametrize(
    ("source", "matters"),
    [
        ("def register_rewards(): pass\n1 / 0\n", False),
        ("def register_hardware(): pass\n1 / 0\n", True),
        ("def register_servers(): pass\n1 / 0\n", False),
        ("def on_step_end(event): pass\n1 / 0\n", True),
        ("from toy_elsewhere import *\n", True),
    ],
)
def test_a_broken_plugin_is_named_only_where_it_matters(site: Path, source: str, matters: bool) -> None:
    """A run with `[hardware] use = "auto"`, and a server that is named."""
    install(site, "toy-broken", source)
    (plugin,) = [p for p in load().plugins if p.name == "toy-broken"]
    assert plugin.status == "failed"
    assert acts_unnamed(plugin, ["hardware"]) is matters


def test_strict_refuses_what_a_trial_refuses(site: Path) -> None:
    install(site, "toy-exit", LETHAL["toy-exit"][0])
    with pytest.raises(
        PluginError, match=r"plugin toy-exit \(toy-exit 1.2, toy_exit\) failed to load: its import calls"
    ):
        load(strict=True)

"""The agentrig that a plugin is made for, and the plugins that a run file requires."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from distributions import install, reward_source

from agentrig.cli.entry import main
from agentrig.errors import ConfigError, PluginError
from agentrig.plan import resolve
from agentrig.plugins.components import PluginInfo
from agentrig.plugins.loading import load


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for distributions, on the path for the length of a test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("toy_"):
            del sys.modules[name]


def info(name: str) -> PluginInfo:
    return next(p for p in load().plugins if p.name == name)


@pytest.mark.parametrize(
    ("requires", "declared", "suits"),
    [
        (["agentrig>=0.2.0.dev0,<0.3"], "<0.3,>=0.2.0.dev0", True),
        (["agentrig>=0.2"], ">=0.2", True),  # a version under development counts as its release
        (["agentrig (>=0.1,<0.2)"], "<0.2,>=0.1", False),
        (["agentrig>=0.9 ; python_version < '3'"], "", True),
        (["agentrig>=0.9 ; extra == 'new'"], "", True),
        (["agentrig-grpo>=9", "Agentrig~=0.1.0"], "~=0.1.0", False),
        (["agentrig"], "", True),
        ([], "", True),
    ],
)
def test_the_declared_range_is_read(site: Path, requires: list[str], declared: str, suits: bool) -> None:
    install(site, "toy-range", reward_source("range"), requires=requires)
    plugin = info("toy-range")
    assert (plugin.status, plugin.declared, plugin.unsuited == "") == ("ok", declared, suits)


def test_a_plugin_for_another_agentrig_is_loaded_with_a_warning_where_it_is_used(
    site: Path, toy_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, "toy-late", reward_source("late"), requires=["agentrig>=0.9,<1"])
    said = "plugin toy-late (toy-late 1.2) is made for agentrig<1,>=0.9, and this is agentrig 0.2.0.dev0: install"
    with caplog.at_level(logging.WARNING):
        resolve("toy", files=[toy_file])
        assert said not in caplog.text
        plan = resolve("toy", files=[toy_file], uses={"reward": "late"})
    assert caplog.text.count(said) == 1
    assert plan.components["reward"].distribution == "toy-late"
    with pytest.raises(PluginError, match=re.escape(said) + ".* or leave --strict-plugins out"):
        load(strict=True)
    listed = CliRunner().invoke(main, ["plugins"])
    assert f"    warning: {said}" in listed.stdout


def test_a_module_of_another_version_than_its_metadata_is_named(
    site: Path, toy_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is loaded, with a warning where it is used; other plugins are not touched."""
    for name, said in (("toy-stale", "1.3"), ("toy-same", "1.2.0"), ("toy-none", "")):
        install(site, name, f"__version__ = {said!r}\n" * bool(said) + reward_source(name.partition("-")[2]))
    says = (
        "plugin toy-stale (toy-stale 1.2): its metadata says version 1.2, and its module toy_stale says 1.3 "
        f"({site / 'toy_stale.py'}). Another copy is imported, or the package has changed since it was installed: "
        "install it again (pip install --force-reinstall toy-stale)"
    )
    listed = {p["name"]: p for p in json.loads(CliRunner().invoke(main, ["plugins", "--json"]).stdout)}
    assert listed["toy-stale"]["status"] == "ok"
    assert listed["toy-stale"]["warning"].startswith(says)
    assert [listed[name]["warning"] for name in ("toy-same", "toy-none", "core")] == [None] * 3
    with caplog.at_level(logging.WARNING):
        resolve("toy", files=[toy_file], uses={"reward": "same"})
        assert "toy-stale" not in caplog.text
        resolve("toy", files=[toy_file], uses={"reward": "stale"})
    assert caplog.text.count(says) == 1
    with pytest.raises(PluginError, match=r"its module toy_stale says 1\.3 .* or leave --strict-plugins out"):
        load(strict=True)


def test_a_range_that_cannot_be_read_is_the_plugins_error(site: Path) -> None:
    install(site, "toy-odd", reward_source("odd"), requires=["agentrig>=nine"])
    assert 'its metadata requires "agentrig>=nine", which is no version range' in str(info("toy-odd").error)


def test_a_plugin_for_another_agentrig_that_fails_says_both(site: Path) -> None:
    install(site, "toy-gone", "from agentrig import NoSuchThing\n", requires=["agentrig>=0.9"])
    assert str(info("toy-gone").error).endswith("(it is made for agentrig>=0.9, and this is 0.2.0.dev0)")


def test_a_run_file_requires_plugins(site: Path, toy_file: str, tmp_path: Path) -> None:
    """All that is wrong is said at once, before anything is looked up; what is there goes into config.toml."""
    install(site, "toy-there", reward_source("there"))
    install(site, "toy-plain", "", plugin=False)
    install(site, "toy-broken", "1 / 0\n")
    install(site, "toy-blocked", "1 / 0\n")
    file = tmp_path / "run.toml"
    words = '["toy-there>=2", "toy-plain", "toy-broken", "toy-blocked", "toy-thero", "no name", "toy-plugin>=1"]'
    head = 'recipe = "no-such-recipe"\n[run]\nblock = ["toy-blocked"]\n'
    file.write_text(f"{head}[plugins]\nrequire = {words}\n")
    with pytest.raises(ConfigError) as caught:
        resolve(str(file), files=[toy_file])
    first, *lines = str(caught.value).splitlines()
    assert first == "this run requires plugins that it does not have ([plugins] require):"
    assert [line.strip() for line in lines] == [
        "toy-there>=2: toy-there 1.2 is installed: pip install 'toy-there>=2'",
        'toy-plain: toy-plain 1.2 is installed, but is no plugin: it has no entry point in the group "agentrig"',
        "toy-broken: toy-broken 1.2 failed to load: ZeroDivisionError: division by zero (toy_broken.py:1 in <module>)",
        "toy-blocked: toy-blocked is blocked (AGENTRIG_BLOCK, or block under [run])",
        "toy-thero: not installed. Did you mean \"toy-there\"? pip install 'toy-thero'",
        'no name: not a name with a version range; write for example "agentrig-exact>=1.2"',
        f"toy-plugin>=1: {toy_file} is a file, which has no version: leave the range out",
    ]
    given = ["algorithm.endpoint=http://127.0.0.1:9/v1", 'plugins.require=["Toy_There>=1,<2", "toy_plugin"]']
    plan = resolve("toy", overrides=given, files=[toy_file])
    assert plan.as_dict()["plugins"] == {"require": ["Toy_There>=1,<2", "toy_plugin"]}
    with pytest.raises(ConfigError, match=r'\[plugins\] a run has no key "requires"\. Did you mean "require"\?'):
        resolve("toy", overrides=["plugins.requires=[]"], files=[toy_file])


def test_show_names_keys_ranges_origin_and_the_agentrig_that_it_is_made_for(site: Path) -> None:
    source = reward_source("shown").replace("summary='One.'", "summary='One.', config=Config")
    more = (
        "import attrs\nfrom agentrig import setting\n\n@attrs.frozen(kw_only=True)\nclass Config:\n"
        "    share: float = setting(0.5, help='the share', gt=0, le=1)\n"
        "    how: str = setting('a', help='how', choices=('a', 'b'))\n"
        "    path: str = setting(help='where')\n"
    )
    install(site, "toy-shown", more + source, requires=["agentrig<0.3,>=0.2"])
    printed = CliRunner().invoke(main, ["plugins", "show", "shown"]).stdout.splitlines()
    assert printed == [
        "reward shown  (toy-shown 1.2)",
        "  One.",
        "  from plugin toy-shown (toy_shown); made for agentrig<0.3,>=0.2",
        "    share = 0.5  (float, > 0, <= 1)  the share",
        '    how = "a"  (str, one of a, b)  how',
        "    path = required  (str)  where",
    ]
    (shown,) = json.loads(CliRunner().invoke(main, ["plugins", "show", "shown", "--json"]).stdout)
    assert (shown["plugin"], shown["origin"], shown["agentrig"]) == ("toy-shown", "toy_shown", "<0.3,>=0.2")
    assert shown["settings"]["share"]["range"] == "> 0, <= 1"
    plugin = CliRunner().invoke(main, ["plugins", "show", "toy-shown"]).stdout
    assert "    made for agentrig<0.3,>=0.2" in plugin.splitlines()
    assert "reward     shown" in plugin

"""Observers with a name and settings: selected in `[observer]`, checked, built early, called; see docs/observers.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentrig.cli.entry import main
from agentrig.errors import ConfigError, LookupFailed, PluginError
from agentrig.plan import Plan, resolve
from agentrig.run.training import train

MakePlan = Callable[..., Plan]

MINE = """
from agentrig import ObserverSpec, hookimpl

class Mine:
{body}

@hookimpl
def register_observers():
    yield ObserverSpec(name="mine", summary="Mine.", build=lambda config: {made})
    yield ObserverSpec(name="other", summary="Nothing.", build=lambda config: None)
"""
STEP = "    def on_step_end(self, event): pass\n"


@pytest.fixture
def file(tmp_path: Path, toy_file: str) -> Callable[..., Plan]:
    """Resolve the text of a run file that builds on the recipe `toy`."""

    def plan(text: str, *overrides: str, observers: tuple[str, ...] = (), mine: str = "") -> Plan:
        path = tmp_path / "run.toml"
        path.write_text(f'recipe = "toy"\n{text}')
        files = [toy_file]
        if mine:
            (tmp_path / "my_observers.py").write_text(mine)
            files.append(str(tmp_path / "my_observers.py"))
        return resolve(str(path), overrides=overrides, observers=observers, files=files)

    return plan


def settings(plan: Plan) -> list[tuple[str, str, int]]:
    return [(c.spec.name, config.file, config.every) for c, config in plan.observers]


def test_a_run_calls_the_observers_that_it_names(toy_plan: MakePlan, tmp_path: Path) -> None:
    """Also: `sys.exit` in one is counted and ends nothing; config.toml and the manifest name it."""
    plan = toy_plan(
        "algorithm.steps=2", "algorithm.report=false", "observer.use=toy-notes", "observer.toy-notes.every=2"
    )
    summary = train(plan)
    run = tmp_path / "runs" / "toy"
    config, *told = (run / "notes.txt").read_text().splitlines()
    assert told == ["step 2", "end 2"]
    assert json.loads(config)["toy-notes"] == {"file": "notes.txt", "every": 2}
    assert summary["observer_errors"] == {"toy-notes": 1}
    named = json.loads((run / "manifest.json").read_text())["observers"]
    assert named == [{"name": "toy-notes", "distribution": "file", "version": "-"}]
    again = resolve(str(run / "config.toml"))
    assert again.as_dict() == plan.as_dict()
    assert settings(again) == [("toy-notes", "notes.txt", 2)]


@pytest.mark.slow
def test_an_observer_that_raises_keyboard_interrupt_does_not_end_the_run(
    toy_plan: MakePlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE.format(body="    def on_step_end(self, event): raise KeyboardInterrupt\n", made="Mine()"))
    summary = train(toy_plan(f'run.plugins=["{mine}"]', "observer.use=mine"))
    assert summary["complete"]
    assert summary["observer_errors"] == {"mine": summary["steps"]}
    assert "observer mine failed in on_step_end" in caplog.text


def test_a_run_without_observers_has_no_such_section(toy_plan: MakePlan) -> None:
    assert "observer" not in toy_plan().as_dict()


def test_file_options_and_overrides_are_merged(file: Callable[..., Plan]) -> None:
    text = '[observer]\nuse = ["toy-notes"]\n[observer.toy-notes]\nevery = 3\n'
    mine = MINE.format(body=STEP, made="Mine()")
    assert settings(file(text)) == [("toy-notes", "notes.txt", 3)]
    assert settings(file(text, "observer.toy-notes.file=a.txt")) == [("toy-notes", "a.txt", 3)]
    assert settings(file(text, observers=("toy-notes",))) == [("toy-notes", "notes.txt", 3)]
    assert file(text, "observer.use=[]").observers == ()  # its settings go with it
    assert settings(file(text, "observer.use=toy-notes")) == [("toy-notes", "notes.txt", 3)]
    both = file(text, observers=("mine",), mine=mine)
    assert [c.spec.name for c, _ in both.observers] == ["toy-notes", "mine"]
    assert [c.spec.name for c, _ in file("", observers=("mine",), mine=mine).observers] == ["mine"]
    qualified = file('[observer]\nuse = ["file:toy-notes"]\n[observer."file:toy-notes"]\nevery = 5\n')
    assert settings(qualified) == [("toy-notes", "notes.txt", 5)]


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("", ["observer.use=toy-note"], 'there is no observer called "toy-note". Did you mean "toy-notes"?'),
        ("", ["observer.use=3"], 'must be a list of names: write use = ["NAME"]'),
        ("", ["observer.use=[3]"], 'must be a list of names: write use = ["NAME"]'),
        ("", ['observer.use=["toy-notes", "file:toy-notes"]'], "names toy-notes twice"),
        (
            "",
            ["observer.use=toy-notes", "observer.toy-notes.evry=2"],
            '[observer.toy-notes] toy-notes (file TOY) has no key "evry". Did you mean "every"?',
        ),
        ("", ["observer.use=toy-notes", "observer.toy-notes.every=0"], "'every' must be >= 1"),
        (
            "",
            ["observer.use=toy-notes", 'observer.toy-notes.every="2"'],
            "Write every = 2; on the command line: observer.toy-notes.every=2",
        ),
        ("", ["observer.use=toy-notes", "observer.every=2"], "is a key of [observer.toy-notes]: write observer.toy-n"),
        ("", ["observer.use=toy-notes", "observer.toy-notes=2"], "write observer.toy-notes.KEY=VALUE"),
        ("", ["observer.toy-notes.every=2"], 'Use it too: --observer toy-notes, or use = ["toy-notes"]'),
        ("", ["observer.usee=toy-notes"], '[observer] has no key "usee". Did you mean "use"?'),
        ("[observers]\nuse = []\n", [], 'there is no section "observers". Did you mean "observer"?'),
    ],
)
def test_a_wrong_section_says_what_to_write(
    file: Callable[..., Plan], toy_file: str, text: str, overrides: list[str], said: str
) -> None:
    with pytest.raises((ConfigError, LookupFailed), match=re.escape(said.replace("TOY", toy_file))):
        file(text, *overrides)


@pytest.mark.parametrize(
    ("body", "made", "said"),
    [
        (STEP, "1 / 0", "the observer mine cannot be built: ZeroDivisionError: division by zero (my_observers.py:10"),
        (STEP, "None", "returned None; it must return an object with a method such as `on_step_end(event)`"),
        (STEP, "Mine", "returned <class"),
        ("    pass\n", "Mine()", "it must return an object with a method such as"),
        (
            "    def on_steps_end(self, event): pass\n",
            "Mine()",
            'unknown hook "on_steps_end" (my_observers.py:5). Did you mean "on_step_end"?',
        ),
        ("    async def on_step_end(self, event): pass\n", "Mine()", "`on_step_end` (my_observers.py:5) is async"),
        ("    def on_step_end(self): pass\n", "Mine()", "`on_step_end` (my_observers.py:5) must take one argument"),
        (STEP, "sys.exit(3)".replace("sys", "__import__('sys')"), "cannot be built: SystemExit: 3"),
    ],
)
def test_an_observer_that_cannot_be_used_ends_a_run_before_its_tasks_are_loaded(
    file: Callable[..., Plan], tmp_path: Path, body: str, made: str, said: str
) -> None:
    mine = MINE.format(body=body, made=made)
    plan = file(f'[run]\ndirectory = "{tmp_path}/runs"\n[tasks]\nuse = "toy-tasks"\n', observers=("mine",), mine=mine)
    with pytest.raises(PluginError, match=re.escape(said)) as caught:
        train(plan)
    assert f"it comes from plugin my_observers (file {tmp_path}/my_observers.py)" in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_the_command_line_lists_and_shows_observers_and_plain_hooks(toy_file: str) -> None:
    listed = json.loads(CliRunner().invoke(main, ["plugins", "--plugin", toy_file, "--json"]).stdout)
    (toy,) = [p for p in listed if p["name"] == "toy_plugin"]
    assert {"kind": "observer", "name": "toy-notes", "summary": "Notes."} in toy["components"]
    (report,) = [p for p in listed if p["name"] == "report"]
    assert report["observes"] == ["on_run_end", "on_run_error"]
    printed = CliRunner().invoke(main, ["plugins", "--plugin", toy_file, "show", "toy-notes"]).stdout
    assert printed.startswith(f"observer toy-notes  ({toy_file})")
    assert "every = 1  (an integer, >= 1)  note every this many steps" in printed

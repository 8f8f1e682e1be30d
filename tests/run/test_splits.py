"""Splits: every row is checked before the run starts, and the message says what is wrong."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from model_server import ModelServer

from agentrig.cli.entry import main
from agentrig.errors import AgentrigError, ConfigError, PluginError
from agentrig.plan import Plan, RunSettings, resolve
from agentrig.plugins import loading
from agentrig.processes.ends import no_silent_end
from agentrig.run import splits
from agentrig.run.splits import few_warnings, json_problem, load_splits, split_warnings
from agentrig.run.training import train
from agentrig.tasks import Task

SOURCE = """
from agentrig import AgentrigError, Task, TasksSpec, hookimpl

def row(i, **more):
    given = {{"id": f"t-{{i}}", "input": {{"number": i, "do": "", "marker": ""}},
             "private": {{"parity": "odd" if i % 2 else "even", "gold": "x"}}}}
    return Task(**{{**given, **more}})

class Mute(Exception):
    def __str__(self): raise RuntimeError("no words")

class Rows(list):
    def __iter__(self): raise RuntimeError("no rows")

def sound(split):
    return [row(i + 100 * (split == "dev")) for i in range(6)]

class Own:
    splits = ("train", "dev")
    roles = {{"train": "train", "validation": "dev", "report": "dev"}}

    def load(self, split):
        if split != {split!r}:
            return sound(split)
{body}

{more}

@hookimpl
def register_tasks():
    yield TasksSpec(name="own", summary="", build=lambda config: Own())
"""


def loaded(plan: Plan) -> dict[str, tuple[str, Sequence[Task]]]:
    return load_splits(plan.tasks(), plan.run, who=plan.whose_tasks)


@pytest.fixture
def own(tmp_path: Path, toy_file: str, model: ModelServer) -> Callable[..., Plan]:
    """Resolve the recipe `toy` with a task set of which one split's `load` is given."""

    def plan(body: str, *overrides: str, split: str = "train", more: str = "") -> Plan:
        text = "\n".join(f"        {line}" for line in body.splitlines())
        file = tmp_path / "my_tasks.py"
        file.write_text(SOURCE.format(split=split, body=text, more=more))
        given = [f"algorithm.endpoint={model.url}", "algorithm.steps=1", "algorithm.tasks=4"]
        given += [f"run.directory={tmp_path}/runs", "run.name=one", "run.validation_tasks=0", "run.report_tasks=0"]
        given.append('run.block=["report"]')
        return resolve("toy", overrides=[*given, *overrides], uses={"tasks": "own"}, files=[toy_file, str(file)])

    return plan


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [row(0), row(1), row(0)]", 'row 2 (the first is 0): id is "t-0", which row 0 has too'),
        ("return [row(0), Task]", "row 1 (the first is 0): it is a type; write agentrig.Task("),
        (
            "class Bare(Task):\n    def __init__(self): pass\nreturn [row(0), Bare()]",
            "its id cannot be read (AttributeError: 'Bare' object has no attribute 'id'). Does Bare call super()",
        ),
        (
            "class Odd(Task):\n    private = property(lambda self: {}['gold'])\nodd = object.__new__(Odd)\n"
            "for name in ('id', 'input'): object.__setattr__(odd, name, {'id': 'x'}.get(name, {}))\nreturn [odd]",
            "row 0 (the first is 0): its private cannot be read (KeyError: 'gold' (my_tasks.py:",
        ),
        (
            "class Odd(dict):\n    def items(self): raise OSError('gone')\nreturn [row(0, input=Odd(a=1))]",
            "row 0 (the first is 0): its input cannot be read (OSError: gone (my_tasks.py:",
        ),
        ("return [row(0, id=7)]", 'row 0 (the first is 0): id is 7 (int); it must be text, for example "7"'),
        ("return [row(0, id='')]", "id is empty; give every task an id of its own"),
        ("return [row(0), {'id': 'x'}]", "row 1 (the first is 0): it is a dict; write agentrig.Task(id=..., input={"),
        ("return (row(i) for i in range(3))", "`load` returned a generator; write `return list(...)`"),
        ("pass", "`load` returned None; is a `return` missing? It must return a list of agentrig.Task objects"),
        ("return {'a': row(0)}", "`load` returned a dict; write `return list(rows.values())`"),
        ("return 7", "`load` returned 7 (int). It must return a list"),
        (
            "async def late(): return [row(0)]\nreturn late()",
            "`load` returned nothing yet, because it is an `async def`; write `def load(self, split):`",
        ),
        ("return [row(0, input=None)]", "input is a NoneType; it must be a dict"),
        ("return [row(0, input={'tags': {'b', }})]", "input.tags is {'b'} (set), no JSON value; write sorted(...)"),
        (
            "return [row(0, private={'a': [1, {'b': b'x'}]})]",
            "private.a[1].b is b'x' (bytes), no JSON value; write .de",
        ),
        ("return [row(0, input={1: 2})]", "input has the key 1 (int); keys must be text"),
        ("return [row(0, input={'x': float('nan')})]", "input.x is nan, which JSON can't hold"),
        ("return [row(0, input={'x': 'a\\ud800'})]", "input.x holds a lone surrogate"),
        ("return [row(0, id='t\\ud800')]", "row 0 (the first is 0): id holds a lone surrogate"),
        ("return [row(0, slices={'s': '\\ud800'})]", "slices.s holds a lone surrogate"),
        (
            "return [row(0, private={'n': [10**4300]})]",
            "private.n[0] is a whole number of more than 4300 digits",
        ),
        ("x = {}\nx['x'] = x\nreturn [row(0, input=x)]", "input contains itself, or is nested deeper than 254 lists"),
        (
            "x = ['x']\nfor _ in range(40):\n    x = [x, x]\nreturn [row(0), row(1, input={'x': x})]",
            "row 1 (the first is 0): input has more than 1000000 values, as JSON writes them; put them into a file",
        ),
        ("return [row(0, row=[{'\\ud800': float('nan')}])]", "a key of row[0] holds a lone surrogate"),
        ("return [][3]", "`load` raised IndexError: list index out of range (my_tasks.py:25 in load)"),
        ("raise Mute", "`load` raised Mute: (its message raised RuntimeError) (my_tasks.py:25 in load)"),
        ("return Rows([row(0)])", "`load` raised RuntimeError: no rows (my_tasks.py:13 in __iter__)"),
        ("import os\nos._exit(0)", "`load` raised RuntimeError: it called os._exit(0), which would end the command"),
        ("raise AgentrigError('get the rows first')", "get the rows first"),
        (
            "return []",
            'there is nothing to learn from: split "train" has no tasks.\n  Name another: run.train=SPLIT, one of dev',
        ),
    ],
)
def test_the_error_of_a_wrong_row_says_what_to_write(own: Callable[..., Plan], body: str, said: str) -> None:
    with pytest.raises(AgentrigError) as caught, no_silent_end():
        loaded(own(body))
    assert said in str(caught.value)
    if "get the rows" not in body:  # the task set's own message is not changed
        assert "task set own" in str(caught.value)
        assert "split train" in str(caught.value) or 'split "train"' in str(caught.value)


def test_rows_of_a_class_that_gives_others_each_time_are_taken_over_once(own: Callable[..., Plan]) -> None:
    more = """
class Liar(list):
    def __len__(self): return 7
    def __iter__(self): return iter([Counts(id="t-0", input={}, private={})])

class Counts(Task):
    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name == "id":
            object.__setattr__(self, name, f"{found}+")
        return found
"""
    _, rows = loaded(own("return Liar([row(1), row(2)])", more=more))["train"]
    assert type(rows) is list
    assert [(type(task), task.id, task.id) for task in rows] == [(Task, "t-0", "t-0")]


def test_values_of_subclasses_become_what_json_writes_for_them(own: Callable[..., Plan]) -> None:
    body = """
import enum, collections, numpy
class Color(str, enum.Enum): RED = "red"
class Number(enum.IntEnum): ONE = 1
pair = collections.namedtuple("pair", "a b")
given = {"input": {Color.RED: [Color.RED, numpy.float64(0.5)]}, "private": {"a": Number.ONE}}
return [row(0, row=pair(1, Color.RED), **given)]"""
    _, (task,) = loaded(own(body))["train"]
    assert (task.input, task.private, task.row) == ({"red": ["red", 0.5]}, {"a": 1}, (1, "red"))
    values = [*task.input, *task.input["red"], *task.private.values(), task.row, *task.row]
    assert [type(value) for value in values] == [str, str, float, int, tuple, int, str]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "del Own.roles",
            'task set own: `roles` is None; write which split serves which role: roles = {"train": "train"',
        ),
        (
            "Own.splits = ('train', 'test')\ndel Own.roles",
            'which split serves which role: roles = {"train": "train", "report": "test"}',
        ),
        (
            "Own.splits = ('all',)\ndel Own.roles",
            'which split serves which role: roles = {"train": "all"}; held-out tasks need a split of their own',
        ),
        ("del Own.splits", "task set own: `splits` is None; write the names of the splits"),
        ("Own.splits = 'train'", "`splits` is 'train'; write the names"),
        ("Own.roles = {'train': 'trian'}", "`roles` has 'train': 'trian'; the roles are train, validation, report"),
        ("Own.splits = ()", "`splits` is (); write the names of the splits"),
        ("Own.held_out = ('zzz',)", "`held_out` is ('zzz',), not a list of these splits: train, dev"),
        ("Own.held_out = None", "`held_out` is None, not a list of these splits: train, dev; if no split is held out"),
        (
            "made = Own\nOwn = lambda: made",
            "`build` returned the class Own, not one of its objects; write `return",
        ),
        (
            "Own.splits = property(lambda self: {}['rows'])",
            "task set own: `splits` raised KeyError: 'rows'",
        ),
        ("Own.roles = {}", "there is nothing to learn from: the task set names no split for it"),
        (
            "Own.load = lambda self, split: []",
            "has no tasks.\n  None of its splits has a task (train, dev): give it data",
        ),
        ("del Own.load", "the task set own cannot be built: `build` (my_tasks.py:"),
        ("Own.__init__ = lambda self: {}['rows']", "the task set own cannot be built: KeyError: 'rows' (my_tasks.py:"),
    ],
)
def test_the_error_of_an_incomplete_task_set_says_what_to_write(own: Callable[..., Plan], more: str, said: str) -> None:
    with pytest.raises((PluginError, ConfigError)) as caught:
        loaded(own("return sound(split)", more=more))
    assert said in str(caught.value)


def test_an_empty_split_cannot_be_measured(own: Callable[..., Plan], tmp_path: Path, toy_file: str) -> None:
    own("return []", split="dev")
    words = ["toy", "--plugin", toy_file, "--plugin", str(tmp_path / "my_tasks.py"), "--tasks", "own"]
    for command in ("eval", "dev"):
        done = CliRunner().invoke(main, [command, *words])
        said = 'split "dev" has no tasks.\n  Name another: --split NAME, one of train'
        assert (done.exit_code, said in done.stderr) == (1, True), done.output


@pytest.mark.parametrize(
    "more", [pytest.param("", marks=pytest.mark.slow), "Own.roles = {'train': 'train'}"], ids=["empty", "unnamed"]
)
def test_a_run_without_validation_and_report_warns_and_trains(
    own: Callable[..., Plan], tmp_path: Path, more: str, caplog: pytest.LogCaptureFixture
) -> None:
    summary = train(own("return []", split="dev", more=more))
    assert (summary["steps"], summary["accuracy"]["before"]) == (1, None)
    warnings = json.loads((tmp_path / "runs" / "one" / "manifest.json").read_text())["warnings"]
    said = 'split "dev" has no tasks' if not more else "no split serves"
    assert [said in w for w in warnings] == [True, True]
    assert "nothing is measured while training; name another with run.validation=SPLIT" in warnings[0]
    assert "no accuracy before and after training can be stated" in warnings[1]
    assert warnings[0] in caplog.text


def test_a_limit_of_tasks_where_there_are_none_is_told() -> None:
    class Rows:
        splits, roles, optional = ("train",), {"train": "train"}, ("validation", "report")

        def why_empty(self, split: str) -> str:
            return f"nobody gave rows of {split or 'any'}"

    splits = {"train": ("train", []), "validation": ("", []), "report": ("", [])}
    assert split_warnings(splits, Rows(), RunSettings()) == []
    assert split_warnings(splits, Rows(), RunSettings(report_tasks=4)) == [
        "run.report_tasks has nothing to choose from: no split serves report: no accuracy before and after training "
        "can be stated; nobody gave rows of any; or name another with run.report=SPLIT"
    ]


def test_a_split_that_serves_two_roles_is_read_once(own: Callable[..., Plan]) -> None:
    more = "Own.read = []\nload = Own.load\nOwn.load = lambda self, split: Own.read.append(split) or load(self, split)"
    plan = own("return sound(split)", more=more)
    splits = loaded(plan)
    assert type(plan.tasks()).read == ["train", "dev"]  # type: ignore[attr-defined]
    assert splits["validation"] == splits["report"]
    (warning,) = split_warnings(splits, plan.build("tasks"))
    assert 'validates and reports on one split, "dev"' in warning


@pytest.mark.parametrize("value", [None, True, 3, -1.5, "text ü", [], {"a": [{"b": (1, None)}]}])
def test_json_values_are_not_changed(value: Any) -> None:
    assert json_problem(value, "input") is None


def test_a_task_set_that_does_not_load_is_named(
    own: Callable[..., Plan], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `load` that waits for a server, or reads a pipe, was silent for as long as it took."""
    monkeypatch.setattr(splits, "TASKS_SLOW_S", 0.05)
    monkeypatch.setattr(loading, "SLOW_S", 0.2)
    caplog.set_level("INFO")
    loaded(own("import time\ntime.sleep(0.5)\nreturn sound(split)"))
    first, second, *_ = [record for record in caplog.records if "still loading" in record.message]
    assert (first.levelname, second.levelname) == ("INFO", "WARNING")
    assert first.message == "still loading the tasks of task set own, split train: 0.05 s; Ctrl-C ends it"
    assert re.match(
        r"still loading the tasks of task set own, split train after 0\.2 s, now at .*my_tasks\.py:", second.message
    )


def test_a_slow_task_set_of_agentrig_itself_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow machine is no fault of the run, and a place in agentrig's own code helps nobody."""
    monkeypatch.setattr(splits, "TASKS_SLOW_S", 0.05)
    monkeypatch.setattr(loading, "SLOW_S", 0.1)
    caplog.set_level("INFO")
    file = tmp_path / "slow.py"
    file.write_text("import time\nclass Slow:\n    splits = ['train']\n    def load(self, split):\n"
                    "        time.sleep(0.4)\n        return []\n")  # fmt: skip
    module: Any = ModuleType("agentrig_slow")
    exec(compile(file.read_text(), file, "exec"), module.__dict__)
    splits.read_split(module.Slow(), "train", who="task set slow")
    said = [(record.levelname, record.message) for record in caplog.records]
    assert said == [
        ("INFO", f"still loading the tasks of task set slow, split train: {seconds} s; Ctrl-C ends it")
        for seconds in ("0.05", "0.1")
    ]


def test_a_task_set_that_replaces_what_the_run_uses_is_named(own: Callable[..., Plan]) -> None:
    before = json.dumps
    said = r"`load` of task set own, split train, replaced json\.dumps, which this command needs itself"
    with pytest.raises(PluginError, match=said):
        loaded(own("import json\njson.dumps = lambda value: ''\nreturn sound(split)"))
    assert json.dumps is before


def test_what_a_task_set_changes_of_python_and_torch_is_put_back(
    own: Callable[..., Plan], caplog: pytest.LogCaptureFixture
) -> None:
    torch = pytest.importorskip("torch")
    words = list(sys.argv)
    more = "import sys, torch\nOwn.__init__ = lambda self: torch.set_default_device('meta')"
    body = """
sys.argv.clear()
torch.set_grad_enabled(False)
torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True)
return sound(split)"""
    loaded(own(body, more=more))
    now = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
    assert (now, torch.zeros(1).device.type, sys.argv) == ((True, torch.float32, False), "cpu", words)
    said = [message for message in caplog.messages if message.endswith("put back")]
    assert [message.partition(", and all")[0] for message in said] == [
        "the task set own called torch.set_default_device(meta)",
        "`load` of task set own called torch.set_grad_enabled(False)",
        "`load` of task set own called torch.set_default_dtype(torch.float64)",
        "`load` of task set own called torch.use_deterministic_algorithms(True)",
        "`load` of task set own emptied sys.argv",
    ]


def test_a_task_set_or_a_file_that_changes_the_directory_moves_no_run(
    own: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    body, more = "import os\nos.chdir('b')\nreturn sound(split)", "import os\nos.chdir('a')"
    plan = own(body, "run.directory=runs", split="dev", more=more)
    train(plan)
    assert (tmp_path / "runs" / "one" / "summary.json").is_file()
    said = "changed the current directory to {}, and all code in its process shares that: put back"
    own(body, more=more)  # in a command it is said once
    found = [r.message for r in caplog.records if "directory" in r.message]
    assert found == [
        f"plugin my_tasks ({tmp_path / 'my_tasks.py'}) {said.format(tmp_path / 'a')}",
        f"`load` of task set own {said.format(tmp_path / 'b')}",
    ]


def test_a_step_that_repeats_tasks_is_warned_of() -> None:
    """As few as one training task is left of a file with two rows, which is split in two."""
    few = ["algorithm.tasks_per_step=4"]
    algorithm = resolve("mini", overrides=few).configs["algorithm"]
    tasks = [Task(id=str(i), input={"n": i}, private={}) for i in range(4)]
    (warning,) = few_warnings(tasks[:1], algorithm)
    assert warning.startswith("1 task to train on: each step has 4 (algorithm.tasks_per_step), so it repeats them")
    assert warning.endswith("Use at least 4 training tasks")
    sft = resolve("mini", overrides=["algorithm.demonstrations=tasks", *few], uses={"algorithm": "sft"})
    shown = sft.configs["algorithm"]  # a step of these has calls, not tasks
    assert few_warnings(tasks, algorithm) == few_warnings([], algorithm) == few_warnings(tasks[:1], shown) == []

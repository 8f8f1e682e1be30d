"""Recipes, run files and overrides: merged in order, and every key checked."""

from __future__ import annotations

import contextlib
import math
import os
import re
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

from agentrig import Secret, setting
from agentrig.errors import AgentrigError, ConfigError, LookupFailed
from agentrig.plan import Plan, parse_override, read_run_file, resolve, to_toml
from agentrig.settings import SYNONYMS, structure, type_words


@pytest.fixture
def file(tmp_path: Path, toy_file: str) -> Callable[[str], str]:
    """Write a run file that builds on the recipe `toy`."""

    def write(text: str, *, recipe: str = 'recipe = "toy"\n') -> str:
        path = tmp_path / "mine.toml"
        path.write_text(f"{recipe}{text}")
        return str(path)

    return write


def test_overrides_beat_the_run_file_which_beats_the_recipe(file: Callable[[str], str], toy_file: str) -> None:
    path = file("[algorithm]\nsteps = 7\ngroup = 5\n[runners]\nn = 3\n")
    plan = resolve(path, overrides=["algorithm.group=9"], files=[toy_file])
    config = plan.configs["algorithm"]
    assert (config.steps, config.group, config.tasks) == (7, 9, 6)
    assert (plan.runners.n, plan.runners.threads) == (3, 4)
    assert config.endpoint == "http://127.0.0.1:9/v1"
    assert plan.recipe == "mine"


def test_plugins_of_a_run_file_are_relative_to_it(tmp_path: Path, toy_file: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "toy_plugin.py").write_text(Path(toy_file).read_text())
    (tmp_path / "run.toml").write_text('recipe = "toy"\n[run]\nplugins = ["sub/toy_plugin.py"]\n')
    plan = resolve(str(tmp_path / "run.toml"))
    assert plan.run.plugins == [str(tmp_path / "sub" / "toy_plugin.py")]


def test_swapping_a_component_drops_the_keys_of_the_former_one(toy_plan: Callable[..., Plan]) -> None:
    plan = toy_plan("adapter.match=check", adapter="agent-match")
    assert plan.configs["adapter"].match == "check"
    kept = toy_plan(algorithm="toy-number")
    assert kept.configs["algorithm"].endpoint.endswith("/v1")
    swapped = toy_plan(reward="own")
    assert swapped.components["reward"].spec.name == "own"


def test_a_key_may_come_before_its_component(toy_plan: Callable[..., Plan]) -> None:
    plan = toy_plan("adapter.match=check", "adapter.use=agent-match")
    assert plan.configs["adapter"].match == "check"
    with pytest.raises(ConfigError, match='has no key "mtach"'):
        toy_plan("adapter.mtach=check", "adapter.use=agent-match")


def test_plugins_of_the_command_line_are_relative_to_where_it_was_given(
    tmp_path: Path, toy_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(Path(toy_file).read_text())
    monkeypatch.chdir(tmp_path)
    plan = resolve("toy", overrides=['run.plugins=["mine.py"]', "algorithm.endpoint=http://127.0.0.1:9/v1"])
    assert plan.run.plugins == [str(tmp_path / "mine.py")]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.setps=3", '[algorithm] toy-number (file TOY) has no key "setps". Did you mean "steps"?'),
        ("algorithm.steps=three", "'three' does not fit toy-number (file TOY): expected an integer (training steps)"),
        ("algorithm.steps=1.5", "expected an integer"),
        ("algorithm.steps=true", "expected an integer"),
        ("algorithm.report=1", "expected true or false"),
        ("algorithm.endpoint=3", "expected text"),
        ("algorithm.steps=-1", "'steps' must be >= 0: -1"),
        ("run.failure_limit=1.5", "'failure_limit' must be <= 1: 1.5"),
        ("algorithm.max_steps=3", 'has no key "max_steps". Did you mean "steps"?'),
        ("run.dir=x", '[run] a run has no key "dir". Did you mean "directory"?'),
        ("adapter.match=None", "adapter.match=None: None is no value. Write adapter.match= for an empty text"),
        ("run.sed=1", '[run] a run has no key "sed". Did you mean "seed"?'),
        ("runners.m=1", "[runners] processes (agentrig "),
        ("runners.steps=1", 'has no key "steps". It is a key of [algorithm]: write algorithm.steps.'),
        ("algorithm.deadline_s=9", 'has no key "deadline_s". It is a key of [runners]: write runners.deadline_s.'),
        ("run.match=x", 'has no key "match". It is a key of [adapter]: write adapter.match.'),
        ("algorithm.threads=2", "It is a key of [runners] and [hardware]: write runners.threads or hardware.threads."),
        (
            "run.recipe=mini",
            'A run file names it above all sections, recipe = "mini", and a command as its first word.',
        ),
        ("agent.recipe=mini", 'has no key "recipe". A run file names it above all sections'),
        ("algorithm.lora_alpha=3", 'has no key "lora_alpha". It is a key of grpo'),
        ("algoritm.steps=3", 'there is no section "algoritm". Did you mean "algorithm"?'),
        ("algorithm.keys.a=text", "keys = {'a': 'text'} does not fit toy-number"),
        ("agent.anything=1", '[agent] toy (file TOY) has no key "anything".'),
        ("reward.use=toy-partiy", 'there is no reward called "toy-partiy". Did you mean "toy-parity"?'),
        ("run.second_reward=nothing", 'there is no reward called "nothing"'),
        ("steps=3", '"steps=3" is not an override; write section.key=value'),
        ("algorithm.steps", "is not an override"),
        (f"run.seed={'1' * 5000}", "run.seed has a whole number of more than 4300 digits"),
        (f"run.seed={'[' * 2000}", "run.seed is nested too deep"),
        ("hardware.thread=2", f'[hardware] cpu (agentrig {version("agentrig")}) has no key "thread". Did you mean'),
        ("runners.n=100000", "'n' must be <= 1024: 100000"),
        ("runners.threads=100000", "'threads' must be <= 1024: 100000"),
        (
            "algorithm.report=True",
            "expected true or false (measure before and after)\n"
            "  Write report = true; on the command line: algorithm.report=true",
        ),
        ("algorithm.report='False'", "Write report = false; on the command line: algorithm.report=false"),
        ('algorithm.change="2e-6"', "Write change = 2e-6; on the command line: algorithm.change=2e-6"),
        ("algorithm.steps='7'", "Write steps = 7; on the command line: algorithm.steps=7"),
        ("algorithm.steps=1e2", "Write steps = 100; on the command line: algorithm.steps=100"),
        ("run.block=core", 'must be a list of strings\n  Write block = ["core"]; on the command'),
        ("run.block=", "must be a list of strings\n  Write block = []; on the command line: 'run.block=[]'"),
    ],
)
def test_a_wrong_key_names_the_right_one(
    toy_plan: Callable[..., Plan], toy_file: str, override: str, said: str
) -> None:
    with pytest.raises((ConfigError, LookupFailed)) as caught:
        toy_plan(override)
    assert said.replace("TOY", toy_file) in str(caught.value)


@pytest.mark.parametrize(
    ("override", "last"),
    [
        ("algorithm.setps=3", "agentrig plugins show toy-number --plugin TOY lists its keys"),
        ("run.sed=1", "agentrig plugins show run lists its keys"),
        ("gateway.modles=1", "agentrig plugins show gateway lists its keys"),
        ("runners.qqq=1", "its keys: n, threads, "),
    ],
)
def test_all_keys_are_listed_only_where_none_is_near(
    toy_plan: Callable[..., Plan], toy_file: str, override: str, last: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        toy_plan(override)
    assert str(caught.value).splitlines()[1].strip().startswith(last.replace("TOY", toy_file))
    assert ("its keys:" in str(caught.value)) == last.startswith("its")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[algorithm]\nsetps = 3", '[algorithm] toy-number (file TOY) has no key "setps"'),
        ("[algorithm]\nsteps = -3", "[algorithm] toy-number (file TOY): 'steps' must be >= 0: -3"),
        ("[runners]\nn = 'two'", "[runners] n = 'two' does not fit"),
        ("[agnet]\nuse = 'toy'", 'there is no section "agnet"'),
        ("[agent]\nuse = 'toyy'", 'there is no agent called "toyy"'),
    ],
)
def test_a_wrong_key_names_the_file_that_has_it(
    file: Callable[[str], str], toy_file: str, tmp_path: Path, text: str, said: str
) -> None:
    path = file(text)
    with pytest.raises((ConfigError, LookupFailed)) as caught:
        resolve(path, files=[toy_file])
    assert str(caught.value).startswith(f"{path}: {said}".replace("TOY", toy_file))
    settings = repr(tomllib.loads(text)).removeprefix("{").removesuffix("}")
    (tmp_path / "own.py").write_text(
        "from agentrig import RecipeSpec, hookimpl\n\n\n@hookimpl\ndef register_recipes():\n    base = dict(tasks="
        "{'use': 'toy'}, agent={'use': 'toy'}, reward={'use': 'toy'}, algorithm={'use': 'toy-number'})\n"
        f"    yield RecipeSpec(name='own', summary='.', settings={{**base, {settings}}})\n"
    )
    with pytest.raises((ConfigError, LookupFailed)) as caught:
        resolve("own", files=[toy_file, str(tmp_path / "own.py")])
    assert str(caught.value).startswith(f"recipe own (file {tmp_path / 'own.py'}): ")
    with pytest.raises(ConfigError, match=r"^\[algorithm\] steps = 'x' does not fit"):
        resolve(file("[algorithm]\nsteps = 3"), overrides=["algorithm.steps=x"], files=[toy_file])


def test_a_key_of_several_others_is_no_reason_to_switch() -> None:
    with pytest.raises(ConfigError, match='has no key "temperature"') as caught:
        resolve("mini", overrides=["algorithm.temperature=1"], uses={"algorithm": "sft"})
    assert "It is a key of " in str(caught.value)
    assert "selects it" not in str(caught.value)
    with pytest.raises(ConfigError, match=r'"api_key"\. It is a key of http: agent\.use=http selects it'):
        resolve("mini", overrides=["agent.api_key=x"])  # and not of a server of this plan
    with pytest.raises(ConfigError, match=r'"api_key"\. It is a key of endpoint: server\.use=endpoint selects it'):
        resolve("mini", overrides=["server.api_key=x"])
    with pytest.raises(ConfigError, match=r"It is a key of sft: algorithm\.use=sft selects it"):
        resolve("mini", overrides=["algorithm.demonstrations=tasks"], uses={"algorithm": "grpo"})


def test_keys_of_automatic_hardware_are_checked_before_the_probe(toy_plan: Callable[..., Plan]) -> None:
    near = r'has a key "thread"\. Did you mean "threads"\?\n  agentrig plugins show hardware names'
    with pytest.raises(ConfigError, match=f"no hardware for toy-number {near}"):
        toy_plan("hardware.use=auto", "hardware.thread=2")
    plan = toy_plan("hardware.use=auto", "hardware.threads=2")
    assert (plan.components["hardware"].spec.name, plan.configs["hardware"].threads) == ("cpu", 2)


def test_an_implausible_value_gets_no_advice(toy_plan: Callable[..., Plan]) -> None:
    for override in ("algorithm.steps=three", "algorithm.steps=1.5", "algorithm.report=perhaps"):
        with pytest.raises(ConfigError) as caught:
            toy_plan(override)
        assert "Write" not in str(caught.value)


def test_a_choice_out_of_range_lists_the_choices(toy_plan: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError) as caught:
        toy_plan("agent.how=slowly", agent="toy-broken")
    assert "raise" in str(caught.value)
    assert "die" in str(caught.value)


def test_the_error_of_a_missing_key_has_its_meaning(file: Callable[[str], str], toy_file: str) -> None:
    with pytest.raises(ConfigError, match="needs endpoint: the model server"):
        resolve(
            file(
                '[tasks]\nuse = "toy-tasks"\n[agent]\nuse = "toy"\n[reward]\nuse = "own"\n'
                '[adapter]\nuse = "toy-match"\n'
                '[algorithm]\nuse = "toy-number"\n[hardware]\nuse = "cpu"\n',
                recipe="",
            ),
            files=[toy_file],
        )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[algorithms]\nsteps = 3\n", 'there is no section "algorithms". Did you mean "algorithm"?'),
        ("algorithm = 3\n", '"algorithm" must be a section: write [algorithm]'),
        ("[algorithm\n", "is not TOML"),
        ("[algorithm]\nuse = 3\n", '[algorithm] use = 3 must be text; write use = "NAME" with one of: '),
        ('recipe = "toy"\n', "(at line 2, column 15)\n  The file has this key twice: delete one of the lines"),
        ('[run]\nplugins = "x.py"\n', "must be a list of strings"),
        ("[run]\nplugins = [3]\n", "must be a list of strings"),
        ("run = 3\n", '"run" must be a section'),
        ("[algorithm]\nreport = True  # as in Python\n", "line 3, column 10)\n  Write report = true"),
        ("[algorithm]\nmore = [True, False]\n", "\n  Write more = [true, false]"),
        ("[tasks]\nuse = toy-tasks\n", '\n  Write use = "toy-tasks"'),
        ("[algorithm]\nendpoint = None\n", "\n  Leave endpoint out, or write a value"),
        ('[tasks]\nuse = "toy\0"\n', "\n  The line has a character that is not text: delete it"),
        (f"[run]\nseed = {'1' * 5000}\n", " has a whole number of more than 4300 digits"),
        (f"[tasks]\nx = {'[' * 2000}{']' * 2000}\n", " is nested too deep"),
        ("[runn]\nseed = 1\n", 'there is no section "runn". Did you mean "run"?'),
        ("[runner]\nn = 1\n", 'Did you mean "runners"?'),
    ],
)
def test_a_wrong_run_file_is_explained(file: Callable[[str], str], toy_file: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(file(text), files=[toy_file])
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["recipe = 5", "recipe = ['mini']", "[recipe]\nname = 'mini'"])
def test_a_recipe_that_is_no_text_is_explained(file: Callable[..., str], text: str) -> None:
    with pytest.raises(ConfigError, match=r'^recipe = .* must be text: write recipe = "mini"$'):
        resolve(file(text, recipe=""))


@pytest.mark.parametrize(("key", "said"), [("seed", "run.seed"), ("lora_rank", "algorithm.lora_rank")])
def test_a_key_above_all_sections_names_its_section(file: Callable[..., str], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf'^"{key}" stands above all sections: .*\b{said}\b'):
        resolve(file(f"{key} = 1\n", recipe=""))


@pytest.mark.parametrize(("name", "warned"), [("nope", True), ("core", False), ("agentrig", False), ("cor", True)])
def test_what_is_blocked_and_not_there_is_a_warning(
    toy_plan: Callable[..., Plan], name: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.suppress(LookupFailed):  # without agentrig's own components
        toy_plan(f'run.block=["{name}"]')
    assert (f"no plugin or distribution called {name}." in caplog.text) == warned
    assert ('Did you mean "core"?' in caplog.text) == (name == "cor")


def test_missing_sources(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run file"):
        resolve(str(tmp_path / "absent.toml"))
    with pytest.raises(ConfigError, match=r"looked in /.*\n  Give its path, or a recipe's name"):
        resolve("mine.toml")
    (tmp_path / "empty.toml").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.toml is empty: it needs"):
        resolve(str(tmp_path / "empty.toml"))
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match=r"pipe\.toml cannot be read: it is no regular file"):
        resolve(str(tmp_path / "pipe.toml"))
    with pytest.raises(ConfigError, match="is a folder; give a recipe's name or a run file"):
        resolve(f"{tmp_path}/")
    (tmp_path / "config.toml").touch()
    with pytest.raises(ConfigError, match=r"is a run directory, not a run file(.|\n)*--resume(.|\n)*--checkpoint"):
        resolve(f"{tmp_path}/")
    with pytest.raises(LookupFailed, match="there is no recipe called"):
        resolve("no-such-recipe")


def test_a_recipe_of_a_file_that_is_not_named_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "from agentrig import RecipeSpec, hookimpl\n\n\n@hookimpl\ndef register_recipes():\n"
    for name in ("clock", "dates"):
        (tmp_path / f"my_{name}.py").write_text(
            f'{text}    yield RecipeSpec(name="{name}", summary="A test.", settings={{}})\n'
        )
    (tmp_path / "other.py").write_text('"clock"')
    with pytest.raises(ConfigError, match=r"is Python and no run file.*\n  clock --plugin my_clock\.py$"):
        resolve("my_clock.py")
    with pytest.raises(LookupFailed, match=r"named: add --plugin my_clock\.py$"):
        resolve("clock")
    with pytest.raises(LookupFailed) as missed:
        resolve("clocks")
    assert str(missed.value).endswith("add --plugin FILE.py")  # none of them has it


def test_a_python_file_instead_of_a_name_gives_advice() -> None:
    with pytest.raises(ConfigError, match=r"my_agent\.py is Python and no run file.*\n.*--plugin my_agent\.py --agent"):
        resolve("my_agent.py")
    with pytest.raises(LookupFailed, match=r'agent called "my_agent\.py"(.*\n)+.*--plugin my_agent\.py, and --agent'):
        resolve("mini", uses={"agent": "my_agent.py"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=3e-4", 3e-4),
        ("a=true", True),
        ("a=[1, 2]", [1, 2]),
        ("a=plain words", "plain words"),
        ('a="3"', "3"),
        ("a=", ""),
        ("a=x=y", "x=y"),
        ("a=1 # not a comment?", 1),
    ],
)
def test_override_values_are_read_as_toml_or_else_as_text(text: str, value: Any) -> None:
    assert parse_override(f"algorithm.{text}") == ("algorithm", "a", value)


def test_an_override_of_several_lines_is_text() -> None:
    assert parse_override("agent.prompt=1\ny = 2")[2] == "1\ny = 2"


def test_nested_keys_reach_into_tables(toy_plan: Callable[..., Plan]) -> None:
    plan = toy_plan("algorithm.keys.actor.lr=3", "algorithm.keys.actor.clip=4")
    assert plan.configs["algorithm"].keys == {"actor.lr": 3, "actor.clip": 4}


def test_overrides_join_the_table_of_a_run_file(file: Callable[[str], str], toy_file: str) -> None:
    path = file("[algorithm.keys]\na = 1\nb = 2\n")
    plan = resolve(path, files=[toy_file], overrides=["algorithm.keys.b=5"])
    assert plan.configs["algorithm"].keys == {"a": 1, "b": 5}


def test_the_resolved_configuration_resolves_to_itself(toy_plan: Callable[..., Plan], tmp_path: Path) -> None:
    plan = toy_plan(
        "algorithm.keys.actor.lr=3",
        "tasks.do=['', \"it's \\\\ odd\"]",
        'adapter.match=(write|"check")\\d',
        "run.seed=5",
    )
    path = tmp_path / "config.toml"
    path.write_text(to_toml(plan.as_dict()))
    again = resolve(str(path))
    assert again.as_dict() == plan.as_dict()
    assert again.configs == plan.configs
    assert tomllib.loads(path.read_text())["adapter"]["match"] == '(write|"check")\\d'


def test_settings_without_a_value_are_left_out_of_toml() -> None:
    text = to_toml({"run": {"a": None, "b": (1, 2), "c": {"d": None}}})
    assert tomllib.loads(text) == {"run": {"b": [1, 2], "c": {}}}


@attrs.frozen(kw_only=True)
class _Shapes:
    optional: float | None = setting(None, help="perhaps", ge=0)
    numbers: list[float] = setting(list, help="several")
    pair: tuple[int, int] = setting((1, 2), help="two")
    texts: tuple[str, ...] = setting((), help="words")
    nested: dict[str, Any] = setting(dict, help="anything")


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        ({"optional": 1}, 1.0),
        ({"optional": None}, None),
        ({"numbers": [1, 2.5]}, [1.0, 2.5]),
        ({"pair": [3, 4]}, (3, 4)),
        ({"texts": ["ab"]}, ("ab",)),
        ({"nested": {"a": {"b": [1]}}}, {"a": {"b": [1]}}),
    ],
)
def test_types_are_structured(keys: dict[str, Any], value: Any) -> None:
    assert getattr(structure(_Shapes, keys, owner="x", section="agent"), next(iter(keys))) == value


@pytest.mark.parametrize(
    "keys",
    [
        {"optional": "1"},
        {"numbers": "12"},
        {"numbers": ["a"]},
        {"numbers": {"1": 2}},
        {"pair": [1, 2, 3]},
        {"pair": "12"},
        {"texts": "ab"},
        {"texts": {"a": "b"}},
    ],
)
def test_types_are_checked(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not fit x"):
        structure(_Shapes, keys, owner="x", section="agent")


@pytest.mark.parametrize("text", ["ab", "answer"])
def test_one_text_is_no_list_of_its_letters(text: str, tmp_path: Path) -> None:
    """`tasks.private=ab` made the columns `a` and `b` private, and handed the column `ab` to the agent."""
    file = tmp_path / "run.toml"
    file.write_text(f'recipe = "mini"\n\n[tasks]\nuse = "table"\nfile = "rows.csv"\nprivate = "{text}"\n')
    said = (
        rf"\[tasks\] private = '{text}' does not fit table .*: expected a list of texts(.|\n)*"
        rf"""Write private = \["{text}"\]; on the command line: 'tasks.private=\["{text}"\]'"""
    )
    with pytest.raises(ConfigError, match=said):
        resolve("mini", uses={"tasks": "table"}, overrides=["tasks.file=rows.csv", f"tasks.private={text}"])
    with pytest.raises(ConfigError, match=said):
        resolve(str(file))


@pytest.mark.parametrize("keys", [{"optional": math.nan}, {"optional": math.inf}, {"numbers": [1.0, -math.inf]}])
def test_numbers_are_finite(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"does not fit x: expected (a finite number|a list of numbers)"):
        structure(_Shapes, keys, owner="x", section="agent")


@pytest.mark.parametrize("value", ["nan", "inf", "5", "true"])
def test_a_number_in_place_of_text_is_to_be_quoted(value: str) -> None:
    said = rf"""expected text \(.*\n  Write it in quotes: name = "{value}"; on the command line: 'run.name="{value}"'"""
    with pytest.raises(ConfigError, match=said):
        resolve("mini", overrides=[f"run.name={value}"])
    assert resolve("mini", overrides=[f'run.name="{value}"']).run.name == value


def test_infinity_is_a_number_where_a_key_says_so() -> None:
    @attrs.frozen(kw_only=True)
    class Unlimited:
        most: float = setting(1.0, help="the most", gt=0, le=math.inf)

    assert structure(Unlimited, {"most": math.inf}, owner="x", section="agent").most == math.inf
    for wrong in (math.nan, -math.inf):
        with pytest.raises(ConfigError, match="expected a finite number"):
            structure(Unlimited, {"most": wrong}, owner="x", section="agent")


def test_a_run_file_that_is_not_utf8_is_refused_with_a_message(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b'[run]\nname = "caf\xe9"\n')
    wrong = r"latin\.toml, line 2, character 12: the byte 0xe9 is not UTF-8; if it is text, save it as UTF-8: iconv"
    with pytest.raises(AgentrigError, match=wrong):
        read_run_file(path)
    path.write_bytes(b'\xef\xbb\xbf[run]\nname = "cafe"\n')  # as an editor on Windows saves it
    assert read_run_file(path) == {"run": {"name": "cafe"}}


@pytest.mark.parametrize(
    ("type_", "words"),
    [
        (int, "an integer"),
        (float | None, "a number"),
        (list[str], "a list of texts"),
        (tuple[int, int], "a list of integers"),
        (list[Any], "a list"),
        (Literal["auto"] | int, '"auto" or an integer'),
        (Literal["auto", True, False], '"auto" or true or false'),
        (dict[str, Any], "a table"),
        (dict[str, float], "a table of numbers"),
        (Secret | None, "a secret"),
    ],
)
def test_types_are_named_in_the_words_of_a_run_file(type_: Any, words: str) -> None:
    assert type_words(type_) == words


def test_a_component_with_the_settings_of_the_recipes_keeps_its_keys(tmp_path: Path) -> None:
    """Otherwise the run would be that of the defaults: a learning rate of 1e-6 in place of 2e-4, in silence."""
    (tmp_path / "ranks.py").write_text(
        "from agentrig import AlgorithmSpec, hookimpl\nfrom agentrig_grpo import LearnerConfig, build\n\n"
        "@hookimpl\ndef register_algorithms():\n"
        "    yield AlgorithmSpec(name='ranks', summary='R.', config=LearnerConfig, build=build, credit='rloo')\n"
    )
    recipe = resolve("mini")
    swapped = resolve("mini", files=[str(tmp_path / "ranks.py")], uses={"algorithm": "ranks"})
    ours, theirs = attrs.asdict(recipe.configs["algorithm"]), attrs.asdict(swapped.configs["algorithm"])
    assert swapped.components["algorithm"].spec.name == "ranks"
    assert {key: ours[key] for key in theirs if key in ours} == theirs
    assert theirs["lr"] != attrs.fields(type(swapped.configs["algorithm"])).lr.default
    assert swapped.configs["credit"] == recipe.configs["credit"]


def test_a_component_whose_spec_gives_no_settings_class_is_told_so(toy_plan: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match=r'has no key "lr"[^\n]*\n  its keys: none$'):
        toy_plan("reward.lr=1", reward="own")


def test_a_run_that_names_no_adapter_trains_every_call(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[1]
    (block,) = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text("utf-8"), re.S)
    file = tmp_path / "my_agent.py"
    file.write_text(block)
    plan = resolve("dates", files=[str(file)])
    assert (plan.components["adapter"].spec.name, plan.configs["adapter"].match) == ("agent-match", "")
    named = resolve("dates", files=[str(file)], overrides=["adapter.match=ask"])
    assert named.configs["adapter"].match == "ask"
    assert resolve("mini").configs["adapter"].match == "write"


def test_a_plugin_file_that_a_run_file_names_too_is_loaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).resolve().parents[1]
    run = root / "examples" / "my_run.toml"
    monkeypatch.chdir(root)
    plan = resolve(str(run), files=["examples/vote_agent.py"])
    assert plan.components["agent"].spec.name == "vote"
    assert [p.name for p in plan.registry.plugins].count("vote_agent") == 1
    assert plan.run.plugins == [str(root / "examples" / "vote_agent.py")], "a runner loads these"


def test_the_config_of_a_run_has_the_name_of_the_runs_recipe(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('recipe = "mini"\n')
    assert resolve(str(file)).recipe == "config"
    for text, name in (('{"recipe": "dates"}', "dates"), ("[]", "config"), ("{", "config")):
        (tmp_path / "manifest.json").write_text(text)
        assert resolve(str(file)).recipe == name


def test_other_trainers_names_lead_to_keys_of_grpo() -> None:
    known = {f.name for f in attrs.fields(resolve("mini").components["algorithm"].spec.config)}
    assert [name for ours in SYNONYMS.values() for name in ours if name not in known] == []
    with pytest.raises(ConfigError, match=r'has no key "learning_rate". Did you mean "lr"\?'):
        resolve("mini", overrides=["algorithm.learning_rate=3"])
    with pytest.raises(ConfigError, match=r'has no key "lerning_rate"\. Did you mean "lr"\?'):  # by its description
        resolve("mini", overrides=["algorithm.lerning_rate=3"])
    with pytest.raises(ConfigError, match=r'Did you mean "clip_low" or "clip_high"\?'):
        resolve("mini", overrides=["algorithm.epsilon=3"])

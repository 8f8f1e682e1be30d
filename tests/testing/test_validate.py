"""`agentrig validate`: a whole domain in one file, keys of its parts, and input that names nothing."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from distributions import install

from agentrig import Outcome, RewardSpec, Score, Task, TasksSpec
from agentrig.cli.entry import main
from agentrig.scaffold.templates import TEMPLATES
from agentrig.testing import CheckFailed, CheckSkipped, check
from agentrig.testing.reward import RewardSubject
from agentrig.testing.tasks import TasksSubject, check_gold_apart

FILE = str(Path(__file__).parent / "domain.py")
DESK = Path(__file__).parents[2] / "src/agentrig/templates/domain/src/agentrig_order_desk/__init__.py"


def validate(*words: str) -> Result:
    return CliRunner().invoke(main, ["validate", *words])


def test_a_key_that_the_agent_may_know_can_be_named_and_a_wrong_setting_is_no_leak() -> None:
    tasks = str(Path(__file__).parent / "broken" / "task_sets.py")
    given = f"{tasks}:gold-apart", "--only", "tasks.gold-apart"
    cure = " ".join(validate(*given).stdout.split()).partition("what to do: ")[2]
    assert cure.startswith("Put what only the reward may know into `private` alone. If the agent may know a key: ")
    assert '`agentrig validate … --shared KEY`, and `checks("tasks", …, shared=["KEY"])` in the package' in cure
    assert validate(*given, "--shared", "gold").exit_code == 0
    wrong = validate(*given, "tasks.shared=gold")
    assert wrong.exit_code == 1
    assert '[tasks] gold-apart has no key "shared"' in wrong.stdout
    assert "why it matters: A run with it does not start." in wrong.stdout
    assert "instead of working it out" not in wrong.stdout
    unused = validate(tasks, "--tasks", "gold-apart")
    assert (unused.exit_code, "validated by its name: FILE.py:NAME" in unused.stderr) == (1, True), unused.stderr
    none = validate("spider-exec", "--shared", "gold")
    assert (none.exit_code, "--shared is about the tasks of a task set" in none.stderr) == (1, True)


HOUSES = [{"id": f"l{i}", "rooms": 1 + i % 7, "price": 900 + 13 * i} for i in range(60)]


def gold_apart(gold: Callable[[int], Any], given: Callable[[int], dict[str, Any]], shared: Sequence[str] = ()) -> str:
    """Return what the check says of a domain whose input has a table that its tools read; '' if nothing."""

    class Houses:
        splits, roles = ("train",), {"train": "train"}

        def load(self, split: str) -> list[Task]:
            table = {"question": "which house?", "houses": HOUSES}
            return [Task(id=f"t{i}", input=table | given(i), private={"gold": gold(i)}) for i in range(40)]

    spec = TasksSpec(name="houses", summary="", build=lambda config: Houses())
    try:
        return check_gold_apart(TasksSubject(kind="tasks", given=spec, shared=shared))
    except CheckFailed as failed:
        return str(failed)


def nothing(i: int) -> dict[str, Any]:
    return {}


LEAKS: dict[str, tuple[Any, Any, str]] = {
    "a class that is part of a text": (
        lambda i: f"{'ab'[i % 2] * 3}/{i}", lambda i: {"kind": "ab"[i % 2] * 3}, "(of a table: tasks.private)"
    ),
    "letters of a text": (lambda i: f"{'ab'[i % 2] * 3}{i}", lambda i: {"kind": "ab"[i % 2] * 3}, ""),
    "one part is in the table": (lambda i: [f"l{i}", 12 * i + 1, f"w{i}"], nothing, ""),
    "one part of an object is there": (lambda i: {"who": f"l{i}", "n": 70 + i}, lambda i: {"who": f"l{i}"}, ""),
    "a list in another order": (lambda i: [i, i + 1, i + 2], lambda i: {"digits": [i + 2, i, i + 1]}, ""),
    "all parts": (lambda i: [f"l{i}", i, f"w{i}"], lambda i: {"hint": [0, f"l{i}", i, f"w{i}"]}, "at input.hint"),
    "all parts of an object": (
        lambda i: {"id": f"x{i}", "of": {"n": [i, 7]}}, lambda i: {"hint": {"of": {"id": f"x{i}", "n": [i, 7]}}},
        "at input.hint",
    ),
    "one of the right answers": (lambda i: [f"a{i}", f"b{i}"], lambda i: {"hint": ["?", f"b{i}"]}, "at input.hint[1]"),
    "a text": (lambda i: f"x{i}", lambda i: {"told": {"by": [f"x{i}"]}}, "at input.told.by[0]"),
    "a long text in a longer one": (
        lambda i: [f"the house number {i} of all", 3], lambda i: {"told": f"Say the house number {i} of all."},
        "at input.told",
    ),
}  # fmt: skip
"""The gold of a task, what more is in its input, and the end of what the check says."""


@pytest.mark.parametrize(("gold", "given", "end"), LEAKS.values(), ids=LEAKS)
def test_a_whole_gold_in_the_input_is_a_leak_and_one_part_of_it_in_a_table_is_none(
    gold: Callable[[int], Any], given: Callable[[int], dict[str, Any]], end: str
) -> None:
    said = gold_apart(gold, given)
    assert said.endswith(end) if end else not said, said


def test_a_table_that_only_tools_read_is_named_and_left_out_without_what_else_leaks() -> None:
    def row(i: int) -> dict[str, Any]:
        return HOUSES[i]

    said = gold_apart(row, nothing)
    assert "at input.houses[0], and elsewhere in others. If that is a table that only tools read: --shared" in said
    assert "--shared input.houses" in said
    assert gold_apart(row, nothing, ["input.houses"]) == ""
    assert "at input.hint" in gold_apart(row, lambda i: {"hint": list(HOUSES[i].values())}, ["input.houses"])


def test_tasks_that_cannot_be_loaded_are_no_fault_of_the_agent(tmp_path: Path) -> None:
    result = validate(f"{FILE}", "--tasks", "table", "--only", "agent.calls-endpoint")
    assert result.exit_code == 1
    assert ":adds cannot be loaded: [tasks] table needs a file of rows: tasks.file=ROWS.csv" in result.stderr
    assert "agent.calls-endpoint" not in result.output
    rows = tmp_path / "rows.csv"
    rows.write_text("question,answer\n" + "".join(f"{i} + {i},{2 * i}\n" for i in range(30)))
    keys = [f"tasks.file={rows}", "tasks.private=['answer']"]
    named = validate(FILE, "--tasks", "table", "--only", "agent.calls-endpoint", *keys)
    assert named.exit_code == 0, named.output
    assert named.stdout.splitlines()[-1] == "all passed"


def test_what_training_says_of_repeated_inputs_is_said(tmp_path: Path) -> None:
    rows, keys = tmp_path / "rows.csv", ['tasks.private=["answer"]', "tasks.input=['word']"]
    rows.write_text("word,answer\n" + "".join(f"w{i // 2},{i}\n" for i in range(120)))
    said = validate("table", f"tasks.file={rows}", *keys).stdout
    assert re.search(r"warning: (\d+) of \d+ train tasks have the input of another one, \1 of them with another", said)
    rows.write_text("word,answer\n" + "".join(f"w,{i}\n" for i in range(40)))
    said = validate("table", f"tasks.file={rows}", *keys, "--only", "tasks.roles").stdout
    assert f"what to do: {rows} has 40 rows with 1 different input" in said


def test_an_agent_that_is_not_played_says_why_and_the_sizes_of_its_splits_are_said(tmp_path: Path) -> None:
    agents = str(Path(__file__).parent / "broken" / "agent_functions.py")
    rows = tmp_path / "rows.csv"
    rows.write_text("word,answer\n" + "".join(f"w{i},{i}\n" for i in range(120)))
    keys = [f"tasks.file={rows}", "tasks.private=['answer']"]
    said = validate(f"{agents}:answers-no-return", "--tasks", "table", "--reward", "exact-match", *keys).stdout
    sizes = re.search(r"^(\d+) training, (\d+) validation and (\d+) held-out tasks\. (.*)$", said, re.MULTILINE)
    assert sizes, said
    *counts, gain = sizes.groups()
    assert sum(map(int, counts)) == 120
    assert gain == (
        f"With {counts[2]} held-out tasks a gain is significant from {float(f'{600 / int(counts[2]):.1f}'):g} points "
        "(if no task becomes worse)"
    )
    assert said.count("held-out tasks. With") == 1
    assert f"\nplay {agents}:answers-no-return: skipped, agent.answers failed\n" in said


def test_an_installed_package_that_cannot_be_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "broken-shop", "one = two\n", point="shop")
    monkeypatch.syspath_prepend(str(tmp_path))
    for word in ("broken-shop", "shop"):
        result = validate(word)
        assert result.exit_code == 1
        assert f"{word}: NameError: name 'two' is not defined" in result.stderr, result.stderr
        assert "Did you mean" not in result.stderr


@pytest.mark.slow
def test_what_is_tried_on_tasks_that_cannot_be_loaded_is_skipped(tmp_path: Path) -> None:
    text = (
        Path(FILE)
        .read_text("utf-8")
        .replace("first = 100", "raise agentrig.ConfigError('no rows')\n        first = 100")
    )
    file = tmp_path / "no_rows.py"
    file.write_text(text)
    result = validate(str(file), "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    failed = {r["check"] for report in found["reports"] for r in report["results"] if r["status"] == "failed"}
    assert failed
    assert {name.partition(".")[0] for name in failed} == {"tasks"}
    results = {r["check"]: r for report in found["reports"] for r in report["results"]}
    assert results["agent.starts"]["status"] == "passed"
    for name in ("agent.calls-endpoint", "agent.answers", "reward.gold"):
        assert results[name]["status"] == "skipped"
        assert results[name]["message"].startswith("it needs tasks.")
    assert found["trials"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "caught", "said"),
    [
        ("build=lambda config: equal", "build=lambda config: 1 / 0", "play.parts", "ZeroDivisionError"),
        (
            "return Score.ok(",
            "return Score.invalid('no number') or (",
            "play.scored",
            "the score is invalid (no number)",
        ),
    ],
)
def test_a_part_that_breaks_a_trial_is_red(tmp_path: Path, right: str, wrong: str, caught: str, said: str) -> None:
    text = Path(FILE).read_text("utf-8")
    assert right in text
    file = tmp_path / "broken_domain.py"
    file.write_text(text.replace(right, wrong))
    result = validate(str(file), "--only", caught, "--limit", "2")
    assert result.exit_code == 1, result.output
    assert f"failed   {caught}" in result.stdout
    assert said in result.stdout
    assert "what to do: " in result.stdout
    assert result.stdout.splitlines()[-1] == f"1 failed: {caught}"
    if caught == "play.scored":
        assert re.search(r"failures +reward-invalid 4\n", result.stdout)
        assert re.search(r"reward mean +gold not scored, nonsense not scored\n", result.stdout)


@pytest.mark.parametrize(("least", "said"), [("0.5", True), ("0.2", False)])
def test_what_nonsense_earns_is_told_where_it_is_much(tmp_path: Path, least: str, said: bool) -> None:
    text = Path(FILE).read_text("utf-8").replace("Score.ok(float(", f"Score.ok({least} + (1 - {least}) * float(")
    file = tmp_path / "generous_domain.py"
    file.write_text(text)
    result = validate(str(file), "--only", "play.readable", "--limit", "2")
    assert result.exit_code == 0, result.output
    assert (f"nonsense gets a mean reward of {least}, right answers 1" in result.stdout) == said, result.stdout


SAID = 'reply.json()["choices"][0]["message"]["content"]'
TOOLS = "'tools': [{'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object'}}}]"


@pytest.mark.parametrize(
    ("right", "wrong", "only", "said"),
    [
        (f'{SAID} or ""', f'{{"answer": {SAID}}}', "play.readable",
         ("differs from the right one only in form", "what to do: Let the agent return")),
        ('{"model": endpoint.model, ', f'{{"model": endpoint.model, {TOOLS}, ', "play.readable",
         ("passed play.readable", "calls offer tools (add), and no demonstration calls one", "demonstrate(task, ")),
        ("build=lambda config: add", "build=lambda config: None", "agent.starts",
         ("Is a `return` missing?", "what to do: Mend what the message names. If `build` works for you: a runner")),
    ],
    ids=["JSON around the answer", "tools without a demonstrator", "build returns nothing"],
)  # fmt: skip
def test_what_newcomers_met_is_said_with_its_cure(
    tmp_path: Path, right: str, wrong: str, only: str, said: Sequence[str]
) -> None:
    text = Path(FILE).read_text("utf-8")
    assert right in text
    file = tmp_path / "my_domain.py"
    file.write_text(text.replace(right, wrong))
    shown = " ".join(validate(str(file), "--only", only, "--limit", "2").stdout.split())
    assert [part for part in said if part not in shown] == [], shown


@pytest.mark.parametrize("call", [pytest.param("add", marks=pytest.mark.slow), "ad"])
def test_a_demonstrator_whose_replies_solve_no_task_is_red(tmp_path: Path, call: str) -> None:
    """With a tool that does not exist, half of the reward was enough for `all passed`."""
    text = DESK.read_text("utf-8")
    assert '[("add", ' in text
    file = tmp_path / "my_desk.py"
    file.write_text(text.replace('[("add", ', f'[("{call}", '))
    result = validate(f"{file}:order-desk", "--only", "play.readable", "--limit", "4")
    assert result.exit_code == (call == "ad"), result.output
    assert ("the answer of no task was judged correct (mean reward 0.1667)" in result.stdout) == (call == "ad")
    assert ("the model said 'ad({" in result.stdout) == (call == "ad")


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        (
            "json.loads(arguments)",
            "arguments",
            "To the model's calls the tool answered 'error: an item and a count to 9, then a day'",
        ),
        ('tool("add"', 'tool("append"', "called add, and the agent's tools are append, deliver"),
        ("                    tools=TOOLS,\n", "", "called add, and the agent offered the model no tools"),
    ],
)
def test_an_agent_that_does_not_use_a_tool_as_demonstrated_is_told_what_the_tool_said(
    tmp_path: Path, right: str, wrong: str, said: str
) -> None:
    text = DESK.read_text("utf-8")
    assert right in text
    unsaid = text.replace(right, wrong).replace('if name == "add"', 'if name == "append"')
    file = tmp_path / "my_desk.py"
    file.write_text(text.replace(right, wrong) if right.startswith("json") else unsaid)
    shown = " ".join(validate(f"{file}:order-desk", "--only", "play.readable", "--limit", "2").stdout.split())
    assert said in shown, shown
    assert "what to do: Compare" not in shown


@pytest.mark.parametrize(
    ("keys", "rollouts", "few"), [("", 256, False), (", 'tasks_per_step': 4, 'group_size': 2", 8, True)]
)
def test_the_costs_of_a_recipe_are_those_of_its_own_step_and_its_warm_up_aims_above_guessing(
    keys: str, rollouts: int, few: bool, tmp_path: Path
) -> None:
    file, text = tmp_path / "with_recipe.py", Path(FILE).read_text()
    text = text.replace("str(a + b)", "str((a + b) % 3)") if few else text
    uses = {"agent": "adds", "tasks": "sums", "reward": "equal"}
    sections = ", ".join(f"{kind!r}: {{'use': {name!r}}}" for kind, name in uses.items())
    file.write_text(
        f"{text}\n\nfrom agentrig import RecipeSpec\n\n\n@hookimpl\ndef register_recipes():\n"
        f"    settings = {{{sections}, 'algorithm': {{'use': 'grpo'{keys}}}}}\n"
        "    yield RecipeSpec(name='learns', summary='Learns.', settings=settings)\n"
    )
    shown = validate(str(file), "--only", "play.trains", "--only", "recipe.loads", "--limit", "2").stdout
    assert re.search(rf"^  step of {rollouts} rollouts +calls {rollouts}, ", shown, re.M), shown
    guessed = re.search(r"^  most frequent answer +(?:right in ([\d.]+)% of the tasks|not known, or)", shown, re.M)
    assert guessed is not None
    until = re.search(r" --until ([\d.]+) \(", shown.splitlines()[-1])
    assert until is not None
    assert (float(guessed[1] or 0) >= 10, float(until[1])) == (few, 0.5 if few else 0.2), shown


def test_a_misspelled_section_of_a_recipe_is_said_before_what_follows_from_it(tmp_path: Path) -> None:
    file = tmp_path / "my_recipe.py"
    file.write_text(
        "from agentrig import AgentSpec, RecipeSpec, hookimpl\n\n\n@hookimpl\ndef register_agents():\n"
        "    yield AgentSpec(name='asks', summary='Asks.', build=lambda config: None)\n\n\n"
        "@hookimpl\ndef register_recipes():\n"
        "    settings = {'algorithm': {'use': 'grpo'}, 'task': {'use': 'mini-sql'}, 'agent': {'use': 'asks'}}\n"
        "    yield RecipeSpec(name='sorts', summary='Learns to sort numbers.', settings=settings)\n"
    )
    result = validate(str(file))
    assert (result.exit_code, "say on which tasks" in result.output) == (1, False), result.output
    said, _, rest = result.stdout.partition('there is no section "task". Did you mean "tasks"?')
    assert "agent" not in said.replace("agentrig", "")
    assert f"agent {file}:asks: not tried, for its tasks are not known until the recipe resolves" in rest
    run_file = tmp_path / "sorts.toml"
    run_file.write_text('[algoritm]\nuse = "grpo"\n')
    assert 'there is no section "algoritm". Did you mean "algorithm"?' in validate(str(run_file)).stderr


def test_a_recipe_that_passes_names_the_next_command(tmp_path: Path) -> None:
    file = tmp_path / "my_recipe.py"
    file.write_text(
        "from agentrig import RecipeSpec, hookimpl\n\n\n@hookimpl\ndef register_recipes():\n"
        "    settings = {'algorithm': {'use': 'grpo', 'steps': 2}, 'tasks': {'use': 'mini-sql'},\n"
        "                'agent': {'use': 'langgraph-sql'}, 'reward': {'use': 'spider-exec'}}\n"
        "    yield RecipeSpec(name='sorts', summary='Learns to sort numbers.', settings=settings)\n"
    )
    result = validate(str(file))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == (
        f"all passed; next: agentrig warmup sorts --plugin {file} --until 0.2 (makes a small model; "
        "for easy tasks add --labels 10 --passes 4; with one of yours: agentrig train sorts "
        f"--plugin {file} algorithm.model=DIR)"
    )
    other = tmp_path / "with_model.py"
    other.write_text(file.read_text().replace("'steps': 2", "'model': 'mini'"))
    result = validate(str(other), "--only", "recipe.loads")
    assert result.stdout.splitlines()[-1] == f"all passed; next: agentrig train sorts --plugin {other}"
    absent = tmp_path / "with_absent_model.py"
    absent.write_text(file.read_text().replace("'steps': 2", "'model': 'models/nowhere'"))
    said = validate(str(absent), "--only", "recipe.loads").stdout.splitlines()[-1]
    makes = f"agentrig warmup sorts --plugin {absent} --until 0.2 --out models/nowhere"
    assert said.startswith(f"all passed; next: {makes} (makes a small model; ")
    own = tmp_path / "with_own_model.py"
    own.write_text(file.read_text().replace("'steps': 2", "'model': 'models/sorts'"))
    said = validate(str(own), "--only", "recipe.loads").stdout.splitlines()[-1]
    desk = TEMPLATES["domain"].commands("sorts", file=own)[0][0].replace(" --labels 10 --passes 4", "")
    assert said.startswith(f"all passed; next: {desk} (makes a small model; "), "as `agentrig new` says it"


@pytest.mark.slow
def test_a_key_of_a_part_is_used() -> None:
    result = validate(FILE, "adapter.match=sovle", "--only", "play.trains", "--limit", "2")
    assert result.exit_code == 1, result.output
    assert "failed   play.trains" in result.stdout
    assert "the calls are under: solve" in result.stdout


UNCHANGED = """
import httpx
from agentrig import AgentSpec, hookimpl

def ask(path, body, read):
    def agent(task_input, endpoint):
        headers = {"authorization": "Bearer own", "x-api-key": "own"}
        said = httpx.post(endpoint.base_url + path, json={"model": endpoint.model, **body,
            "messages": [{"role": "user", "content": task_input["question"]}]}, headers=headers)
        said.raise_for_status()
        return read(said.json())
    return agent

@hookimpl
def register_agents():
    chat = ask("/chat/completions", {}, lambda r: r["choices"][0]["message"]["content"])
    wordy = ask("/chat/completions", {"max_tokens": 7}, lambda r: r["choices"][0]["message"]["content"])
    claude = ask("/messages", {"max_tokens": 9999}, lambda r: r["content"][0]["text"])
    for name, agent in {"chat": chat, "wordy": wordy, "claude": claude}.items():
        yield AgentSpec(name=name, summary="", build=lambda config, agent=agent: agent)
"""
MENDED = ("agent.calls-endpoint", "agent.recorded", "agent.sampling")


@pytest.fixture
def unchanged(tmp_path: Path) -> str:
    """Agents whose clients know nothing of the endpoint but its address and model."""
    (tmp_path / "unchanged.py").write_text(UNCHANGED)
    return str(tmp_path / "unchanged.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chat", "wordy"])
def test_an_unchanged_client_passes_what_the_tap_adds(unchanged: str, name: str) -> None:
    """It sends no sampling field of the run's, or a lower limit."""
    only = [word for check in MENDED for word in ("--only", check)]
    result = validate(f"{unchanged}:{name}", "--tasks", f"{FILE}:sums", "--limit", "2", *only)
    assert result.exit_code == 0, result.output
    assert "3 passed" in result.output


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ('"temperature": 0', "the temperature out of the agent's calls. Training samples, so"),
        ('"seed": 5', "the seed out of the agent's calls: with it, all rollouts of a task are the same."),
    ],
)
def test_an_agent_with_a_sampling_of_its_own_is_told_to_leave_it_out(tmp_path: Path, field: str, told: str) -> None:
    greedy = tmp_path / "greedy.py"
    greedy.write_text(UNCHANGED.replace('"/chat/completions", {}', f'"/chat/completions", {{{field}}}'))
    result = validate(f"{greedy}:chat", "--tasks", f"{FILE}:sums", "--limit", "2", "--only", "agent.sampling")
    assert result.exit_code == 1, result.output
    said = " ".join(result.stdout.split())
    assert f"what to do: Leave {told}" in said
    assert "algorithm.temperature" not in said
    greedy.write_text(UNCHANGED.replace('"/chat/completions", {}', '"/chat/completions", {"temperature": 1}'))
    result = validate(f"{greedy}:chat", "--tasks", f"{FILE}:sums", "--limit", "2", "--only", "agent.sampling")
    assert result.exit_code == 0, "a run's default temperature trains"


@pytest.mark.slow
def test_another_api_needs_the_gateway_and_validate_has_it(unchanged: str) -> None:
    words = (f"{unchanged}:claude", "--tasks", f"{FILE}:sums", "--limit", "2", "--only", "agent.sampling")
    without = validate(*words, "--only", "agent.calls-endpoint")
    assert without.exit_code == 1
    assert "with gateway.use=on, agentrig's gateway answers it" in without.output
    through = validate(*words, "gateway.use=on")
    assert through.exit_code == 0, through.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["spider-exce"], 'and no file of a plugin. Did you mean "spider-exec"?'),
        (["nowhere.py"], "there is no file"),
        ([FILE, "--only", "agent.samplin"], 'there is no check "agent.samplin". Did you mean "agent.sampling"?'),
        (
            ["CHAT", "--tasks", f"{FILE}:sums", "runners.n=3"],
            "nothing that is validated reads [runners]. Known: adapter, agent, gateway, reward, tasks",
        ),
        (["CHAT"], "--tasks NAME, or --tasks FILE.py:NAME"),
    ],
    ids=["no name", "no file", "no check", "no section", "no tasks"],
)
def test_what_cannot_be_validated_is_named_at_once(unchanged: str, words: list[str], said: str) -> None:
    result = validate(*(word.replace("CHAT", f"{unchanged}:chat") for word in words))
    assert (result.exit_code, result.stdout) == (1, "")
    assert said in result.stderr


@pytest.mark.slow
def test_names_are_looked_up_in_files_given_as_plugins(unchanged: str) -> None:
    result = validate("chat", "--plugin", unchanged, "--plugin", FILE, "--tasks", "sums", "--only", "agent.starts")
    assert result.exit_code == 0, result.output


def test_a_run_file_is_answered_with_the_command_for_its_agent(tmp_path: Path) -> None:
    (tmp_path / "bash.toml").write_text('[run]\nplugins = ["game.py"]\n[agent]\nuse = "command"\ncommand = "true"\n')
    result = validate(str(tmp_path / "bash.toml"))
    assert result.exit_code == 1
    words = f"agentrig validate command --plugin {tmp_path}/game.py --tasks TASKS --reward REWARD agent.command=…"
    assert words in result.stderr


def test_a_file_that_ends_its_process_is_named(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(7)\n")
    result = validate(str(tmp_path / "ends.py"))
    assert result.exit_code == 1
    assert "it ended its process (exit status 7)" in result.stderr
    (tmp_path / "ends.py").write_text("raise KeyboardInterrupt('enough')\n")
    raised = validate(str(tmp_path / "ends.py"))
    assert raised.exit_code == 1
    assert "KeyboardInterrupt: enough" in raised.stderr.replace("\n", " ")
    os.mkfifo(tmp_path / "pipe.py")
    assert "pipe.py is no regular file" in validate(str(tmp_path / "pipe.py")).stderr.replace("\n", " ")


PICKY = """
from agentrig import AgentSpec, hookimpl
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def search(question: str) -> str:
    "Search."
    return "nothing"


def model_of(endpoint):
    return ChatOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, model=endpoint.model)


def unchanged(task_input, endpoint):
    agent = create_agent(model_of(endpoint), tools=[search])
    return agent.invoke({"messages": [("user", "find it")]})["messages"][-1].content


def strict(task_input, endpoint):
    reply = model_of(endpoint).invoke("find it")
    if reply.tool_calls or not reply.content:  # as the Agents SDK and pydantic-ai do
        raise RuntimeError(f"unexpected model behavior: {reply.tool_calls}")
    return reply.content


@hookimpl
def register_agents():
    for agent in (unchanged, strict):
        yield AgentSpec(name=agent.__name__, summary="", build=lambda config, agent=agent: agent)
"""


@pytest.mark.slow
def test_how_libraries_end_on_odd_replies_is_a_fact_and_no_fault(tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(PICKY)

    def found(name: str) -> dict[str, tuple[str, str]]:
        tasks = [Task(id="t", input={"q": "?"})]
        checked = ["odd-replies", "deadline"]
        more: dict[str, Any] = {"tasks": tasks, "script": "1", "deadline_s": 4.0, "only": checked}
        report = check("agent", f"{tmp_path}/picky.py:{name}", raise_failed=False, **more)
        return {r.check.partition(".")[2]: (r.status, r.message) for r in report.results}

    endless = found("unchanged")
    assert (endless["odd-replies"][0], endless["deadline"][0]) == ("passed", "passed")
    assert endless["deadline"][1].startswith(
        "on a call of a tool that nobody offered your agent has not ended after 4 s and"
    )
    assert "recursion_limit" in endless["deadline"][1]
    strict = found("strict")
    assert (strict["odd-replies"][0], strict["deadline"]) == ("passed", ("passed", ""))
    assert "on an empty reply your agent ends with agent-error, RuntimeError: " in strict["odd-replies"][1]
    assert (
        "on a call of a tool that nobody offered your agent ends with agent-error, RuntimeError: "
        in strict["odd-replies"][1]
    )


@pytest.mark.parametrize(
    ("private", "gold", "found"),
    [
        ({"date": "2026"}, None, "2026"),
        ({"day": "7", "date": "2026"}, "date", "2026"),
        ({"date": "2026", "gold": "a"}, None, "a"),
        ({"day": "7", "date": "2026"}, None, None),
        ({"date": "2026"}, "day", None),
    ],
)
def test_the_right_answer_is_the_only_private_key_or_the_one_that_is_named(
    private: dict[str, str], gold: str | None, found: str | None
) -> None:
    spec = RewardSpec(name="any", summary="", build=lambda config: lambda task, outcome, budget_s: Score.ok(0.0))
    subject = RewardSubject(kind="reward", given=spec, tasks=[Task(id="t", input={}, private=private)], gold=gold)
    if found is not None:
        assert subject.golds == [found]
        return
    with pytest.raises(CheckSkipped, match=r"Name its key \(date.*\): agentrig validate … --gold KEY"):
        _ = subject.golds


@pytest.mark.parametrize("strict", [False, True])
def test_a_right_answer_that_names_a_key_twice_is_told_of(strict: bool) -> None:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        return {} if strict and len(dict(found)) < len(found) else dict(found)

    def reward(task: Task, outcome: Outcome, budget_s: float) -> Score:
        try:
            answer = json.loads(outcome.answer, object_pairs_hook=pairs)
        except (TypeError, ValueError, RecursionError):
            return Score.ok(0.0)
        return Score.ok(float(answer == json.loads(task.private["gold"])))

    spec = RewardSpec(name="any", summary="", build=lambda config: reward)
    tasks = [Task(id=str(i), input={}, private={"gold": json.dumps({"a": i, "b": 1})}) for i in range(2)]
    (found,) = check("reward", spec, tasks=tasks, only=["reward.odd-answers"]).results
    told = 'task 0: {"a": [0], "a": 0, "b": 1} counts as correct, although it names a key twice, first with a wrong'
    assert found.message.startswith(told) != strict


def test_a_reward_that_is_too_slow_for_every_check_fails() -> None:
    def slow(task: Task, outcome: Outcome, budget_s: float) -> Score:
        time.sleep(1.5)
        return Score.ok(0.0)

    spec = RewardSpec(name="slow", summary="", build=lambda config: slow)
    tasks = [Task(id=str(i), input={}, private={"gold": str(i)}) for i in range(2)]
    report = check("reward", spec, tasks=tasks, budget_s=0.1, raise_failed=False)
    assert [r.check for r in report.results if r.status == "failed"] == ["reward.scores"], "the others only skip"
    assert "an answer's score ran past its budget of 0.1 s" in str(report)


def test_tasks_with_one_right_answer_are_counted_and_their_split_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\n" + "".join(f"q{i},yes\n" for i in range(3)))
    spec = RewardSpec(name="any", summary="", build=lambda config: lambda task, outcome, budget_s: Score.ok(0.0))
    keys = {"file": str(tmp_path / "rows.csv"), "private": ["answer"], "shares": [1.0, 0.0, 0.0]}
    report = check("reward", spec, tasks="table", tasks_settings=keys, split="train", only=["reward.tells-apart"])
    told = "it needs 2 tasks with different right answers, and the first 3 tasks of the split train have none"
    assert [r.message for r in report.results if r.check == "reward.tells-apart"] == [told]


REFUNDS = """
import json
from agentrig.demonstrations import Reply
from agentrig import AgentSpec, RewardSpec, Score, Task, TasksSpec, hookimpl

class Refunds:
    splits = ("train", "dev")
    roles = {"train": "train", "validation": "dev"}

    def load(self, split):
        asked = [(f"{split}-{i}", 43 + i) for i in range(3)]
        return [Task(id=name, input={"question": name}, private={"refund": refund}) for name, refund in asked]

    def demonstrate(self, task, call):
        return Reply(content=json.dumps({"refund": task.private["refund"]}))

def read(task_input, endpoint):
    import httpx
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": task_input["question"]}]}
    reply = httpx.post(f"{endpoint.base_url}/chat/completions", json={**body, **endpoint.sampling}, timeout=60)
    try:
        return json.loads(reply.json()["choices"][0]["message"]["content"])
    except ValueError:
        return {"refund": None}

def equal(task, outcome, budget_s):
    return Score.ok(float(outcome.answer["refund"] == task.private["refund"]))

@hookimpl
def register_tasks():
    yield TasksSpec(name="refunds", summary="", build=lambda config: Refunds())

@hookimpl
def register_agents():
    yield AgentSpec(name="reads", summary="", build=lambda config: read)

@hookimpl
def register_rewards():
    yield RewardSpec(name="equal", summary="", build=lambda config: equal)
"""


def test_right_answers_are_those_that_a_demonstrator_leads_to_and_a_guess_is_called_one(tmp_path: Path) -> None:
    told, raises, rejects = (tmp_path / f"{name}.py" for name in ("told", "raises", "rejects"))
    told.write_text(REFUNDS)
    raises.write_text(REFUNDS.replace("def demonstrate(", "def not_used("))
    rejects.write_text(raises.read_text().replace("float(", "float(isinstance(outcome.answer, dict) and "))
    only = [word for name in ("play.readable", "reward.scores", "reward.gold") for word in ("--only", name)]
    result = validate(str(told), *only)
    assert result.exit_code == 0, result.output
    guess = '. That private["refund"] is the right answer is a guess. If it is wrong, name the right one: '
    raised = " ".join(validate(str(raises), "--only", "reward.scores").stdout.split())
    assert "answer 43: the reward raised TypeError: 'int' object is not subscriptable" in raised
    assert (guess in raised, "tasks.text" in raised) == (True, False)
    assert raised.count("`demonstrate(task, call)`") == 1
    both, floats = (tmp_path / f"{name}.py" for name in ("both", "floats"))
    both.write_text(REFUNDS.replace('outcome.answer["refund"]', 'outcome.answer[0]["refund"]'))
    raised = " ".join(validate(str(both), "--only", "reward.scores").stdout.split())
    assert (guess in raised, "`demonstrate" in raised) == (True, False), raised
    floats.write_text(REFUNDS.replace("return Score.ok(", "return 0.5 or ("))
    returned = " ".join(validate(str(floats), "--only", "reward.scores").stdout.split())
    assert ("the reward returned float" in returned, "is a guess" in returned) == (True, False), returned
    wrong = " ".join(validate(str(rejects), "--only", "reward.gold").stdout.split())
    assert f"task dev-0, answer the number 43, status ok, value 0.0{guess}" in wrong
    rejects.write_text(rejects.read_text().replace("    try:", "    return {}\n    try:"))
    shaped = " ".join(validate(str(rejects), "--only", "play.parts", "--only", "reward.gold").stdout.split())
    known = 'the right answer is not known: private["refund"] is a number, and the agent answers with an object.'
    assert known in shaped, shaped
    second, seldom = (tmp_path / f"{name}.py" for name in ("second", "seldom"))
    more = '    yield RewardSpec(name="calls", summary="", sees_trace=True, build=lambda config: scored)\n'
    calls = "def scored(task, outcome, budget_s, trace):\n    return equal(task, outcome, budget_s)\n"
    second.write_text(REFUNDS + more + calls)
    seldom.write_text(
        second.read_text().replace('json.dumps({"refund": ', 'json.dumps({"refund": task.id[-1] != "1" and ')
    )
    for file in (second, seldom):
        result = validate(str(file), *only)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("was", "check"), [("lambda config: Refunds()", "recipe.tasks"), ("asked = [", "tasks.rows")], ids=["build", "load"]
)
def test_a_file_that_tasks_do_not_find_is_what_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was: str, check: str
) -> None:
    monkeypatch.chdir(tmp_path)
    uses = "tasks={'use': 'refunds'}, agent={'use': 'reads'}, reward={'use': 'equal'}, algorithm={'use': 'grpo'}"
    text = REFUNDS.replace(was, was.replace("Refunds()", "open('dates.csv')").replace("[", "open('dates.csv') and ["))
    text = text.replace("import AgentSpec", "import RecipeSpec, AgentSpec") + "\n@hookimpl\ndef register_recipes():\n"
    Path("calendar_tasks.py").write_text(f"{text}    yield RecipeSpec(name='c', summary='', settings=dict({uses}))\n")
    said = " ".join(validate("calendar_tasks.py", "--only", check).stdout.split())
    assert f"what to do: There is no {tmp_path / 'dates.csv'}: make the file, or call agentrig in the folder" in said, (
        said
    )


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"private": ["totl"]}, "orders.csv, line 1: there is no column totl, which tasks.private names. Did you mean"),
        ({"shares": [0.5, 0.6]}, "the shares are [0.5, 0.6]; write three numbers that add up to 1"),
        ({"private": ["total"], "file": ""}, "its data is not here: [tasks] table needs a file of rows"),
        ({"private": ["total"]}, "passed recipe.tasks"),
    ],
    ids=str,
)
def test_the_table_of_a_recipe_is_loaded_as_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("orders.csv").write_text("question,total\n" + "".join(f"What is {i}?,{i}\n" for i in range(40)))
    tasks = {"use": "table", "file": "orders.csv", **keys}
    uses = f"tasks={tasks}, agent={{'use': 'reads'}}, reward={{'use': 'equal'}}, algorithm={{'use': 'grpo'}}"
    text = REFUNDS.replace("import AgentSpec", "import RecipeSpec, AgentSpec")
    hook = "\n@hookimpl\ndef register_recipes():\n"
    Path("shop.py").write_text(f"{text}{hook}    yield RecipeSpec(name='shop', summary='', settings=dict({uses}))\n")
    result = validate("shop.py:shop", "--only", "recipe.tasks")
    told = " ".join(result.stdout.split())
    assert (said in told, result.exit_code) == (True, int("needs a file" not in said and "passed" not in said)), told


def test_a_trial_shows_the_rewards_of_calls(tmp_path: Path) -> None:
    file = tmp_path / "calls.py"
    file.write_text(
        REFUNDS.replace("budget_s):", "budget_s, trace):")
        .replace('summary="", build=lambda config: equal', 'summary="", sees_trace=True, build=lambda config: equal')
        .replace('private["refund"]))', 'private["refund"]), calls=[0.5 for call in trace.llm_calls()])')
    )
    shown = " ".join(validate(str(file), "--only", "play.parts").stdout.split())
    assert "calls per rollout 1.0 prompt tokens per rollout 23.0" in shown
    assert "first rewards of calls gold [0.5], nonsense [0.5]" in shown, shown


def test_figures_of_a_rollout_are_those_of_right_replies(tmp_path: Path) -> None:
    """After nonsense this agent ends; after a reply that it can read it asks once more."""
    file = tmp_path / "twice.py"
    reads = 'json.loads(reply.json()["choices"][0]["message"]["content"])'
    again = 'httpx.post(f"{endpoint.base_url}/chat/completions", json={**body, **endpoint.sampling}, timeout=60)'
    file.write_text(REFUNDS.replace(f"return {reads}", f"return ({reads}, {again})[0]"))
    shown = " ".join(validate(str(file), "--only", "play.parts").stdout.split())
    assert "figures below of 3 rollouts with right replies calls per rollout 2.0 prompt tokens" in shown, shown


def test_an_answer_of_another_type_than_gold_is_told_with_both_types(tmp_path: Path) -> None:
    file = tmp_path / "amounts.py"
    text = Path(FILE).read_text("utf-8")
    file.write_text(text.replace('{"answer": str(a + b)}', '{"answer": a + b}'))
    result = validate(str(file), "--only", "play.readable", "--limit", "2")
    assert result.exit_code == 1, result.output
    assert "the agent's answer is the text '100', private.answer is the number 100" in " ".join(result.stdout.split())


def test_what_a_terminal_would_obey_is_shown(tmp_path: Path) -> None:
    text = Path(FILE).read_text("utf-8").replace("first = 100 *", "first = 0 *")
    (tmp_path / "colored.py").write_text(text.replace('f"{split}-{a}"', r'f"\x1b[31m{split}-{a}"'))
    found = validate(f"{tmp_path}/colored.py", "--only", "tasks.disjoint")
    assert 'are in train ("train") too; the first: \\x1b[31mdev-0' in found.stdout

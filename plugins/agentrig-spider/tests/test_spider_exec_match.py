"""`ExecMatch` and the two rewards: scores, caches, batches, threads and processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from agentrig_spider import ExecMatch
from agentrig_spider.rewards import exec_match, specs
from agentrig_spider.rewards.golds import is_volatile
from sqlite_files import sqlite_file

from agentrig import Outcome, Score, Task

ENDLESS = "WITH RECURSIVE r(i) AS (SELECT {} UNION ALL SELECT i + 1 FROM r) SELECT count(*) FROM r"
SCHEMA = "CREATE TABLE band (id INTEGER PRIMARY KEY, name TEXT, age INTEGER)"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    rows = [(1, "Ada", 30), (2, "Bo", 25), (3, "Cy", 41), (4, "Di", 25), (5, "Ed", None)]
    return sqlite_file(tmp_path / "band.sqlite", SCHEMA, band=rows)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the text of every query that reaches SQLite."""
    seen: list[str] = []
    run_query = exec_match.run_query

    def recording(path: str, mark: Any, sql: str, **more: Any) -> Any:
        seen.append(sql)
        return run_query(path, mark, sql, **more)

    monkeypatch.setattr(exec_match, "run_query", recording)
    return seen


@pytest.mark.parametrize("mode", ["official", "strict"])
@pytest.mark.parametrize(
    ("prediction", "wrong", "words"),
    [
        ("", "no-query", "empty"),
        ("SELECT nam FROM band", "error", "no such column"),
        ("SELECT name, id FROM band WHERE id < 3 ORDER BY id", "columns", "has 2 columns, the gold query 1"),
        ("SELECT name FROM band WHERE id < 2 ORDER BY id", "rows", "returns 1 row, the gold query 2"),
        ("SELECT name FROM band ORDER BY id", "rows", "returns more than 2 rows, the gold query 2"),
        ("SELECT name FROM band WHERE id > 9 ORDER BY id", "empty", "returns no row, the gold query returns 2 rows"),
        ("SELECT name FROM band WHERE id < 3 ORDER BY id DESC", "order", "in another order"),
        ("SELECT name FROM band WHERE id IN (1, 3) ORDER BY id", "values", "other values"),
    ],
)
def test_the_reason_why_an_answer_is_wrong(database: Path, mode: Any, prediction: str, wrong: str, words: str) -> None:
    score = ExecMatch(mode).score(prediction, "SELECT name FROM band WHERE id < 3 ORDER BY id", database)
    assert (score.value, score.details["wrong"]) == (0.0, wrong)
    assert words in score.details["reason"]


def test_a_right_and_a_wrong_answer(database: Path) -> None:
    match = ExecMatch()
    right = match.score("SELECT name FROM band WHERE age = 25", "SELECT name FROM band WHERE age < 30", str(database))
    wrong = match.score("SELECT name FROM band", "SELECT name FROM band WHERE age < 30", database)
    failing = match.score("SELEC name FROM band", "SELECT name FROM band", database)
    assert (right.status, right.value, right.components) == ("ok", 1.0, {"executes": 1.0})
    assert (wrong.status, wrong.value, wrong.components) == ("ok", 0.0, {"executes": 1.0})
    assert (failing.status, failing.value, failing.components) == ("ok", 0.0, {"executes": 0.0})
    assert "syntax error" in failing.details["reason"]


@pytest.mark.parametrize("predicted", [None, 1, ["SELECT 1"], {"sql": "SELECT 1"}, b"SELECT 1"])
def test_an_answer_that_is_no_text_is_invalid(database: Path, predicted: Any) -> None:
    score = ExecMatch().score(predicted, "SELECT 1", database)
    assert score.status == "invalid"
    assert type(predicted).__name__ in score.details["reason"]
    assert [score] == ExecMatch().score_many([(predicted, "SELECT 1", database)])


@pytest.mark.parametrize(
    ("arguments", "message"), [({"mode": "lax"}, "'official' or 'strict'"), ({"timeout_s": 0}, "above 0")]
)
def test_wrong_arguments_name_the_right_ones(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExecMatch(**arguments)


def test_a_gold_is_run_once_until_the_file_changes(database: Path, runs: list[str]) -> None:
    match = ExecMatch()
    for index in range(5):
        match.score(f"SELECT {index}", "SELECT count(*) FROM band", database)
    assert runs.count("SELECT count(*) FROM band") == 1
    os.utime(database, ns=(1, 1))
    match.score("SELECT 9", "SELECT count(*) FROM band", database)
    assert runs.count("SELECT count(*) FROM band") == 2


def test_a_gold_asked_for_by_many_threads_is_run_once(database: Path, runs: list[str]) -> None:
    match = ExecMatch()
    gold = "SELECT count(*) FROM band a, band b, band c, band d, band e, band f, band g"
    with ThreadPoolExecutor(6) as pool:
        scores = list(pool.map(lambda index: match.score(f"SELECT {index}", gold, database), range(6)))
    assert {score.value for score in scores} == {0.0}
    assert runs.count(gold) == 1


def test_equal_items_of_a_batch_are_scored_once(database: Path, runs: list[str]) -> None:
    items = [
        ("SELECT id FROM band", "SELECT id + 0 FROM band", database),
        ("SELECT 1", "SELECT id FROM band", database),
    ]
    scores = ExecMatch().score_many(items * 10)
    assert [score.value for score in scores] == [1.0, 0.0] * 10
    assert runs.count("SELECT id FROM band") == 2  # once as a prediction, once as a gold
    assert runs.count("SELECT 1") == 1


@pytest.mark.alone
def test_slow_items_of_a_batch_run_in_parallel(database: Path) -> None:
    items = [(ENDLESS.format(index), "SELECT 1", database) for index in range(4)]
    start = time.monotonic()
    scores = ExecMatch(timeout_s=0.8).score_many([*items, ("SELECT 1.0", "SELECT 1", database)])
    assert [score.status for score in scores] == ["timeout"] * 4 + ["ok"]
    assert time.monotonic() - start < 2.4


@pytest.mark.alone
def test_a_budget_shortens_the_timeout(database: Path) -> None:
    start = time.monotonic()
    score = ExecMatch(timeout_s=60).score(ENDLESS.format(1), "SELECT 1", database, budget_s=0.3)
    assert (score.status, score.value) == ("timeout", 0.0)
    assert "0.3 s" in score.details["reason"]
    assert time.monotonic() - start < 0.8


def test_a_changing_gold_is_not_kept(database: Path, runs: list[str]) -> None:
    match = ExecMatch()
    assert {match.score("SELECT random()", "SELECT random()", database).value for _ in range(2)} == {0.0}
    assert len(runs) == 4


@pytest.mark.parametrize(
    ("sql", "volatile"),
    [
        ("SELECT random()", True),
        ("SELECT date('now')", True),
        ("SELECT date ( )", True),
        ("SELECT strftime('%Y')", True),
        ("SELECT CURRENT_TIMESTAMP", True),
        ("SELECT strftime('%Y', d) FROM t", False),
        ("SELECT known, count(*) FROM t", False),
        ("SELECT date(d) FROM t", False),
    ],
)
def test_volatile_queries_are_recognized(sql: str, volatile: bool) -> None:
    assert is_volatile(sql) is volatile


def test_every_database_of_the_folder_counts(database: Path) -> None:
    sqlite_file(database.with_name("more.sqlite3"), SCHEMA, band=[(1, "Ada", 26)])
    gold = "SELECT name FROM band WHERE age < 30"
    assert ExecMatch().score("SELECT name FROM band WHERE age <= 29", gold, database).value == 1.0
    score = ExecMatch().score("SELECT name FROM band WHERE age = 25", gold, database)
    assert score.value == 0.0
    assert "more.sqlite3" in score.details["reason"]


def test_a_database_added_later_counts_at_once(database: Path) -> None:
    match = ExecMatch()
    for number in range(3):
        assert match.score("SELECT 5", "SELECT count(*) FROM band", database).value == 1.0
        extra = sqlite_file(database.with_name(f"extra{number}.sqlite"), "CREATE TABLE band (id)")
        assert match.score("SELECT 5", "SELECT count(*) FROM band", database).value == 0.0
        extra.unlink()


def _in_child(match: ExecMatch, database: str, answers: Any) -> None:
    values = [
        match.score(sql, "SELECT hex(id) FROM band", database).value
        for sql in ("SELECT hex(id) FROM band b", "SELECT 1")
    ]
    answers.put(values)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_share_nothing(database: Path, method: Any) -> None:
    match = ExecMatch()
    assert match.score("SELECT hex(id) FROM band x", "SELECT hex(id) FROM band", database).value == 1.0
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    arguments = (match if method == "fork" else ExecMatch, str(database), answers)
    target = _in_child if method == "fork" else _in_spawned
    children = [context.Process(target=target, args=arguments) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    assert [answers.get() for _ in children] == [[1.0, 0.0]] * 2
    assert match.score("SELECT hex(id) FROM band y", "SELECT hex(id) FROM band", database).value == 1.0


def _in_spawned(make: Any, database: str, answers: Any) -> None:
    _in_child(make(), database, answers)


def test_importing_is_light() -> None:
    code = (
        "import sys, agentrig_spider; print([name for name in ('sqlglot', 'sqlparse', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------- the rewards


def task(database: Path, **private: Any) -> Task:
    return Task(id="t", input={"question": "?", "db_id": "band", "database": str(database)}, private=private)


SPECS = pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.name)


@SPECS
def test_the_rewards_score_outcomes(database: Path, spec: Any) -> None:
    reward = spec.build(spec.config())
    good = task(database, gold="SELECT name FROM band")
    items = [
        (good, Outcome(answer="SELECT name FROM band;")),
        (good, Outcome(answer="SELECT age FROM band")),
        (good, Outcome(answer={"sql": "SELECT name FROM band"})),
        (good, Outcome(answer=None)),
        (task(database), Outcome(answer="SELECT 1")),
        (Task(id="x", input={}, private={"gold": "SELECT 1"}), Outcome(answer="SELECT 1")),
    ]
    expected = [("ok", 1.0), ("ok", 0.0), *[("invalid", None)] * 4]
    one_by_one = [reward(*item, 5.0) for item in items]
    batch = reward.score_many(items, 5.0)
    assert [(score.status, score.value) for score in one_by_one] == expected
    assert batch == one_by_one
    assert all(isinstance(score, Score) for score in batch)
    assert "dict" in batch[2].details["reason"]
    assert "private['gold']" in batch[4].details["reason"]


@SPECS
def test_a_database_that_changed_during_the_run_is_not_used(database: Path, spec: Any) -> None:
    """An empty database would make any prediction match."""
    reward = spec.build(spec.config())
    asked = task(database, gold="SELECT name FROM band WHERE age > 30")
    assert reward(asked, Outcome(answer="SELECT name FROM band WHERE age < 0"), 5.0).value == 0.0
    sqlite_file(database, "DELETE FROM band")
    again = [reward(asked, Outcome(answer="SELECT name FROM band WHERE age < 0"), 5.0)]
    again += reward.score_many([(asked, Outcome(answer="SELECT name FROM band WHERE age < 0"))], 5.0)
    assert [score.status for score in again] == ["invalid", "invalid"]
    assert "band.sqlite was changed or replaced during the run" in again[0].details["reason"]
    assert spec.build(spec.config())(asked, Outcome(answer="SELECT name FROM band WHERE age < 0"), 5.0).value == 1.0


def test_settings_reach_the_reward(database: Path) -> None:
    spec: Any = next(spec for spec in specs() if spec.name == "spider-exec")
    reward = spec.build(spec.config(timeout_s=0.2))
    assert reward(task(database, gold="SELECT 1"), Outcome(answer=ENDLESS.format(1)), 60.0).status == "timeout"
    with pytest.raises(ValueError, match="timeout_s"):
        spec.config(timeout_s=0)

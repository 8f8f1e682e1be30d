"""mini-sql: equal bytes for equal seeds, disjoint splits, questions that distinguish right queries from wrong ones."""

from __future__ import annotations

import hashlib
import os
import random
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from agentrig_spider.tasks import mini_sql
from agentrig_spider.tasks.domains import SEEN, UNSEEN
from agentrig_spider.tasks.mini_sql import MiniSql, MiniSqlConfig
from agentrig_spider.tasks.questions import mutants, questions_of
from agentrig_spider.tasks.wordings import CONDITIONS, INTENTS

from agentrig import Task
from agentrig.errors import AgentrigError, ConfigError

GENERATE = "import sys; from pathlib import Path; from agentrig_spider.tasks.mini_sql import generate; "
GENERATE += "generate(Path(sys.argv[1]), seed=int(sys.argv[2]))"


def in_a_process(target: Path, *, seed: int = 0, hash_seed: str = "1") -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.Popen([sys.executable, "-c", GENERATE, str(target), str(seed)], env=environment)


def bytes_of(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> MiniSql:
    return MiniSql(MiniSqlConfig(cache=str(tmp_path_factory.mktemp("cache"))))


@pytest.fixture(scope="module")
def splits(tasks: MiniSql) -> dict[str, list[Task]]:
    return {split: list(tasks.load(split)) for split in tasks.splits}


def rows_of(task: Task, sql: str) -> list[str] | None:
    connection = sqlite3.connect(f"file:{task.input['database']}?mode=ro", uri=True)
    try:
        rows = [repr(row) for row in connection.execute(sql)]
    except sqlite3.Error:
        return None
    finally:
        connection.close()
    return rows if "ORDER BY" in task.private["gold"] else sorted(rows)


def test_the_same_seed_gives_the_same_bytes_whatever_the_hash_seed(tasks: MiniSql, tmp_path: Path) -> None:
    assert in_a_process(tmp_path / "again", hash_seed="77").wait() == 0
    again = bytes_of(tmp_path / "again")
    assert len(again) == len(SEEN) + len(UNSEEN) + len(tasks.splits)
    assert again == bytes_of(tasks.folder)


@pytest.mark.slow
def test_two_processes_may_generate_at_once(tasks: MiniSql, tmp_path: Path) -> None:
    both = [in_a_process(tmp_path / "cache" / "same") for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert bytes_of(tmp_path / "cache" / "same") == bytes_of(tasks.folder)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["same"]


def test_a_crash_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, made = mini_sql.write_database, []

    def fails_at_the_third(*args: object) -> None:
        made.append(args)
        if len(made) == 3:
            raise OSError("disk full")
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(mini_sql, "write_database", fails_at_the_third)
    with pytest.raises(OSError, match="disk full"):
        mini_sql.generate(tmp_path / "cache" / "x", seed=0)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_splits_are_large_enough_and_apart(splits: dict[str, list[Task]]) -> None:
    questions = {name: {(t.input["db_id"], t.private["gold"]) for t in found} for name, found in splits.items()}
    assert len(questions["test"]) == len(splits["test"]) >= 300
    assert len(questions["unseen"]) == len(splits["unseen"]) >= 300
    assert len(questions["dev"]) >= 200
    names = list(questions)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert not questions[one] & questions[other], (one, other)
    databases = {name: {db for db, _ in found} for name, found in questions.items()}
    assert databases["train"] == databases["dev"] == databases["test"] == {d.name for d in SEEN}
    assert len(databases["train"]) >= 12
    assert databases["unseen"] == {d.name for d in UNSEEN}
    ids = [t.id for found in splits.values() for t in found]
    assert len(ids) == len(set(ids))


def test_roles_keep_the_reported_split_out_of_training(tasks: MiniSql) -> None:
    assert tasks.roles == {"train": "train", "validation": "dev", "report": "test"}
    assert not {"train", "dev"} & set(tasks.held_out)


def test_an_agent_sees_question_and_database_only(splits: dict[str, list[Task]]) -> None:
    for task in splits["test"]:
        assert set(task.input) == {"question", "db_id", "database"}
        assert Path(task.input["database"]).is_file()
        assert task.private["gold"] not in task.input["question"]


def test_a_question_text_has_one_meaning(splits: dict[str, list[Task]]) -> None:
    asked = defaultdict(set)
    for found in splits.values():
        for task in found:
            asked[task.input["db_id"], task.input["question"]].add(task.private["gold"])
    assert not {text: golds for text, golds in asked.items() if len(golds) > 1}


def test_questions_come_in_several_wordings(splits: dict[str, list[Task]]) -> None:
    frames = defaultdict(set)
    for task in splits["train"]:
        frames[task.private["intent"]].add(task.private["frame"])
    for intent in INTENTS:
        assert len(intent.frames) >= 3, intent.name
        assert frames[intent.name] == set(range(len(intent.frames))), intent.name
    assert min(len(ways) for ways in CONDITIONS.values()) >= 5
    assert not [t for t in splits["train"] if re.search(r"[{}<>]|\s\s|\s[.?,]", t.input["question"])]


@pytest.mark.parametrize("split", ["test", "unseen"])
def test_every_gold_query_returns_something(splits: dict[str, list[Task]], split: str) -> None:
    for task in splits[split]:
        rows = rows_of(task, task.private["gold"])
        assert rows, task
        assert rows not in (["(0,)"], ["(None,)"]), task


@pytest.mark.slow
@pytest.mark.parametrize("split", ["test", "unseen"])
def test_the_answer_to_another_question_is_rarely_right(splits: dict[str, list[Task]], split: str) -> None:
    by_database = defaultdict(list)
    for task in splits[split]:
        by_database[task.input["db_id"]].append(task)
    right = tried = 0
    for found in by_database.values():
        for task in found:
            gold = rows_of(task, task.private["gold"])
            others = [rows_of(task, other.private["gold"]) for other in found if other is not task]
            right += sum(rows == gold for rows in others)
            tried += len(others)
    assert tried > 5000
    assert right / tried < 0.005


def test_no_mutant_of_the_generator_is_right(tasks: MiniSql) -> None:
    domain = SEEN[0]
    path = tasks.folder / "database" / domain.name / f"{domain.name}.sqlite"
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    questions = questions_of(domain, connection, 1, random.Random("other questions than the task set's"))
    assert len({q.intent.name for q in questions}) > 20
    for question in questions:
        gold = connection.execute(question.sql).fetchall()
        wrong = set(mutants(question, domain))
        assert wrong
        assert question.sql not in wrong
        for sql in wrong:
            try:
                rows = connection.execute(sql).fetchall()
            except sqlite3.Error:
                continue
            assert (rows if "ORDER" in sql else sorted(map(repr, rows))) != (
                gold if "ORDER" in sql else sorted(map(repr, gold))
            ), (question.sql, sql)
    connection.close()


def test_an_unknown_split_names_the_known_ones(tasks: MiniSql) -> None:
    with pytest.raises(ConfigError, match=r'no split .tests.\. Did you mean "test"\? It has train, dev, test, unseen'):
        tasks.load("tests")


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTRIG_CACHE", str(tmp_path / "here"))
    assert mini_sql.cache_folder() == tmp_path / "here"
    monkeypatch.delenv("AGENTRIG_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    assert mini_sql.cache_folder() == tmp_path / "there" / "agentrig"


def test_the_databases_are_below_the_root_of_their_tasks(tasks: MiniSql) -> None:
    task = tasks.load("dev")[0]
    assert (
        task.under("/elsewhere").input["database"]
        == f"/elsewhere/database/{task.input['db_id']}/{task.input['db_id']}.sqlite"
    )


def modes(folder: Path) -> dict[str, set[int]]:
    return {
        kind: {path.stat().st_mode & 0o777 for path in folder.glob(pattern)}
        for kind, pattern in (("gold", "*.jsonl"), ("databases", "database/*/*.sqlite"))
    }


def test_only_the_owner_reads_gold_and_databases_are_read_only(tasks: MiniSql) -> None:
    assert modes(tasks.folder) == {"gold": {0o600}, "databases": {0o444}}


def test_a_cache_of_an_older_version_gets_these_permissions(tasks: MiniSql) -> None:
    for path in tasks.folder.rglob("*.*"):
        if path.is_file():
            path.chmod(0o644)
    tasks.load("dev")
    assert modes(tasks.folder) == {"gold": {0o600}, "databases": {0o444}}


AS_NOBODY = """
import os, sqlite3, sys
os.setgid(65534); os.setuid(65534)
try:
    open(sys.argv[1]).read()
    print("read")
except PermissionError:
    print("refused")
connection = sqlite3.connect("file:" + sys.argv[2] + "?mode=ro&immutable=1", uri=True)
print(len(connection.execute("SELECT * FROM sqlite_master").fetchall()))
(table,) = connection.execute("SELECT name FROM sqlite_master").fetchone()
try:
    sqlite3.connect(sys.argv[2]).execute("DROP TABLE " + table)
    print("written")
except sqlite3.OperationalError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_agent_in_a_sandbox_of_another_user_reads_databases_and_no_gold() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        tasks = MiniSql(MiniSqlConfig(cache=name))
        task = tasks.load("dev")[0]
        words = [sys.executable, "-c", AS_NOBODY, str(tasks.folder / "dev.jsonl"), task.input["database"]]
        done = subprocess.run(words, capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.splitlines() == ["refused", "2", "attempt to write a readonly database"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_cache_of_another_user_is_refused_with_a_message() -> None:
    code = (
        "import os, sys; from agentrig_spider.tasks.mini_sql import MiniSql, MiniSqlConfig\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: MiniSql(MiniSqlConfig(cache=sys.argv[1])).load('dev')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        MiniSql(MiniSqlConfig(cache=name)).load("dev")
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("AgentrigError")
    assert "dev.jsonl can't be read" in done.stdout
    assert "AGENTRIG_CACHE" in done.stdout


@pytest.mark.parametrize("home", ["/proc", "/dev/null"])
def test_a_cache_folder_that_cannot_be_made_is_named(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGENTRIG_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home)
    with pytest.raises(AgentrigError, match=rf"cache folder {home}/\.cache/agentrig/mini-sql: .*AGENTRIG_CACHE"):
        mini_sql.generate(mini_sql.cache_folder() / "mini-sql" / "v1", seed=0)

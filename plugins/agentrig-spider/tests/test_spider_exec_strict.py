"""Mode `strict`: which results it accepts as equal, and which it no longer accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
from agentrig_spider import ExecMatch
from agentrig_spider.rewards.sql import NotAQuery, read_select
from sqlite_files import sqlite_file


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sqlite_file(
        tmp_path_factory.mktemp("strict") / "band.sqlite",
        """
        CREATE TABLE band (id INTEGER PRIMARY KEY, name TEXT, country TEXT, age INTEGER, score REAL);
        INSERT INTO band VALUES (1,'Ada','France',30,1.5),(2,'Bo','Spain',25,2.0),(3,'Cy','France',41,2.0),
            (4,'Di','Japan',25,0.1),(5,'Ed',NULL,52,0.2),(6,'Flo','Japan',30,7.25);
        CREATE TABLE gig (gid INTEGER PRIMARY KEY, band_id INTEGER, venue TEXT COLLATE NOCASE);
        INSERT INTO gig VALUES (1,1,'North'),(2,1,'north'),(3,2,'East'),(4,3,'south'),(5,3,'South'),(6,6,'North');
        CREATE VIEW old AS SELECT * FROM band WHERE age > 29;
        """,
    )


STRICT = ExecMatch("strict")


def value(predicted: str, gold: str, database: Path) -> float | None:
    score = STRICT.score(predicted, gold, database)
    assert score.status == "ok", score
    return score.value


@pytest.mark.parametrize(
    ("predicted", "gold"),
    [
        ("SELECT name FROM band;", "SELECT name FROM band"),
        ("WITH x AS (SELECT * FROM band) SELECT name FROM x", "SELECT name FROM band"),
        ("SELECT age, name FROM band", "SELECT name, age FROM band"),
        ("SELECT country FROM band GROUP BY country", "SELECT DISTINCT country FROM band"),
        # numbers within the tolerance
        ("SELECT 0.3 FROM band", "SELECT 0.1 + 0.2 FROM band"),
        ("SELECT sum(score) * 1.0 / count(*) FROM band", "SELECT avg(score) FROM band"),
        ("SELECT id * 1.0, age FROM band", "SELECT id, age FROM band"),
        # ties by the sort keys
        ("SELECT name FROM band ORDER BY age, name DESC", "SELECT name FROM band ORDER BY age"),
        ("SELECT name FROM band ORDER BY age, name", "SELECT name FROM band ORDER BY age"),
        ("SELECT name, age FROM band ORDER BY 2, name DESC", "SELECT name, age FROM band ORDER BY 2"),
        ("SELECT name, age y FROM band ORDER BY y, 1 DESC", "SELECT name, age AS y FROM band ORDER BY y"),
        ("SELECT name FROM band ORDER BY age * 2, id DESC", "SELECT name FROM band ORDER BY age * 2 LIMIT 10"),
        # ... of which LIMIT may keep any
        ("SELECT name FROM band WHERE name = 'Di'", "SELECT name FROM band ORDER BY age LIMIT 1"),
        ("SELECT name FROM band WHERE name = 'Bo'", "SELECT name FROM band ORDER BY age LIMIT 1"),
        ("SELECT name FROM band WHERE name = 'Bo'", "SELECT name FROM band ORDER BY age LIMIT 1 OFFSET 1"),
        ("SELECT name FROM band WHERE name = 'Bo'", "SELECT name FROM band ORDER BY age LIMIT 1, 1"),
        (
            "SELECT country, count(*) FROM band GROUP BY 1 HAVING country = 'Japan'",
            "SELECT country, count(*) FROM band GROUP BY 1 ORDER BY count(*) DESC LIMIT 1",
        ),
        # by the collation of the column
        ("SELECT gid FROM gig ORDER BY venue, gid DESC", "SELECT gid FROM gig ORDER BY venue"),
        # order in a subquery or a window is not the result's
        ("SELECT name FROM band WHERE age > 30", "SELECT name FROM (SELECT * FROM band ORDER BY id) WHERE age > 30"),
        (
            "SELECT name, rank() OVER (ORDER BY id) FROM band ORDER BY 1 DESC",
            "SELECT name, rank() OVER (ORDER BY id) FROM band",
        ),
        ("SELECT name FROM band WHERE age > 29", "SELECT name FROM old"),
        ("SELECT id FROM band WHERE age > = 30", "SELECT id FROM band WHERE age >= 30"),
        ('SELECT id FROM band WHERE country = "Japan"', "SELECT id FROM band WHERE country = 'Japan'"),
        ("SELECT name FROM band WHERE 0", "SELECT name FROM band WHERE age > 99"),
    ],
)
def test_right(predicted: str, gold: str, database: Path) -> None:
    assert value(predicted, gold, database) == 1.0


@pytest.mark.parametrize(
    ("predicted", "gold"),
    [
        ("SELECT country FROM band", "SELECT DISTINCT country FROM band"),
        ("SELECT DISTINCT country FROM band", "SELECT country FROM band"),
        ("SELECT count(DISTINCT *) FROM band", "SELECT count(*) FROM band"),
        # order
        ("SELECT name FROM band ORDER BY age DESC", "SELECT name FROM band ORDER\nBY age"),
        ("SELECT name FROM band", "SELECT name FROM band ORDER BY age"),
        ("SELECT name FROM band ORDER BY name", "SELECT name FROM band ORDER  BY age"),
        ("SELECT name FROM band WHERE name = 'Ada'", "SELECT name FROM band ORDER BY age LIMIT 1"),
        ("SELECT name FROM band WHERE name = 'Ada'", "SELECT name FROM band ORDER BY age LIMIT 1 OFFSET 1"),
        (
            "SELECT name FROM band WHERE id IN (2, 4) UNION ALL SELECT name FROM band WHERE id = 2",
            "SELECT name FROM band ORDER BY age LIMIT 3",
        ),
        # empty results
        ("SELECT id, name FROM band WHERE 0", "SELECT name FROM band WHERE age > 99"),
        # text is no number, whole numbers are exact
        ("SELECT CAST(id AS TEXT) FROM band", "SELECT id FROM band"),
        ("SELECT id + 1000000000000 FROM band", "SELECT id + 1000000000001 FROM band"),
        ("SELECT round(avg(score), 2) FROM band", "SELECT avg(score) FROM band"),
        # statements
        ("SELECT name FROM band; SELECT 1", "SELECT name FROM band"),
        ("SELECT name FROM band; DROP TABLE band", "SELECT name FROM band"),
        ("VALUES ('Bo'), ('Di')", "SELECT name FROM band WHERE age = 25"),
        ("SELECT * FROM (VALUES ('Bo'), ('Di'))", "SELECT name FROM band WHERE age = 25"),
        (
            "WITH x(n) AS (VALUES ('Bo'), ('Di')) SELECT n FROM x, band GROUP BY n",
            "SELECT name FROM band WHERE age = 25",
        ),
        ("WITH x AS (SELECT 1) DELETE FROM band RETURNING name", "SELECT name FROM band"),
        ("BEGIN", "SELECT name FROM band WHERE age > 99"),
        ("PRAGMA foreign_keys", "SELECT 0 FROM band WHERE id = 1"),
        ("EXPLAIN SELECT name FROM band", "SELECT name FROM band"),
        ("", "SELECT name FROM band WHERE age > 99"),
        ("-- nothing", "SELECT name FROM band WHERE age > 99"),
        # constants
        ("SELECT 6", "SELECT count(*) FROM band"),
        ("SELECT 'Bo' UNION SELECT 'Di'", "SELECT name FROM band WHERE age = 25"),
        ("SELECT count(*) FROM gig", "SELECT count(*) FROM band"),
    ],
)
def test_wrong(predicted: str, gold: str, database: Path) -> None:
    assert value(predicted, gold, database) == 0.0


@pytest.mark.parametrize("gold", ["SELECT 1; SELECT 2", "", "VALUES (1)", "DELETE FROM band", "SELECT nope FROM band"])
def test_a_gold_that_is_no_single_select_is_invalid(gold: str, database: Path) -> None:
    score = STRICT.score("SELECT 1", gold, database)
    assert score.status == "invalid"
    assert "gold" in score.details["reason"]


def test_a_gold_without_tables_asks_for_none(database: Path) -> None:
    assert value("SELECT 2 - 1", "SELECT 1", database) == 1.0


def test_the_perturbed_copies_count(tmp_path: Path) -> None:
    database = tmp_path / "band.sqlite"
    copy = tmp_path / "perturbed" / "band-0-1.sqlite"
    copy.parent.mkdir()
    for path, ages in ((database, (25, 40)), (copy, (27, 40))):
        sqlite_file(path, "CREATE TABLE band (id INTEGER PRIMARY KEY, age INTEGER)", band=enumerate(ages))
    lucky, gold = "SELECT id FROM band WHERE age = 25", "SELECT id FROM band WHERE age < 30"
    assert ExecMatch("official").score(lucky, gold, database).value == 1.0
    score = ExecMatch("strict").score(lucky, gold, database)
    assert score.value == 0.0
    assert "band-0-1.sqlite" in score.details["reason"]
    assert ExecMatch("strict").score("SELECT id FROM band WHERE age <= 29", gold, database).value == 1.0
    elsewhere = tmp_path / "copies" / "band"
    elsewhere.mkdir(parents=True)
    copy.rename(elsewhere / copy.name)
    assert ExecMatch("strict").score(lucky, gold, database).value == 1.0
    assert ExecMatch("strict", copies=tmp_path / "copies").score(lucky, gold, database).value == 0.0


@pytest.mark.parametrize(
    ("sql", "order"),
    [
        ("SELECT a FROM t ORDER BY a, b DESC NULLS LAST LIMIT 3", [["A"], ["B"]]),
        ("SELECT a FROM t ORDER /* x */ BY max(a, b) ASC", [["MAX", "(", "A", ",", "B", ")"]]),
        ("SELECT (SELECT a FROM t ORDER BY a)", []),
        ("SELECT 'ORDER BY a' AS \"ORDER BY b\"", []),
        ("WITH x AS (SELECT a FROM t ORDER BY a) SELECT a FROM x ORDER BY 1", [["1"]]),
        ("SELECT a FROM t UNION SELECT b FROM u ORDER BY a -- LIMIT 1", [["A"]]),
    ],
)
def test_the_outermost_order_is_read(sql: str, order: list[list[str]]) -> None:
    assert [[token.text for token in term] for term in read_select(sql).order] == order


@pytest.mark.parametrize(
    "sql",
    ["SELECT 1; SELECT 2", "", ";", "VALUES (1)", "SELECT * FROM (VALUES (1))", "WITH x AS (SELECT 1) DELETE FROM t"],
)
def test_what_is_no_single_select(sql: str) -> None:
    with pytest.raises(NotAQuery):
        read_select(sql)


@pytest.mark.parametrize(
    "sql", ["SELECT 1;", "SELECT ';'", "SELECT replace(a, 'x', 'y') FROM t ; ;", "SELECT 1 -- ; x"]
)
def test_what_is_a_single_select(sql: str) -> None:
    assert read_select(sql).text.startswith("SELECT")

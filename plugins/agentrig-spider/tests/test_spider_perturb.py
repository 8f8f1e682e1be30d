"""Perturbed copies: other rows with the same schema, keys and constraints, and equal copies for equal seeds."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from agentrig_spider import ExecMatch
from agentrig_spider.perturb import perturb, perturb_command
from click.testing import CliRunner
from sqlite_files import sqlite_file

from agentrig import AgentrigError

SCHEMA = """
CREATE TABLE country (code TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, people INTEGER CHECK (people >= 0));
CREATE TABLE band (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, code TEXT REFERENCES country, age INTEGER,
    born INTEGER, died INTEGER, CHECK (died IS NULL OR died > born));
CREATE TABLE gig (band_id INTEGER, year INTEGER, seats INTEGER, PRIMARY KEY (band_id, year),
    FOREIGN KEY (band_id) REFERENCES band (id));
CREATE TABLE tag (name TEXT PRIMARY KEY, weight REAL) WITHOUT ROWID;
CREATE TABLE log (what TEXT, twice INTEGER GENERATED ALWAYS AS (length(what) * 2) VIRTUAL);
CREATE VIEW old AS SELECT * FROM band WHERE age > 40;
CREATE TRIGGER watch AFTER UPDATE ON band BEGIN DELETE FROM gig; END;
CREATE INDEX by_age ON band (age);
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return sqlite_file(
        tmp_path / "band.sqlite",
        SCHEMA + "".join(f"INSERT INTO log (what) VALUES ('{'x' * i}');" for i in range(9)),
        country=[(c, f"Land {c}", ord(c)) for c in "ABCDEF"],
        band=[(i, f"n{i}", "ABCDEF"[i % 5], 20 + i % 40, 1900 + i, 2000 + i) for i in range(60)],
        gig=[(i, 2000 + y, i * y) for i in range(20) for y in (1, 2)],
        tag=[(f"t{i}", i / 7) for i in range(9)],
    )


def rows(path: Path, sql: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def test_rows_change_and_the_schema_stays(source: Path, tmp_path: Path) -> None:
    before = source.read_bytes()
    target = tmp_path / "copies" / "band-0-1.sqlite"
    done = perturb(source, target, seed=1)
    assert source.read_bytes() == before
    assert done["removed"] > 0
    assert done["added"] > 0
    assert done["replaced"] > 50
    schema = "SELECT type, name, sql FROM sqlite_master ORDER BY 1, 2"
    assert rows(target, schema) == rows(source, schema)
    assert rows(target, "SELECT * FROM band") != rows(source, "SELECT * FROM band")
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize("seed", range(8))
def test_keys_and_constraints_hold(source: Path, tmp_path: Path, seed: int) -> None:
    target = tmp_path / "copy.sqlite3"
    perturb(source, target, seed=seed)
    assert rows(target, "PRAGMA foreign_key_check") == []
    assert rows(target, "PRAGMA integrity_check") == [("ok",)]
    assert rows(target, "SELECT count(*) FROM band WHERE name IS NULL OR NOT died > born") == [(0,)]
    assert rows(target, "SELECT count(*) FROM country") >= [(2,)]
    known = {name for (name,) in rows(source, "SELECT name FROM band")}
    assert {name for (name,) in rows(target, "SELECT name FROM band")} <= known
    assert rows(target, "SELECT count(*) FROM gig") > [(0,)]  # the trigger did not fire


def test_each_seed_gives_one_copy(source: Path, tmp_path: Path) -> None:
    copies: Sequence[Path] = [tmp_path / f"copy{index}.db" for index in range(3)]
    for copy, seed in zip(copies, (1, 1, 2), strict=True):
        perturb(source, copy, seed=seed)
    assert copies[0].read_bytes() == copies[1].read_bytes()
    assert copies[0].read_bytes() != copies[2].read_bytes()


def test_a_query_that_is_right_by_chance_fails(source: Path) -> None:
    gold, lucky = "SELECT count(*) FROM band", "SELECT (SELECT count(*) FROM gig) + 20 FROM band LIMIT 1"
    assert ExecMatch("strict").score(lucky, gold, source).value == 1.0
    done = CliRunner().invoke(perturb_command, [str(source), "--copies", "2"])
    assert done.exit_code == 0, done.output
    assert len(list((source.parent / "perturbed").iterdir())) == 2
    match = ExecMatch("strict")
    assert match.score(lucky, gold, source).value == 0.0
    assert match.score("SELECT count(id) FROM band", gold, source).value == 1.0


def test_the_command_walks_folders_and_skips_copies(source: Path, tmp_path: Path) -> None:
    for _ in range(2):
        done = CliRunner().invoke(perturb_command, [str(tmp_path), "--copies", "1", "--json"])
        assert done.exit_code == 0, done.output
        (line,) = json.loads(done.output)
        assert line["copy"] == str(tmp_path / "perturbed" / "band-0-1.sqlite")
    out = tmp_path / "elsewhere"
    CliRunner().invoke(perturb_command, [str(source), "--copies", "1", "--seed", "7", "--out", str(out)])
    assert [path.name for path in (out / "band").iterdir()] == ["band-7-1.sqlite"]


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    garbage = tmp_path / "x.sqlite"
    garbage.write_bytes(b"garbage" * 1000)
    with pytest.raises(AgentrigError, match="intact SQLite"):
        perturb(garbage, tmp_path / "y.sqlite", seed=0)
    assert not (tmp_path / "y.sqlite.part").exists()
    done = CliRunner().invoke(perturb_command, [str(tmp_path / "none")])
    assert isinstance(done.exception, AgentrigError)
    assert "does not exist" in str(done.exception)

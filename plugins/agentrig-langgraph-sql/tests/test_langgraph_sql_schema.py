from __future__ import annotations

import importlib.util
import os
import re
import sqlite3
from pathlib import Path

import attrs
import pytest
from agentrig_langgraph_sql.database import DatabaseBroken
from agentrig_langgraph_sql.schema import STYLES, Table, quoted, render, schema_text
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlite_files import sqlite_file

SPIDER = Path(os.environ.get("AGENTRIG_SPIDER_DIR") or Path(__file__).parents[4] / "shared" / "spider")


def test_every_name_of_the_spaced_form_follows_a_space(zoo: Path) -> None:
    assert schema_text(zoo, style="spaced") == "table species: id name legs\ntable animal: id name species_id born"


def test_views_and_odd_names_are_shown(tmp_path: Path) -> None:
    schema = 'CREATE TABLE "two words" ("a b" INTEGER, c); CREATE VIEW v AS SELECT c FROM "two words";'
    path = sqlite_file(tmp_path / "odd.sqlite", schema)
    assert schema_text(path, style="compact") == '"two words"("a b",c)\nv(c)'
    assert schema_text(path).endswith('CREATE VIEW v AS SELECT c FROM "two words";')


def test_a_quoted_name_means_the_same_name() -> None:
    connection = sqlite3.connect(":memory:")
    try:
        for name in ("plain", "two words", 'a"b', "1st", "é"):
            assert connection.execute(f"SELECT 1 AS {quoted(name)}").description[0][0] == name
    finally:
        connection.close()


def test_a_changed_file_is_read_again(zoo: Path) -> None:
    before = schema_text(zoo, style="compact")
    sqlite_file(zoo, "CREATE TABLE keeper (name)")
    assert schema_text(zoo, style="compact") == f"{before}\nkeeper(name)"


def test_an_unchanged_file_is_read_once(zoo: Path) -> None:
    first = schema_text(zoo)
    assert schema_text(str(zoo)) is first


def test_what_is_missing_is_named(zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        schema_text(tmp_path / "nowhere.sqlite")
    with pytest.raises(ValueError, match="use one of create, compact, spaced"):
        schema_text(zoo, style="short")
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(b"no database" * 100)
    with pytest.raises(DatabaseBroken):
        schema_text(damaged)


def test_sample_rows_follow_their_table(zoo: Path) -> None:
    assert schema_text(zoo, sample_rows=2) == (
        "CREATE TABLE species (id INTEGER PRIMARY KEY, name TEXT, legs INTEGER);\n"
        "/*\n2 rows from species table:\nid\tname\tlegs\n1\tcat\t4\n2\tcrane\t2\n*/\n\n"
        "CREATE TABLE animal (id INTEGER PRIMARY KEY, name TEXT, species_id INT REFERENCES species (id), born INT);\n"
        "/*\n2 rows from animal table:\nid\tname\tspecies_id\tborn\n1\tTom\t1\t2019\n2\tAnn\t2\t2020\n*/"
    )
    assert "3 rows from animal table:" in schema_text(zoo, style="compact", sample_rows=3)
    assert "Kaa\t3\tNULL" in schema_text(zoo, sample_rows=3)
    assert "rows from" not in schema_text(zoo)
    with pytest.raises(ValueError, match="from 0 to 3"):
        schema_text(zoo, sample_rows=4)


def test_a_sample_row_cannot_break_out_of_its_comment_or_line(tmp_path: Path) -> None:
    path = sqlite_file(
        tmp_path / "odd.sqlite",
        """
        CREATE TABLE t (a, b);
        INSERT INTO t VALUES ('x */ DROP TABLE t', 'two' || char(10) || 'lines' || char(9) || '.'), (x'00ff', NULL);
        CREATE TABLE none (a);
        CREATE VIEW v AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) AS i FROM n;
        """,
        t=[("y" * 5000, 1.5)],
    )
    comment = schema_text(path, style="compact", sample_rows=3)
    rows = [r"x * / DROP TABLE t	two\nlines\t.".replace(r"t	two", "t\ttwo"), "x'00ff'\tNULL", "y" * 100 + "\t1.5"]
    assert comment == "t(a,b)\n/*\n3 rows from t table:\na\tb\n" + "\n".join(rows) + "\n*/\nnone(a)\nv(i)"


def test_a_table_with_a_value_that_is_too_long_has_no_sample_rows(tmp_path: Path) -> None:
    path = sqlite_file(tmp_path / "long.sqlite", "CREATE TABLE t (a); INSERT INTO t VALUES (zeroblob(20000000))")
    assert schema_text(path, sample_rows=3) == "CREATE TABLE t (a);"


@pytest.mark.skipif(importlib.util.find_spec("langchain_community") is None, reason="needs langchain-community")
@pytest.mark.filterwarnings("ignore")
def test_sample_rows_are_those_of_langchain(zoo: Path) -> None:
    """Compare the comments, not the statements around them, which are the database's own here."""
    from langchain_community.utilities import SQLDatabase

    sqlite_file(zoo, "UPDATE animal SET born = 0 WHERE born IS NULL")  # shown as None there
    theirs = SQLDatabase.from_uri(f"sqlite:///file:{zoo}?mode=ro&immutable=1&uri=true").get_table_info()
    comments = re.compile(r"/\*\n.*?\n\*/", re.DOTALL)
    assert sorted(comments.findall(schema_text(zoo, sample_rows=3))) == sorted(comments.findall(theirs))


TABLES = st.lists(
    st.builds(
        lambda name, columns: Table(
            name, columns, f"CREATE TABLE {name} (\n  {', '.join(f'{c} TEXT' for c in columns)}\n)"
        ),
        st.from_regex(r"[a-z]{1,12}", fullmatch=True),
        st.lists(st.from_regex(r"[a-z]{1,20}", fullmatch=True), min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=50)  # a shared machine may stall any example
@given(TABLES, st.integers(100, 1500))
def test_a_statement_is_complete_or_left_out_with_a_note(tables: list[Table], limit: int) -> None:
    text = render(tables, style="create", limit=limit)
    assert len(text) <= limit
    statements = [f"{table.sql};" for table in tables]
    if text in ("\n\n".join(statements), "\n".join(table.compact for table in tables)):
        return  # nothing is lost, or only the form of the statements
    rest = text
    for statement in sorted(set(statements), key=len, reverse=True):
        rest = rest.replace(statement, "")
    assert "CREATE TABLE" not in rest  # no statement is cut off
    assert "too long" in text or "left out" in text


@settings(deadline=None, max_examples=50)  # a shared machine may stall any example
@given(TABLES, st.integers(100, 600))
def test_the_compact_form_keeps_whole_lines(tables: list[Table], limit: int) -> None:
    text = render(tables, style="compact", limit=limit)
    assert len(text) <= limit
    lines = text.splitlines()
    whole = [table.compact for table in tables]
    if lines != whole:
        assert lines[:-1] == whole[: len(lines) - 1]
        assert lines[-1] == f"-- {len(whole) - len(lines) + 1} more tables left out"


def test_tables_that_do_not_fit_are_still_named() -> None:
    wide = Table("wide", ["a", "b"], "CREATE TABLE wide (a TEXT, b TEXT) -- " + "x" * 500)
    narrow = Table("narrow", ["c"], "CREATE TABLE narrow (c TEXT)")
    assert render([wide, narrow], style="create", limit=200) == (
        "CREATE TABLE narrow (c TEXT);\n\n"
        "-- The schema is too long to show in full: these tables only by name and columns.\n"
        "-- wide(a,b)"
    )


ROWS = st.lists(st.tuples(st.integers(), st.text("ab \t\n*/", max_size=30)), max_size=3)


@settings(deadline=None, max_examples=100)
@given(TABLES, st.data(), st.integers(100, 1500), st.sampled_from(STYLES))
def test_a_sample_row_is_complete_or_left_out(tables: list[Table], data: st.DataObject, limit: int, style: str) -> None:
    tables = [
        attrs.evolve(table, name=f"{table.name}{i}", columns=["a", "b"], rows=data.draw(ROWS))
        for i, table in enumerate(tables)
    ]
    text = render(tables, style=style, limit=limit)
    assert len(text) <= limit
    bare = render([attrs.evolve(table, rows=()) for table in tables], style=style, limit=limit)
    comments = re.findall(r"\n/\*\n(\d) rows from (\w+) table:\n(.*?)\n\*/", text, re.DOTALL)
    assert re.sub(r"\n/\*\n\d rows from.*?\n\*/", "", text, flags=re.DOTALL) == bare  # rows do not displace the schema
    for n, name, lines in comments:
        table = next(table for table in tables if table.name == name)
        assert table.sample(int(n)).endswith(f"{lines}\n*/")
        assert len(lines.split("\n")) == 1 + int(n)


@pytest.mark.skipif(not SPIDER.is_dir(), reason="needs Spider: set AGENTRIG_SPIDER_DIR")
def test_every_spider_schema_fits_with_all_its_tables() -> None:
    for path in SPIDER.glob("*database/*/*.sqlite"):
        compact = schema_text(path, style="compact", limit=10**6).splitlines()
        text = schema_text(path, limit=2048)
        assert len(text) <= 2048
        if "left out" not in text:
            assert text.count("CREATE ") + text.count("\n-- ") >= len(compact), path


@pytest.mark.skipif(not SPIDER.is_dir(), reason="needs Spider: set AGENTRIG_SPIDER_DIR")
def test_every_spider_schema_keeps_its_length_with_sample_rows() -> None:
    shown = 0
    for path in SPIDER.glob("*database/*/*.sqlite"):
        text = schema_text(path, limit=2048, sample_rows=3)
        assert len(text) <= 2048
        assert text.count("\n/*\n") == len(re.findall(r"^[123] rows from .* table:$", text, re.MULTILINE)), path
        shown += " rows from " in text
    assert shown > 150

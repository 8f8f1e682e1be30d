"""The tasks `spider` and the conversion from an official download, small and real."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from agentrig_spider.tasks.convert import convert
from agentrig_spider.tasks.spider import Spider, SpiderConfig
from click.testing import CliRunner

from agentrig.cli import main
from agentrig.errors import AgentrigError

ROOT = Path(__file__).resolve().parents[3]


def official(folder: Path) -> Path:
    """A download in the official form: JSON files and databases, in a folder of their own."""
    root = folder / "spider_data"
    for name in ("band", "shop"):
        (root / "database" / name).mkdir(parents=True)
        connection = sqlite3.connect(root / "database" / name / f"{name}.sqlite")
        connection.execute("CREATE TABLE t (a INTEGER)")
        connection.commit()
        connection.close()

    def row(database: str, question: str) -> dict[str, object]:
        return {"db_id": database, "question": question, "query": "SELECT a FROM t", "sql": {}, "query_toks": []}

    (root / "train_spider.json").write_text(json.dumps([row("band", f"q{i}") for i in range(5)]))
    (root / "dev.json").write_text(json.dumps([row("shop", "d0"), row("shop", "d1")]))
    (root / "tables.json").write_text("[]")
    return root


def test_a_folder_is_converted_and_loads(tmp_path: Path) -> None:
    message = convert(str(official(tmp_path)), str(tmp_path / "out"))
    assert "train: 5 tasks on 1 databases" in message
    assert "dev: 2 tasks on 1 databases" in message
    assert "test: not there" in message
    tasks = Spider(SpiderConfig(dir=str(tmp_path / "out"))).load("dev")
    assert [t.id for t in tasks] == ["dev-00000", "dev-00001"]
    assert set(tasks[0].input) == {"question", "db_id", "database"}
    assert tasks[0].private == {"gold": "SELECT a FROM t"}
    assert Path(tasks[0].input["database"]).is_file()


def test_a_zip_is_converted_by_the_command(tmp_path: Path) -> None:
    official(tmp_path / "download")
    archive = shutil.make_archive(str(tmp_path / "spider"), "zip", tmp_path / "download")
    done = CliRunner().invoke(main, ["data", "spider", "--from", archive, "--to", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "train_spider.parquet").is_file()
    again = CliRunner().invoke(main, ["data", "spider", "--from", str(tmp_path / "out")])
    assert "train: 5 tasks" in again.output


def test_a_target_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(AgentrigError, match="not empty"):
        convert(str(official(tmp_path)), str(tmp_path / "out"))


def test_questions_in_two_splits_are_counted(tmp_path: Path) -> None:
    convert(str(official(tmp_path)), str(tmp_path / "out"))
    train = pq.read_table(tmp_path / "out" / "train_spider.parquet").to_pylist()
    dev = [{**train[0]}, *pq.read_table(tmp_path / "out" / "dev.parquet").to_pylist()]
    pq.write_table(pa.Table.from_pylist(dev), tmp_path / "out" / "dev.parquet")
    assert "dev: 3 tasks on 2 databases, 1 of them in an earlier split too" in convert(str(tmp_path / "out"))


def test_a_missing_database_is_named(tmp_path: Path) -> None:
    convert(str(official(tmp_path)), str(tmp_path / "out"))
    shutil.rmtree(tmp_path / "out" / "database" / "shop")
    with pytest.raises(AgentrigError, match=r"lacks 1 databases of split dev, the first is shop; .*agentrig data"):
        Spider(SpiderConfig(dir=str(tmp_path / "out"))).load("dev")


def test_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AgentrigError, match="no official Spider download"):
        convert(str(tmp_path))
    with pytest.raises(AgentrigError, match="neither a folder nor a zip"):
        convert(str(tmp_path / "nothing"))


@pytest.mark.parametrize("variable", ["AGENTRIG_SPIDER_DIR", "VERL_SPIDER_DATA_DIR"])
def test_the_folder_comes_from_the_environment(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGENTRIG_SPIDER_DIR", "VERL_SPIDER_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(AgentrigError, match=r"AGENTRIG_SPIDER_DIR.*agentrig data spider"):
        Spider(SpiderConfig()).load("dev")
    convert(str(official(tmp_path)), str(tmp_path / "out"))
    monkeypatch.setenv(variable, str(tmp_path / "out"))
    assert len(Spider(SpiderConfig()).load("train")) == 5


def test_real_spider_has_its_splits() -> None:
    candidates = [os.environ.get("AGENTRIG_SPIDER_DIR", ""), str(ROOT.parent / "shared" / "spider")]
    folder = next((c for c in candidates if c and (Path(c) / "dev.parquet").is_file()), None)
    if folder is None:
        pytest.skip("real Spider is not there; set AGENTRIG_SPIDER_DIR to run this test")
    spider = Spider(SpiderConfig(dir=folder))
    assert {s: len(spider.load(s)) for s in ("train", "dev", "test")} == {"train": 7000, "dev": 1034, "test": 2147}

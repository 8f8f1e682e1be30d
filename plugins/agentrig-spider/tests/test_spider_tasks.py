"""The tasks `spider` and the conversion from an official download, small and real."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from agentrig_spider.tasks.convert import SAMPLES, convert
from agentrig_spider.tasks.spider import Spider, SpiderConfig, read_rows
from click.testing import CliRunner
from sqlite_files import sqlite_file

from agentrig.cli.entry import main
from agentrig.errors import AgentrigError
from agentrig.plan import resolve
from agentrig.run.splits import load_splits, split_warnings

ROOT = Path(__file__).resolve().parents[3]


def official(folder: Path) -> Path:
    """A download in the official form: JSON files and databases in a folder."""
    root = folder / "spider_data"
    for name in ("band", "shop"):
        (root / "database" / name).mkdir(parents=True)
        sqlite_file(root / "database" / name / f"{name}.sqlite", "CREATE TABLE t (a INTEGER)")

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
    assert tasks[0].given(whole=True) == {"db_id": "shop", "question": "d0", "query": "SELECT a FROM t"}
    assert Path(tasks[0].input["database"]).is_file()
    (tmp_path / "out").rename(tmp_path / "moved")
    assert Spider(SpiderConfig(dir=str(tmp_path / "moved"))).load("dev") == [
        t.under(str(tmp_path / "moved")) for t in tasks
    ]


def test_a_zip_is_converted_by_the_command(tmp_path: Path) -> None:
    official(tmp_path / "download")
    archive = shutil.make_archive(str(tmp_path / "spider"), "zip", tmp_path / "download")
    done = CliRunner().invoke(main, ["data", "spider", "--from", archive, "--to", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "train_spider.parquet").is_file()
    again = CliRunner().invoke(main, ["data", "spider", "--from", str(tmp_path / "out")])
    assert "train: 5 tasks" in again.output


def test_a_target_that_is_not_empty_is_not_changed(tmp_path: Path) -> None:
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


def test_other_formats_and_damaged_downloads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AgentrigError, match="not an official Spider download"):
        convert(str(tmp_path))
    cut_off = tmp_path / "given.zip"
    cut_off.write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(AgentrigError, match=r"given\.zip is neither a folder nor a zip file; was its download cut off"):
        convert(str(cut_off))
    (official(tmp_path) / "dev.json").write_text('[{"db_id": "band"')
    archive = shutil.make_archive(str(tmp_path / "given"), "zip", tmp_path, "spider_data")
    with pytest.raises(AgentrigError, match=r"given\.zip/spider_data/dev\.json is damaged"):
        convert(archive)


@pytest.mark.parametrize("variable", ["AGENTRIG_SPIDER_DIR", "VERL_SPIDER_DATA_DIR"])
def test_the_folder_comes_from_the_environment(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGENTRIG_SPIDER_DIR", "VERL_SPIDER_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(AgentrigError, match=r"AGENTRIG_SPIDER_DIR.*agentrig data spider"):
        Spider(SpiderConfig()).load("dev")
    convert(str(official(tmp_path)), str(tmp_path / "out"))
    monkeypatch.setenv(variable, str(tmp_path / "out"))
    assert len(Spider(SpiderConfig()).load("train")) == 5


def with_test(root: Path, rows: int = 600) -> Path:
    (root / "test_database").mkdir()
    (root / "database" / "shop").rename(root / "test_database" / "shop")
    (root / "dev.json").write_text(json.dumps([{"db_id": "band", "question": "d0", "query": "SELECT a FROM t"}]))
    test = [{"db_id": "shop", "question": f"t{i}", "query": "SELECT a FROM t"} for i in range(rows)]
    (root / "test.json").write_text(json.dumps(test))
    return root


def bundle(folder: Path) -> Path:
    """The published bundle: three files, all databases in one folder."""
    made = folder / "made"
    convert(str(with_test(official(folder))), str(made))
    root = folder / "bundle"
    root.mkdir()
    for name in ("train_spider", "test_dev_500", "test_dev"):
        rows = pq.read_table(made / f"{name}.parquet").to_pylist()
        pq.write_table(pa.Table.from_pylist([{**row, "db_path": "x"} for row in rows]), root / f"{name}.parquet")
    shutil.copytree(made / "database", root / "database")
    shutil.copytree(made / "test_database" / "shop", root / "database" / "shop")
    return root


def test_the_samples_of_test_are_made(tmp_path: Path) -> None:
    message = convert(str(with_test(official(tmp_path))), str(tmp_path / "out"))
    assert "test_dev_500: 500 tasks on 1 databases, a sample of test" in message
    assert "test_dev: 100 tasks on 1 databases, a sample of test" in message
    assert "a run trains on train, validates on dev, reports on test_dev_500" in message
    spider = Spider(SpiderConfig(dir=str(tmp_path / "out")))
    asked = [task.input["question"] for task in spider.load("test_dev_500")]
    assert len(set(asked)) == 500
    again = numpy.random.RandomState(0).choice(600, 500, replace=False)
    assert asked == [f"t{i}" for i in again]
    assert spider.load("test")[0].input["database"].endswith("test_database/shop/shop.sqlite")


def test_a_test_side_that_is_too_small_gives_no_sample_and_says_so(tmp_path: Path) -> None:
    message = convert(str(with_test(official(tmp_path), rows=20)), str(tmp_path / "out"))
    assert "test_dev_500: not made, because test has only 20 rows" in message
    assert "reports on test" in message


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_zip_of_the_bundle_is_taken(tmp_path: Path, wrapped: bool) -> None:
    root = bundle(tmp_path)
    base = {"root_dir": str(tmp_path), "base_dir": root.name} if wrapped else {"root_dir": str(root)}
    archive = shutil.make_archive(str(tmp_path / "spider"), "zip", **base)
    message = convert(archive, str(tmp_path / "out"))
    assert "validates on test_dev_500, reports on test_dev" in message
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    assert len(Spider(SpiderConfig(dir=str(tmp_path / "out"))).load("test_dev_500")) == 500


def test_a_run_needs_no_settings_with_the_bundle_alone(tmp_path: Path) -> None:
    plan = resolve("spider", overrides=[f"tasks.dir={bundle(tmp_path)}", "run.report_tasks=30"])
    splits = load_splits(plan.tasks(), plan.run, who=plan.whose_tasks)
    assert {role: (name, len(rows)) for role, (name, rows) in splits.items()} == {
        "train": ("train", 5),
        "validation": ("test_dev_500", 200),
        "report": ("test_dev", 30),
    }
    assert all(Path(task.input["database"]).is_file() for _, rows in splits.values() for task in rows)
    assert "held out for final figures" in split_warnings(splits, plan.build("tasks"))[0]


def test_one_split_for_validation_and_report_is_warned_of(tmp_path: Path) -> None:
    convert(str(official(tmp_path)), str(tmp_path / "out"))
    plan = resolve("spider", overrides=[f"tasks.dir={tmp_path / 'out'}"])
    splits = load_splits(plan.tasks(), plan.run, who=plan.whose_tasks)
    assert (splits["validation"][0], splits["report"][0]) == ("dev", "dev")
    (warning,) = split_warnings(splits, plan.build("tasks"))
    assert warning.startswith('this run validates and reports on one split, "dev"')
    assert "run.report" in warning


def test_the_error_of_a_missing_split_names_the_settings(tmp_path: Path) -> None:
    root = bundle(tmp_path)
    with pytest.raises(AgentrigError, match=r"has no split dev: .*train, test_dev_500, test_dev: .*run\.validation"):
        Spider(SpiderConfig(dir=str(root))).load("dev")


def damaged(root: Path, how: str) -> None:
    if how == "database":
        shutil.rmtree(root / "database" / "shop")
    elif how == "parquet":
        (root / "test_dev.parquet").write_bytes(b"PAR1 no more")
    elif how == "columns":
        pq.write_table(pa.table({"a": [1]}), root / "test_dev.parquet")
    else:
        shutil.rmtree(root / "database")


@pytest.mark.parametrize("how", ["database", "parquet", "columns", "databases"])
def test_messages_name_what_was_given(tmp_path: Path, how: str) -> None:
    root = bundle(tmp_path)
    damaged(root, how)
    archive = shutil.make_archive(str(tmp_path / "given"), "zip", root)
    with pytest.raises(AgentrigError) as caught:
        convert(archive, str(tmp_path / "out"))
    assert str(caught.value).startswith(archive)
    assert "/." not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_empty_cell_is_named_with_file_row_and_column(tmp_path: Path) -> None:
    root = bundle(tmp_path)
    rows = read_rows(root / "test_dev.parquet")
    for column in ("query", "db_id"):
        pq.write_table(pa.Table.from_pylist([*rows, {**rows[0], column: None}]), root / "test_dev.parquet")
        with pytest.raises(AgentrigError) as caught:
            Spider(SpiderConfig(dir=str(root))).load("test_dev")
        assert f"test_dev.parquet, row {len(rows)} (the first is 0), column {column} is empty" in str(caught.value)


def test_converted_databases_are_read_only(tmp_path: Path) -> None:
    convert(str(official(tmp_path)), str(tmp_path / "out"))
    assert [p.stat().st_mode & 0o222 for p in (tmp_path / "out").glob("database/*/*.sqlite")] == [0, 0]


@pytest.fixture
def real() -> Path:
    candidates = [os.environ.get("AGENTRIG_SPIDER_DIR", ""), str(ROOT.parent / "shared" / "spider")]
    folder = next((Path(c) for c in candidates if c and (Path(c) / "test_dev.parquet").is_file()), None)
    return folder or pytest.skip("real Spider is not there; set AGENTRIG_SPIDER_DIR to run this test")


def test_real_spider_has_its_splits(real: Path) -> None:
    spider = Spider(SpiderConfig(dir=str(real)))
    assert {s: len(spider.load(s)) for s in ("train", "dev", "test")} == {"train": 7000, "dev": 1034, "test": 2147}
    assert spider.roles == {"train": "train", "validation": "dev", "report": "test_dev_500"}


def test_real_spider_has_the_samples_that_the_converter_makes(real: Path) -> None:
    test = read_rows(real / "test.parquet")
    for split, (n, seed) in SAMPLES.items():
        places = numpy.random.RandomState(seed).choice(len(test), n, replace=False)
        assert read_rows(real / f"{split}.parquet") == [test[i] for i in places]

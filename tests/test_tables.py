"""The task set `table`, and data frames as tasks: columns by what they are for, and bad rows by their place."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrig.errors import AgentrigError, ConfigError
from agentrig.plan import RunSettings, resolve
from agentrig.run.evaluate import eval_tasks
from agentrig.run.splits import load_splits, read_split, split_warnings
from agentrig.tasks import Table, TableConfig, Task, from_frame, table

ROWS = "id,question,answer,level,part\n" + "".join(
    f"q{i},What is {i} + 1?,{i + 1},{'hard' if i % 2 else 'easy'},{('train', 'validation', 'test')[i % 3]}\n"
    for i in range(30)
)
NAMED: dict[str, Any] = {"input": ["question"], "private": ["answer"], "slices": ["level"]}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.csv"
    file.write_text(ROWS)
    return file


def test_columns_are_what_they_are_named(rows: Path) -> None:
    tasks = table(TableConfig(file=str(rows), split="part", **NAMED))
    (first, *more) = tasks.load("test")
    assert len(more) == 9
    assert (first.id, first.input, first.private, first.slices) == (
        "test-q2", {"question": "What is 2 + 1?"}, {"answer": 3}, {"level": "easy"},
    )  # fmt: skip
    assert first.given(whole=True) == {"question": "What is 2 + 1?", "answer": 3}
    rest = table(TableConfig(file=str(rows), private=["answer"], split="part"))
    assert set(rest.load("train")[0].input) == {"question", "level"}
    sliced = TableConfig(file=str(rows), private=["answer", "part"], split="part", slices=["level", "answer", "part"])
    assert set(table(sliced).load("train")[0].input) == {"question", "level"}  # slices change no input
    assert table(TableConfig(file=str(rows), split="part", **{**NAMED, "id": "question"})).load("test")[0].id == (
        "test-What is 2 + 1?"
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "has 1 row, and a row comes into this split with a chance of 10% (tasks.shares): with about 30 rows"),
        ({"shares": [1.0, 0.0, 0.0]}, "has 1 row, and tasks.shares gives none of them to this split"),
        ({"split": "part"}, 'has 1 row, and none has "validation" in its column part (tasks.split)'),
    ],
)
def test_a_split_without_rows_says_how_many_the_file_has(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "one.csv"
    file.write_text("text,answer,part\nthe 3rd of May 2001,2001-05-03,train\n")
    tasks = table(TableConfig(file=str(file), private=["answer"], **settings))
    assert not tasks.load("validation")
    with pytest.raises(ConfigError) as raised:
        eval_tasks(tasks, RunSettings(), None, who="task set table", role="validation")
    assert f"{file} {said}" in str(raised.value)
    splits = {role: (split, tasks.load(split)) for role, split in tasks.roles.items()}
    assert any(f"{file} {said}" in warning for warning in split_warnings(splits, tasks))


def test_rows_with_few_inputs_are_told_where_a_split_has_none(tmp_path: Path) -> None:
    """More rows can't help: rows with one input stay in one split."""
    file = tmp_path / "one.csv"
    file.write_text("database,question,answer\n" + "".join(f"shop,q{n},{n}\n" for n in range(60)))
    tasks = table(TableConfig(file=str(file), input=["database"], private=["answer"]))
    (empty, *_) = (split for split in tasks.splits if not tasks.load(split))
    said = tasks.why_empty(empty)
    assert said.startswith(
        f"{file} has 60 rows with 1 different input (tasks.input = database); rows with one input stay in one split, "
        "and a different input comes into this split with a chance of "
    )
    assert "different inputs it very likely gets one" in said
    assert ". Name other columns in tasks.input, add rows with other inputs, or give the split" in said


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"validation": "v"}, "beside tasks.validation: leave it out, and give the other split a file too: tasks.test"),
        ({"validation": "v", "test": "v"}, "beside tasks.validation: leave it out$"),
        ({"split": "part"}, "beside tasks.split: leave it out$"),
    ],
)
def test_shares_without_an_effect_are_refused(rows: Path, keys: dict[str, str], said: str) -> None:
    files = {key: str(rows) if value == "v" else value for key, value in keys.items()}
    table(TableConfig(file=str(rows), **NAMED, **files))
    with pytest.raises(ConfigError, match=rf"tasks\.shares has no effect {said}"):
        table(TableConfig(file=str(rows), shares=[0.6, 0.2, 0.2], **NAMED, **files))
    if "validation" in keys:
        with pytest.raises(ConfigError, match=r"tasks\.split has no effect beside tasks\.validation: each"):
            table(TableConfig(file=str(rows), split="part", **NAMED, **files))


def test_shares_put_rows_with_one_input_into_one_split(rows: Path) -> None:
    rows.write_text(ROWS + ROWS.split("\n", 1)[1].replace("q", "again"))
    tasks = table(TableConfig(file=str(rows), shares=[0.5, 0.2, 0.3], **NAMED))
    splits = {name: [t.input["question"] for t in tasks.load(name)] for name in tasks.splits}
    assert sum(map(len, splits.values())) == 60
    assert min(map(len, splits.values())) > 0
    assert not set(splits["train"]) & set(splits["validation"] + splits["test"])
    assert [t.id for t in tasks.load("test")] == [t.id for t in table(TableConfig(
        file=str(rows), shares=[0.5, 0.2, 0.3], **NAMED)).load("test")]  # fmt: skip


def test_files_are_splits_and_a_run_takes_them(rows: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "What is 99 + 1?", "answer": 100, "level": "hard"}\n')
    keys = {"file": rows, "validation": other, "test": other}
    words = [*(f"tasks.{key}={value}" for key, value in keys.items()), 'tasks.private=["answer"]', "reward.use=own"]
    plan = resolve("mini", uses={"tasks": "table"}, overrides=words)
    splits = load_splits(plan.tasks(), plan.run, who=plan.whose_tasks)
    assert {role: len(tasks) for role, (_, tasks) in splits.items()} == {
        "train": 30, "validation": 1, "report": 1,
    }  # fmt: skip


def test_an_empty_text_beside_another_right_answer_is_one(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    rows = [{"question": f"q{i}", "answer": f"a{i}", "order": "" if i else "7"} for i in range(9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = loaded(table, TableConfig(file=str(file), private=["answer", "order"]))
    assert sum(task.private["order"] == "" for split in tasks for task in split) == 8
    file.write_text(file.read_text().replace('"a3"', '""'))
    with pytest.raises(ConfigError, match="line 4, column answer is empty, and the reward needs it"):
        loaded(table, TableConfig(file=str(file), private=["answer", "order"]))


def loaded(make: Callable[..., Table], *given: Any, **more: Any) -> list[Sequence[Task]]:
    tasks = make(*given, **more)
    return [tasks.load(split) for split in tasks.splits]


@pytest.mark.parametrize(
    ("text", "keys", "said"),
    [
        (ROWS.replace(",", ";"), {}, r"rows\.csv, line 1: the header is one column.*separated by ';'"),
        (ROWS.replace("answer", "anser"), {}, r'no column answer, which tasks.private names. Did you mean "anser"\?'),
        (ROWS.replace(",8,", ",,"), {}, r"line 9, column answer is empty, and the reward needs it"),
        (ROWS.replace("q5,", "q4,"), {}, r'column id: "q4" is the id of line 6 too'),
        (ROWS.replace(",hard,test", ",hard,tset", 1), {"split": "part"}, r"'tset' is none of train, valid"),
        (ROWS.replace(",8,", ",eight,"), {}, r"line 9, column answer: 'eight' is no number"),
        (ROWS, {"shares": [0.5, 0.5]}, "write three numbers that add up to 1"),
        (ROWS, {"shares": [2, -1, 0]}, "write three numbers from 0 on that add up to 1"),
        (ROWS, {"slices": ["levle"]}, "there is no column levle, which tasks.slices names"),
        (ROWS.split("\n")[0] + "\n", {}, r"rows\.csv has no rows, only the names of its columns"),
        (ROWS, {"private": ["question", "answer"]}, r"question is in tasks\.input and in tasks\.private: "),
        (ROWS.replace("answer", "answer\xa0"), {}, r"no column answer, .* It has 'answer\\xa0': remove the white"),
        (
            ROWS,
            {"input": [], "private": ["question", "answer", "level", "part"]},
            r"line 2: no column is left for the agent",
        ),
    ],
)
def test_bad_input_is_named_with_file_line_and_column(rows: Path, text: str, keys: dict[str, Any], said: str) -> None:
    rows.write_text(text)
    with pytest.raises(AgentrigError, match=said):
        loaded(table, TableConfig(file=str(rows), **{**NAMED, **keys}))


@pytest.mark.parametrize(("ending", "value"), [(".jsonl", "nan"), (".jsonl", "inf"), (".parquet", "nan")])
def test_a_number_that_json_cannot_hold_is_named_with_its_place(tmp_path: Path, ending: str, value: str) -> None:
    file, given = tmp_path / f"rows{ending}", [{"q": 1.5, "gold": 1}, {"q": float(value), "gold": 1}]
    if ending == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in given))  # NaN and Infinity, as Python writes them
    else:
        pq.write_table(pa.Table.from_pylist(given), file)
    tasks = table(TableConfig(file=str(file), private=["gold"], shares=[1.0, 0.0, 0.0]))
    with pytest.raises(AgentrigError, match=rf"rows\{ending}, (line 2|row 1 .*): input\.q is {value}, .* write null"):
        read_split(tasks, "train", who="tasks")
    frame = pd.DataFrame(given).replace(float("inf"), float("nan"))
    missing = from_frame(frame, private=["gold"], shares=[1.0, 0.0, 0.0])
    assert [dict(task.input) for task in read_split(missing, "train", who="tasks")] == [{"q": 1.5}, {"q": None}]


def test_a_column_is_of_one_kind_in_all_files(rows: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("question,answer,size\nWhy?,1,large\n")
    rows.write_text("question,answer,size\nWhat?,2,3\n")
    with pytest.raises(ConfigError, match=r"column size: 'large' is text, and in split train"):
        loaded(table, TableConfig(file=str(rows), validation=str(other), private=["answer"]))


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["10.00", "16.8"], ["10.00", "16.8"]),
        (["100", "007"], ["100", "007"]),
        (["1", "+1"], ["1", "+1"]),
        (["1e3", "2"], ["1e3", "2"]),
        (["-0", "1"], ["-0", "1"]),
        (["10", "-16.8", "1e-05"], [10, -16.8, 1e-05]),
    ],
)
def test_a_column_is_numbers_if_each_cell_is_what_its_number_is_written_as(
    tmp_path: Path, cells: list[str], values: list[Any]
) -> None:
    file = tmp_path / "bills.csv"
    file.write_text("question,total\n" + "".join(f"q{cell},{cell}\n" for cell in cells))
    tasks = table(TableConfig(file=str(file), private=["total"], shares=[1, 0, 0])).load("train")
    assert [task.private["total"] for task in tasks] == values
    assert [type(task.private["total"]) for task in tasks] == [*map(type, values)]


def test_gold_is_of_one_kind_in_all_files(tmp_path: Path) -> None:
    """Amounts of one file may all be written as their numbers by chance: 27.79, and in the other 10.00."""
    for name, total in (("train", "10.00"), ("test", "27.79")):
        (tmp_path / f"{name}.csv").write_text(f"question,total\nWhat does {name} cost?,{total}\n")
    files = {"file": str(tmp_path / "train.csv"), "test": str(tmp_path / "test.csv")}
    said = r"column total: 27.79 is a number, and in split train .* or read both as text: tasks\.text=\[\"total\"\]"
    with pytest.raises(ConfigError, match=said):
        loaded(table, TableConfig(**files, private=["total"]))
    _, _, (task,) = loaded(table, TableConfig(**files, private=["total"], text=["total"]))
    assert task.private == {"total": "27.79"}
    for name, total in (("train", "10"), ("test", '"10"')):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"question": "What does {name} cost?", "total": {total}}}\n')
    said = r"test.jsonl, line 1, column total: '10' is text, and the column holds a number in .*train.jsonl, line 1:"
    lines = {split: file.replace(".csv", ".jsonl") for split, file in files.items()}
    with pytest.raises(ConfigError, match=said):
        loaded(table, TableConfig(**lines, private=["total"]))


def test_latin_1_bytes_are_named(rows: Path) -> None:
    rows.write_bytes(ROWS.replace("What is 4", "Qu\xe9 es 4").encode("latin-1"))
    with pytest.raises(
        AgentrigError, match=r"line 6, character 6: the byte 0xe9 is not UTF-8; .* iconv -f ENCODING -t"
    ):
        table(TableConfig(file=str(rows)))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("t.jsonl", b'{"question": 1}\n\n7\n', 't.jsonl, line 3: it is a number; write an object, as {"question": …}'),
        ("t.jsonl", b"null", "t.jsonl, line 1: it is null; write an object"),
        ("t.jsonl", b"[1, 2]", "t.jsonl, line 1: it is a list; write an object"),
        ("t.json", b'["text"]', "t.json, row 0 (the first is 0): it is text; write an object"),
        ("t.csv", "question,answer\né,1\n".encode("utf-16"), "is UTF-16 text; save it as UTF-8: iconv -f utf-16"),
        ("t.csv", gzip.compress(b"question\n1\n", mtime=0), "t.csv is compressed (gzip); unpack it: gunzip <"),
        ("t.csv", b'question,answer\na,1\n"b\n""",2\n"c,3\nd,4\n', "a quote that is opened in line 5 is never closed"),
        ("t.csv", b'question,answer\na,1\n"b"c,2\n', "line 3: ',' expected after '\"'; a quote in a cell with quotes"),
        ("t.csv", b'question;answer\n"a\nb";1\n', "its cells are separated by ';'. Save it with commas"),
        ("t.csv", b'"question";"answer"\n"a";"1"\n', "its cells are separated by ';'. Save it with commas"),
        ("t.jsonl", b'{"question": 1, "answer": NaN}', "line 1, column answer is empty (NaN), and the reward needs it"),
        ("t.jsonl", b'{"question": ' + b"[" * 100_000, "line 1 is nested too deep for JSON"),
        ("t.json", b"[" * 100_000, "t.json is nested too deep for JSON"),
        ("t.jsonl", b'{"question": ' + b"9" * 5000 + b"}", "line 1 holds a whole number of more than 4300 digits"),
        (
            "t.jsonl",
            b'{"question": 1}\n{"question": 1, "question": 2}',
            'line 2: an object has the key "question" twice',
        ),
        ("t.json", b'[{"question": {"a": 1, "a": 2}}]', 't.json: an object has the key "a" twice'),
        ("t.csv", b"question,answer\na,1\nb\n", "line 3 has 1 cell, and the header has 2: a cell is missing"),
        (
            "t.csv",
            b"question,answer\na,1\nb,2,3\n",
            "line 3 has 3 cells, and the header has 2: put a cell with a comma",
        ),
        ("t.csv", b"question,answer\na,1\nb,2\nc,nan\n", 'among those of text: tasks.text=["answer"]'),
        (
            "t.jsonl",
            b'{"question": "a", "answer": 7}\n{"question": "b", "answer": "7"}',
            "line 2, column answer: '7' is text",
        ),
        ("t.csv", b",question,answer\n0,a,1\n1,b,2\n", "column 1 has no name: if it is the index of pandas, write"),
        (
            "t.csv",
            b"question,answer,\na,1,\nb,2,\n",
            "column 3 has no name: its cells are empty too, so remove the com",
        ),
        ("t.csv", b"sep=,\nquestion,answer\na,1\n", "t.csv, line 1: 'sep=,' is only for Excel; remove this line"),
        ("t.csv", b"# mine\nquestion,answer\na,1\n", "line 1: '# mine' is read as the header; if it is a comment, rem"),
        ("t.csv", "question\n1\n".encode("utf-16-le"), "save it as UTF-8: iconv -f utf-16le -t utf-8 OLD > NEW"),
        (
            "t.parquet",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
            "is a pointer of Git LFS, not the file",
        ),
        ("t.jsonl", b'[\n {"question": 1}\n]', "If it is one JSON value over several lines, rename the file to t.json"),
        ("t.json", b'{"question": 1}\n{"question": 2}\n', "each line is a value of its own, rename the file to t.js"),
        ("t.jsonl", b'{"question": 1},\n{"question": 2},\n', "A line of JSON Lines ends without a comma; remove it"),
        ("t.jsonl", b'{"question": "a', "t.jsonl, line 1 is no JSON: Unterminated string starting at column 14"),
        ("t.json", b"[\n{]", "t.json, line 2 is no JSON: Expecting property name"),
    ],
)
def test_bad_files_are_told_in_plain_words(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(data)
    columns = {"input": ["question"], "private": ["answer"] if b"answer" in data else []}
    with pytest.raises(AgentrigError, match=re.escape(said)):
        loaded(table, TableConfig(file=str(tmp_path / name), **columns))


def test_columns_of_bytes_are_to_be_stored_as_text(tmp_path: Path) -> None:
    latin = pa.array([b"ok", b"caf\xe9"])
    broken = pa.StringArray.from_buffers(2, *latin.buffers()[1:])
    for column, said in (
        (latin[1:], "question is b'caf\\xe9' (bytes), no JSON value; store the column as text"),
        (broken, "row 1 (the first is 0), column question: the byte 0xe9 is not UTF-8; store the column as text"),
    ):
        pq.write_table(pa.table({"question": column}), tmp_path / "t.parquet")
        config = TableConfig(file=str(tmp_path / "t.parquet"), shares=[1.0, 0.0, 0.0])
        with pytest.raises(AgentrigError, match=re.escape(said)) as failed:
            read_split(table(config), "train", who="task set table")
        assert "iconv" not in str(failed.value)


@pytest.mark.timeout(60)
def test_a_pipe_is_no_file_of_rows(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.csv")
    with pytest.raises(AgentrigError, match=r"t\.csv is no regular file"):
        table(TableConfig(file=str(tmp_path / "t.csv")))
    (tmp_path / "link.csv").symlink_to("link.csv")
    with pytest.raises(AgentrigError, match=r"link\.csv is a link to link\.csv, which leads to no file; mend the link"):
        table(TableConfig(file=str(tmp_path / "link.csv")))


def test_an_empty_list_is_a_file_without_rows(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("[]")
    with pytest.raises(AgentrigError, match=r"t\.json has no rows$"):
        table(TableConfig(file=str(tmp_path / "t.json")))


def test_two_columns_with_one_name_are_named(tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    pq.write_table(pa.table([["a"], ["b"], ["1"]], names=["q", "q", "answer"]), file)
    with pytest.raises(AgentrigError, match=r't\.parquet: two columns are called "q"$'):
        table(TableConfig(file=str(file), private=["answer"]))


def test_a_file_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.file=ROWS\.csv"):
        table(TableConfig())


def test_a_frame_is_a_task_set(rows: Path) -> None:
    frame = pd.read_csv(rows)
    tasks = from_frame(frame, split="part", **NAMED)
    assert [t.id for t in tasks.load("test")] == [f"test-q{i}" for i in range(2, 30, 3)]
    assert tasks.load("test")[0].private == {"answer": 3}
    numbered = from_frame(pd.DataFrame([["What?", 1]]), private=["1"], shares=[1.0, 0.0, 0.0])
    assert numbered.load("train")[0].input == {"0": "What?"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda frame: frame.assign(answer=frame.answer.where(frame.id != "q7")), r"row 7 .*, column answer is empty"),
        (lambda frame: frame.set_axis(pd.MultiIndex.from_product([["a"], frame.columns]), axis=1), "have 2 levels"),
        (lambda frame: frame.set_index(["id", "part"]), r"index holds id, part, .*: reset_index\(\)"),
        (lambda frame: frame.rename(columns={"part": "id"}), 'data frame: two columns are called "id"'),
        (lambda frame: frame.set_index("id"), r"index holds id, .* reset_index\(\)"),
    ],
    ids=["NaN", "MultiIndex of columns", "MultiIndex of rows", "one name twice", "named index"],
)
def test_a_bad_frame_is_named(rows: Path, change: Any, said: str) -> None:
    frame = change(pd.read_csv(rows))
    with pytest.raises(AgentrigError, match=said):
        loaded(from_frame, frame, **NAMED)

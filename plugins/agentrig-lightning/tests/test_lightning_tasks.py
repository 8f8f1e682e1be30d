"""Rows as tasks in one line, and agents that get whole rows with their gold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import agentrig_lightning as lightning
import pytest
from click.testing import CliRunner

from agentrig import Endpoint, Task
from agentrig.cli.entry import main
from agentrig.errors import AgentrigError, ConfigError
from agentrig.plan import Plan, resolve
from agentrig.run.evaluate import eval_tasks, evaluate
from agentrig.run.manifest import manifest
from agentrig.run.splits import load_splits, split_warnings

ROWS = [{"question": "1 + 1", "result": 2, "hints": ["a"]}, {"question": "2 + 2", "result": 4, "hints": []}]


def load(source: Any, split: str = "train", **more: Any) -> Any:
    spec = lightning.tasks(source, name="sums", **more)
    return spec.build(spec.config()).load(split)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same rows in every form."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset, DatasetDict

    folder = tmp_path_factory.mktemp("rows")
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    (folder / "rows.json").write_text(json.dumps(ROWS))
    saved = Dataset.from_list(ROWS)
    saved.save_to_disk(folder / "saved", num_shards=2)
    DatasetDict(train=saved, test=saved.select([1])).save_to_disk(folder / "splits")
    arrow = next((folder / "splits" / "train").glob("*.arrow"))
    shutil.copy(arrow, folder / "rows.arrow")
    frame = pd.read_parquet(folder / "rows.parquet")
    found = {file.name: file for file in folder.iterdir()}
    return {**found, "list": ROWS, "frame": frame, "dataset": saved, "text path": str(folder / "rows.parquet")}


@pytest.mark.parametrize(
    "form",
    [
        "list",
        "frame",
        "dataset",
        "rows.parquet",
        "rows.jsonl",
        "rows.json",
        "rows.arrow",
        "saved",
        "splits",
        "text path",
    ],
)
def test_rows_of_every_form_are_tasks(files: dict[str, Any], form: str) -> None:
    first, second = load(files[form], gold=["result"])
    assert first == Task(
        id="train-00000", input={"question": "1 + 1", "hints": ["a"]}, private={"result": 2}, row=ROWS[0]
    )
    assert second.row == ROWS[1]
    assert second.given(whole=True) == ROWS[1]
    assert second.given(whole=False) == {"question": "2 + 2", "hints": []}


def test_csv_and_texts(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('question,result,level\n"1, 1",2,0.5\nx,3,1.5\n')
    rows = [task.row for task in load(tmp_path / "rows.csv")]
    assert rows == [{"question": "1, 1", "result": 2, "level": 0.5}, {"question": "x", "result": 3, "level": 1.5}]
    (text,) = load(["Why is the sky blue?"], gold=[])
    assert (text.input, text.given(whole=True)) == ({"input": "Why is the sky blue?"}, "Why is the sky blue?")


def test_roles(files: dict[str, Any]) -> None:
    tasks = lightning.tasks(files["splits"], name="sums").build(None)
    assert (tasks.splits, tasks.roles) == (
        ("train", "test"),
        {"train": "train", "validation": "test", "report": "test"},
    )
    assert [task.row for task in tasks.load("test")] == ROWS[1:]
    given = lightning.tasks(files["splits"], name="sums", validation=ROWS).build(None)
    assert given.roles == {"train": "train", "validation": "validation", "report": "test"}
    assert len(given.load("validation")) == 2
    assert lightning.tasks(ROWS, name="sums", report=ROWS[:1]).build(None).roles == {
        "train": "train",
        "report": "report",
    }


def test_what_cannot_be_read_is_named(tmp_path: Path, files: dict[str, Any]) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "rows.json").write_text('{"a": 1}')
    (tmp_path / "rows.jsonl").write_text('\ufeff{"a": 1}\n\n{"a": 2\n', "utf-8")
    (tmp_path / "rows.txt").touch()
    for source, words in {
        tmp_path / "none.csv": r"there is no .*none.csv; a path .* starts in the current folder",
        tmp_path / "rows.parquet": "rows.parquet can't be read",
        tmp_path / "rows.json": "holds an object; write a list of rows",
        tmp_path / "rows.jsonl": r"rows.jsonl, line 3 is no JSON: Expecting ',' delimiter at column 8",
        tmp_path / "rows.txt": "unknown ending; rows are read from Parquet",
        tmp_path: "no folder that Dataset.save_to_disk wrote",
    }.items():
        with pytest.raises(AgentrigError, match=words):
            load(source)
    with pytest.raises(AgentrigError, match="rows are a list, a data frame, or a path to Parquet"):
        load(7)
    with pytest.raises(
        ConfigError, match=r"row 0 \(the first is 0\): there is no gold column answer; its columns are q"
    ):
        load(ROWS, gold=["answer"])


def written(folder: Path, name: str, text: str | bytes) -> Path:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder / name


HEAD = "id,question,result\n"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", HEAD + "a,1 + 1,2\n,2 + 2,4\n", "t.csv, line 3, column id is empty"),
        ("t.csv", HEAD + 'a,"1\n+ 1",2\nb,2 + 2,\n', "t.csv, line 4, column result is empty: a reward has nothing to"),
        ("t.csv", "id,question,id\n1,x,2\n", 't.csv, line 1: two columns are called "id"'),
        ("t.csv", "", "t.csv is empty"),
        ("t.jsonl", b'{"q": 1}\n\n{"q": "caf\xe9"}\n', "t.jsonl, line 3, character 11: the byte 0xe9 is not UTF-8"),
        ("t.json", b'[{"q": 1},\n{"q": "caf\xe9"}]', "t.json, line 2, character 11: the byte 0xe9 is not UTF-8"),
        ("t.jsonl", '{"result": 2}\n\n{"result": null}\n', "t.jsonl, line 3, column result is empty"),
        ("t.jsonl", '{"result": 2}\n\n{"answer": 2}\n', "t.jsonl, line 3: there is no gold column result; its columns"),
    ],
)
def test_a_wrong_cell_is_named_with_file_line_and_column(
    tmp_path: Path, name: str, text: str | bytes, said: str
) -> None:
    with pytest.raises(AgentrigError) as caught:
        load(written(tmp_path, name, text), gold=["result"])
    assert said in str(caught.value)


def test_a_wrong_cell_of_parquet_is_named_with_row_and_column(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": [7, 7], "result": [1, 2]}), tmp_path / "t.parquet")
    with pytest.raises(AgentrigError, match=r't\.parquet, row 1 \(the first is 0\), column id: "7" is the id of row 0'):
        load(tmp_path / "t.parquet", gold=["result"])


def test_a_column_id_is_the_tasks_id(tmp_path: Path) -> None:
    """Agents get the other columns: two splits with ids of their own can still be compared."""
    source = written(tmp_path, "t.csv", HEAD + "q7,1 + 1,2\nq9,2 + 2,4\n")
    first, second = load(source, gold=["result"])
    assert (first.id, second.id) == ("train-q7", "train-q9")
    assert (first.input, first.place) == ({"question": "1 + 1"}, f"{source}, line 2")
    assert first.row == {"id": "q7", "question": "1 + 1", "result": 2}


def test_cells_of_a_csv_keep_their_kind(tmp_path: Path) -> None:
    text = "n,x,ok,note,code,day\n1,0.5,true,1,007,2026-11-24\n,-2000.0,False,,7,\n3,,TRUE,x and y,12,2026-11-25\n"
    rows = [task.row for task in load(written(tmp_path, "t.csv", text), text=["note"], gold=[])]
    assert rows == [
        {"n": 1, "x": 0.5, "ok": True, "note": "1", "code": "007", "day": "2026-11-24"},
        {"n": None, "x": -2000.0, "ok": False, "note": "", "code": "7", "day": ""},
        {"n": 3, "x": None, "ok": True, "note": "x and y", "code": "12", "day": "2026-11-25"},
    ]
    with pytest.raises(AgentrigError, match=r"column size: 'XL' is no number, .*\n.* tasks\.text=\[\"size\"\]"):
        load(written(tmp_path, "sizes.csv", "size\n1\n2\nXL\n"), gold=[])
    with pytest.raises(AgentrigError, match=r"there is no column cod.* Did you mean \"code\""):
        load(tmp_path / "t.csv", text=["cod"], gold=[])


def test_tasks_that_repeat_others_are_warned_of_with_their_place(tmp_path: Path) -> None:
    rows = "id,number,result\na,1,odd\nb,2,even\nc,1,odd\nd,2,odd\n"
    train = written(tmp_path, "train.csv", rows)
    test = written(tmp_path, "test.csv", "number,result\n3,odd\n2.0,even\n0.5,none\n")
    tasks = lightning.tasks(train, name="n", validation=test, report=ROWS, gold=["result"]).build(None)
    splits = {role: (role, tasks.load(role)) for role in ("train", "validation", "report")}
    assert split_warnings(splits, tasks)[-2:] == [
        f"2 of 4 train tasks have the input of another one, 1 of them with another private part: {train}, line 4 "
        f"repeats {train}, line 2; {train}, line 5 repeats {train}, line 3",
        f"1 of 3 validation tasks are in the training split too; the first: {test}, line 3",
    ]


@pytest.mark.slow
def test_a_relative_path_is_found_by_validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, number in (("train", 1), ("val", 3), ("test", 5)):
        written(tmp_path, f"{name}.csv", f"number,result\n{number},odd\n{number + 1},even\n")
    written(
        tmp_path,
        "mine.py",
        "import agentrig_lightning as lightning\nfrom agentrig import hookimpl\n\n\n@hookimpl\ndef register_tasks():\n"
        "    yield lightning.tasks('train.csv', validation='val.csv', report='test.csv', gold=['result'], name='n')\n",
    )
    done = CliRunner().invoke(main, ["validate", "mine.py"])
    assert done.exit_code == 0, done.output


PLUGIN = """
import agentlightning as agl
import agentrig_lightning as lightning
from agentrig import AgentSpec, RewardSpec, Score, hookimpl

ROWS = [{"question": "[reply=2]", "result": "2"}, {"question": "[reply=2]", "result": "4"}]


class Judging(agl.LitAgent):
    def rollout(self, task, resources, rollout):
        from openai import OpenAI

        if "result" not in task:
            raise KeyError(f"no result in {rollout.mode}")
        llm = resources["main_llm"]
        with OpenAI(base_url=llm.endpoint, api_key="none") as client:
            reply = client.chat.completions.create(
                model=llm.model, messages=[{"role": "user", "content": task["question"]}]
            )
        return float(reply.choices[0].message.content == task["result"])


def last_reply(trace):
    return trace.llm_calls()[-1].attributes["response"]["choices"][0]["message"]["content"]


@hookimpl
def register_agents():
    yield lightning.agent(Judging, name="hidden", summary="Gets the input only.")
    yield lightning.agent(Judging, name="whole", summary="Gets whole rows.", whole_rows=True)
    yield lightning.agent(Judging, name="both", summary="Has an answer too.", whole_rows=True, answer=last_reply)


@hookimpl
def register_tasks():
    yield lightning.tasks(ROWS, name="sums", validation=ROWS, report=ROWS)
    yield lightning.tasks(ROWS, name="sums-gold", validation=ROWS, report=ROWS, gold=["result"])


@hookimpl
def register_rewards():
    def build(config):
        return lambda task, outcome, budget_s: Score.ok(float(outcome.answer == task.private["result"]))

    yield RewardSpec(name="exact", summary="Compares the answer.", build=build)
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("plugin") / "judging.py"
    file.write_text(PLUGIN)
    return str(file)


def plan(plugin: str, toy: str, **uses: str) -> Plan:
    return resolve("toy", files=[toy, plugin], uses={"tasks": "sums-gold", "reward": "own", **uses})


def test_whole_rows_are_off_by_default_and_told(plugin: str, toy_file: str) -> None:
    resolved = plan(plugin, toy_file, agent="whole", tasks="sums")
    (warning,) = resolved.gold_warnings()
    assert warning.startswith("this agent sees its gold: whole gets whole rows")
    splits = load_splits(resolved.tasks(), resolved.run, who=resolved.whose_tasks)
    assert manifest(resolved, resolved.build("hardware"), splits)["agent_sees_gold"] is True
    hidden = plan(plugin, toy_file, agent="hidden")
    assert hidden.gold_warnings() == []
    splits = load_splits(hidden.tasks(), hidden.run, who=hidden.whose_tasks)
    assert manifest(hidden, hidden.build("hardware"), splits)["agent_sees_gold"] is False
    with pytest.raises(
        ConfigError, match=r"task set sums does not say which columns are gold.* the agent hidden does not"
    ):
        plan(plugin, toy_file, agent="hidden", tasks="sums").tasks()


def test_an_agent_that_sees_its_gold_and_other_rewards(
    plugin: str, toy_file: str, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Through real runners: `own` takes its number; another reward judges its answer, or says that it has none."""
    endpoint = Endpoint(base_url=model.url, model="toy-model", token_ids=True)

    resolved = plan(plugin, toy_file, agent="both", reward="exact")
    _, tasks = eval_tasks(resolved.tasks(), resolved.run, None, who=resolved.whose_tasks)
    judged = evaluate(resolved, tasks=tasks, endpoint=endpoint, keep=True).rollouts
    assert [(r.outcome.answer, r.outcome.own_reward, r.value) for r in judged] == [("2", 1.0, 1.0), ("2", 0.0, 0.0)]
    assert "this agent sees its gold: both gets whole rows" in caplog.text


def test_one_column_is_no_list_of_its_letters() -> None:
    for what in ("gold", "text"):
        with pytest.raises(ConfigError, match=rf'lightning\.tasks: write {what}=\["result"\], a list of strings'):
            lightning.tasks(ROWS, name="n", **{what: "result"})

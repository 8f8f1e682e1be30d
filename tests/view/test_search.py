"""Rollouts are found by step, score, failure, node, text and length."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrig.run.rows import rollout_schema
from agentrig.testing.run_directory import write_run
from agentrig.view.reading import RolloutFile, columns_of, judged, verdict
from agentrig.view.watch.app import serving
from agentrig.view.watch.rewards import _histogram
from agentrig.view.watch.rollouts import TEXTS, Filter, Rollouts


def row(i: int, **values: Any) -> dict[str, Any]:
    base = {
        "id": f"r{i}", "task_id": f"t{i // 2}", "group": f"train-1-{i // 2}", "mode": "train", "step": 1,
        "failure": None, "message": None, "status": "ok", "value": 1.0, "correct": True, "components": "{}",
        "details": "{}", "second_rewards": None, "input": json.dumps({"question": f"how many {i}?"}),
        "answer": json.dumps("an answer"), "own_reward": None, "start": 1.0, "duration_s": 0.5, "reward_s": 0.0,
        "version": 0, "calls": 1, "triplets": 1, "prompt_tokens": 9, "response_tokens": 10 * i,
        "nodes": '["write"]', "replies": "a reply", "spans": "[]",
    }  # fmt: skip
    return {**base, **values}


def write(run: Path, name: str, *rows: dict[str, Any]) -> None:
    """Write a file of rollouts with the columns that a run writes."""
    pq.write_table(pa.Table.from_pylist(list(rows), schema=rollout_schema(pa)), run / "rollouts" / f"{name}.parquet")


def ids_of(table: pa.Table) -> list[str]:
    return table["id"].to_pylist()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "rollouts").mkdir()
    one = [
        row(0),
        row(1, value=0.0, correct=False, replies="SELECT 7 (special.chars)"),
        row(2, value=0.5, correct=False, nodes='["check", "write", "查询"]'),
        row(3, value=None, correct=None, status=None, failure="deadline", message="it took 120 s"),
    ]
    write(tmp_path, "train-00001", *one)
    write(tmp_path, "validation-00002", row(9, mode="validation", step=2))
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (Filter(), "r0 r1 r2 r3 r9"),
        (Filter(mode="train", step=1), "r0 r1 r2 r3"),
        (Filter(score="right"), "r0 r9"),
        (Filter(score="wrong"), "r1"),
        (Filter(score="part"), "r2"),
        (Filter(score="part 0.5..0.5"), "r2"),
        (Filter(score="right 0..0.9"), ""),
        (Filter(score="failed"), "r3"),
        (Filter(score="0.2..0.8"), "r2"),
        (Filter(score="..0.5"), "r1 r2"),
        (Filter(score="0.6.."), "r0 r9"),
        (Filter(failure="deadline"), "r3"),
        (Filter(node="check"), "r2"),
        (Filter(node="查询"), "r2"),
        (Filter(text="select 7 (SPECIAL.chars)"), "r1"),
        (Filter(text="120 s"), "r3"),
        (Filter(text="many 9?"), "r9"),
        (Filter(shortest=15, longest=40), "r2 r3"),
        (Filter(task="t0", score="right"), "r0"),
        (Filter(text="nobody said this"), ""),
    ],
)
def test_a_filter_finds_these(run: Path, wanted: Filter, ids: str) -> None:
    assert sorted(ids_of(Rollouts(run).find(wanted))) == ids.split()


@pytest.mark.parametrize("score", ["good", "1..2..3", "1.2.3..2", "--1..2"])
def test_a_wrong_score_says_what_is_right(run: Path, score: str) -> None:
    with pytest.raises(ValueError, match="score"):
        Rollouts(run).find(Filter(score=score))


def test_files_that_appear_change_or_go_are_seen(run: Path) -> None:
    rollouts = Rollouts(run)
    assert len(rollouts.table()) == 5
    write(run, "train-00003", row(20, step=3))
    assert len(rollouts.table()) == 6
    (run / "rollouts" / "train-00001.parquet").unlink()
    assert ids_of(rollouts.table()) == ["r9", "r20"]
    write(run, "train-00003", row(21, step=3), row(22, step=3))
    assert ids_of(rollouts.table()) == ["r9", "r21", "r22"]


def test_only_files_with_candidates_are_searched_for_a_text(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def noted(file: RolloutFile, columns: Sequence[str]) -> pa.Table | None:
        read.extend([file.path.name] if set(TEXTS) <= set(columns) else [])
        return columns_of(file, columns)

    monkeypatch.setattr("agentrig.view.watch.rollouts.columns_of", noted)
    rollouts = Rollouts(run)
    assert ids_of(rollouts.find(Filter(text="SELECT 7"))) == ["r1"]
    write(run, "train-00001", row(1), row(2, replies="select 7"))
    assert ids_of(rollouts.find(Filter(text="SELECT 7"))) == ["r2"]
    read.clear()
    assert ids_of(rollouts.find(Filter(text="an answer", mode="validation"))) == ["r9"]
    assert "train-00001.parquet" not in read


def test_a_damaged_file_is_named_each_time_and_the_others_are_shown(run: Path) -> None:
    (run / "rollouts" / "train-00002.parquet").write_bytes(b"PAR1 but not really")
    rollouts = Rollouts(run)
    for _ in range(2):
        assert len(rollouts.table()) == 5
        assert len(rollouts.unreadable()) == 1
        assert "rollouts/train-00002.parquet cannot be read" in rollouts.unreadable()[0]
    write(run, "train-00002", row(9, step=2))
    assert "r9" in ids_of(rollouts.table())
    assert rollouts.unreadable() == [], "it is whole again"


def test_only_files_with_the_names_that_a_run_gives_are_listed(run: Path) -> None:
    """Somebody's copy was a second file of its step, with each rollout twice."""
    listed = Rollouts(run).files()
    for name in ("train-2", "train-000002", "train-00002-copy", "train-٠٠٠٠٢"):
        write(run, name, row(9, step=2))
    assert Rollouts(run).files() == listed


def test_a_whole_row_is_decoded(run: Path) -> None:
    found = Rollouts(run).row("r2")
    assert (found["input"], found["spans"], found["mode"]) == ({"question": "how many 2?"}, [], "train")
    with pytest.raises(KeyError):
        Rollouts(run).row("r99")


@pytest.mark.parametrize("score", ["right", "wrong", "part", "failed"])
def test_a_filter_and_a_verdict_have_the_same_rules(run: Path, score: str) -> None:
    assert {verdict(row) for row in Rollouts(run).find(Filter(score=score)).to_pylist()} == {score}


def test_the_first_view_reads_one_file_and_the_others_are_read_meanwhile(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=6)
    rollouts = Rollouts(run)
    files = len(rollouts.files())
    step = rollouts.find(Filter(mode="train", step=6))
    assert (len(step), rollouts.progress()) == (16, (1, files))
    assert rollouts.row(step["id"][0].as_py())["step"] == 6
    assert len(rollouts.inputs(ids_of(step))) == 16
    assert rollouts.nodes() == ["check_query", "rewrite_query", "write_query"]
    assert rollouts.progress() == (1, files), "a page of one step needs its file only"
    with serving(run) as link:
        texts = [httpx.get(f"{link}run/run/traces").text]
        deadline = time.monotonic() + 60
        while "files.</p>" in texts[-1] and time.monotonic() < deadline:
            texts.append(httpx.get(f"{link}run/run/traces").text)
        assert "files.</p>" not in texts[-1]
    assert rollouts.row("train-1-0")["step"] == 1
    assert rollouts.progress() == (files, files)


def test_a_full_reward_of_a_wrong_answer_is_no_part() -> None:
    assert judged(row(0, correct=False)) == "full reward, counted as wrong"
    assert [judged(row(0, **of)) for of in ({}, {"value": 0.5, "correct": False})] == ["right", "part"]


def test_a_reward_of_right_and_of_wrong_answers_has_a_row_for_each() -> None:
    rows = [row(0), row(1), row(2, correct=False), row(3, value=0.0, correct=False)]
    found = _histogram(rows, [1], "train")["rows"]
    counted = {each["name"]: (each["cells"][0]["n"], each["cells"][0]["query"]) for each in found}
    assert {name: n for name, (n, _) in counted.items()} == {"0": 1, "1, right": 2, "1, counted as wrong": 1}
    assert "score=part+1..1" in counted["1, counted as wrong"][1]

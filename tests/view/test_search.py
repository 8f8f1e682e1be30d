"""Rollouts are found by step, score, failure, node, text and length, also those of earlier versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from agentrig.view.reading import RolloutFile, verdict
from agentrig.view.watch.rollouts import Filter, Rollouts, _read_texts


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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    one = [
        row(0),
        row(1, value=0.0, correct=False, replies="SELECT 7 (special.chars)"),
        row(2, value=0.5, correct=False, nodes='["check", "write"]'),
        row(3, value=None, correct=None, status=None, failure="deadline", message="it took 120 s"),
    ]
    pl.DataFrame(one).write_parquet(folder / "train-00001.parquet")
    pl.DataFrame([row(9, mode="validation", step=2)]).write_parquet(folder / "validation-00002.parquet")
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (Filter(), "r0 r1 r2 r3 r9"),
        (Filter(mode="train", step=1), "r0 r1 r2 r3"),
        (Filter(score="right"), "r0 r9"),
        (Filter(score="wrong"), "r1"),
        (Filter(score="part"), "r2"),
        (Filter(score="failed"), "r3"),
        (Filter(score="0.2..0.8"), "r2"),
        (Filter(score="..0.5"), "r1 r2"),
        (Filter(score="0.6.."), "r0 r9"),
        (Filter(failure="deadline"), "r3"),
        (Filter(node="check"), "r2"),
        (Filter(text="select 7 (SPECIAL.chars)"), "r1"),
        (Filter(text="120 s"), "r3"),
        (Filter(text="many 9?"), "r9"),
        (Filter(shortest=15, longest=40), "r2 r3"),
        (Filter(task="t0", score="right"), "r0"),
        (Filter(text="nobody said this"), ""),
    ],
)
def test_a_filter_finds_these(run: Path, wanted: Filter, ids: str) -> None:
    assert sorted(Rollouts(run).find(wanted)["id"].to_list()) == ids.split()


@pytest.mark.parametrize("score", ["good", "1..2..3", "1.2.3..2", "--1..2"])
def test_a_wrong_score_says_what_is_right(run: Path, score: str) -> None:
    with pytest.raises(ValueError, match="score"):
        Rollouts(run).find(Filter(score=score))


def test_files_that_appear_change_or_go_are_seen(run: Path) -> None:
    rollouts = Rollouts(run)
    assert len(rollouts.table()) == 5
    pl.DataFrame([row(20, step=3)]).write_parquet(run / "rollouts" / "train-00003.parquet")
    assert len(rollouts.table()) == 6
    (run / "rollouts" / "train-00001.parquet").unlink()
    assert rollouts.table()["id"].to_list() == ["r9", "r20"]
    pl.DataFrame([row(21, step=3), row(22, step=3)]).write_parquet(run / "rollouts" / "train-00003.parquet")
    assert rollouts.table()["id"].to_list() == ["r9", "r21", "r22"]


@pytest.mark.parametrize("most", [0, 10**6])
def test_searched_texts_are_kept_until_their_file_changes(
    run: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    read: list[str] = []

    def noted(file: RolloutFile) -> pl.DataFrame:
        read.append(file.path.name)
        return _read_texts(file)

    monkeypatch.setattr("agentrig.view.watch.rollouts._read_texts", noted)
    monkeypatch.setattr("agentrig.view.watch.rollouts.MOST_TEXT", most)
    rollouts, both = Rollouts(run), ["train-00001.parquet", "validation-00002.parquet"]
    for _ in range(2):
        assert rollouts.find(Filter(text="SELECT 7"))["id"].to_list() == ["r1"]
    assert read == (both if most else 2 * both)
    read.clear()
    pl.DataFrame([row(1), row(2, replies="select 7")]).write_parquet(run / "rollouts" / "train-00001.parquet")
    assert rollouts.find(Filter(text="SELECT 7"))["id"].to_list() == ["r2"]
    assert read == (both[:1] if most else both)
    read.clear()
    assert rollouts.find(Filter(text="an answer", mode="validation"))["id"].to_list() == ["r9"]
    assert "train-00001.parquet" not in read, "only files with candidates"


def test_a_damaged_file_is_named_and_the_others_are_shown(run: Path) -> None:
    (run / "rollouts" / "train-00002.parquet").write_bytes(b"PAR1 but not really")
    rollouts = Rollouts(run)
    assert len(rollouts.table()) == 5
    assert list(rollouts.unreadable) == ["train-00002.parquet"]


def test_rollouts_of_earlier_versions_are_searched_in_their_spans(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    spans = [{"id": "a", "parent": None, "name": "chain.chain", "attributes": {"langchain.chain.type": "check"}}]
    old = [row(0, spans=json.dumps(spans)), row(1)]
    for each in old:
        del each["nodes"], each["replies"]
    pl.DataFrame(old).write_parquet(tmp_path / "rollouts" / "train-00001.parquet")
    rollouts = Rollouts(tmp_path)
    assert rollouts.find(Filter(node="check"))["id"].to_list() == ["r0"]
    assert rollouts.find(Filter(text="an answer"))["id"].to_list() == ["r0", "r1"]


def test_a_whole_row_is_decoded(run: Path) -> None:
    found = Rollouts(run).row("r2")
    assert found is not None
    assert (found["input"], found["spans"], found["mode"]) == ({"question": "how many 2?"}, [], "train")
    assert Rollouts(run).row("r99") is None


def test_verdicts() -> None:
    assert [verdict(row(0, **v)) for v in ({}, {"correct": False, "value": 0.0}, {"correct": False, "value": 0.3})] == [
        "right",
        "wrong",
        "part",
    ]
    assert verdict(row(0, value=None)) == "failed"

"""`agentrig.load_run` on run directories that are unfinished, damaged or copied."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import agentrig
from agentrig.errors import AgentrigError
from agentrig.testing.run_directory import write_run
from agentrig.view.notebook import COLUMNS, SPAN_COLUMNS


def test_a_crashed_run_is_read_and_read_again(tmp_path: Path) -> None:
    run = agentrig.load_run(write_run(tmp_path / "run", steps=2, held_out=4, ended=False))
    assert repr(run) == "<run run: crashed, 2 steps>"
    assert any("summary.json is not there" in text for text in run.missing)
    assert len(run.steps) == 2
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**json.loads(lines[-1]), "step": 3}) + "\n")
    assert list(run.reload().steps.index) == [1, 2, 3]
    assert not run.summary
    assert run.config["algorithm"]["use"] == "grpo"


def test_a_damaged_run_gives_what_is_left_and_names_the_rest(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=3, held_out=4)
    (directory / "rollouts" / "train-00002.parquet").write_bytes(b"PAR1 cut off")
    (directory / "manifest.json").write_text("{")
    file = directory / "rollouts" / "train-00003.parquet"
    table = pq.read_table(file)
    place = table.schema.get_field_index("spans")
    texts = ["{", *table["spans"].to_pylist()[1:]]
    pq.write_table(table.set_column(place, "spans", [texts]), file)
    run = agentrig.load_run(str(directory))
    with pytest.warns(UserWarning, match=r"train-00002.parquet cannot be read"):
        frame = run.rollouts("train")
    assert set(frame["step"]) == {1, 3}
    assert list(frame.columns) == ["mode", "step", *COLUMNS]
    assert frame["components"].map(type).eq(dict).all()
    with pytest.warns(UserWarning, match="the spans of rollout train-3-0 cannot be read"):
        spans = run.traces("train", step=3)
    assert list(spans.columns) == list(SPAN_COLUMNS)
    assert spans["rollout"].nunique() == 15
    assert any("manifest.json is damaged: Expecting property name" in text for text in run.missing)
    assert "manifest.json is damaged" in run._repr_html_()


def test_the_figures_of_a_hostile_run_are_shown_as_text(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=1, held_out=2)
    (directory / "error.json").write_text(json.dumps({"error": "X", "message": "<script>alert(1)</script>"}))
    shown = agentrig.load_run(directory)._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;alert(1)" in shown


def test_errors_say_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = agentrig.load_run(write_run(tmp_path / "run", steps=0, held_out=2, ended=False))
    with pytest.raises(AgentrigError, match='no rollouts of the mode "train"; modes with rollouts: report'):
        run.rollouts("train")
    with pytest.raises(AgentrigError, match=r'no plot "acuracy"\. Did you mean "accuracy"'):
        run.plot("acuracy")
    with pytest.raises(AgentrigError, match='nothing to draw yet for the plot "time"'):
        run.plot("time")
    assert run.plot("accuracy").save(tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(AgentrigError, match=r"pip install 'agentrig\[notebook\]'"):
        run.rollouts("report")
    with pytest.raises(AgentrigError, match="there is no run directory"):
        agentrig.load_run(tmp_path / "nothing")

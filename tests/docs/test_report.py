"""The page docs/report.md is compared with the files of a run, and imports at start-up with what is allowed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pyarrow.parquet as pq
import pytest

from agentrig import Endpoint, Score, Task
from agentrig.plan import resolve
from agentrig.rollouts import Mode, Rollout
from agentrig.run.directory import RunDirectory
from agentrig.run.manifest import manifest
from agentrig.run.session import RunSession
from agentrig.runners.scorer import Scorer
from agentrig.testing.run_directory import rollout_of
from agentrig.view import build_report
from agentrig.view.comparison import compare

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "report.md").read_text("utf-8")


def named(section: str) -> set[str]:
    table = PAGE.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


class Prepared:
    """Replaces the runner pool: returns prepared rollouts."""

    warnings = ()
    unrecorded = 0

    adapter = staticmethod(lambda trace: [])
    scorer = Scorer(lambda task, outcome, budget_s: Score.ok(1.0), budget_s=5.0)

    def check(self) -> None: ...

    def run(self, tasks: Sequence[Task], *, n: int, endpoint: Any, step: int, mode: Mode, **more: Any) -> list[Rollout]:
        found = [
            rollout_of(i, right=i % 3 > 0, mode=mode, step=step, failure="llm-error" if i == 7 else None)
            for i in range(n * len(tasks))
        ]
        return [r if r.score is None else attrs.evolve(r, score=with_a_part(r.score)) for r in found]


def with_a_part(score: Score) -> Score:
    return attrs.evolve(score, components={"words": 3.0})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory filled by the run's own session, rather than by the generator of these tests."""
    folder = tmp_path_factory.mktemp("runs")
    plan = resolve("mini", overrides=[f"run.directory={json.dumps(str(folder))}", "run.name=demo", "run.audit=false"])
    run = RunDirectory.create(plan)
    hardware: Any = plan.build("hardware")
    tasks = [rollout_of(i, right=True, mode="train", step=1).task for i in range(4)]
    strict = Scorer(lambda task, outcome, budget_s: Score.ok(float(len(outcome.answer) % 2)), budget_s=5.0)
    engine: Any = Prepared()
    endpoint = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
    session = RunSession(
        plan=plan,
        engine=engine,
        runtime=engine,
        run=run,
        hardware=hardware,
        tasks=dict.fromkeys(("train", "validation", "report"), tasks),
        second={"length-is-odd": strict},
    )
    run.write_json("manifest.json", manifest(plan, hardware, {"report": ("test", tasks)}))
    session.validate(endpoint, step=0)
    session.report(endpoint, when="before", step=0)
    for step in (1, 2):
        session.rollouts(tasks, n=4, endpoint=endpoint, step=step)
        session.validate(endpoint, step=step)
        digests = {"dtype": "float32", "weights": {"model.norm.weight": "0" * 32}}
        session.end_step(step, metrics={"weight_change": 0.1 * step}, time_s={"update": 0.01}, digests=digests)
    session.report(endpoint, when="after", step=2)
    run.write_json("summary.json", session.summary(wall_s=1.0))
    return run.path


def test_every_column_of_a_rollout_file_is_explained_and_no_other(directory: Path):
    schema = pq.read_schema(directory / "rollouts" / "train-00001.parquet")
    assert named("`rollouts/*.parquet`") == set(schema.names)


def test_every_key_of_a_step_is_explained_and_no_other(directory: Path):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert named("`metrics.jsonl`") == {key for line in lines for key in line}


def test_the_report_reads_the_files_of_a_session(directory: Path):
    build_report([directory])
    row = compare([directory]).rows[0]
    assert (row["status"], row["steps"], row["turns"], row["missing"]) == ("finished", 2, 2, [])
    assert row["accuracy"]["n"] == 4
    assert row["accuracy"]["best_validation"] == 0.5
    assert row["trained"] == ["write_query"]
    assert row["failures"] == {"llm-error": 2}
    text = (directory / "report.html").read_text("utf-8")
    assert "length-is-odd" in text
    assert "of 30" in text  # where the two rewards disagree, of the training rollouts that were scored
    assert "trained reward 1, length-is-odd 0" in text

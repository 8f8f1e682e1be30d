"""Recorded trainings of a real learner: each planted cause is named first, and nothing is wrong in healthy ones.

`tests/support/planted_runs.py` recorded them; the slow test trains each of them again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from planted_runs import ROOT, RUNS, make, recorded

from agentrig.cli.entry import main
from agentrig.report.causes.evidence import Seen
from agentrig.report.diagnosis import CAUSES, Diagnosis, diagnose, words
from agentrig.report.page import render
from agentrig.report.reading import read_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return recorded(tmp_path_factory.mktemp("recorded"))


def judge(name: str, found: Diagnosis) -> None:
    cause = RUNS[name].cause
    assert [f.cause for f in found.problems][:1] == ([cause] if cause else []), words(found)
    for problem in found.problems:
        assert problem.count is not None
        assert problem.since is not None
        assert problem.settings
        assert problem.advice or problem.ended  # an error of one line has its advice in the text


@pytest.mark.parametrize("name", RUNS)
def test_the_planted_cause_of_a_recorded_run_is_named_first(runs: Mapping[str, Path], name: str) -> None:
    judge(name, diagnose(runs[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_planted_cause_of_a_new_run_is_named_first(tmp_path: Path, name: str) -> None:
    judge(name, diagnose(make(name, tmp_path)))


def test_enough_runs_are_recorded() -> None:
    causes = {planned.cause for planned in RUNS.values() if planned.cause}
    assert len(causes) >= 10
    assert causes <= CAUSES.keys()
    assert sum(not planned.cause for planned in RUNS.values()) >= 10


def test_a_run_that_goes_on_is_asked_again_and_only_new_files_are_read(
    runs: Mapping[str, Path], tmp_path: Path
) -> None:
    whole, run = runs["queries cut"], tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "rollouts" / "train-00004.parquet").unlink()
    (run / "summary.json").unlink()
    seen = Seen()
    early = diagnose(run, seen)
    assert (early.status, early.problems[0].of) == ("unfinished", 384)
    for file in (run / "rollouts").iterdir():  # what was read is not read again
        state = file.stat()
        file.write_bytes(b"x" * state.st_size)
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    shutil.copy2(whole / "rollouts" / "train-00004.parquet", run / "rollouts")
    later = diagnose(run, seen)
    assert later.problems[0] == diagnose(whole).problems[0]
    assert (later.problems[0].of, later.missing) == (512, early.missing)
    blind = diagnose(run)
    assert (blind.problems, sum("cannot be read" in text for text in blind.missing)) != ([], 0)


def test_a_group_is_no_problem_without_enough_of_them(runs: Mapping[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["the reward is hacked"], run)
    lines = (run / "metrics.jsonl").read_text().splitlines()[:3]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for file in (run / "rollouts").glob("train-*"):
        if int(file.stem[6:]) > 3:
            file.unlink()
    assert "reward-and-audit-part" not in [f.cause for f in diagnose(run).problems]


def test_the_command_prints_it_and_its_exit_status_says_whether_something_was_wrong(
    runs: Mapping[str, Path], tmp_path: Path
) -> None:
    said = CliRunner().invoke(main, ["why", str(runs["queries cut"])])
    assert said.exit_code == 1
    page = (ROOT / "docs" / "how-to" / "debug-a-run.md").read_text("utf-8")
    shown = page.split("```text\n")[1].split("```")[0]
    assert said.stdout.startswith(shown)
    as_json = CliRunner().invoke(main, ["why", str(runs["prompts too long"]), "--json"])
    assert as_json.exit_code == 1
    causes = [problem["cause"] for problem in json.loads(as_json.stdout)["problems"]]
    assert causes == ["overlong-prompts", "failures", "call-errors"]
    healthy = CliRunner().invoke(main, ["why", str(runs["healthy: solved"])])
    assert (healthy.exit_code, "Nothing held learning back." in healthy.stdout) == (0, True)
    none = CliRunner().invoke(main, ["why", str(tmp_path / "nothing")])
    assert none.exit_code == 2
    assert "there is no run directory" in none.stderr


def test_the_report_shows_the_same_text(runs: Mapping[str, Path]) -> None:
    run = runs["entropy collapse"]
    page = render([read_run(run)])
    assert "What held learning back" in page
    for problem in diagnose(run).problems:
        assert f"<b>{problem.cause}</b>" in page
        assert f"since step {problem.since}" in page
    assert "Nothing held learning back." in render([read_run(runs["healthy: it learns"])])


def test_every_cause_is_on_the_page() -> None:
    page = (ROOT / "docs" / "how-to" / "debug-a-run.md").read_text("utf-8")
    assert [cause for cause in CAUSES if f"`{cause}`" not in page] == []

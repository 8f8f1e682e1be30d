"""Recorded trainings of a real learner: each planted cause is named first, and nothing is wrong in healthy ones.

`tests/support/planted_runs.py` recorded them; the slow test trains each of them again.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner
from planted_runs import ROOT, RUNS, make, recorded

from agentrig.cli.entry import main
from agentrig.ledger import UNMATCHED_NODE
from agentrig.view.causes import outcome
from agentrig.view.causes.evidence import Evidence
from agentrig.view.causes.outcome import SETTINGS
from agentrig.view.diagnosis import NO_GAIN, NOTHING_WRONG, Diagnosis, details, diagnose, verdict, words
from agentrig.view.notebook import LoadedRun
from agentrig.view.page import render
from agentrig.view.reading import read_run

PAGE = (ROOT / "docs" / "how-to" / "debug-a-run.md").read_text("utf-8")


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


def test_a_run_that_goes_on_is_asked_again_and_only_new_files_are_read(
    runs: Mapping[str, Path], tmp_path: Path
) -> None:
    whole, run = runs["queries cut"], tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "rollouts" / "train-00004.parquet").unlink()
    (run / "summary.json").unlink()
    before = read_run(run)
    early = diagnose(before)
    assert (early.status, early.problems[0].of) == ("crashed", 384)
    for file in (run / "rollouts").iterdir():  # what was read is not read again
        state = file.stat()
        file.write_bytes(b"x" * state.st_size)
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    shutil.copy2(whole / "rollouts" / "train-00004.parquet", run / "rollouts")
    later = diagnose(read_run(run, before.seen))
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
    assert "second-reward-behind" not in [f.cause for f in diagnose(run).problems]


def test_the_command_prints_it_and_its_exit_status_says_whether_something_was_wrong(
    runs: Mapping[str, Path], tmp_path: Path
) -> None:
    said = CliRunner().invoke(main, ["why", str(runs["queries cut"])])
    assert said.exit_code == 1
    shown = PAGE.split("```text\n")[1].split("```")[0]
    assert said.stdout.startswith(shown)
    as_json = CliRunner().invoke(main, ["why", str(runs["prompts too long"]), "--json"])
    assert as_json.exit_code == 1
    causes = [problem["cause"] for problem in json.loads(as_json.stdout)["problems"]]
    assert causes == ["overlong-prompts", "failures", "call-errors"]
    healthy = CliRunner().invoke(main, ["why", str(runs["healthy: solved"])])
    assert (healthy.exit_code, "No fault was found, and the run got better." in healthy.stdout) == (0, True)
    none = CliRunner().invoke(main, ["why", str(tmp_path / "nothing")])
    assert none.exit_code == 2
    assert "there is no run directory" in none.stderr


def test_the_report_shows_the_same_text(runs: Mapping[str, Path]) -> None:
    run = runs["entropy collapse"]
    page = render([read_run(run)])
    assert "What held learning back" in page
    for problem in diagnose(run).problems:
        assert f"<b>{problem.cause}</b>" in page
        assert all(line in html.unescape(page) for line in details(problem))
    assert "No fault was found, and the run got better." in render([read_run(runs["healthy: it learns"])])


def test_every_cause_is_on_the_page() -> None:
    causes = set(SETTINGS) | {planned.cause for planned in RUNS.values() if planned.cause}
    for file in Path(outcome.__file__).parent.glob("*.py"):
        causes |= set(re.findall(r'(?:problem\(|cause(?:, \w+)? =)\s*"([a-z-]+)"', file.read_text()))
    assert len(causes) > 30
    assert [cause for cause in sorted(causes) if f"`{cause}`" not in PAGE] == []


# --- runs without a significant gain ---------------------------------------------------------------


def changed(run: Path, place: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy a recorded run, and change each line of its metrics."""
    shutil.copytree(run, place)
    lines = [json.loads(text) for text in (place / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        change(line)
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def test_nothing_held_learning_back_is_said_of_a_run_with_a_significant_gain_only(runs: Mapping[str, Path]) -> None:
    for name in ("healthy: it learns", "healthy: solved"):
        assert verdict(diagnose(runs[name])).startswith(NOTHING_WRONG)
    run = runs["healthy: gains within noise"]
    found = diagnose(run)
    assert (found.problems, found.gained) == ([], False)
    assert found.next_step
    assert verdict(attrs.evolve(found, lost=False)) == f"{NO_GAIN.format('gained')} {found.next_step}"
    assert "what the run lost may be chance" in verdict(attrs.evolve(found, lost=True))
    for text in (words(found), render([read_run(run)]), LoadedRun(run)._repr_html_()):
        assert NOTHING_WRONG not in text
        assert re.search("what the run (gained|lost) may be chance", text)


def test_a_reward_that_rose_without_the_accuracy_is_said_as_such(
    runs: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = runs["healthy: it learns"]
    monkeypatch.setattr(Evidence, "changed", property(lambda self: (3, 2, 0, 113)))
    found = diagnose(run)
    assert found.problems == []
    assert found.reward_rise is not None
    assert found.reward_rise > 0
    assert (found.gained, found.gain) == (False, ""), "as why --json says it"
    said = f"no significant gain in accuracy; the mean reward of training rose by {found.reward_rise:.2g}."
    for text in (words(found), render([read_run(run)])):
        assert said in text
        assert NOTHING_WRONG not in text
    fell = changed(run, tmp_path / "fell", lambda line: line.update(validation_reward=0.5 - line["step"] / 1000))
    last = read_run(fell).steps[-1]["step"]
    said = f"rose by {found.reward_rise:.2g}, and that of validation went from 0.499 to {0.5 - last / 1000:.3g}."
    assert said in words(diagnose(fell))


def test_a_low_entropy_from_the_start_is_named(runs: Mapping[str, Path], tmp_path: Path) -> None:
    run = changed(
        runs["healthy: gains within noise"],
        tmp_path / "run",
        lambda line: line.update(zero_variance_groups=0.71, algorithm={**line["algorithm"], "entropy": 0.03}),
    )
    found = diagnose(run)
    assert [f.cause for f in found.problems] == ["low-entropy"], found
    assert "the entropy of the trained calls was 0.03 nats a token from the first steps on" in found.problems[0].text
    assert "71% of all groups" in found.problems[0].text
    learns = changed(
        runs["healthy: it learns"],
        tmp_path / "learns",
        lambda line: line.update(zero_variance_groups=0.71, algorithm={**line["algorithm"], "entropy": 0.03}),
    )
    assert diagnose(learns).problems == [], "it learned all the same"


@pytest.mark.parametrize(
    ("name", "after"),
    [("learning rate too large", {"learning-rate-too-large"}), ("healthy: gains within noise", set())],
)
def test_an_adapter_that_leaves_out_most_calls_is_named_before_the_learning_rate(
    runs: Mapping[str, Path], tmp_path: Path, name: str, after: set[str]
) -> None:
    def left_out(line: dict[str, Any]) -> None:
        n = line["rollouts"]
        line["calls"] = {"recorded": 3 * n, "trained": n, "dropped": {UNMATCHED_NODE: 2 * n}}
        line["nodes"] = {
            "seen": {"write_query": n, "check_query": n, "rewrite_query": n},
            "trained": {"check_query": n},
        }

    found = diagnose(changed(runs[name], tmp_path / "run", left_out))
    first, *others = found.problems
    assert first.cause == "unmatched-calls"
    assert after <= {f.cause for f in others}
    assert "the adapter trains check_query, and left out 67% of the calls: rewrite_query, write_query" in first.text
    assert "adapter.match" in first.settings
    learned = diagnose(changed(runs["healthy: it learns"], tmp_path / "learned", left_out))
    assert learned.problems == [], "to train some nodes only is no fault of a run that learns"

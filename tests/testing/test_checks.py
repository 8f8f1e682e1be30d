"""The kit's base: checks, reports, subjects and the pytest plugin."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrig import CreditSpec, RewardSpec, Score
from agentrig.errors import ConfigError
from agentrig.plugins import loading
from agentrig.run.directory import RunDirectory
from agentrig.testing import Check, CheckFailed, CheckSkipped, check, checks
from agentrig.testing.kit import needs
from agentrig.testing.scripted import Reply, ScriptedServer
from agentrig.testing.subject import Subject

FINE = RewardSpec(name="fine", summary="Always 1.", build=lambda config: lambda task, outcome, budget_s: Score.ok(1))
calls: list[str] = []


def check_red(subject: Subject) -> None:
    """It is not red.

    Why: It matters.
    Cure: Mend it, in
        two lines.
    """
    calls.append("red")
    raise CheckFailed("seen at 1.py:3")


@needs(check_red)
def check_second(subject: Subject) -> None:
    """Never done."""
    calls.append("second")


@needs(check_second)
def check_third(subject: Subject) -> None:
    """Never done."""
    calls.append("third")


def check_ends_python(subject: Subject) -> None:
    """It does not end Python."""
    sys.exit("the plugin ends Python")


def check_slow(subject: Subject) -> None:
    """It ends soon."""
    time.sleep(0.6)


def ran(*functions: Callable[[Subject], None]) -> list[Check]:
    calls.clear()
    subject = Subject(kind="reward", given=FINE)
    subject.chosen |= {check_red, *functions}
    return [Check(kind="reward", function=function, subject=subject) for function in functions]


def test_a_check_that_takes_long_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "SLOW_S", 0.1)
    assert [c.result().status for c in ran(check_slow)] == ["passed"]
    said = f"still doing the check reward.slow after 0.1 s, now at {__file__}"
    assert [m for m in caplog.messages if m.startswith(said) and m.endswith("; Ctrl-C ends it")]


def test_a_failure_names_check_reason_and_cure() -> None:
    red, ends = ran(check_red, check_ends_python)
    message = "reward.red: seen at 1.py:3\n  why it matters: It matters.\n  what to do: Mend it, in two lines."
    with pytest.raises(CheckFailed) as failed:
        red()
    assert str(failed.value) == message
    with pytest.raises(CheckFailed, match=r"reward.ends-python: SystemExit: the plugin ends Python .*test_checks.py"):
        ends()


def test_what_a_check_needs_runs_once_and_its_failure_skips() -> None:
    for each in ran(check_third, check_second):
        with pytest.raises(CheckSkipped, match=r"needs reward.red, which failed"):
            each()
    assert calls == ["red"]


def test_without_tasks_the_cure_is_to_name_some() -> None:
    report = check("reward", FINE, only=["scores", "odd-answers"], raise_failed=False)
    (scores,) = report.failed
    assert [r.status for r in report.results] == ["failed", "skipped"]
    assert "with which tasks to try it: its plugin brings no task set" in scores.message
    assert "agentrig validate NAME --tasks TASKS" in scores.message
    assert "Installed: mini-sql, spider" in scores.message
    assert "Such a rollout is left out" not in scores.message, "the reason of a check that was not done"


def test_a_report_is_said_line_by_line_and_raises() -> None:
    broken = RewardSpec(name="broken", summary="Cannot be built.", build=lambda config: 1 / 0)
    said: list[str] = []
    report = check("reward", broken, only=["loads", "odd-answers"], raise_failed=False, say=said.append)
    assert "\n".join(said).rstrip() == str(report)
    assert len(said) == 4
    assert "cannot be built: ZeroDivisionError" in str(report)
    assert "1 failed, 1 skipped" in str(report)
    with pytest.raises(CheckFailed, match=r"reward\.loads"):
        check("reward", broken, only=["loads"])
    assert check("reward", FINE, only=["loads"]).ok


@pytest.mark.parametrize(
    ("given", "settings", "said"),
    [
        ("exact-matc", None, 'there is no reward called "exact-matc"'),
        (FINE, {"lr": 1}, 'fine has no key "lr"'),
        (lambda task, outcome, budget_s: Score.ok(1), {"lr": 1}, "is already built"),
        ("nowhere.py:fine", None, "there is no file"),
    ],
)
def test_a_subject_that_cannot_be_loaded_fails_one_check(given: object, settings: object, said: str) -> None:
    report = check("reward", given, settings=settings, raise_failed=False)
    assert [r.check for r in report.failed] == ["reward.loads"]
    assert {r.status for r in report.results[1:]} <= {"skipped"}
    assert said in report.results[0].message


def test_a_credit_is_told_from_which_made_up_groups_it_learns() -> None:
    def high(groups: Any) -> Any:
        for group in groups:
            values = [rollout.value or 0.0 for rollout in group]
            mean = sum(values) / max(1, len(values))
            yield [value - mean if value > 0.9 and mean > 0.4 else None for value in values]

    spec = CreditSpec(name="high", summary="", build=lambda config: high)
    (*_, learns) = check("credit", spec, only=["learns"]).results
    assert learns.status == "passed"
    assert learns.message.startswith(
        "2 of 6 made-up groups with unlike rewards teach something; nothing is learned from such as are mostly wrong "
        "(0, 1, 0, 0); mostly low"
    )
    (*_, learns) = check("credit", "grpo", only=["learns"]).results
    assert learns.message == "6 of 6 made-up groups with unlike rewards teach something"


def test_unknown_kinds_checks_and_options_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no checks of a \"rewards\". Did you mean \"reward\""):
        checks("rewards", FINE)
    with pytest.raises(ConfigError, match=r"none called 'lods'. Did you mean \"loads\""):
        checks("reward", FINE, only=["lods"])
    with pytest.raises(ConfigError, match="have no option 'task_n'"):
        checks("reward", FINE, task_n=3)


FAILING = """
import pytest
from agentrig import RewardSpec
from agentrig.testing import checks


def build(config):
    raise KeyError("mine")


RED = RewardSpec(name="red", summary="Cannot be built.", build=build)


@pytest.mark.parametrize("check", checks("reward", RED, only=["loads"]), ids=str)
def test_reward(check):
    check()
"""


@pytest.mark.slow
def test_pytest_shows_the_message_of_a_failed_check_and_no_line_of_the_kit(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FAILING)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_it.py"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    (summary,) = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert done.stdout.replace(summary, "").count("reward.loads: ") == 1
    assert "KeyError: 'mine' (test_it.py:8 in build)" in done.stdout
    assert "what to do: " in done.stdout
    assert "kit.py" not in done.stdout


def test_no_command_imports_the_kit() -> None:
    code = "import sys, agentrig.cli.groups, agentrig.plugins.loading as l; l.load(); print([m for m in sys.modules if "
    done = subprocess.run(
        [sys.executable, "-c", code + "m.startswith('agentrig.testing')])"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr


def test_the_scripted_server_returns_ids_where_they_are_asked_for_and_its_headers(
    scripted_server: ScriptedServer,
) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Zwölf?"}]}
    plain = httpx.post(f"{scripted_server.url}/chat/completions", json=body).json()
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]
    scripted_server.script = Reply(status=429, text="busy", headers={"retry-after": "1"})
    busy = httpx.post(f"{scripted_server.url}/chat/completions", json=body)
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")


def test_the_database_and_the_run_directory_are_real(one_table_database: Path, run_directory: Path) -> None:
    with closing(sqlite3.connect(one_table_database)) as connection:
        assert connection.execute("SELECT name FROM animal WHERE kg IS NULL").fetchall() == [("Zoë",)]
    run = RunDirectory(run_directory)
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    assert json.loads((run_directory / "summary.json").read_text())["complete"] is True

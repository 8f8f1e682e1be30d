"""Whole runs of `gepa` and `apo` on an agent whose accuracy depends on its prompt in a known way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentrig_prompts.record import FILE, Record
from click.testing import CliRunner
from prompted_model import REFLECTIONS, Model, settings
from prompted_plugin import RULES
from quick import quick_first

from agentrig.cli.entry import main
from agentrig.cli.options import find_checkpoint
from agentrig.errors import ConfigError, RunFileError
from agentrig.plan import Plan, resolve
from agentrig.prompting import read_prompts
from agentrig.run.training import train
from agentrig.testing.scripted import serving
from agentrig.view.diagnosis import diagnose
from agentrig.view.terminal import run_ending


@pytest.fixture
def model() -> Iterator[Model]:
    with serving(Model()) as server:
        yield server


ALGORITHMS = ("gepa", "apo")
CALLS = {"gepa": 150, "apo": 300}
"""The budget of each: what `apo` makes is not tried on the minibatch first, and costs two reflections."""


def plan_of(model: Model, place: Path, algorithm: str, *overrides: str, **more: Any) -> Plan:
    file = place / "run.toml"
    file.write_text("")
    return resolve(str(file), overrides=[*settings(model.url, place, algorithm), *overrides], **more)


def searched(model: Model, run: Path) -> list[str]:
    """What was paid for the search: everything but the two measurements on held-out tasks."""
    held_out = 2 * json.loads((run / "summary.json").read_text())["accuracy"]["n"]
    assert held_out == 40
    return model.paid[20:-20]


@pytest.mark.parametrize("algorithm", quick_first(ALGORITHMS, ["gepa"]))
def test_the_best_prompt_is_found_within_the_budget_in_spite_of_failures(
    model: Model, tmp_path: Path, algorithm: str
) -> None:
    count = 0

    def failing(said: str) -> bool | float:
        nonlocal count
        count += 1
        return 2.0 if count == 45 else count % 7 == 0 and "prompt" not in said and 20 < count < 95

    model.failing = failing
    run, max_calls = tmp_path / "run", CALLS[algorithm]
    summary = train(plan_of(model, tmp_path, algorithm, f"algorithm.max_calls={max_calls}", "run.failure_limit=0.6"))

    assert summary["accuracy"]["before"] == 0.0
    assert summary["accuracy"]["after"] >= 0.95, summary  # the best prompt has all rules: 100%
    assert len(searched(model, run)) <= max_calls
    assert summary["failures"]["llm-error"] > 5
    found = json.loads((run / "prompts.json").read_text())
    assert all(rule in found["prompts"]["system"] for rule in RULES.values())
    assert found["validation_reward"] == 1.0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["algorithm"]["calls_used"] == len(searched(model, run))
    assert lines[-1]["algorithm"]["tokens_used"] > 0
    assert "weight_change" not in lines[-1]["algorithm"]
    # No failure counts as an answer without reward.
    record = [json.loads(line) for line in (run / "search.jsonl").read_text().splitlines()]
    assert all("value" not in line for line in record if line.get("failure"))

    # The report knows that no weights changed.
    seen = diagnose(run)
    said = [f.text for f in (*seen.checks, *seen.warnings)]
    assert "the run trained prompts, no weights: nothing had to arrive at the model's server" in said
    assert any(text.endswith("prompts, no weights") for text in said)
    assert seen.unseen == []
    assert not any("nothing" in text and "no weights" not in text for text in said), said
    with pytest.raises(ConfigError, match="found prompts, and no model"):
        find_checkpoint(run)
    assert summary["audited"]["faults"] == []
    assert "For sum: ADD" in resolve(str(run / "config.toml"), prompts=read_prompts(run)).prompts["system"]


def test_eval_says_which_model_and_which_prompts_it_measures(model: Model, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    found = tmp_path / "prompts.json"
    found.write_text(json.dumps({"prompts": {"system": plan_of(model, tmp_path, "gepa").prompts["system"]}}))
    words = [*settings(model.url, tmp_path, "gepa"), "--prompts", str(found), "--limit", "1"]
    done = CliRunner().invoke(main, ["eval", str(tmp_path / "run.toml"), *words])
    assert done.exit_code == 0, done.output
    assert f"1 task of split test, model: scripted at {model.url}, prompts: {found}" in done.stderr


def killer(model: Model, at: int, process: list[subprocess.Popen[bytes]]) -> None:
    """Let the server kill the run when it gets the request of this number, which is then not paid."""

    def failing(said: str) -> bool:
        if len(model.paid) == at and process:
            time.sleep(0.5)  # what was answered before has been recorded
            os.killpg(process.pop().pid, signal.SIGKILL)
            return True
        return False

    model.failing = failing


SMALL = ["algorithm.max_calls=80", "runners.threads=1", "run.report_tasks=4", "run.validation_tasks=4"]
SECOND = {"gepa": 25, "apo": 50}
"""A request of the second step: after 4 held-out tasks, 4 on validation, and a step of up to 11 or 36."""


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_killed_run_goes_on_and_pays_no_call_twice(model: Model, tmp_path: Path, algorithm: str) -> None:
    (tmp_path / "killed.toml").write_text("")
    words = [*settings(model.url, tmp_path, algorithm), *SMALL]
    command = [sys.executable, "-m", "agentrig", "train"]
    process: list[subprocess.Popen[bytes]] = []
    killer(model, SECOND[algorithm], process)
    with (tmp_path / "log").open("wb") as log:
        first = subprocess.Popen(
            [*command, str(tmp_path / "killed.toml"), *words], stdout=log, stderr=log, start_new_session=True
        )
        process.append(first)
        assert first.wait(timeout=240) == -signal.SIGKILL, (tmp_path / "log").read_text()
        assert len(model.paid) == SECOND[algorithm]
        assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
        assert (
            subprocess.run(
                [*command, "--resume", str(tmp_path / "run")], stdout=log, stderr=log, timeout=240, check=False
            ).returncode
            == 0
        ), (tmp_path / "log").read_text()
    assert len(model.paid) == len(set(model.paid)) or algorithm == "apo"  # which asks for several edits
    interrupted = (tmp_path / "run" / "prompts.json").read_text()
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))

    # It is the run that it would have been without the interruption.
    whole = tmp_path / "whole"
    whole.mkdir()
    paid, model.paid, model.failing = model.paid, [], lambda said: False
    train(plan_of(model, whole, algorithm, *SMALL))
    assert (whole / "run" / "prompts.json").read_text() == interrupted
    assert sorted(model.paid) == sorted(paid)


@pytest.mark.parametrize(
    ("algorithm", "overrides", "said"),
    [
        ("gepa", ["algorithm.max_calls=56"], r"max_calls = 56 can find nothing: .* need at least 57"),
        ("apo", ["algorithm.max_calls=62"], r"max_calls = 62 can find nothing: .* need at least 63"),
        ("apo", ["agent.use=unprompted"], r"this agent declares none"),
        ("gepa", ["algorithm.minibatch=25", "algorithm.max_calls=900"], r"minibatch = 25: there are 24 training tasks"),
    ],
)
def test_what_can_find_nothing_is_refused_before_the_first_rollout(
    model: Model, tmp_path: Path, algorithm: str, overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        train(plan_of(model, tmp_path, algorithm, *overrides))
    assert model.paid == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [('{"broken', "is no JSON that a search wrote"), ("7", "is no JSON that a search wrote"), ("{}", "lacks 'calls'")],
)
def test_a_damaged_line_of_the_record_is_named(tmp_path: Path, line: str, said: str) -> None:
    Record(tmp_path).add("a", calls=1, tokens=2, settled=True)
    with (tmp_path / FILE).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(RunFileError, match=f"line 2 {said}; delete that line: what it paid is paid again"):
        Record(tmp_path)


@pytest.mark.parametrize("silent", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_model_that_answers_nonsense_is_named_in_the_log_and_in_the_report(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture, silent: bool
) -> None:
    """Half of the critiques are empty, or each is a text; no new prompt is usable."""

    def empty(asked: str) -> bool:
        return silent and REFLECTIONS[1] in asked and bool(len(asked) % 2)

    model.reflects = lambda asked: "" if empty(asked) else "The weather is fine."
    summary = train(plan_of(model, tmp_path, "apo", "algorithm.max_calls=80", *SMALL[1:]))
    assert summary["accuracy"]["before"] == summary["accuracy"]["after"] == 0.0
    assert ("prompt system: the critique is empty" in caplog.text) == silent
    assert "prompt system: a new text is refused: the reply has no prompt between two lines of ```" in caplog.text
    asked = [said for said in model.paid if any(words in said for words in REFLECTIONS)]
    refused = [said for said in asked if REFLECTIONS[2] in said or empty(said)]
    unusable = f"{len(refused)} of {len(refused)} attempts at a new prompt gave no usable text"
    ended = f"the budget has less; {unusable}"
    seen = diagnose(tmp_path / "run")
    assert any(finding.text.endswith(ended) for finding in seen.checks)
    said = f"why: reflections-unusable: {unusable}"
    assert said in list(run_ending(tmp_path / "run"))
    latest = "a new text is refused: the reply has no prompt between two lines of ```; what came back: The weather"
    assert latest in str(seen) or "the critique is empty; what came back: {" in str(seen), str(seen)
    assert "settings: algorithm.reflection_model, algorithm.reflection_base_url" in str(seen)
    assert CliRunner().invoke(main, ["why", str(tmp_path / "run")]).exit_code == 1

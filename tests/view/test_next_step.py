"""What is said after a gain, in a terminal and on the pages: nothing held learning back, and what is next."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest

from agentrig import Outcome, Score, Task
from agentrig.correctness import Correctness
from agentrig.run.directory import RunDirectory
from agentrig.testing.run_directory import rollout_of, trace_of, write_run
from agentrig.view.causes.evidence import Evidence, StepFacts, reason_of
from agentrig.view.causes.finding import Finding
from agentrig.view.causes.outcome import changes, classes, memorised, more, more_tasks, weak_slice
from agentrig.view.causes.policy import collapsed, unexploring
from agentrig.view.causes.rewards import one_reason
from agentrig.view.diagnosis import (
    GOES_ON,
    LOSS,
    LOWER_REWARD,
    NO_GAIN,
    NOTHING_WRONG,
    REWARD_ONLY,
    UNCHANGED,
    UNMEASURED,
    UNREADABLE,
    diagnose,
    ending,
    verdict,
    words,
)
from agentrig.view.page import render
from agentrig.view.reading import read_run
from agentrig.view.terminal import run_ending
from agentrig.view.watch.app import serving


def with_lines(run: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        change(line)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def validated(run: Path, rights: dict[int, int]) -> None:
    """Let so many of 30 validation tasks be right at these steps."""
    for step, n in rights.items():
        rollouts = [rollout_of(i, right=i < n, mode="validation", step=step) for i in range(30)]
        RunDirectory(run).write_rollouts(rollouts, mode="validation", step=step)
    with_lines(run, lambda line: line.update({"validation_accuracy": rights.get(line["step"], 0) / 30 or None}))


def unvalidated(line: dict[str, Any]) -> None:
    line.pop("validation_accuracy", None)


def level(line: dict[str, Any]) -> None:
    line.update({"validation_accuracy": 0.5} if line["step"] in (2, 4, 6) else {"validation_accuracy": None})


def test_a_validation_that_still_rises_asks_for_more_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", lift=0.6, held_out=60)
    validated(run, {8: 15, 16: 18, 24: 24})  # 6 more of 30, and none fewer
    shares = "60.0% at step 16, 80.0% at step 24"
    said = f"Validation accuracy was still rising at the end ({shares}): train for more steps."
    gain = r"Of 60 held-out tasks measured at both ends, \d+ went from wrong to right and \d from right to wrong "
    interval = r"; 95% interval of the difference \+48\.0 to \+74\.6 points"
    whole = rf"{NOTHING_WRONG} {gain}\(sign test p < 0\.001: significant\){interval}\. {re.escape(said)}"
    assert re.fullmatch(whole, verdict(diagnose(run)))
    for last in (18, 20, 23):  # 23: a rise by 5 tasks has p = 0.06
        validated(run, {8: 15, 16: 18, 24: last})
        assert "more steps" not in ending(diagnose(run))[0]


def test_an_interval_that_the_exact_test_does_not_share_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", lift=0.0)
    for last, said in ((26, True), (24, False)):  # 13 became right, and so many wrong: p = 0.053, -24.6 to -0.8
        for step in (0, 24):
            right = [i < last if step == 0 else last <= i < last + 13 for i in range(100)]
            made = [rollout_of(i, right=right[i], mode="report", step=step) for i in range(100)]
            RunDirectory(run).write_rollouts(made, mode="report", step=step)
        assert ("points (it is approximate, and the test is exact)" in str(diagnose(run))) == said


def test_a_training_accuracy_far_above_the_held_out_one_asks_for_more_tasks(tmp_path: Path) -> None:
    run = with_lines(write_run(tmp_path / "run", lift=0.6, held_out=200), unvalidated)
    assert "more tasks (tasks.use)" not in diagnose(run).next_step
    less = write_run(tmp_path / "less", lift=0.25, held_out=200)
    for file in (less / "rollouts").glob("report-*"):
        file.replace(run / "rollouts" / file.name)
    assert re.fullmatch(
        r"8\d\.\d% of the training rollouts of the last 6 steps are right, and \d\d\.\d% of the held-out tasks: "
        r"train on more tasks \(tasks\.use\)\.",
        diagnose(run).next_step,
    )


def sliced(monkeypatch: pytest.MonkeyPatch, parts: dict[str, tuple[int, int]]) -> None:
    """Let the held-out tasks have these classes: how many tasks, and how many of them are right at the end."""
    classes = {part: {"n_after": n, "before": 0.1, "after": right / n} for part, (n, right) in parts.items()}
    found = {"slices": {"database": classes}, "components": {}}
    monkeypatch.setattr("agentrig.view.tables.held_out", lambda run: found)


def test_the_weakest_class_is_named_only_if_it_is_no_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_lines(write_run(tmp_path / "run", lift=0.6, held_out=60), level)
    others = {f"other {i}": (26, 20) for i in range(13)}
    sliced(monkeypatch, {})  # as of a component of one's own, whose tasks have no slices
    assert weak_slice(Evidence.of(read_run(run))) == ""
    sliced(monkeypatch, {**others, "music": (24, 15)})  # the lowest of 14: alone, its p is 0.1
    assert weak_slice(Evidence.of(read_run(run))) == ""
    sliced(monkeypatch, {**others, "music": (24, 6)})
    said = "Held-out tasks with database = music are right least often (25.0% of 24): "
    assert diagnose(run).next_step == f"{said}see why: agentrig watch {run}"
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('use = "mini-sql"', 'use = "table"\nfile = "my.csv"'))
    assert diagnose(run).next_step == f"{said}add rows like these to my.csv (tasks.file)."
    assert "more tasks (tasks.file)" in more_tasks(
        attrs.evolve(evidence(tmp_path / "gap", right=[48] * 8, known=60, n=150), run=read_run(run))
    )


def with_steps(run: Path, steps: int) -> Path:
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("[algorithm]", f"[algorithm]\nsteps = {steps}"))
    return run


def test_more_steps_come_with_the_whole_command(tmp_path: Path) -> None:
    run = with_steps(write_run(tmp_path / "run", steps=8, lift=0.0), 8)
    said = f"Train for more steps: agentrig train --resume {run} algorithm.steps=16"
    assert diagnose(run).next_step == said
    manifest = run / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(json.dumps({**json.loads(whole), "most_steps": 52}))
    assert diagnose(run).next_step == said.replace("=16", "=52"), "what the recipe asked for, before it was stopped"
    manifest.write_text(whole)
    assert more(Evidence.of(read_run(with_steps(write_run(tmp_path / "short", steps=8, lift=0.0), 20)))) == (
        f"Train for more steps: agentrig train --resume {tmp_path / 'short'}"
    )
    found = attrs.evolve(diagnose(run), gained=True, reward_rise=0.11)
    assert verdict(found).endswith(f"the mean reward of training rose by 0.11. {said}")
    assert verdict(attrs.evolve(found, status="running")) == GOES_ON


def test_a_run_that_stopped_early_is_told_to_go_on_and_not_that_its_gain_may_be_chance(tmp_path: Path) -> None:
    run = with_steps(write_run(tmp_path / "run", steps=2, lift=0.0, ended=False), 9)
    (run / "error.json").write_text(json.dumps({"error": "KeyboardInterrupt", "message": "stopped", "cause": ""}))
    assert verdict(diagnose(run)) == (
        f"The run stopped after step 2 of 9, and its gain was not measured. Go on with: agentrig train --resume {run}"
    )
    assert "stopped" in words(diagnose(run))
    assert "running" not in words(diagnose(run))
    lost = "ended at once; step 2 was not saved, so a resume goes on after step 1"
    for said, kept in (("ended early", []), (lost, [lost])):
        message = f"{said}; resume with: agentrig train --resume {run}"
        (run / "error.json").write_text(json.dumps({"error": "Interrupted", "message": message, "cause": ""}))
        assert words(diagnose(run)).count("agentrig train --resume") == 1
        assert [f.text for f in diagnose(run).warnings if "ended" in f.text] == kept
    (run / "error.json").unlink()
    killed = words(diagnose(run))
    assert (killed.count("agentrig train --resume"), "the run was killed, or this is a copy" in killed) == (1, True)
    manifest = json.loads((run / "manifest.json").read_text())
    reward = read_run(run).setting("reward", "use")
    manifest["components"] = {"reward": {"name": "another"}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("steps = 9", "steps = 1"))
    told = verdict(diagnose(run))
    said = f"config.toml was edited: it names the reward {reward}, and the run began with another: "
    assert told.startswith("The run stopped after step 2, and its gain was not measured. A resume would be refused now")
    assert (said in told, 'write [reward] use = "another" there again' in told) == (True, True)
    assert "agentrig train --resume" not in words(diagnose(run))
    none = with_steps(write_run(tmp_path / "none", steps=0, ended=False), 9)
    (none / "error.json").write_text(json.dumps({"error": "Interrupted", "message": "stopped", "cause": ""}))
    assert verdict(diagnose(none)) == (
        f"The run stopped before its first step had ended. Go on with: agentrig train --resume {none}"
    )


def test_a_stopped_run_whose_reward_rose_has_no_verdict_on_a_gain_that_was_not_measured(tmp_path: Path) -> None:
    run = with_steps(write_run(tmp_path / "run", steps=13, lift=0.6, ended=False), 40)
    (run / "error.json").write_text(json.dumps({"error": "Interrupted", "message": "stopped", "cause": ""}))
    first, *others = sorted((run / "rollouts").glob("validation-*"))
    for file in others:
        file.write_bytes(first.read_bytes())
    found = diagnose(run)
    assert (found.gained, found.reward_rise) == (False, None)
    assert verdict(found) == (
        f"The run stopped after step 13 of 40, and its gain was not measured. Go on with: agentrig train --resume {run}"
    )
    steps = [int(file.stem.rpartition("-")[2]) for file in (first, others[-1])]
    (said,) = [f.text for f in found.warnings if "none of" in f.text]
    assert f"validation tasks measured at step {steps[0]} and step {steps[1]} changed its outcome" in said


def test_an_accuracy_that_did_not_change_or_was_not_measured_is_no_gain_that_may_be_chance(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3, lift=0.0)
    first, last = sorted((run / "rollouts").glob("report-*"))
    last.write_bytes(first.read_bytes())
    assert verdict(diagnose(run)).startswith(f"{UNCHANGED}. ")
    rollouts = [rollout_of(i, right=i % 2 == 0, mode="report", step=0) for i in range(30)]
    RunDirectory(run).write_rollouts(rollouts, mode="report", step=0)
    rollouts = [rollout_of(i, right=i % 2 == 1, mode="report", step=3) for i in range(30)]
    RunDirectory(run).write_rollouts(rollouts, mode="report", step=3)
    assert verdict(diagnose(run)).startswith(f"{UNCHANGED}: 15 tasks got better and 15 worse. ")
    for file in (run / "rollouts").glob("[rv]*-*"):
        file.unlink()
    assert verdict(diagnose(run)) == UNREADABLE
    (run / "progress.json").write_text("{}")
    (run / "summary.json").write_text(json.dumps({"complete": True, "steps": 3}))
    assert verdict(diagnose(run)).startswith(UNMEASURED)


def test_more_steps_are_the_next_step_where_validation_was_measured_too_seldom(tmp_path: Path) -> None:
    run = with_lines(with_steps(write_run(tmp_path / "run", steps=20, lift=0.6, held_out=60), 20), unvalidated)
    assert diagnose(run).next_step == (
        "0 validations do not show whether validation still rose: in the next run, a smaller algorithm.validate_every "
        f"measures more often. Or train for more steps: agentrig train --resume {run} algorithm.steps=40"
    )
    all_right = [rollout_of(i, right=True, mode="report", step=20) for i in range(60)]
    RunDirectory(run).write_rollouts(all_right, mode="report", step=20)
    assert diagnose(run).next_step == (
        "More steps would hardly help: 100.0% of the held-out tasks are right. Use harder tasks."
    )


def test_a_run_that_solved_its_tasks_or_gained_nothing_has_no_next_step_of_a_gain(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", lift=0.6, held_out=60)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "solved": True}))
    assert re.fullmatch(
        rf"{NOTHING_WRONG} Of 60 held-out tasks .*: significant\); 95% interval .* points\.", verdict(diagnose(run))
    )
    assert verdict(diagnose(write_run(tmp_path / "none", steps=3, lift=0.0))) == (
        f"{NO_GAIN.format('gained')} Train for more steps."
    )


def test_a_significant_loss_is_no_gain_that_may_be_chance(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", lift=0.0, held_out=60)
    for step, right in ((0, 59), (24, 45)):
        rollouts = [rollout_of(i, right=i < right, mode="report", step=step) for i in range(60)]
        RunDirectory(run).write_rollouts(rollouts, mode="report", step=step)
    for file in (run / "rollouts").glob("train-*"):
        step = int(file.stem[-5:])
        rollouts = [attrs.evolve(rollout_of(i // 8, right=True, mode="train", step=step), id=str(i)) for i in range(96)]
        RunDirectory(run).write_rollouts(rollouts, mode="train", step=step)
    found = diagnose(run)
    assert [(f.cause, f.follows) for f in found.problems] == [("learning-rate-too-large", ""), ("tasks-too-easy", "")]
    first = "\n".join(ending(found))
    assert first.startswith(
        "learning-rate-too-large: accuracy fell significantly: of 60 held-out tasks measured at both ends, 0 went from "
        "wrong to right and 14 from right to wrong (sign test p"
    )
    assert "The learning rate of 0.0003 is the likely cause. Use a tenth of it: agentrig train " in first
    assert "algorithm.lr=3e-05" in first
    assert words(found).count("right to wrong") == 1
    assert "\n".join(map(str, run_ending(run))).count("went from wrong to right") == 1
    (run / "summary.json").unlink()
    first = "\n".join(ending(diagnose(attrs.evolve(read_run(run), running=True))))
    assert "accuracy is falling significantly: of 60 held-out tasks measured at step 0 and step 24, " in first
    assert "End the run with Ctrl-C" in first
    for file in (run / "rollouts").glob("train-*"):
        file.unlink()
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(re.sub("(?m)^lr = .*$", "", config))
    told = diagnose(attrs.evolve(read_run(run), running=False))
    assert (told.problems, verdict(told)) == ([], LOSS), "without a learning rate, none is to blame"


def test_a_mean_reward_that_moved_significantly_is_no_chance(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", lift=0.0)

    def measured(first: float, last: float, right: tuple[int, int] = (-1, -1)) -> str:
        for step, reward, which in zip((0, 24), (first, last), right, strict=True):
            made = [rollout_of(i, right=i == which, mode="report", step=step) for i in range(12)]
            made = [
                attrs.evolve(
                    r,
                    score=Score.ok(reward + i / 100, correct=i == which),
                    outcome=Outcome(answer=f"at {step}"),
                    trace=trace_of(r.id, r.task, [f"at {step}"], right=i == which, start=1.0),
                )
                for i, r in enumerate(made)
            ]
            RunDirectory(run).write_rollouts(made, mode="report", step=step)
        return words(diagnose(run))

    measured(0.7, 0.1)
    (fell,) = diagnose(run).problems
    text = "the mean reward of the 12 held-out tasks went from 0.755 to 0.155"
    assert fell.text.startswith(f"the reward fell significantly: {text}")
    assert (fell.cause, fell.count, fell.of) == ("learning-rate-too-large", 12, 12)
    assert fell.text.endswith("significant); it fell in 12 of 12 tasks and rose in 0"), "not only in which it fell"
    assert (" few, so" in str(diagnose(run)), "seen in" in str(diagnose(run))) == (False, False)
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(re.sub("(?m)^lr = .*$", "", config))
    assert (diagnose(run).problems, verdict(diagnose(run))) == ([], LOWER_REWARD)
    (run / "config.toml").write_text(config)
    rose = measured(0.1, 0.7)
    assert f"{REWARD_ONLY} The mean reward of the 12 held-out tasks went from 0.155 to 0.755" in rose
    assert "significant)." in rose
    rose = measured(0.1, 0.7, right=(0, 1))
    assert f"{NOTHING_WRONG} The mean reward of the 12 held-out tasks went from 0.155 to 0.755" in rose
    assert "significant); how many of them are right did not change significantly." in rose
    same = measured(0.5, 0.5)
    assert UNCHANGED in same
    assert "- the mean reward of the 12 held-out tasks went from 0.555 to 0.555: +0.000, 95% interval" in same


@pytest.mark.parametrize(("changed", "said"), [(3, False), (6, True)])
def test_held_out_requests_that_are_not_the_same_after_training_are_told(
    tmp_path: Path, changed: int, said: bool
) -> None:
    run = write_run(tmp_path / "run", steps=3, lift=0.0)
    for step in (0, 3):
        made = [rollout_of(i, right=not step or i > 5, mode="report", step=step) for i in range(12)]
        for i in range(changed if step else 0):
            task = Task(id=made[i].task.id, input={"question": f"{made[i].task.input['question']} Again."})
            made[i] = attrs.evolve(made[i], trace=trace_of(made[i].id, task, ["1"], right=False, start=1.0))
        RunDirectory(run).write_rollouts(made, mode="report", step=step)
    found = words(diagnose(run))
    told = f"the first call of {changed} of 12 held-out tasks are not the same before and after training"
    assert (told in found, "First see why the agent asks other things" in found) == (said, said)
    assert ('older than 30?"}], after: … ' in found) == said
    assert ('older than 30? Again."}])' in found) == said
    for step in (0, 3):  # and where every task got better
        made = [
            attrs.evolve(rollout_of(i, right=bool(step), mode="report", step=step), id=f"{step}-{i}") for i in range(12)
        ]
        if step:
            tasks = [Task(id=r.task.id, input={"question": f"{r.task.input['question']} Again."}) for r in made]
            asked = [trace_of(r.id, task, ["1"], right=True, start=1.0) for r, task in zip(made, tasks, strict=True)]
            made = [attrs.evolve(r, trace=trace) for r, trace in zip(made, asked, strict=True)]
        RunDirectory(run).write_rollouts(made, mode="report", step=step)
    better = diagnose(run)
    assert better.gained
    assert "But the messages of the first call of 12 of 12 held-out tasks are not the same" in "".join(ending(better))
    assert words(better).count("the messages of the first call of") == 1


def trained_on(run: Path, answers: list[str], scores: list[Score]) -> str:
    """Write step 1 of a run: two tasks' rollouts, with the same replies; return what is said of it."""
    write_run(run, steps=1)
    made = [attrs.evolve(rollout_of(i % 2, right=True, mode="train", step=1), id=f"{i}") for i in range(len(answers))]
    pairs = zip(made, answers, scores, strict=True)
    made = [attrs.evolve(r, outcome=Outcome(answer=answer), score=score) for r, answer, score in pairs]
    RunDirectory(run).write_rollouts(made, mode="train", step=1)
    return words(diagnose(run))


def test_answers_that_differ_where_the_replies_do_not_are_told(tmp_path: Path) -> None:
    scores = [Score.ok(i / 8) for i in range(8)]
    said = "the answer is not made from the model's replies alone: {} of 12 pairs of rollouts of a task with the same"
    told = trained_on(tmp_path / "all", list("abcdefgh"), scores)
    assert f"{said.format(12)} replies have unlike answers" in told
    assert "12 of these pairs have unlike scores, too, which teaches the model nothing (agent.use)" in told
    told = trained_on(tmp_path / "half", [*"aaaaaabc"], [Score.ok(float(i == 7)) for i in range(8)])
    assert said.format(6) in told
    assert " 3 of these pairs have unlike scores" in told
    told = trained_on(tmp_path / "harmless", list("abcdefgh"), [Score.ok(1.0)] * 8)
    assert "is harmless if the reward ignores it" in told
    assert "replies alone" not in trained_on(tmp_path / "fewer", [*"aaaaaaab"], scores)


def test_rewards_of_another_scale_without_a_rule_for_correct_are_told_first(tmp_path: Path) -> None:
    run, rule = write_run(tmp_path / "run", steps=3, lift=0.0), Correctness()
    for step in (0, 3):
        made = [rollout_of(i, right=True, mode="report", step=step) for i in range(12)]
        made = [attrs.evolve(r, score=Score.ok(60.0).with_correct(rule)) for r in made]
        RunDirectory(run).write_rollouts(made, mode="report", step=step)
    assert "Use harder" in words(diagnose(run)), "a reward that has a rule"
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "warnings": [rule.warning]}))
    said = words(diagnose(run))
    assert said.splitlines()[2].startswith("Accuracy counts an answer as correct if its reward is at least 1")
    assert (said.count("but a reward of 60 is outside 0 to 1"), "harder" in said) == (1, False)


def test_answers_that_the_reward_scored_as_timeout_are_told(tmp_path: Path) -> None:
    scores = [Score.ok(0.5), Score.ok(0.4), *[Score.timeout("past its budget of 3 s", 0.1)] * 3, Score.timeout("slow")]
    assert (
        "the reward scored 4 of 6 training answers as `timeout`: most often (3 times) past its budget of 3 s. They "
        "count as wrong and were trained on with the value that it gave them, 0.075 on average (settings: "
        "run.reward_budget_s, reward.use)"
    ) in trained_on(tmp_path / "run", ["a"] * 6, scores)
    assert "`timeout`" not in trained_on(tmp_path / "few", ["a"] * 32, [*[Score.ok(0.5)] * 31, Score.timeout("slow")])
    assert any("1 of 32" in fact.text for fact in diagnose(tmp_path / "few").checks), "under 5%, as a fact"


def test_one_reason_of_most_wrong_answers_is_named_with_its_share(tmp_path: Path) -> None:
    told = {"the prediction fails: no such table: cars": 50, 'the prediction fails: near "x"': 4}
    counts = Counter(reason_of(json.dumps({"reason": reason})) for reason, n in told.items() for _ in range(n))
    assert counts == {"the prediction fails: no such table": 50, "the prediction fails: near …": 4}
    evidence = Evidence.of(read_run(write_run(tmp_path / "run", steps=1)))
    said = [f.text for f in one_reason(attrs.evolve(evidence, steps=[StepFacts(step=1, scored=64, reasons=counts)]))]
    assert said[0].startswith(
        "50 of 64 scored training rollouts are wrong for one reason: the prediction fails: no such"
    )
    for other in ({"wrong": 60}, {"a": 32, "b": 32}):
        assert not list(one_reason(attrs.evolve(evidence, steps=[StepFacts(step=1, scored=64, reasons=other)])))
    assert (reason_of("{"), reason_of(None), reason_of('{"reason": null}'), reason_of("3")) == ("", "", "", "")


@pytest.mark.parametrize("lift", [0.6, 0.0])
def test_the_pages_say_it_and_whether_the_gain_may_be_chance(tmp_path: Path, lift: float) -> None:
    run = write_run(tmp_path / "run", steps=8, lift=lift, held_out=60)
    said = verdict(diagnose(run))
    assert said.startswith(NOTHING_WRONG if lift else NO_GAIN.split("{}")[0])
    words = "significant" if lift else "may be chance"
    with serving(run) as link:
        why, main = (httpx.get(f"{link}run/run{path}", timeout=30).text for path in ("/why", ""))
    assert f"<h2>Did anything hold learning back?</h2><p>{html.escape(said)}</p>" in why
    for text in (main, render([read_run(run)])):
        head = text[text.index('<div class="accuracy">') :].split("95% intervals")[0]
        assert re.search(rf"points{'</b>' if lift else ''} \(sign test p [^)]*: {words}\)", head)
        assert ('<b class="good">' in head) == (lift > 0), "only a gain that is no chance is green"


def test_groups_with_one_reward_are_said_with_what_the_others_are_for(tmp_path: Path) -> None:
    without_update = {"zero_variance_groups": 1.0, "algorithm": {"weight_change": 0.0}}
    for steps, few in ((8, 2), (80, 20)):  # a quarter of the steps, as everywhere in what it says
        run = write_run(tmp_path / f"{steps}", steps=steps)
        with_lines(run, lambda line: line.update(zero_variance_groups=0.66))
        checks = [f.text for f in diagnose(run).checks]
        assert any(text.startswith("the weights changed in every step (") for text in checks)
        (said,) = [text for text in checks if "got the same reward" in text]
        left = "training learns from the other 34%"
        assert said.endswith(
            f"last {few} steps all rollouts got the same reward (66% in the first {few} steps): " + left
        )
        with_lines(run, lambda line: line.update(untaught_groups=0.5))
        (said,) = [f.text for f in diagnose(run).checks if "got the same reward" in f.text]
        assert said.startswith(f"50% of the groups of the last {few} steps taught nothing")
        assert said.endswith("; in 66% all rollouts got the same reward: training learns from 50%")
        with_lines(run, lambda line: line.update(without_update if line["step"] == 1 else {}))
        checks = [f.text for f in diagnose(run).checks]
        assert any(text.startswith("the weights changed in every step with an update (") for text in checks)


def test_no_low_entropy_is_found_where_nothing_was_trained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=8, lift=0.0)

    def alike(trained: int) -> Callable[[dict[str, Any]], None]:
        figures = {"weight_change": 0.01, "loss": 0.0, "entropy": 0.0}
        calls = {"recorded": 16, "trained": trained, "masked": 0, "dropped": {}, "unaccounted": 0}
        return lambda line: line.update(zero_variance_groups=0.8, algorithm=figures, calls=calls)

    assert [f.cause for f in diagnose(with_lines(run, alike(16))).problems] == ["low-entropy"]
    assert "low-entropy" not in [f.cause for f in diagnose(with_lines(run, alike(0))).problems]
    with_lines(run, lambda line: alike(16 if line["step"] <= 2 else 0)(line))
    assert "seen in 2 of 2 steps with an update, first seen in step 1" in str(diagnose(run))
    with_lines(run, lambda line: alike(16 if line["step"] == 1 else 0)(line))
    assert "low-entropy" not in [f.cause for f in diagnose(run).problems], "one step is no mean"
    with_lines(run, alike(16))
    with_lines(run, lambda line: line["calls"].update(dropped={"left-out-by-credit": 64}))
    assert "low-entropy" not in [f.cause for f in diagnose(run).problems], "the credit took the best calls"


def test_no_low_entropy_is_found_beside_tasks_that_are_too_hard(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=8, lift=0.0)
    with_lines(run, lambda line: line.update(zero_variance_groups=0.8, algorithm={"entropy": 0.01}))
    assert [f.cause for f in diagnose(run).problems] == ["low-entropy"]
    error = {"error": "RunStopped", "cause": "tasks-too-hard", "message": "step 8: all rollouts got the reward 0"}
    (run / "error.json").write_text(json.dumps(error))
    assert [f.cause for f in diagnose(run).problems] == ["tasks-too-hard"]


def evidence(tmp_path: Path, *, right: list[int], known: int, n: int) -> Evidence:
    """Return a run of steps with so many right answers of 64, that knows so many of n held-out tasks at both ends."""
    found = Evidence.of(read_run(write_run(tmp_path / "run", steps=len(right), lift=0.0)))
    steps = [
        StepFacts(step=i, rollouts=64, scored=64, right=count, reward=mean * 64, group_means=[mean] * 8)
        for i, count in enumerate(right, 1)
        for mean in [0.8 + 0.2 * count / 64]
    ]
    end = {f"task-{i}": (f"rollout-{i}", i < known, "an answer", float(i < known)) for i in range(n)}
    return attrs.evolve(found, steps=steps, ends=(end, end), where="held-out split, step 0 and step 8")


@pytest.mark.parametrize(("right", "cause"), [(60, "tasks-too-easy"), (40, "low-entropy")])
def test_a_sure_model_that_is_nearly_always_right_has_tasks_that_are_too_easy(
    tmp_path: Path, right: int, cause: str
) -> None:
    found = evidence(tmp_path, right=[right] * 8, known=10, n=18)
    with_lines(found.run.directory, lambda line: line.update(zero_variance_groups=0.75, algorithm={"entropy": 0.01}))
    steps = [attrs.evolve(facts, groups=8, same=6, same_right=6, same_answer=6) for facts in found.steps]
    found = attrs.evolve(found, run=read_run(found.run.directory), steps=steps)
    assert [f.cause for f in unexploring(found)] == [cause]


def test_few_held_out_tasks_are_enough_to_see_that_training_tasks_are_memorised(tmp_path: Path) -> None:
    (found,) = memorised(evidence(tmp_path, right=[46, 47, 49, 40, 47, 39, 33, 31], known=1, n=18))
    assert "50% of the training rollouts of the last 2 steps are right, and 1 of 18 held-out tasks" in found.text
    assert "demonstrations that vary, or more labels (--labels)" in found.advice


def test_a_model_that_was_right_on_new_tasks_before_its_last_update_has_not_memorised(tmp_path: Path) -> None:
    found = evidence(tmp_path, right=[46, 47, 49, 44], known=0, n=18)
    first = {task: (rollout, True, answer, 1.0) for task, (rollout, _, answer, _) in found.ends[1].items()}
    found = attrs.evolve(found, ends=(first, found.ends[1]))
    assert list(memorised(found))
    steps = [attrs.evolve(facts, tried=frozenset({f"train-{i}"})) for i, facts in enumerate(found.steps)]
    assert not list(memorised(attrs.evolve(found, steps=steps)))


def test_few_right_rollouts_of_a_warmed_up_model_are_memorised_too_and_the_command_is_named(tmp_path: Path) -> None:
    found = evidence(tmp_path, right=[16, 17, 15, 16, 17, 16, 17, 16], known=11, n=148)
    assert not list(memorised(evidence(tmp_path / "as", right=[9] * 8, known=11, n=148)))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "warmup.json").write_text(json.dumps({"labels": ["a"] * 200}))
    config = {**found.run.config, "algorithm": {"model": str(tmp_path / "m")}}
    (said,) = memorised(attrs.evolve(found, run=attrs.evolve(found.run, config=config)))
    assert "26% of the training rollouts of the last 2 steps are right, and 11 of 148 held-out tasks" in said.text
    command = f"agentrig warmup {tmp_path / 'run' / 'config.toml'} --labels 800 --until 0.2 --out {tmp_path / 'm'}-800"
    assert command in said.advice
    (tmp_path / "m-800").mkdir()
    (said,) = memorised(attrs.evolve(found, run=attrs.evolve(found.run, config=config)))
    assert f"{command}-2" in said.advice, "a folder that is not there yet"
    manifest = {**found.run.manifest, "data": {"train": {"tasks": 400}}}
    (said,) = memorised(attrs.evolve(found, run=attrs.evolve(found.run, config=config, manifest=manifest)))
    assert f"--labels 300 --until 0.2 --out {tmp_path / 'm'}-300" in said.advice, "not more than there are tasks"


@pytest.mark.parametrize(("known", "n"), [(1, 4), (9, 18)])
def test_nothing_is_memorised_where_held_out_tasks_may_be_right_as_often(tmp_path: Path, known: int, n: int) -> None:
    assert not list(memorised(evidence(tmp_path, right=[40] * 8, known=known, n=n)))


def test_a_gap_without_a_gain_asks_for_more_tasks_and_not_for_more_steps(tmp_path: Path) -> None:
    found = evidence(tmp_path, right=[48] * 8, known=60, n=150)
    assert not list(memorised(found))
    assert more_tasks(found) == (
        "75.0% of the training rollouts of the last 2 steps are right, and 40.0% of the held-out tasks: "
        "train on more tasks (tasks.use)."
    )
    said = verdict(attrs.evolve(diagnose(tmp_path / "run"), next_step=more_tasks(found)))
    assert said == f"{NO_GAIN.format('gained')} {more_tasks(found)}"


def test_a_run_whose_tasks_are_all_but_solved_is_told_to_use_harder_ones(tmp_path: Path) -> None:
    said = more(evidence(tmp_path / "solved", right=[60] * 8, known=143, n=150))
    assert said == "More steps would hardly help: 95.3% of the held-out tasks are right. Use harder tasks."
    found = evidence(tmp_path / "no-room", right=[60] * 8, known=148, n=150)
    assert more(found) == (
        "148 of 150 held-out tasks were right before training, so at most 2 can improve, and a gain is significant "
        "from 6 on: no number of steps can show one. Use harder or more held-out tasks."
    )
    (change,) = changes(found)
    assert change.text.endswith("; too few were wrong before for a significant gain"), change.text
    assert "few," not in change.text
    assert "harder" not in more(evidence(tmp_path / "not", right=[60] * 8, known=140, n=150))


def test_a_training_reward_that_falls_a_little_is_told(tmp_path: Path) -> None:
    (found,) = collapsed(evidence(tmp_path, right=[46, 47, 49, 40, 47, 39, 33, 31], known=1, n=18))
    assert (found.level, found.cause) == ("warn", "")
    assert "from 0.945 in the first 2 steps to 0.9 in the last, right answers from 73% to 50%" in found.text
    assert not list(collapsed(evidence(tmp_path / "even", right=[46, 44, 47, 45, 46, 44, 47, 45], known=1, n=18)))


@pytest.mark.parametrize("steps", [8, 16])
def test_a_reward_that_only_the_mix_of_classes_lowers_is_no_fall(tmp_path: Path, steps: int) -> None:
    found = evidence(tmp_path, right=[32] * steps, known=1, n=18)
    right = {task: (rollout, True, answer, 1.0) for task, (rollout, _, answer, _) in found.ends[1].items()}

    def falling(easy: Callable[[int], tuple[int, float]], ends: object = found.ends) -> list[Finding]:
        """Return what is said where so many of a step's 16 groups are easy and get that reward, and others 0.1."""
        made = []
        for i, facts in enumerate(found.steps):
            n, reward = easy(i * 8 // steps)
            means = [reward + 0.01 * (k % 2) for k in range(n)] + [0.1 + 0.01 * (k % 2) for k in range(16 - n)]
            slices = [{"kind": "easy"}] * n + [{"kind": "hard"}] * (16 - n)
            total = 4 * sum(means)
            made.append(attrs.evolve(facts, reward=total, group_means=means, group_slices=slices))
        return list(collapsed(attrs.evolve(found, steps=made, ends=ends)))

    assert falling(lambda i: (14 - i, 0.9)) == falling(lambda i: (14 - int(1.5 * i), 0.9)) == []
    assert [f.cause for f in falling(lambda i: (8, 0.9 - 0.1 * i))] == ["learning-rate-too-large"]
    assert [f.cause for f in falling(lambda i: (9 - i % 2, 0.9 - 0.02 * i))] == [""], "within a class"
    assert falling(lambda i: (8, 0.9 - 0.02 * i), (found.ends[1], right)) == [], "the run got better"


def test_it_is_said_that_the_held_out_tasks_are_few(tmp_path: Path) -> None:
    texts = [next(changes(evidence(tmp_path / str(n), right=[46] * 8, known=n // 2, n=n))).text for n in (18, 200)]
    assert texts[0].endswith("; 8 steps and 18 tasks are few, so this is not surprising")
    assert texts[1].endswith("; 8 steps are few, so this is not surprising")
    advice = [more(evidence(tmp_path / f"more-{n}", right=[46] * 8, known=n // 2, n=n)) for n in (18, 200)]
    assert advice[0].startswith("Few tasks, here 18, can show a large gain only. Measure more of them (for rows of a")
    assert not advice[1].startswith("Few tasks")


def test_the_advice_is_a_command_that_resume_takes(tmp_path: Path) -> None:
    run = with_steps(write_run(tmp_path / "run", steps=8, lift=0.0), 8)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:-1]))
    assert diagnose(run).next_step.endswith("algorithm.steps=16")
    progress = json.loads((run / "progress.json").read_text()) if (run / "progress.json").exists() else {}
    (run / "progress.json").write_text(json.dumps({**progress, "checkpoints": {"step-00008": []}}))
    assert diagnose(run).next_step == "Train for more steps."


def test_a_search_for_prompts_is_given_more_calls_and_no_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=8, lift=0.0)
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("[algorithm]", "[algorithm]\nmax_calls = 30"))
    said = f"Let the search make more calls: agentrig train --resume {run} algorithm.max_calls=60"
    assert diagnose(run).next_step == said


def by_class(tmp_path: Path, **parts: tuple[int, int, int, int]) -> Evidence:
    """Return a run with these classes of tasks: how many held out, right before, right after, right of 40 in training.

    The last steps tried each class 40 times.
    """
    found = evidence(tmp_path, right=[0] * 8, known=0, n=0)
    run, ends = found.run.directory, ([], [])
    for name, (n, *rights, _) in parts.items():
        for end, right, step in zip(ends, rights, (0, 8), strict=True):
            for i in range(n):
                rollout = rollout_of(i, right=i < right, mode="report", step=step)
                task = attrs.evolve(rollout.task, id=f"{name}-{i}", slices={"kind": name})
                end.append(attrs.evolve(rollout, id=f"{rollout.id}-{name}", task=task))
    for path in (run / "rollouts").glob("report-*"):
        path.unlink()
    for end, step in zip(ends, (0, 8), strict=True):
        RunDirectory(run).write_rollouts(end, mode="report", step=step)
    tried = {("kind", name): (right, 40) for name, (*_, right) in parts.items()}
    steps = [
        attrs.evolve(facts, right=sum(right for right, _ in tried.values()), scored=40 * len(tried), classes=tried)
        for facts in found.steps
    ]
    return attrs.evolve(Evidence.of(read_run(run)), steps=steps)


def test_a_gap_that_is_only_another_mix_of_classes_asks_for_no_more_tasks(tmp_path: Path) -> None:
    found = by_class(tmp_path, easy=(30, 27, 27, 36), hard=(120, 24, 24, 8))
    assert more_tasks(found) == ""
    assert [finding.text for finding in classes(found)] == [
        "55.0% of the training rollouts of the last 2 steps are right, and 34.0% of the held-out tasks, because the "
        "mix of classes differs: in the mix by kind of the held-out tasks it would be 34.0% of the training rollouts"
    ]
    apart = by_class(tmp_path / "apart", easy=(30, 15, 15, 36), hard=(120, 24, 24, 20))
    assert more_tasks(apart).endswith("train on more tasks (tasks.use).")
    assert not list(classes(apart))


def test_classes_that_fell_are_named_before_more_steps_are_advised(tmp_path: Path) -> None:
    found = by_class(tmp_path, short=(66, 20, 66, 40), long=(45, 19, 6, 6))
    said = (
        "held-out accuracy fell significantly in kind = long (42.2 → 13.3% of 45 tasks, p < 0.001) and rose "
        "significantly in kind = short (30.3 → 100.0% of 66 tasks, p < 0.001)"
    )
    assert next(classes(found)) == Finding("warn", said)
    run = found.run.directory
    assert diagnose(run).next_step == (
        f"Mind that {said}. Before more steps, train on more tasks of the classes that fell (tasks.use), or with a "
        f"lower learning rate (algorithm.lr); see what their answers became: agentrig watch {run}"
    )
    (alike,) = classes(by_class(tmp_path / "alike", short=(66, 20, 66, 40), long=(45, 19, 40, 40)))
    assert alike.level == "ok"
    assert not list(classes(by_class(tmp_path / "chance", short=(66, 20, 25, 16), long=(45, 19, 15, 16))))

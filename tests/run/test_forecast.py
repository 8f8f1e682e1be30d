"""A forecast: pass@k and groups that differ against brute force, the verdict on four recipes, and each mistake."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs
import pytest
from agentrig_grpo.naming import model_directory
from click.testing import CliRunner
from quick import quick_first
from rollouts import rollout, trace_of

from agentrig import Score, Triplet
from agentrig.algorithms import Measurement
from agentrig.cli.commands.forecast import _lines
from agentrig.cli.entry import main
from agentrig.credit import TurnConfig
from agentrig.errors import ConfigError, RunStopped
from agentrig.figures import duration, percent
from agentrig.plan import Plan, resolve
from agentrig.processes.servers import ServerError
from agentrig.run.forecast import Trial
from agentrig.run.verdict import differing, judge, never_right, pass_at
from agentrig.tasks import input_key
from agentrig.traces import SERVER
from agentrig.view.comparison import money

ROOT = Path(__file__).resolve().parents[2]
LETTERS = str(ROOT / "tests" / "support" / "letters_plugin.py")
TOY = str(ROOT / "tests" / "support" / "toy_plugin.py")


# --- the estimators ---


def test_pass_at_k_is_the_mean_over_all_subsets() -> None:
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            sampled = [True] * c + [False] * (n - c)
            found = fmean(any(subset) for subset in itertools.combinations(sampled, k))
            assert pass_at(k, [(n, c)]) == pytest.approx(found, abs=1e-12), (n, c, k)
    assert pass_at(2, [(4, 0), (4, 4), (2, 1), (1, 1)]) == pytest.approx(2 / 3), "the last has no two rollouts"
    assert pass_at(3, [(2, 1)]) is None
    assert pass_at(500, [(1024, 1)]) == pytest.approx(500 / 1024)


@pytest.mark.parametrize("rewards", [(0, 0, 0), (0, 1, 1, 0), (0.2, 0.2, 1, 0.5, 0.2), (0, 0, 0, 1, 1, 2)])
def test_groups_that_differ_are_the_mean_over_all_subsets(rewards: Sequence[float]) -> None:
    for size in range(2, len(rewards) + 1):
        found = fmean(len(set(subset)) > 1 for subset in itertools.combinations(rewards, size))
        assert differing([rewards], size) == pytest.approx(found), size
    assert differing([rewards], 99) == float(len(set(rewards)) > 1), "with fewer rollouts: those that are there"


def test_one_rollout_of_each_task_is_as_if_all_were_equally_hard() -> None:
    assert differing([[0.0], [1.0], [0.0], [0.0]], 3) == pytest.approx(1 - 0.75**3 - 0.25**3)
    assert differing([[0.0, 1.0], [1.0], []], 2) == 1.0, "where some have two, only those count"


# --- the verdict ---


def groups_of(*groups: Sequence[float | None], failure: str = "deadline") -> list[Any]:
    return [[rollout(failure=failure, message="no answer") if v is None else rollout(v) for v in g] for g in groups]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([(1, 1), (0, 0), (0, 0)] * 4, "kind=author (8 rollouts) and kind=reserve (8) were"),
        ([(1, 1), (0, 1), (0, 0)] * 4, "kind=reserve (8 rollouts) was"),
        ([(1, 1), (0, 1), (0, 0)], ""),  # by chance
        ([(1, 1), (0, 1), (0, 1)] * 4, ""),
        ([(0, 0)] * 12, ""),
    ],
)
def test_the_verdict_names_kinds_of_tasks_that_were_never_right(groups: Any, said: str) -> None:
    of = [
        [attrs.evolve(r, task=attrs.evolve(r.task, slices={"kind": kind, "of": kind[0]})) for r in group]
        for kind, group in zip(("copies", "author", "reserve") * 4, groups_of(*groups), strict=False)
    ]
    found = judge(of, 2)
    assert (f"{said} never right: reward can't teach" in found.message) == bool(said), found.message
    assert ("never right" in found.message) == bool(said)


def test_classes_that_were_never_right_are_those_of_one_slice_and_the_advice_is_given_once() -> None:
    """The slice `turns` has the same rollouts: of as many, the slice with more classes says more."""
    tried = {("kind", "count"): (0, 80), ("kind", "who"): (0, 180), ("kind", "shelf"): (90, 90)}
    tried |= {("turns", "2"): (90, 90), ("turns", "3"): (0, 260)}
    assert never_right(tried).startswith("kind=count (80 rollouts) and kind=who (180) were never right: reward can't")
    rights = {"copies": [(1, 1)], "author": [(0, 0)]}
    of = [
        [attrs.evolve(r, task=attrs.evolve(r.task, slices={"kind": kind})) for r in group]
        for kind, groups in rights.items()
        for group in groups_of(*groups * 9)
    ]
    found = judge(of, 2, cure="Give more labels.")
    assert found.kind == "hopeless"
    last = "rewards that differ, and these are about 0% of the tasks (95%: 0% to 18%) only"
    assert last in found.message
    end = ". kind=author (18 rollouts) was never right: reward can't teach what is never right. Raise the temperature"
    assert end in found.message, "it does not contrast"
    assert "Warm up longer" not in found.message


def test_the_verdict_names_a_kind_of_tasks_that_was_hardly_ever_right() -> None:
    rights = {"author": [(1, 0)] * 30, "copies": [(1, 0)] + [(0, 0)] * 29, "reserve": [(0, 0)] * 30}
    of = [
        [attrs.evolve(r, task=attrs.evolve(r.task, slices={"kind": kind})) for r in group]
        for kind, groups in rights.items()
        for group in groups_of(*groups)
    ]
    said = "But kind=copies (1 of 60 rollouts) and kind=reserve (0 of 60) were hardly ever right: reward teaches little"
    assert said in judge(of, 2).message


@pytest.mark.parametrize(
    ("groups", "kind", "words"),
    [
        ([(0, 1), (0, 0), (1, 1)], "good", "whose 2 rollouts get rewards that differ, and these are about 33%"),
        ([(0.1, 0.4), (0, 0.2)], "good", "no sampled answer is correct yet, but"),
        ([(1, 1)] * 19 + [(0, 1)], "solved", "Use harder tasks"),
        ([(0, 0)] * 9, "hopeless", "Warm up first .*make the tasks easier.* raising the temperature"),
        (
            [(0, 0), (1, 1)] * 4,
            "hopeless",
            "about 0% of the tasks .*only.* Raise the temperature .* other tasks",
        ),
        (
            [(1, 1)] * 9 + [(0, 0)],
            "solved",
            "90% of the sampled answers are correct .* 0% of the tasks .* only. Use harder",
        ),
        ([(None, 1), (0, 1), (0, 1)], "good", "about 100%"),
        ([(None, 1), (0, None), (0, 1)], "failing", r"2 of 6 rollouts failed.*\n  2 x deadline: for example no answer"),
        ([(None, None)], "failing", "No rollout was scored"),
    ],
)
def test_the_verdict_has_a_cure(groups: Any, kind: str, words: str) -> None:
    found = judge(groups_of(*groups), 2, failure_limit=0.25)
    assert found.kind == kind, found.message
    assert re.search(words, found.message, re.DOTALL), found.message


@pytest.mark.parametrize(("calls", "kind"), [((0.0, 1.0), "good"), ((0.0, 0.0), "hopeless"), ((), "hopeless")])
def test_under_turn_the_rewards_of_calls_decide(calls: Sequence[float], kind: str) -> None:
    """The rollouts' own rewards are alike, or differ, without effect; a rollout with more calls is no other one."""
    trace = trace_of("a", "a")
    triplets = [Triplet(prompt_ids=[1], response_ids=[2], span_id=f"c{i}") for i in range(2)]
    scores = [Score(status="ok", value=0.5 * i, correct=False, calls=[value, None]) for i, value in enumerate(calls)]
    scores = scores or [Score.ok(0.5), Score.ok(0.0)]
    group = [rollout(score=s, trace=trace, triplets=triplets[: 2 - i]) for i, s in enumerate(scores)]
    found = judge([group] * 8, 2, credit=TurnConfig())
    assert found.kind == kind, found
    words = (
        "get rewards of calls that differ" if kind == "good" else "every scored call has the reward 0, and no answer"
    )
    assert (words if calls else "no call of 16 rollouts has one") in found.message


RECIPES = {
    "mini": (["mini"], "good"),
    "letters": (["letters", "algorithm.temperature=2"], "good"),
    "solved": (["letters", "--reward", "most-answers"], "solved"),
    "hopeless": (["letters", "--reward", "one-letter"], "hopeless"),
}
"""Four recipes with the shipped model. It has not seen the prompts of `letters`: it says nearly the same to all."""


def plan_of(words: Sequence[str], *more: str) -> Plan:
    uses = {"reward": words[2]} if "--reward" in words else {}
    return resolve(words[0], overrides=[w for w in words if "=" in w] + list(more), uses=uses, files=[LETTERS])


@pytest.mark.parametrize("name", quick_first(RECIPES, ("letters",)))
def test_which_recipes_can_learn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tasks are enough for these."""
    monkeypatch.chdir(tmp_path)
    words, kind = RECIPES[name]
    trial = Trial.of(plan_of(words), tasks=8, rollouts=4)
    trial.roll_out()
    trial.update()
    found = trial.forecast()
    assert found["verdict"]["kind"] == kind, found
    assert (found["complete"], found["tasks"], found["failures"]) == (True, 8, {})
    assert len(found["pass_at_k"]) == 4
    each, step, run = found["per_rollout"], found["step"], found["run"]
    assert 1 <= each["trained_calls"] <= each["calls"]
    assert 0 < each["trained_response_tokens"] <= each["response_tokens"]
    assert found["groups"]["taught"] == found["groups"]["differ"]
    assert step["memory"].startswith("memory: ")
    if step["update_s"] is not None:
        assert 100 << 20 < step["peak_bytes"] < 20 << 30
        needed, free = (line for line in _lines(found) if line.startswith("memory"))
        assert re.match(r"memory needed: [\d.]+ [GM]iB, the most that this process had, with the update$", needed)
        assert re.search(r"[:;] [\d.]+ GiB of cpu are free, and an update computes [\d,]+ tokens at once", free)
    assert (step["update_s"] is not None) == (found["groups"]["differ"] > 0), "an update that learns nothing is none"
    assert run["seconds"] > step["seconds"] >= step["rollout_s"] > 0
    assert found["gain"]["least_tasks"] == 6
    if trial.held_out <= 32:  # as many rollouts as the tasks have
        assert found["gain"]["start"] == trial.start.accuracy is not None
        assert trial.start.n == trial.held_out
        told = "% of them are right before training, measured as a run does it" in " ".join(_lines(found))
        assert told == (not found["gain"]["no_room"])
    assert list(tmp_path.iterdir()) == []


def test_a_long_update_is_measured_on_one_group_with_the_memory_plan_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: `fit` plans its memory before the learner is made."""
    plan, done = plan_of(["letters"]), []

    class Algorithm:
        def serving(self, hardware: Any, checkpoint: Any) -> str:
            return f"plan for {hardware.name}"

        def fit(self, serving: str, session: Any) -> None:
            done.append((serving, session.calls, session.server_memory.sequences))
            session.record("memory", {"line": "memory: all of it"})

        def learner(self, session: Any) -> Any:
            done.append((len(session.train_tasks), session.seed))
            return self

        def update(self, samples: Sequence[Any], *, step: int) -> None:
            done.append([sample.group for sample in samples])
            time.sleep(0.05)

    monkeypatch.setattr("agentrig.run.forecast.UPDATE_S", 0.15)
    monkeypatch.setattr(
        Plan, "build", lambda self, kind, real=Plan.build: Algorithm() if kind == "algorithm" else real(self, kind)
    )
    trial = Trial.of(plan, tasks=6, rollouts=2)
    triplets = [Triplet(prompt_ids=(1,), response_ids=(2,), node="pull", span_id="c0")]
    trial.groups = [[rollout(v, triplets=triplets, group=f"{i}") for v in (0, i % 2)] for i in range(12)]
    trial.rollouts_s = 1.0
    trial.update()
    found = trial.forecast()["step"]
    assert done == [("plan for cpu", 8, 64), (6, 0), ["1", "1"]]
    assert (found["memory"], found["updated"]) == ("memory: all of it", "estimated from the update of one group")
    assert found["update_s"] == pytest.approx(6 * 0.05, rel=0.9), "six of twelve groups differ, and a step has twelve"


def test_the_time_of_a_run_is_that_of_warm_rollouts_or_a_range() -> None:
    """`letters` runs as many at once as its runners have threads; times are those of eight rollouts of `mini`."""
    keys = ["runners.n=2", "runners.threads=32", "run.audit=false"]
    trial = Trial.of(plan_of(["letters", *keys]), tasks=8, rollouts=4)

    def forecast(*arrived: tuple[float, int]) -> tuple[dict[str, Any], list[str]]:
        trial.groups = [[rollout(i % 2, group=f"{group}") for i in range(4)] for group in range(arrived[-1][1] // 4)]
        trial.arrived, trial.rollouts_s = list(arrived), arrived[-1][0]
        found = trial.forecast()
        return found, [line for line in _lines(found) if line.startswith(("a run", "a step", "  few rollouts"))]

    loop: Any = trial.plan.configs["algorithm"]
    of_step = loop.tasks_per_step * loop.group_size
    found, said = forecast((1.1, 4), (1.15, 8))
    step, run = found["step"], found["run"]
    assert (step["least_rollout_s"], step["rollout_s"]) == pytest.approx((of_step * 1.15 / 64, of_step * 1.15 / 8))
    assert run["least_seconds"] == pytest.approx(run["seconds"] * 8 / 64)
    assert [" to " in line for line in said[:2]] == [True, True]
    assert len(said) == 3

    found, said = forecast((60.0, 64), (61.0, 96), (62.0, 128))  # a minute of start, then 32 rollouts a second
    assert found["step"]["rollout_s"] == found["step"]["least_rollout_s"] == pytest.approx(of_step / 32)
    assert found["run"]["seconds"] == found["run"]["least_seconds"]
    assert [" to " in line for line in said] == [False, False]

    trial.plan = attrs.evolve(trial.plan, run=attrs.evolve(trial.plan.run, audit=True))
    trial.start_s, trial.update_s = 3.0, 2.0
    found, said = forecast((60.0, 64), (61.0, 96), (62.0, 128))
    step, run = found["step"], found["run"]
    parts = run["parts"]
    assert parts["audits_s"] == 2 * 1.5 * max(10.0, step["seconds"])
    assert run["seconds"] == pytest.approx(
        3.0 + loop.steps * step["seconds"] + parts["measured"] / 32 + parts["audits_s"]
    )
    assert run["seconds"] - run["least_seconds"] == pytest.approx(parts["audits_s"] - 2 * step["update_s"])
    told = next(line for line in _lines(found) if line.startswith("  at most: start 3.0 s, steps "))
    assert f", {parts['measured']} measured answers" in told
    assert f", audits of the first steps {duration(parts['audits_s'])}; saving" in told
    assert len(said) == 2, "the rollouts say it well"


@pytest.mark.slow
def test_four_recipes_by_the_command(tmp_path: Path) -> None:
    """As a user types it, with the tasks that it chooses."""
    for words, kind in RECIPES.values():
        command = [sys.executable, "-m", "agentrig", "forecast", *words, "--plugin", LETTERS]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)
        assert f"verdict: {kind}. " in done.stdout, done.stdout + done.stderr
        assert done.returncode == (kind != "good")
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("right", "kind"), [(58, "solved"), (55, "good")])
def test_a_gain_that_does_not_fit_below_all_right_is_no_good_verdict(right: int, kind: str) -> None:
    """pass@1 of the training tasks is 50%; the held-out start decides."""
    trial = Trial.of(plan_of(["letters"]), tasks=2, rollouts=2)
    trial.groups, trial.rollouts_s, trial.complete = [[rollout(0.0), rollout(1.0)]] * 2, 1.0, True
    trial.report = (list(trial.report) * 61)[:61]
    assert trial.forecast()["verdict"]["kind"] == "good"
    trial.start = Measurement(accuracy=right / 61, reward=None, n=61)
    found = trial.forecast()
    assert found["verdict"]["kind"] == kind
    lines = list(_lines(found))
    if kind == "solved":
        said = (
            "58 of 61 held-out tasks were right before training, so at most 3 can improve, and a gain is significant "
        )
        assert found["verdict"]["message"].startswith(f"{said}from 6 on: no number of steps can show one. ")
        assert not any("a gain is significant from" in line and line.startswith("With") for line in lines)
        trial.groups = [[rollout(1.0), rollout(1.0)]] * 20
        assert f"no gain can be significant (exact sign test, p < 0.05): {said}" in "\n".join(_lines(trial.forecast()))
        return
    assert f"  {percent(right / 61)}% of them are right before training, measured as a run does it" in lines
    trial.report, trial.start = trial.report[:12], None
    few = trial.forecast()
    assert (found["gain"]["enough"], few["gain"]["enough"], few["verdict"]["kind"]) == (14, 14, "good")
    assert any(
        line.startswith("With 12 held-out tasks a gain is significant from 50 points (if") for line in _lines(few)
    )
    assert "  12 are too few to show what this model may gain, from pass@1 to pass@2: use at least 14" in "\n".join(
        _lines(few)
    )


@pytest.mark.parametrize("labels", [18, 24])
def test_tasks_that_the_model_learned_by_heart_are_not_played(labels: int, tmp_path: Path) -> None:
    """As in `warmup`, which tries its model on training tasks without a label, if there are any."""
    model = tmp_path / "model"
    shutil.copytree(model_directory("mini"), model, copy_function=os.symlink)
    train = plan_of(["letters"]).tasks().load("train")
    known = sorted(map(input_key, train[:labels]))
    (model / "warmup.json").write_text(json.dumps({"labels": [], "inputs": known}))
    plan = plan_of(["letters", f"algorithm.model={model}"])
    trial = Trial.of(plan)
    fresh = len(train) - labels
    assert len(train) == 24
    assert len(trial.tasks) == (fresh or 12), "as many as a step has"
    assert {input_key(task) in known for task in trial.tasks} == {not fresh}
    trial.groups = [[rollout(0.0), rollout(1.0)]] * len(trial.tasks)
    trial.rollouts_s = 1.0
    head = next(iter(_lines(trial.forecast())))
    played = "6 tasks without a label, of split train (18 of its 24 tasks are the model's labels), "
    everything = "12 tasks of split train, which are all labels of the model: it may know them by heart, "
    assert (played if fresh else everything) in head
    with pytest.raises(ConfigError, match=rf"has {fresh or 24} tasks{' without a label' if fresh else ''}; ask for at"):
        Trial.of(plan, tasks=25)


# --- mistakes ---


def failed(*words: str) -> str:
    """Return the message of a command that can't tell."""
    done = CliRunner().invoke(main, ["forecast", *words])
    assert done.exit_code in (1, 2), done.output
    assert "verdict" not in done.stdout
    return done.stderr


def test_what_cannot_be_forecast_is_named() -> None:
    assert 'there is no recipe called "lettres". Did you mean "letters"?' in failed("lettres", "--plugin", LETTERS)
    assert "--limit 25: the split train has 24 tasks" in failed("letters", "--plugin", LETTERS, "--limit", "25")
    assert "Invalid value for '--limit': 0" in failed("letters", "--plugin", LETTERS, "--limit", "0")
    assert 'there is no task set called "0"' in failed("letters", "--plugin", LETTERS, "--tasks", "0")
    assert "sft learns from demonstrations" in failed("letters", "--plugin", LETTERS, "--algorithm", "sft")
    for name in ("gepa", "apo"):
        said = failed("letters", "--plugin", LETTERS, "--algorithm", name)
        assert f"{name} improves prompts and changes no weights; a forecast says what rewards can teach" in said


def test_an_agent_that_always_fails_ends_it_early(toy_plan: Callable[..., Plan]) -> None:
    trial = Trial.of(toy_plan("tasks.do=['raise']"), tasks=24, rollouts=8)
    with pytest.raises(
        RunStopped, match=r"step 1: (all|\d+) of the first \d+ of 192 train rollouts failed.*\n.*cannot count"
    ):
        trial.roll_out()
    assert 32 <= len(trial.rollouts) < 192


def test_an_agent_without_a_call_is_told_so_once(toy_plan: Callable[..., Plan], caplog: Any) -> None:
    plan = toy_plan("tasks.do=['no-call']")
    algorithm = plan.components["algorithm"]
    learns = attrs.evolve(algorithm, spec=attrs.evolve(algorithm.spec, credit=True))
    plan = attrs.evolve(plan, components={**plan.components, "algorithm": learns})
    with pytest.raises(RunStopped, match="No call to the model was recorded"):
        Trial.of(plan, tasks=2, rollouts=2).roll_out()
    assert "No call" not in caplog.text


def test_a_reward_that_raises_and_a_dead_server_are_named(toy_plan: Callable[..., Plan]) -> None:
    with pytest.raises(RunStopped, match=r"4 of 4 train rollouts failed.*\n  4 x reward-invalid: .*the judge is out"):
        Trial.of(toy_plan("reward.invalid=true"), tasks=2, rollouts=2).roll_out()
    with pytest.raises(RunStopped, match=r"4 of 4 train rollouts failed.*\n  4 x .*"):
        Trial.of(toy_plan("algorithm.endpoint=http://127.0.0.1:9/v1"), tasks=2, rollouts=2).roll_out()


def test_more_failures_than_a_run_allows_are_the_verdict(toy_plan: Callable[..., Plan]) -> None:
    trial, before = Trial.of(toy_plan("tasks.do=['raise', '']"), tasks=8, rollouts=2), list[int]()
    trial.roll_out(started=lambda: before.append(len(trial.rollouts)))
    assert before == [0], "the start was said once, before the first rollout"
    trial.update()
    found = trial.forecast()
    assert found["complete"]
    assert found["verdict"]["kind"] == "failing"
    assert sum(found["failures"].values()) == 8
    assert "loop of its own" in found["step"]["updated"]


@pytest.mark.slow
def test_a_server_that_dies_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrig_grpo.server.handle import Embedded

    servers, begin = [], Embedded.__enter__
    monkeypatch.setattr(Embedded, "__enter__", lambda self: servers.append(self) or begin(self))
    trial = Trial.of(plan_of(["letters"]), tasks=24, rollouts=8)

    def kill(rollout: Any) -> None:
        if servers:
            os.kill(servers.pop().pid, signal.SIGKILL)

    with pytest.raises(ServerError, match="SIGKILL"):
        trial.roll_out(kill)
    assert trial.forecast()["tasks"] < 24 or trial.forecast()["failures"]


@pytest.mark.slow
def test_ctrl_c_shows_what_is_known_so_far(model: Any, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    command = [sys.executable, "-m", "agentrig", "forecast", "toy", "--plugin", TOY, "--limit", "6", "--rollouts", "2"]
    command += [f"algorithm.endpoint={model.url}", "tasks.do=['', '', 'hang']", f"tasks.marker={marks}"]
    command += ["runners.threads=12"]  # one for each rollout
    begun = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watch = threading.Timer(100, begun.kill)
    watch.start()
    while len(list(marks.iterdir())) < 2 or len(model.requests) < 8:
        assert begun.poll() is None, begun.communicate()
        time.sleep(0.05)
    time.sleep(3.0)  # until the results of the others are there
    begun.send_signal(signal.SIGINT)
    said, errors = begun.communicate(timeout=60)
    watch.cancel()
    assert begun.returncode == 130, errors
    assert "so far: 4 tasks of split train, 2 rollouts each" in said, said + errors
    assert "interrupted by Ctrl-C" in errors
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["marks"]


def test_json(model: Any) -> None:
    words = ["forecast", "toy", "--plugin", TOY, f"algorithm.endpoint={model.url}", "--limit", "4", "--json"]
    done = CliRunner().invoke(main, [*words, "--rollouts", "2"])
    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert found["verdict"]["kind"] == "hopeless", "a model that says the same to all"
    assert found["pass_at_k"]["1"] == found["pass_at_k"]["2"] > 0


PRICES = """
currency = "EUR"
[models."qwen2-mini"]
prompt = 2.0
response = 8.0
[models."large-1"]
prompt = 100.0
response = 1000.0
[machines."MACHINE"]
hour = 0.5
"""


def asked_twice(value: float) -> Any:
    """Return a rollout with a call of the run's model (2 tokens, 1 sampled) and one of `large-1` (30, 5)."""
    trace = trace_of("write", "judge")
    *others, judge = trace.spans
    usage = {"prompt_tokens": 30, "completion_tokens": 5}
    said = {SERVER: "http://large/v1", "request": {"model": "large-1"}, "response": {"usage": usage}}
    return rollout(value, trace=attrs.evolve(trace, spans=(*others, attrs.evolve(judge, attributes=said))))


def test_costs_are_those_of_the_price_table_of_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's tokens are those of a rollout times its rollouts, measurements too, and its machine costs by the hour."""

    def roll_out(trial: Trial, *calls: Any) -> None:
        trial.groups, trial.rollouts_s, trial.start_s = [[asked_twice(0.0), asked_twice(1.0)]] * 2, 1.0, 3.0
        trial.complete = True

    monkeypatch.setattr(Trial, "roll_out", roll_out)
    monkeypatch.setattr(Trial, "update", lambda trial: setattr(trial, "update_s", 2.0))
    trial, file, model = Trial.of(plan_of(["letters"])), tmp_path / "prices.toml", tmp_path / "qwen2-mini"
    model.symlink_to(model_directory("mini"))
    words = ["forecast", "letters", "--plugin", LETTERS, f"algorithm.model={model}", "--limit", "2"]
    words += ["--rollouts", "2", "--prices", str(file)]

    file.write_text(PRICES.replace("MACHINE", trial.machine()))
    done = CliRunner().invoke(main, [*words, "--json"])
    found = json.loads(done.stdout)
    loop: Any = trial.plan.configs["algorithm"]
    assert found["run"]["rollouts"] == (
        loop.steps * loop.tasks_per_step * loop.group_size
        + 2 * trial.held_out
        + trial.validated * (1 + loop.steps // loop.validate_every if loop.validate_every else 0)
    )
    for part in ("run", "gain"):
        cost, n = found[part]["cost"], found[part]["rollouts"]
        own, other = n * (2 * 2 + 1 * 8) / 1e6, n * (30 * 100 + 5 * 1000) / 1e6
        machine = 0.5 * found[part]["seconds"] / 3600
        assert cost["models"] == {"qwen2-mini": pytest.approx(own), "large-1": pytest.approx(other)}
        assert (cost["machine"], cost["no_price"]) == (pytest.approx(machine), [])
        assert cost["total"] == pytest.approx(own + other + machine)
    assert found["gain"]["cost"]["total"] < found["run"]["cost"]["total"]
    said = CliRunner().invoke(main, words).stdout
    assert f"{money(found['run']['cost']['total'])} EUR\n" in said
    assert f"{money(found['gain']['cost']['total'])} EUR, if it moved" in said

    file.write_text(PRICES.replace("large-1", "large-2"))
    said = CliRunner().invoke(main, words).stdout
    assert f"no price for: model large-1; machine {trial.machine()}" in said
    assert "EUR" not in said, "tokens of another server without a price: the cost is not known"

"""Scores are typed, and a reward that raises, hangs or returns something else gives `invalid`, never a number."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import numpy as np
import psutil
import pytest

from agentrig import Outcome, Score, Task
from agentrig.correctness import Correctness
from agentrig.errors import AgentFailure, PluginError
from agentrig.frozen import frozen
from agentrig.plan import Plan
from agentrig.plugins import composing
from agentrig.plugins.builtin import own
from agentrig.pools import Job, Result
from agentrig.runners.attempt import run_agent
from agentrig.runners.engine import RolloutEngine
from agentrig.runners.judging import GRACE_S, NoScores
from agentrig.runners.reward_process import NOWHERE, RewardWorker, scores_of
from agentrig.runners.scorer import Scorer
from agentrig.text import Room, TooLong, plain_values
from agentrig.traces import LLM_CALL, REWARD, Span, Trace

ITEMS = [(Task(id=str(i), input={}, private={"gold": i}), Outcome(answer=i)) for i in range(12)]


def test_the_three_kinds_of_score() -> None:
    ok, timeout, invalid = Score.ok(1, exact=0.5), Score.timeout("too slow"), Score.invalid("no database", path="x")
    assert (ok.status, ok.value, ok.components) == ("ok", 1.0, {"exact": 0.5})
    assert (timeout.status, timeout.value, timeout.details) == ("timeout", 0.0, {"reason": "too slow"})
    assert (invalid.status, invalid.value, invalid.details) == ("invalid", None, {"reason": "no database", "path": "x"})


def test_scores_that_differ_by_rounding_only_are_one_score() -> None:
    assert Score.ok(0.1 + 0.2) == Score.ok(0.3)
    assert Score.ok(sum([0.1] * 10)).with_correct(Correctness()).correct
    assert Score.ok(1 - sum([0.1] * 10)).value == Score.ok(-1e-16).value == 0.0
    assert Score.ok(3e8 * (0.1 + 0.2)) == Score.ok(3e8 * 0.3)
    assert Score(status="ok", value=0.3, calls=[0.1 + 0.2, None, 1]).calls == (0.3, None, 1)
    assert Score.ok(2e-12).value == 2e-12 != Score.ok(3e-12).value


def test_feedback_is_kept_with_the_details_of_a_score() -> None:
    score = Score.ok(0.3, feedback="the query has no such column", exact=0.0)
    assert (score.feedback, score.components) == ("the query has no such column", {"exact": 0.0})
    assert Score.ok(1, correct=1, feedback="half").feedback == "half"
    assert Score.timeout("too slow", feedback="it scans a table").feedback == "it scans a table"
    each, number = Score.ok(1.0, calls=[0.5, None]), Score.ok(1.0, calls=2, size=1)
    assert (each.calls, each.components, number.calls, number.components) == (
        (0.5, None),
        {},
        (),
        {"calls": 2, "size": 1},
    )
    assert (Score.ok(1).feedback, Score.ok(1).details, Score.invalid("no database").feedback) == ("", {}, "")
    with pytest.raises(TypeError, match="feedback is 3 \\(int\\); give a text"):
        Score.ok(1, feedback=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"status": "fine", "value": 1.0}, "use 'ok', 'invalid' or 'timeout'"),
        ({"status": "ok"}, "has value None"),
        ({"status": "timeout"}, "has value None"),
        ({"status": "invalid", "value": 0.0}, "only 'invalid' has none"),
    ],
)
def test_a_score_cannot_contradict_itself(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Score(**fields)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308, -1e308, 1.1e9, 10**400])
def test_a_value_is_a_number_that_training_can_sum_and_square(value: float) -> None:
    with pytest.raises((ValueError, OverflowError)):
        Score.ok(value)
    cure = "give Score.invalid" if value != value else "scale it"
    with pytest.raises(ValueError, match=rf"must lie between -1e\+09 and 1e\+09, .*: {cure}"):
        Score(status="ok", value=value)
    assert Score.ok(-1e9).value == -1e9


@pytest.mark.parametrize("part", [float("nan"), float("inf"), -float("inf"), np.float32("nan"), 10**400])
def test_a_component_is_a_finite_number(part: Any) -> None:
    """metrics.jsonl has its mean, and NaN is no JSON."""
    score = Scorer(lambda t, o, b: Score(status="ok", value=1.0, components={"a": part}), budget_s=5)(ITEMS[:1])[0]
    assert score.status == "invalid"
    assert "a score's component a is " in score.details["reason"] or "OverflowError" in score.details["reason"]


@pytest.mark.parametrize("value", ["0.5", b"0.5", [0.5]])
def test_a_text_is_no_number(value: Any) -> None:
    for made in (
        lambda: Score.ok(value),
        lambda: Score.timeout("late", value=value),
        lambda: Score.ok(1.0, part=value),
        lambda: Score(status="ok", value=value),
    ):
        with pytest.raises(TypeError, match=r"^a score's (value|component part) is .*; give a number$"):
            made()


class Fickle(Score):
    """A score that has another value whenever it is read."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == "value" and isinstance(found, float):
            object.__setattr__(self, name, found * 1e9 if found < 1e18 else math.nan)
        return found


@pytest.mark.parametrize("many", [False, True])
def test_a_score_that_changes_after_it_was_made_is_read_once(many: bool) -> None:
    """One of a class of the plugin's own ended the run in two tracebacks."""

    def forged(*_: Any) -> Score:
        score = Score.ok(0.5)
        object.__setattr__(score, "value", math.nan)
        return score

    def fickle(*_: Any) -> Score:
        score = Fickle(status="ok", value=0.0)
        object.__setattr__(score, "value", 0.5)
        return score

    def judged(make: Callable[[], Score]) -> Score:
        reward: Any = _Batch(lambda items: [make() for _ in items]) if many else lambda *_: make()
        return Scorer(reward, budget_s=5)(ITEMS[:1])[0]

    score = judged(forged)
    assert (score.status, score.value) == ("invalid", None)
    assert "a score's value is nan" in score.details["reason"]
    score = judged(fickle)
    assert (type(score), score.status, score.value, score.correct) == (Score, "ok", 0.5, False)


def judged(answer: Any, *, many: bool, process: bool, budget_s: float = 60) -> Score:
    """Return the score of a reward that returns this for one outcome, or in its list for a batch."""
    reward: Any = _Batch(lambda items: [answer] * len(items)) if many else lambda *_: answer
    if not process:
        return Scorer(reward, budget_s=budget_s)(ITEMS[:1])[0]
    done = run_agent(RewardWorker(reward, budget_s), Job(id="0", input=[ITEMS[0]], endpoint=NOWHERE))
    return scores_of(done.outcome, 1)[0]


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("process", [False, True])
def test_details_have_the_same_limit_in_threads_and_in_a_process(many: bool, process: bool) -> None:
    """The kit judges in threads, a run in a process: both must say the same."""
    most = Score(status="ok", value=1.0, details={"o": '"' * 1_999_000})
    correct = None if process else True
    assert judged(most, many=many, process=process) == attrs.evolve(most, correct=correct)
    said = "the details of its score are longer than the 4000000 characters of JSON allowed"
    for large in ("x" * 4_100_000, '"' * 2_100_000):
        longer = Score(status="ok", value=1.0, details={"o": large})
        assert judged(longer, many=many, process=process) == Score.invalid(said)


def test_no_more_of_a_value_is_looked_at_than_has_room() -> None:
    branches: list[Any] = []
    for _ in range(90):
        branches = [branches, branches]  # one list, 2**90 of them as JSON
    for value in (branches, {"a": "x" * 1001}, {"x" * 1001: 1}, [1] * 1001, [Broken(), *[None] * 1001]):
        with pytest.raises(TooLong):
            plain_values(value, room=Room(1000))
    assert plain_values(["x" * 900, (1, 2)], room=Room(1000)) == ["x" * 900, [1, 2]]


class SlowText:
    """Becomes text only after the budget and its grace."""

    def __str__(self) -> str:
        time.sleep(1.3)
        return "slow"


@pytest.mark.parametrize("many", [False, True])
def test_the_check_of_what_a_reward_returns_does_not_count_toward_its_budget(many: bool) -> None:
    """Details of 150 MB were called a regular expression that held the interpreter."""
    slow = Score(status="ok", value=1.0, details={"o": SlowText()})
    assert judged(slow, many=many, process=True, budget_s=0.1).details == {"o": "slow"}


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"x": found}
    return found


def ring() -> dict[str, Any]:
    inner: dict[str, Any] = {"a": 1}
    inner["me"] = inner
    return {"list": [inner], "twice": inner}


class Broken:
    def __str__(self) -> str:
        raise OSError("the rows are gone")


DIGITS = "Exceeds the limit (4300 digits) for integer string conversion; use sys.set_int_max_str_digits() to increase "
TOO_DEEP = "(dict that cannot be written: ValueError: it contains itself, or is nested too deep)"


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize(
    ("details", "said"),
    [
        ({("a", 1): (1, 2), date(2026, 1, 2): {3}}, {"('a', 1)": [1, 2], "2026-01-02": "{3}"}),
        ({np.int64(3): np.float64(0.5), 4: None}, {"3": 0.5, "4": None}),
        ({"half \ud800": "\udfff"}, {"half \ufffd": "\ufffd"}),
        (ring(), {"list": [{"a": 1, "me": TOO_DEEP}], "twice": {"a": 1, "me": TOO_DEEP}}),
        ({"n": [10**4300]}, {"n": [f"(int that cannot be written: ValueError: {DIGITS}the limit)"]}),
        ({"o": Broken()}, {"o": "(Broken that cannot be written: OSError: the rows are gone)"}),
        *((nested(levels), None) for levels in (300, 900, 5000)),
    ],
)
def test_details_are_json_values_in_threads_and_in_a_process(
    details: dict[Any, Any], said: dict[str, Any] | None, many: bool, process: bool
) -> None:
    """A process made scores invalid that threads did not; deep ones ended a run in a traceback."""
    given: Any = {"details": details, "components": {("a", 1): 0.5}}
    score = judged(Score(status="ok", value=1.0, **given), many=many, process=process)
    assert (score.status, score.value, score.components) == ("ok", 1.0, {"('a', 1)": 0.5})
    found: Any = frozen(score).details
    if said is not None:
        assert found == said
    else:
        levels = 0
        while isinstance(found, dict):
            levels, found = levels + 1, found["x"]
        assert (levels, found) == (100, TOO_DEEP)


def test_components_and_details_are_mappings() -> None:
    for fields in ({"details": "why"}, {"components": [1.0]}, {"details": None}):
        with pytest.raises(TypeError, match="must be a mapping"):
            Score(status="ok", value=1.0, **fields)  # type: ignore[arg-type]


def test_outcomes_are_scored_concurrently() -> None:
    meet = threading.Barrier(4, timeout=5)

    def reward(task: Task, outcome: Outcome, budget_s: float) -> Score:
        meet.wait()
        return Score.ok(1.0)

    assert [s.value for s in Scorer(reward, budget_s=6, threads=4)(ITEMS[:4])] == [1.0] * 4


def test_rewards_and_own_rewards() -> None:
    task = Task(id="t", input={})
    none, both = Outcome(own_reward=0.5), Outcome(answer="2", own_reward=0.5)

    def exact(task: Task, outcome: Outcome, budget_s: float) -> Score:
        return Score.ok(float(outcome.answer == "2"))

    takes = Scorer(own, budget_s=1, sees_trace=True)
    assert [s.value for s in takes([(task, outcome, Trace(rollout_id="t")) for outcome in (none, both)])] == [0.5, 0.5]
    scores = Scorer(exact, budget_s=1)([(task, none), (task, both), (task, Outcome(answer=None)), (task, none)])
    assert [s.status for s in scores] == ["invalid", "ok", "ok", "invalid"]
    assert "has no answer that another reward could judge: use --reward own" in scores[0].details["reason"]
    assert [s.value for s in scores[1:3]] == [1.0, 0.0]


def test_a_reward_that_raises_is_invalid_for_that_outcome_alone() -> None:
    def reward(task: Task, outcome: Outcome, budget_s: float) -> Score:
        if task.id == "1":
            return Score.ok(task.private["db"])
        return Score.ok(sum(map(float, task.private["gold"])) if task.id == "2" else 1.0)

    third = Task(id="2", input={}, private={"gold": 2}, place="gold.csv, line 4")
    scores = Scorer(reward, budget_s=5)([*ITEMS[:2], (third, Outcome(answer="2"))])
    assert [s.status for s in scores] == ["ok", "invalid", "invalid"]
    said = [score.details.get("reason", "") for score in scores]
    assert re.search(r"KeyError: 'db' \(test_rewards\.py:\d+ in reward\); the task has .* gold in private$", said[1])
    assert said[2].endswith('set tasks.text=["gold"]')
    made = Task(id="2", input={}, private={"gold": 2})
    for task, answer in ((made, "2"), (third, {"total": 43})):  # no file has the number, or it may be the answer's
        (score,) = Scorer(reward, budget_s=5)([(task, Outcome(answer=answer))])
        assert "the reward raised TypeError: 'int' object" in score.details["reason"]
        assert "tasks.text" not in score.details["reason"]


def test_a_reward_that_exits_is_invalid_at_once() -> None:
    def leave(*_: Any) -> Any:
        sys.exit("no judge")

    several = _Batch(lambda items: leave())
    for reward in (leave, several):
        start = time.monotonic()
        scores = Scorer(reward, budget_s=5)(ITEMS[:2])
        assert time.monotonic() - start < 4
        assert [s.details["reason"].split(" (")[0] for s in scores] == ["the reward raised SystemExit: no judge"] * 2


def test_the_error_of_a_reward_that_returns_a_number_says_what_to_return() -> None:
    score = Scorer(lambda t, o, b: 1.0, budget_s=5)(ITEMS[:1])[0]  # type: ignore[arg-type,return-value]
    assert score.status == "invalid"
    assert "the reward returned float; it must return an agentrig.Score" in score.details["reason"]


@pytest.mark.parametrize("many", [False, True])
def test_an_async_reward_is_told_to_be_plain_and_python_warns_of_nothing(many: bool) -> None:
    async def reward(*_: Any) -> Score:
        return Score.ok(1.0)

    made: Any = _Batch(reward) if many else reward
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        score = Scorer(made, budget_s=5)(ITEMS[:1])[0]
        gc.collect()
    assert score.status == "invalid"
    assert ("coroutine" if many else "write def, not async def") in score.details["reason"]
    assert not [w for w in warned if "never awaited" in str(w.message)]


def test_a_reward_that_hangs_is_invalid_and_the_others_continue() -> None:
    release = threading.Event()

    def reward(task: Task, outcome: Outcome, budget_s: float) -> Score:
        if task.id in ("0", "1", "2", "3"):  # one for each thread
            release.wait(30)
        return Score.ok(1.0)

    start = time.monotonic()
    try:
        scores = Scorer(reward, budget_s=0.2, threads=4)(ITEMS)
    finally:
        release.set()
    assert time.monotonic() - start < 0.2 + GRACE_S + 3
    assert [s.status for s in scores] == ["invalid"] * 4 + ["ok"] * 8
    assert "ran past its budget of 0.2 s" in scores[0].details["reason"]


def test_the_start_of_the_rewards_process_is_no_time_of_the_reward(toy_plan: Callable[..., Plan]) -> None:
    """Imports and `build` take seconds, a comparison of two words nothing."""
    task = Task(id="t", input={"number": 1}, private={"parity": "odd", "gold": "gold"})
    result = Result(id="r", outcome=Outcome(answer="odd"), trace=Trace(rollout_id="r"), start=0.0, duration_s=0.1)
    with contextlib.closing(toy_plan("reward.build_s=1.5").scorer()) as scorer:
        engine = RolloutEngine(None, scorer=scorer, adapter=lambda trace: [])  # type: ignore[arg-type]  # runs nothing
        start = time.monotonic()
        (first,) = engine.scored([result], {"r": (task, "g")}, step=0, mode="dev")
        assert time.monotonic() - start > 1.5
        assert first.value == 1.0
        assert 0 < first.reward_s < 1.0
        waited_s = scorer.waited_s
        (again,) = engine.scored([result], {"r": (task, "g")}, step=0, mode="dev")
        assert scorer.waited_s - waited_s < 0.1
        assert again.reward_s > 0


@pytest.mark.slow
def test_a_reward_that_never_ends_holds_up_nobody(toy_plan: Callable[..., Plan], caplog: Any) -> None:
    """Threads that spin would share the interpreter with everything else: 12 such rollouts took three minutes."""
    plan = toy_plan("reward.spin=true", "run.reward_budget_s=0.5")
    task = Task(id="t", input={"number": 1}, private={"parity": "odd", "gold": "gold"})
    rollouts = [(task, Outcome(answer=answer), Trace(rollout_id="r")) for answer in ["spin"] * 6 + ["odd", "even"] * 3]
    start = time.monotonic()
    with contextlib.closing(plan.scorer()) as scorer:
        first = scorer(rollouts)
        assert [s.status for s in first] == ["invalid"] * 6 + ["ok"] * 6
        assert [s.value for s in first[6:]] == [1.0, 0.0] * 3
        assert {s.details["reason"] for s in first[:6]} == {"the reward ran past its budget of 0.5 s"}
        assert first[6].components == {"parity": 1.0}
        assert "the reward's process is killed: task" in caplog.text
        assert [s.value for s in scorer(rollouts[6:])] == [1.0, 0.0] * 3
    assert time.monotonic() - start < 60


HARMS = """
import ctypes, json, math, os, socket, sys, threading, time, warnings
from agentrig import Outcome, RewardSpec, Score, Task, hookimpl
from agentrig.runners.reward_process import RewardPlan
from agentrig.runners.scorer import Scorer
from agentrig.traces import Trace

lock = threading.Lock()

def harm(task, outcome, budget_s):
    exec(task.private["do"], globals(), told := {})
    return Score.ok(told.get("value", float(len(outcome.answer))))

class Harms:
    def score_many(self, items, budget_s):
        return [harm(*item, budget_s) for item in items]

@hookimpl
def register_rewards():
    yield RewardSpec(name="harm", summary="Harms its process.", build=lambda config: harm)
    yield RewardSpec(name="harms", summary="Harms its process.", build=lambda config: Harms())

def here():
    mask = os.umask(0o022)
    os.umask(mask)
    return os.getcwd(), mask, socket.getdefaulttimeout(), warnings.filters[:], math.isfinite, math.sqrt, json.dumps

if __name__ == "__main__":
    name, budget_s, *does = sys.argv[1:]
    plan = RewardPlan(name=name, config={}, files=(sys.argv[0],), budget_s=float(budget_s))
    judge = Scorer(Harms() if name == "harms" else harm, budget_s=float(budget_s), plan=plan)
    out = open("found.jsonl", "w")  # what a reward prints would come between the lines of stdout
    def scores(does):
        tasks = [Task(id=f"t{i}", input={}, private={"do": do}) for i, do in enumerate(does)]
        return judge([(task, Outcome(answer="a" * i), Trace(rollout_id="r")) for i, task in enumerate(tasks)])
    assert [s.value for s in scores([""])] == [0.0]
    for do in does:
        todo = eval(do) if do.startswith("[") else ["", "", do, "", "", ""]
        before, found, after = here(), scores(todo), here()
        assert before == after
        print(json.dumps([[score.value, score.details.get("reason")] for score in found]), file=out, flush=True)
    judge.close()
"""


def harmed(folder: Path, *words: str) -> tuple[list[list[list[Any]]], str]:
    """Return the scores of six outcomes for each harm that the third of them does, and what was said.

    A harm that is a list has one for each outcome.
    """
    (folder / "harm.py").write_text(HARMS)
    command = [sys.executable, folder / "harm.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(found) for found in (folder / "found.jsonl").read_text().splitlines()], done.stderr


@pytest.mark.parametrize("name", ["harm", "harms"])
def test_what_a_reward_changes_in_its_process_changes_no_score_and_not_the_run(tmp_path: Path, name: str) -> None:
    """In threads of the command it did: NaN was a score, the run's files could not be read, and a run hung."""
    found, said = harmed(
        tmp_path,
        name,
        "30",
        "math.isfinite = lambda x: True; value = 2.0",
        "math.sqrt = lambda x: 0.0",
        "warnings.simplefilter('error')",
        "socket.setdefaulttimeout(0.001)",
        "os.umask(0o777)",
        "os.chdir('/')",
        "json.dumps = lambda *given, **more: '\"patched\"'",
        "time.time = time.monotonic = lambda: 'now'",
        "print('a' * 300_000)",
        repr(["json.dumps = lambda value: 'patched'; json.loads(json.dumps({}))"]),
    )
    assert found[:-1] == [[[float(i), None] for i in range(6)]] * 9
    assert "died" not in said
    assert "Traceback" not in said
    shares = "of the interpreter, and all code in its process shares that"
    for replaced in ("math.isfinite", "json.dumps", "time.time", "time.monotonic"):  # a thread may see the first alone
        assert re.search(
            rf"the reward {name} replaced [\w., ]*\b{re.escape(replaced)}\b[\w., ]* {shares}: put back\n", said
        )
    (((value, reason),),) = found[-1:]
    assert value is None
    assert reason.startswith("the reward raised JSONDecodeError: ")
    assert reason.endswith(f"; the reward {name} replaced json.dumps {shares}")


@pytest.mark.parametrize("name", ["harm", "harms"])
def test_a_reward_that_ends_its_process_is_named_and_loses_one_score(tmp_path: Path, name: str) -> None:
    kills = "os.kill(os.getppid(), 9); time.sleep(60)"
    found, said = harmed(tmp_path, name, "30", "os.closerange(0, 100)", "os._exit(0)", "ctypes.string_at(0)", kills)
    for scores in found:
        value, reason = scores.pop(2)
        assert [each[0] for each in scores] == [0.0, 1.0, 3.0, 4.0, 5.0]
        assert value is None
        assert reason.startswith("the reward gave no score: the reward's process died (")
    assert len(re.findall(r"the reward's process \d+ died \(", said)) >= len(found)
    for code in ("exit code 0", "killed by SIGSEGV", "killed by SIGKILL"):  # that of a closed pipe is 0 or 1
        assert re.search(rf"the reward's process \d+ died \({code}\), while it judged tasks? t\d", said)
    assert re.search(r"the reward's process \d+ died \(killed by SIGKILL\), while it judged task t2\n", said)
    assert not re.search(r"\ban? agent\b|\bthe agent\b|\brunner\b", said)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["harm", "harms"])
def test_a_reward_that_holds_the_interpreter_loses_one_score(tmp_path: Path, name: str) -> None:
    """No thread and no signal's handler of the command could end it: it hung for good."""
    comes_back = "ctypes.PyDLL(None).usleep(7_600_000)" if name == "harms" else "ctypes.PyDLL(None).usleep(2_600_000)"
    found, said = harmed(tmp_path, name, "1", "ctypes.PyDLL(None).sleep(15)", comes_back)
    for scores in found:
        value, reason = scores.pop(2)
        assert [each[0] for each in scores] == [0.0, 1.0, 3.0, 4.0, 5.0]
        assert value is None
        assert reason.startswith("the reward ran past its budget of 1 s")
    assert "the reward's process is killed: task t2 ran past the budget of 1 s (run.reward_budget_s)" in said


def test_only_the_outcome_that_held_the_interpreter_is_late(tmp_path: Path) -> None:
    """Those judged beside it took as long: which one it was is known once each has a process."""
    holds = [f"ctypes.PyDLL(None).usleep({2_000_000 if i == 3 else 50_000})" for i in range(6)]
    ((*others, late, fifth, sixth),), _ = harmed(tmp_path, "harm", "0.4", repr(holds))
    assert [value for value, _ in (*others, fifth, sixth)] == [0.0, 1.0, 2.0, 4.0, 5.0]
    assert late[0] is None


STOPS = "threading.Timer(0.3, os.kill, (os.getpid(), 19)).start()"
"""Stops the process by SIGSTOP after the answer has left it."""


def test_an_outcome_is_not_charged_with_what_others_did_to_its_process(tmp_path: Path) -> None:
    """One was judged alone in a process that an earlier one had stopped; others were late beside one that hung."""
    stopped = ["time.sleep(0.9)"] * 2 + [f"time.sleep(0.6); {STOPS}", STOPS, "", ""]
    beside = ["lock.acquire(); time.sleep(60)"] + ["time.sleep(0.5); lock.acquire(); lock.release()"] * 3
    found, said = harmed(tmp_path, "harm", "2", repr(stopped), repr(beside))
    assert found[0] == [[float(i), None] for i in range(6)]
    assert "it was stopped by a signal" in said
    assert found[1].pop(0) == [None, "the reward ran past its budget of 2 s"]
    assert [value for value, _ in found[1]] == [1.0, 2.0, 3.0]
    assert re.search(r"is killed: tasks t0, .* ran past the budget .*; each is judged again alone\n", said)


def test_one_signal_ends_a_command_whose_reward_spins_and_all_its_processes(tmp_path: Path) -> None:
    (tmp_path / "harm.py").write_text(HARMS)
    spins = "open('spins', 'w').close()\nwhile True: pass"
    command = [sys.executable, "harm.py", "harm", "600", spins]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # the tests may run in background
    ) as command_process:
        end = time.monotonic() + 60
        while not (tmp_path / "spins").exists():
            assert command_process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        started = psutil.Process(command_process.pid).children(recursive=True)
        command_process.send_signal(signal.SIGINT)
        said = command_process.communicate(timeout=30)[1]
    assert "KeyboardInterrupt" in said
    assert len(started) > 2
    assert not psutil.wait_procs(started, timeout=20)[1]


def test_a_process_that_reads_its_pipe_no_more_is_ended(tmp_path: Path) -> None:
    """Nothing could be sent to it, so no outcome in it was late."""
    found, said = harmed(tmp_path, "harm", "60", repr([STOPS]), "[time.sleep(1) or '#' * 3_000_000]")
    assert found == [[[0.0, None]]] * 2
    assert "died" in said


def test_a_thread_that_spins_is_ended_where_python_can() -> None:
    def reward(task: Task, outcome: Outcome, budget_s: float) -> Score:
        while True:
            pass

    before = set(threading.enumerate())
    scores = Scorer(reward, budget_s=0.1)(ITEMS[:2])
    assert [s.status for s in scores] == ["invalid"] * 2
    end = time.monotonic() + 10
    while (left := set(threading.enumerate()) - before) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left


def test_a_reward_that_changes_directory_and_umask_does_not_move_or_lock_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run's files were sought in the reward's folder, and the run ended: its folder "was removed"."""
    monkeypatch.chdir(tmp_path)

    def reward(task: Task, outcome: Outcome, budget_s: float) -> Score:
        os.chdir("/")
        os.umask(0o777)
        return Score.ok(1.0)

    before = os.umask(0o022)
    try:
        assert [s.value for s in Scorer(reward, budget_s=5)(ITEMS[:2])] == [1.0, 1.0]
        assert Path.cwd() == tmp_path
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert (
        "the reward changed the current directory to /, and all code in its process shares that: put back"
        in caplog.text
    )
    assert "the reward changed the umask from 022 to 777, and all code" in caplog.text


def held(task: Task, outcome: Outcome, budget_s: float) -> Score:
    """Hold the interpreter for longer than the budget and its grace, and come back."""
    ctypes.PyDLL(None).usleep(1_300_000 if task.id == "3" else 0)
    return Score.ok(1.0)


@pytest.mark.parametrize("many", [False, True])
def test_a_score_that_comes_back_after_the_budget_does_not_count(many: bool) -> None:
    """Nothing ended a reward that held the interpreter for 15 s of its 3: its score was taken."""
    made: Any = _Batch(lambda items: [held(*item, 0.1) for item in items]) if many else held
    (score,) = Scorer(made, budget_s=0.1)(ITEMS[3:4])
    assert score.status == "invalid"
    assert "the reward ran past its budget of 0.1 s" in score.details["reason"]
    with pytest.raises(AgentFailure, match="the reward ran past its budget"):
        RewardWorker(made, 0.1).run_job(Job(id="0", input=ITEMS[3:4], endpoint=NOWHERE))


COMES_BACK = """
import os
from agentrig import Outcome, Score, Task
from agentrig.runners.scorer import Scorer
from agentrig.traces import Trace

def reward(task, outcome, budget_s):
    os.fork()
    return Score.ok(1.0)

class Batch:
    def score_many(self, items, budget_s):
        os.fork()
        return [Score.ok(1.0)] * len(items)

for made in (reward, Batch()):
    items = [(Task(id=str(i), input={}), Outcome(answer="a"), Trace(rollout_id="r")) for i in range(20)]
    print(*{score.value for score in Scorer(made, budget_s=5)(items)})
"""


def test_a_fork_that_comes_back_from_the_reward_is_ended_and_told_once() -> None:
    done = subprocess.run([sys.executable, "-c", COMES_BACK], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("1.0\n1.0\n", 0)
    said = "agentrig: the reward forked (<string>:8 in reward), and the child came back: it is ended."
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


class _Batch:
    def __init__(self, answer: Any) -> None:
        self.answer, self.calls = answer, 0

    def __call__(self, task: Task, outcome: Outcome, budget_s: float) -> Score:
        raise AssertionError("score_many is there")

    def score_many(self, items: Sequence[tuple[Task, Outcome]], budget_s: float) -> Any:
        self.calls += 1
        return self.answer(items)


def endless(items: Sequence[Any]) -> Iterator[Score]:
    while True:
        yield Score.ok(1.0)


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda items: items[1:], "score_many gave {few} results for {items}"),
        (lambda items: [*items, Score.ok(1.0)], "score_many gave more than {n} results for {items}"),
        (endless, "score_many gave more than {n} results for {items}"),
        (lambda items: None, "the reward returned NoneType; it must return an agentrig.Score, a list of them from"),
        (lambda items: {"a": Score.ok(1.0)}, "the reward returned dict; it must return an agentrig.Score, a list of"),
        (lambda items: 1 / 0, "the reward raised ZeroDivisionError"),
        (lambda items: sys.exit("no judge"), "the reward raised SystemExit: no judge"),
    ],
)
def test_a_batch_without_a_score_for_each_is_judged_one_by_one(answer: Any, said: str, hostile: bool) -> None:
    """One task among eight stopped a run: the outcomes beside it were invalid too."""

    def judge(items: Sequence[Any]) -> Any:
        bad = len(items) > 1 or (hostile and items[0][0].id == "3")
        return answer(items) if bad else [Score.ok(task.private["gold"]) for task, _ in items]

    scorer = Scorer(_Batch(judge), budget_s=5)
    scores = scorer(ITEMS)
    wrong = [3] if hostile else []
    assert [s.value for s in scores] == [None if i in wrong else i for i in range(12)]
    assert all(said.format(few=0, n=1, items="1 item") in scores[i].details["reason"] for i in wrong)
    assert said.format(few=11, n=12, items="12 items") in scorer.batch_fault
    done = run_agent(RewardWorker(_Batch(judge), 5), Job(id="0", input=ITEMS, endpoint=NOWHERE))
    with pytest.raises(NoScores) as fault:
        scores_of(done.outcome, len(ITEMS))
    assert str(fault.value) == scorer.batch_fault


def test_one_thing_that_is_no_score_among_those_of_a_batch_is_invalid_alone() -> None:
    def forged(task: Task) -> Any:
        score = Score.ok(task.private["gold"])
        object.__setattr__(score, "value", math.nan if task.id == "3" else score.value)
        return None if task.id == "5" else score

    reward = _Batch(lambda items: (forged(task) for task, _ in items))
    scores = Scorer(reward, budget_s=5)(ITEMS)
    assert [s.value for s in scores] == [None if i in (3, 5) else i for i in range(12)]
    assert "a score's value is nan" in scores[3].details["reason"]
    assert "the reward returned NoneType" in scores[5].details["reason"]
    assert reward.calls == 1


def test_a_batch_that_hangs_is_judged_one_by_one() -> None:
    release = threading.Event()

    def judge(items: Sequence[Any]) -> Any:
        if any(task.id == "1" for task, _ in items):
            release.wait(30)
        return [Score.ok(1.0)] * len(items)

    try:
        scores = Scorer(_Batch(judge), budget_s=0.2)(ITEMS[:3])
    finally:
        release.set()
    assert [s.status for s in scores] == ["ok", "invalid", "ok"]
    assert "past its budget" in scores[1].details["reason"]


@pytest.mark.parametrize("many", [False, True])
def test_a_reward_changes_nothing_but_its_own_copies(many: bool) -> None:
    """The record has the agent's answer, and the other rollouts of the group are judged by the same gold."""
    task = Task(id="t", input={"words": ["a"]}, private={"gold": [1]}, row={"gold": [1]})
    span = Span(id="1", parent=None, name=LLM_CALL, start=0, end=1, error=None, attributes={"ids": [1]})
    rollouts = [(task, Outcome(answer={"n": [i]}), Trace(rollout_id="r", spans=(span,))) for i in range(3)]
    before = repr([(t.input, t.private, t.row, o, trace) for t, o, trace in rollouts])

    def reward(task: Task, outcome: Outcome, budget_s: float, trace: Trace) -> Score:
        gold = list(task.private["gold"])
        for plain in (task.input, task.private, task.row, trace.spans[0].attributes):
            plain.clear()
        outcome.answer["n"].append(9)
        object.__setattr__(outcome, "answer", "changed")
        return Score.ok(sum(gold))

    batch: Any = _Batch(lambda items: [reward(task, outcome, 1.0, trace) for task, outcome, trace in items])
    scores = Scorer(batch if many else reward, budget_s=5, sees_trace=True)(rollouts)
    assert [s.value for s in scores] == [1.0] * 3
    assert repr([(t.input, t.private, t.row, o, trace) for t, o, trace in rollouts]) == before


def test_a_reward_may_score_each_call_and_its_process_ends_with_its_scorer(toy_plan: Callable[..., Plan]) -> None:
    def processes() -> set[int]:
        return {process.pid for process in psutil.Process().children(recursive=True)}

    plan = toy_plan("reward.calls=true")
    task = Task(id="t-1", input={"number": 1}, private={"parity": "odd", "gold": "gold"})
    spans = [Span(id=str(i), parent=None, name=LLM_CALL, start=0, end=1) for i in range(3)]
    with contextlib.closing(plan.scorer()) as scorer:
        two = scorer([(task, Outcome(answer="odd"), Trace(rollout_id="r", spans=spans[:2]))])[0]
        three = scorer([(task, Outcome(answer="odd"), Trace(rollout_id="r", spans=spans))])[0]
        judging = processes()
    assert judging - processes()
    assert (two.value, two.calls) == (1.0, (0.5, None))
    assert three.status == "invalid"
    assert "gave 2 values of calls, and the rollout has 3 recorded calls" in three.details["reason"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e10, "0.5"])
def test_the_value_of_a_call_is_a_number_too(value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="value of a call"):
        Score(status="ok", value=1.0, calls=[None, value])


def test_an_empty_batch() -> None:
    assert Scorer(lambda t, o, b: Score.ok(1.0), budget_s=5)([]) == []


@pytest.mark.parametrize(
    ("answer", "status"), [(0.5, "ok"), (1, "ok"), (True, "ok"), ("1", "invalid"), (None, "invalid")]
)
def test_the_reward_own_takes_the_agents_number(answer: Any, status: str) -> None:
    score = own(ITEMS[0][0], Outcome(answer=answer), 1.0, Trace(rollout_id="r"))
    assert score.status == status
    if status == "invalid":
        assert "agent that returns a number" in score.details["reason"]


def test_the_reward_own_takes_the_last_reward_that_was_given_if_no_number_is_returned() -> None:
    spans = [
        Span(id=str(i), parent=None, name="reward", start=i, end=i, attributes={REWARD: value})
        for i, value in enumerate((1.0, 0.25, "nonsense"))
    ]
    trace = Trace(rollout_id="r", spans=spans)
    for outcome, value in (
        (Outcome(answer="SELECT 1"), 0.25),
        (Outcome(answer=0.5), 0.5),
        (Outcome(answer="SELECT 1", own_reward=0.75), 0.75),
    ):
        assert own(ITEMS[0][0], outcome, 1.0, trace) == Score.ok(value)
    other = Scorer(lambda task, outcome, budget_s: Score.ok(0.0), budget_s=5)
    (score,) = other([(ITEMS[0][0], Outcome(answer="SELECT 1"), trace)])
    assert score.value == 0.0, "no other reward takes it"


def test_the_reward_own_names_the_failed_call_that_an_agent_hid() -> None:
    """`LitSQLAgent` catches the error and returns None."""
    refused = Span(id="1", parent=None, name=LLM_CALL, start=0, end=1, error="HTTP 401: another key", attributes={})
    score = own(ITEMS[0][0], Outcome(), 1.0, Trace(rollout_id="r", spans=(refused,)))
    assert score.details["reason"].endswith("a call to the model that failed: HTTP 401: another key")


def test_a_reward_that_replaces_what_a_command_uses_in_its_threads_ends_it() -> None:
    before = json.dumps, time.monotonic, os.close

    def reward(task: Task, outcome: Outcome, budget_s: float) -> Score:
        json.dumps, time.monotonic = (lambda *given, **more: "{}"), (lambda: 0.0)
        return Score.ok(1.0)

    said = r"the reward replaced json\.dumps and time\.monotonic, which this command needs(.|\n)*use them as they are"
    with pytest.raises(PluginError, match=said):
        Scorer(reward, budget_s=5)(ITEMS[:2])
    assert (json.dumps, time.monotonic, os.close) == before


def test_what_a_reward_replaces_for_itself_alone_is_no_fault() -> None:
    def reward(task: Task, outcome: Outcome, budget_s: float) -> Score:
        with mock.patch("time.time", return_value=1.0):
            return Score.ok(time.time())

    assert [s.value for s in Scorer(reward, budget_s=5, threads=1)(ITEMS[:2])] == [1.0, 1.0]


CLOSES = """
import os, pathlib, sys
from agentrig import Outcome, Score, Task
from agentrig.processes.ends import no_silent_end
from agentrig.processes.locks import Lock
from agentrig.runners.scorer import Scorer
from agentrig.traces import Trace

def reward(task, outcome, budget_s):
    CLOSE
    return Score.ok(1.0)

lock = Lock(pathlib.Path(sys.argv[1]))
assert lock.take()
with no_silent_end():
    Scorer(reward, budget_s=5)([(Task(id="a", input={}), Outcome(answer="a"), Trace(rollout_id="r"))])
"""


@pytest.mark.parametrize(
    ("close", "named"),
    [
        ("os.closerange(3, 200)", "/"),
        ("os.close(1)", "its standard output,"),
        ("sys.stdout.close(); os.close(1)", "its standard output,"),
        ("sys.stdout = sys.stderr; sys.stdout.close()", "its standard error,"),
    ],
)
def test_a_reward_that_closes_the_files_of_the_command_is_named(tmp_path: Path, close: str, named: str) -> None:
    """Its threads printed three tracebacks, and none named the reward."""
    command = [sys.executable, "-c", CLOSES.replace("CLOSE", close), str(tmp_path / "run.lock")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"the reward closed files and connections of this command, such as {named}")
    assert ended.stderr.count("Let the reward use them as they are") == 1
    assert "Traceback" not in ended.stderr


def test_a_reward_that_replaces_something_while_it_is_built_is_put_right(
    toy_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, build = json.loads, composing.build

    def careless(*given: Any) -> Any:
        json.loads = lambda *given, **more: {}
        return build(*given)

    monkeypatch.setattr(composing, "build", careless)
    toy_plan().scorer().close()
    assert json.loads is before
    assert "while it was built, replaced json.loads, which this command needs itself: put back" in caplog.text

"""A starting model for one's own tasks: labels, demonstrations by the agent itself, the model, and each mistake."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
from click.testing import CliRunner
from openai import BadRequestError, OpenAI
from rollouts import rollout

from agentrig import Span, Task, Trace
from agentrig.algorithms import Measurement
from agentrig.cli.commands.warmup import _again, far_past, next_step, warmup, why_ended
from agentrig.cli.entry import main
from agentrig.cli.progress import Progress, progress
from agentrig.demonstrations import Reply, StartingModel, StartPlan, Turn, gold_of
from agentrig.errors import AgentrigError, ConfigError, PluginError
from agentrig.observers import StepEnd
from agentrig.plan import Plan, resolve
from agentrig.processes.ends import RunSignals
from agentrig.rollouts import Rollout
from agentrig.run.auditing import Auditing
from agentrig.run.demonstration_server import demonstrating
from agentrig.run.evaluate import Evaluation
from agentrig.run.manifest import manifest
from agentrig.run.splits import label_warnings, load_splits
from agentrig.run.training import train
from agentrig.run.verdict import judge
from agentrig.run.warmup import (
    Demonstrations,
    _Progress,
    check_makes_start,
    check_unsolved,
    choose_labels,
    demonstrate,
    guessed,
    make_start,
    unused_tools,
    verdict,
)
from agentrig.tasks import input_key
from agentrig.traces import LLM_CALL

ROOT = Path(__file__).resolve().parents[2]
FILE = str(ROOT / "tests" / "support" / "warmup_plugin.py")
STARTER = ROOT / "plugins" / "agentrig-grpo" / "src" / "agentrig_grpo" / "models" / "starter"


@pytest.fixture
def colors() -> Callable[..., Plan]:
    def plan(*overrides: str, **uses: str) -> Plan:
        return resolve("colors", overrides=overrides, uses=uses, files=[FILE])

    return plan


# --- the server ---


def test_each_rollout_gets_its_own_demonstrations() -> None:
    tasks = [Task(id=name, input={}, private={"gold": name}) for name in ("one", "two", "one")]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

    def says(task: Task, call: Any) -> Any:
        if call.tools:
            return Reply(tool_calls=[{"name": "add", "arguments": {"a": 1}}])
        if call.text == "wrong":
            raise ValueError("no idea")
        return None if call.text == "none" else f"{task.private['gold']} {call.turn} {call.rng.random():.3f}"

    def asked(client: OpenAI, text: str, **more: Any) -> Any:
        messages: Any = [{"role": "user", "content": text}]
        return client.chat.completions.create(model="demonstration", messages=messages, **more)

    with demonstrating(tasks, says, seed=0) as (endpoints, conversations):
        clients = [OpenAI(base_url=e.base_url, api_key=e.api_key, max_retries=0) for e in endpoints]
        said = [asked(client, "x").choices[0].message.content for client in clients]
        assert [text[:5] for text in said] == ["one 0", "two 0", "one 0"]
        assert said[0] != said[2], "a second demonstration of a task has random numbers of its own"
        streamed = "".join(c.choices[0].delta.content or "" for c in asked(clients[0], "y", stream=True))
        assert streamed.startswith("one 1")
        call = asked(clients[1], "sum", tools=tools).choices[0].message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        with pytest.raises(BadRequestError, match="raised ValueError: no idea"):
            asked(clients[2], "wrong")
        with pytest.raises(BadRequestError, match="no reply to call 2: 'none'"):
            asked(clients[2], "none")
        for key in ("none", "0-0", endpoints[0].api_key[:-2] + "-9"):
            headers = {"Authorization": f"Bearer {key}"}
            stranger = httpx.post(f"{endpoints[0].base_url}/chat/completions", json={}, headers=headers)
            assert stranger.status_code == 401, key
        for client in clients:
            client.close()
    assert [len(c.turns) for c in conversations] == [2, 2, 1]
    assert conversations[1].turns[1].tools == tools
    with demonstrating(tasks, says, seed=0) as (endpoints, _):
        client = OpenAI(base_url=endpoints[0].base_url, api_key=endpoints[0].api_key)
        assert asked(client, "x").choices[0].message.content == said[0]
        client.close()


# --- labels and gold ---


def test_labels_are_training_tasks_and_never_held_out_ones(colors: Callable[..., Plan]) -> None:
    labels = choose_labels(colors(), 8, seed=1)
    assert (len(labels.tasks), len(labels.measured), labels.split, labels.fresh) == (8, 4, "train", True)
    ids = [t.id for t in (*labels.tasks, *labels.measured)]
    assert sorted(ids) == sorted(f"train-{i}" for i in range(12))
    assert [t.id for t in choose_labels(colors(), 8, seed=1).tasks] == ids[:8]
    assert [t.id for t in choose_labels(colors(), 8, seed=2).tasks] != ids[:8]
    everything = choose_labels(colors(), 0, seed=0)
    assert (len(everything.tasks), everything.fresh) == (12, False)
    some = choose_labels(colors(), None, seed=0)
    assert (len(some.tasks), len(some.measured), some.fresh) == (6, 6, True)
    assert some.note.startswith("half of its 12 tasks")
    assert some.more == 0, "no tasks would be left to try the model on"
    assert choose_labels(colors("tasks.train=40"), 8, seed=0).more == 24
    with pytest.raises(ConfigError, match="--labels 13: the split train has 12 tasks"):
        choose_labels(colors(), 13, seed=0)
    with pytest.raises(ConfigError, match=r"3 of 12 labelled tasks occur in the split test \(report\) too.*train-9"):
        choose_labels(colors("tasks.test=9"), 12, seed=0)


def test_a_run_says_which_held_out_tasks_its_model_was_warmed_up_on(
    colors: Callable[..., Plan], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The labels were training tasks; then other settings held three of them out, as other `tasks.shares` do."""
    model, run = tmp_path / "model", tmp_path / "runs" / "a" / "checkpoints" / "step-00003"
    shutil.copytree(STARTER, model, copy_function=os.symlink)
    run.mkdir(parents=True)
    inputs = sorted(map(input_key, choose_labels(colors(), 0, seed=0).tasks))
    (model / "warmup.json").write_text(json.dumps({"labels": [], "inputs": inputs}))
    (run.parents[1] / "manifest.json").write_text(json.dumps({"model": str(model)}))
    own = [f"algorithm.model={model}", f"run.directory={model}/config.json", "tasks.test=9"]
    with pytest.raises(AgentrigError, match=r"config\.json"):  # no folder; it is made after the tasks were looked at
        train(colors(*own))
    (said,) = [record.getMessage() for record in caplog.records if "labels of the warm-up" in record.getMessage()]
    assert said.startswith(f"3 of 12 report tasks were labels of the warm-up that made {model}, ")
    assert "the first: test-9. Make the model again with the splits of this run (agentrig warmup --out" in said
    splits = load_splits(colors("tasks.test=9").tasks(), colors().run, who="colors")
    assert label_warnings(splits, run)[0].startswith("3 of 12 report tasks"), "a run that began with it knows them, too"
    assert label_warnings(load_splits(colors().tasks(), colors().run, who="colors"), model) == []
    own_splits = load_splits(colors().tasks(), colors().run, who="colors")
    own_model = colors(f"algorithm.model={model}")
    data = manifest(own_model, own_model.use_hardware(), own_splits)["data"]
    assert [data[role]["labels"] for role in ("train", "report")] == [12, 0]


def test_a_run_quotes_the_verdict_of_a_warm_up_that_advised_against_its_model(
    colors: Callable[..., Plan], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model"
    shutil.copytree(STARTER, model, copy_function=os.symlink)
    own = [f"algorithm.model={model}", f"run.directory={model}/config.json"]  # no folder: the run ends soon
    for ready in (False, True):
        caplog.clear()
        verdict = {"kind": "hopeless", "message": "Don't train this model by reward yet: few differ. Give more labels."}
        (model / "warmup.json").write_text(json.dumps({"ready": ready, "verdict": verdict}))
        with pytest.raises(AgentrigError, match=r"config\.json"):
            train(colors(*own))
        said = f"agentrig warmup said of {model}: Don't train this model by reward yet: few differ (warmup.json there"
        assert (said in caplog.text) != ready


def test_gold_is_found_or_its_keys_are_named() -> None:
    def task(**private: Any) -> Task:
        return Task(id="t", input={}, private=private)

    assert gold_of(task(answer="a", hint="h")) == "a"
    assert gold_of(task(sql="select 1")) == "select 1"
    assert gold_of(task(a=1, b={"c": "é"}), "b") == '{"c": "é"}'
    with pytest.raises(ConfigError, match="no gold to demonstrate: its private part has a, b"):
        gold_of(task(a=1, b=2))
    with pytest.raises(ConfigError, match="its private part has nothing"):
        gold_of(task())
    with pytest.raises(ConfigError, match='no "goal": its private part has gold'):
        gold_of(task(gold=1), "goal")


# --- demonstrations by the agent ---


def test_the_agent_itself_makes_the_prompts(colors: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """The task set demonstrates a mistake and its repair; only the repair is learned."""
    monkeypatch.setattr("agentrig.run.evaluate.CHUNK", 3)  # each task keeps its own endpoint in every chunk
    plan = colors()
    labels = choose_labels(plan, 4, seed=0).tasks
    found = demonstrate(plan, labels, repeats=2)
    assert (found.rollouts, len(found.turns), found.rejected) == (8, 8, [])
    for task, turn in zip([t for t in labels for _ in range(2)], found.turns, strict=True):
        first, mistake, again = turn.messages
        assert first["content"] == f"color {task.input['number']}"
        assert again["content"] == f"again, not {mistake['content']}"
        assert turn.reply == Reply(content=task.private["gold"])


@pytest.mark.slow
def test_mistakes_are_named(colors: Callable[..., Plan], toy_plan: Callable[..., Plan], tmp_path: Path) -> None:
    labels = choose_labels(colors(), 2, seed=0).tasks
    with pytest.raises(ConfigError, match="agent silent ended 2 rollouts without a call to its endpoint"):
        demonstrate(colors(agent="silent"), labels)
    with pytest.raises(PluginError, match=r"2 of 2 demonstrations failed; agent broken on task train-\d+: .*KeyError"):
        demonstrate(colors(agent="broken"), labels)
    toy = toy_plan()
    with pytest.raises(ConfigError, match=r"does not count 4 of 4 demonstrations by the tasks' gold as correct"):
        demonstrate(toy, choose_labels(toy, 4, seed=0).tasks)
    with pytest.raises(ConfigError, match=r"makes no starting models.*--algorithm grpo"):
        check_makes_start(toy)


# --- the verdict ---


def measured(values: list[float], failed: int = 0, each: int = 1) -> Evaluation:
    """Return the measurement of rollouts with these rewards, `each` of a task, and of some without an answer."""
    rollouts = [rollout(value, group=str(i // each)) for i, value in enumerate(values)]
    rollouts += [rollout(failure="deadline", message="no answer after 9 s") for _ in range(failed)]
    right = sum(bool(r.correct) for r in rollouts)
    return Evaluation(
        accuracy=right / len(values) if values else None, ci95=None, reward=None, n=len(values), failures={},
        wall_s=1.0, by_turn={}, rollouts_per_s=1.0, slices={}, wrong={}, rollouts=rollouts,
    )  # fmt: skip


def test_a_start_without_reward_and_one_without_room_are_named() -> None:
    found = verdict(measured([0.0, 1.0]))
    assert found.kind == "good"
    assert found.message == (
        "You can train this model by reward: training learns from tasks whose 8 rollouts get rewards that differ, and "
        "these would be about 99% of the tasks."
    )
    found = verdict(measured([0.0, 0.0]))
    assert found.kind == "hopeless"
    assert "start at zero" in found.message
    assert "--labels" in found.message
    assert verdict(measured([0.0, 0.2])).kind == "good"
    found = verdict(measured([1.0, 1.0]))
    assert found.kind == "solved"
    assert "already solves" in found.message
    assert found.message.endswith("fewer labels or passes.")
    last = next_step({"verdict": attrs.asdict(found)}, "colors")
    assert last.startswith("next: use harder tasks")
    assert last.endswith("little left to gain; to do it all the same: agentrig train colors")
    good = {"verdict": attrs.asdict(verdict(measured([0.0, 1.0])))}
    steps = next_step(good, "colors")
    assert steps == next_step({}, "colors")
    better = next_step(good, "colors", "agentrig warmup colors --labels 192")
    assert better == "next: agentrig warmup colors --labels 192\nor train this one: agentrig train colors"
    assert steps.split("agentrig ") == ["next: ", "dev colors\n      ", "forecast colors\n      ", "train colors"]
    found = verdict(measured([], failed=2))
    assert found.kind == "failing"
    assert found.message.splitlines()[1:] == ["  2 x deadline: for example no answer after 9 s"]
    assert verdict(measured([0.0, 1.0], failed=2), failure_limit=0.25).kind == "failing"
    check_unsolved(measured([0.0, 1.0]), "mini")
    with pytest.raises(ConfigError, match="mini already solves these tasks: 100"):
        check_unsolved(measured([1.0, 1.0]), "mini")


def test_the_command_for_more_labels_has_the_options_that_were_typed() -> None:
    words = ["colors", "--until", "0.25", "--minutes", "2", "--labels", "10", "--out", "m"]
    with warmup.make_context("warmup", words):
        again = _again("colors", 30, Path("m"))
    assert again == "agentrig warmup colors --minutes 2 --until 0.25 --labels 30 --out m-30"


def test_the_cure_of_groups_that_do_not_differ_depends_on_why() -> None:
    """Mostly right, or the same answer each time: fewer passes; mostly wrong in different ways: more."""

    def groups(right: int, wrong: int, answers: tuple[str, str]) -> Evaluation:
        made = [rollout(1.0, group=str(g)) for g in range(right) for _ in range(2)]
        made += [rollout(0.0, group=f"w{g}", answer=answer) for g in range(wrong) for answer in answers]
        return attrs.evolve(measured([1.0]), rollouts=made)

    fewer, more = "Give fewer passes", "Give more labels"
    assert fewer in verdict(groups(6, 4, ("a", "b"))).message
    assert more in verdict(groups(1, 9, ("a", "b"))).message
    assert fewer in verdict(groups(1, 9, ("a", "a"))).message
    assert more in verdict(groups(0, 9, ("a", "a"))).message, "never right: it has learned nothing"
    lower = "A lower temperature (algorithm.temperature) may help too."
    assert verdict(groups(1, 9, ("a", "b"))).message.endswith(lower)
    assert lower in verdict(groups(0, 9, ("a", "b"))).message
    sure = judge([[rollout(1.0, group=str(g))] * 2 for g in range(6)] + [[rollout(0.0)] * 2] * 4, 2)
    assert "Raise the temperature (algorithm.temperature), or use other tasks" in sure.message


def test_a_model_is_too_sure_if_its_replies_are_equal_not_the_answers_that_the_agent_makes_of_them() -> None:
    """An agent may return {} for each call whose arguments are broken."""

    def groups(*arguments: str) -> list[list[Rollout]]:
        called = [Reply(tool_calls=[{"name": "at", "arguments": {"hour": each}}]).message() for each in arguments]
        calls = [{"response": {"choices": [{"message": message}]}} for message in called]
        traces = [
            Trace(rollout_id="r", spans=[Span(id="c", parent=None, name=LLM_CALL, start=0, end=1, attributes=call)])
            for call in calls
        ]
        return [[rollout(0.0, answer={}, trace=trace) for trace in traces]] * 19 + [[rollout(1.0), rollout(0.0)]]

    found = judge(groups('9["', "9}", "[9"), 2).message
    assert "too sure" not in found
    assert "For 100% of the tasks with equal rewards, its replies are different, and none is right" in found
    assert "more --labels or --passes. A lower temperature (algorithm.temperature) may help too." in found
    found = judge(groups("9", "9", "9"), 2).message
    assert "The model is too sure: for 100% of the other tasks" in found
    assert "--until" not in found, "so few answers are right that none was reached"


@pytest.mark.parametrize(("until", "accuracy", "said"), [(None, 0.3, True), (0.2, 0.3, False), (None, 0.1, False)])
def test_an_until_that_was_given_or_not_reached_is_no_advice(until: float | None, accuracy: float, said: bool) -> None:
    same = [rollout(value, group=str(g)) for g, value in enumerate([1.0] * 2 + [0.0] * 18) for _ in range(2)]
    found = attrs.evolve(measured([1.0]), rollouts=same, accuracy=accuracy)
    message = verdict(found, until=until).message
    assert "Give fewer passes" in message
    assert ("--until 0.2" in message) == said


def test_a_start_with_hardly_any_reward_is_not_recommended() -> None:
    """A step learns from groups whose rewards differ; nearly none do at a mean reward of 0.009."""
    rare = [1.0] + [0.0] * 110
    found = verdict(measured(rare), group=8)
    assert found.kind == "hopeless"
    assert found.message.startswith("Don't train this model by reward yet: training learns from tasks whose 8 rollouts")
    assert "would be about 7% of the tasks only" in found.message
    assert "about 34% of the tasks" in verdict(measured([1.0] + [0.0] * 19), group=8).message
    assert "--labels" in found.message
    assert verdict(measured(rare), group=64).kind == "good", "larger groups find one"
    partly = measured([0.1, 0.2, 0.3, 0.0] * 16)
    assert verdict(partly, group=8).kind == "good", "partial credit is something to begin with"
    found = verdict(measured([0.1] * 6 + [0.0] * 58), group=8)
    assert found.kind == "hopeless"
    assert "the mean reward is 0.00938, hardly more than the least" in found.message


def test_a_model_that_repeats_its_demonstrations_is_told_apart() -> None:
    known = measured([1.0] * 30 + [0.0] * 10)
    found = verdict(measured([0.0] * 40), known=known)
    assert found.kind == "hopeless"
    said = "The model repeats its demonstrations: 75% of 40 demonstrated tasks are right, and 0% of the answers"
    assert said in found.message
    assert "more passes or optimizer steps of the warm-up do not help" in found.message
    assert "passes (--passes)" not in found.message
    found = verdict(measured([1.0] * 3 + [0.0] * 37), known=known)
    assert found.kind == "good"
    assert found.message.startswith("You can train this model by reward, but more labels would help more. ")
    assert said.replace("0%", "8%") in found.message
    for rate in (0.3, 0.5):
        others = measured([1.0] * round(40 * rate) + [0.0] * round(40 * (1 - rate)))
        assert "repeats" not in verdict(others, known=known).message, rate


@pytest.mark.parametrize(("reached", "passes"), [(0.05, 1), (0.15, 2), pytest.param(0.9, 6, marks=pytest.mark.slow)])
def test_a_warm_up_ends_when_enough_answers_are_right(
    colors: Callable[..., Plan],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    reached: float,
    passes: int,
) -> None:
    """The measurements are given, but for one that tells the classes of its tasks."""
    shares, said = iter([0.1, 0.2, 0.3, 0.4, 0.5]), list[float]()

    def enough(done: float, measure: Callable[[], Any]) -> bool:
        assert 0 < done < 6
        if reached == 0.05:
            found = measure()
            assert [(of, n) for of, (_, n) in found.classes.items()] == [(("kind", "color"), len(labels.measured))]
        said.append(next(shares))
        return said[-1] >= reached

    plan = colors()
    wanted = StartPlan(directory=tmp_path / "model", parameters=60_000, tokenizer="bytes", passes=6.0)
    turns = [Turn(messages=[{"role": "user", "content": "a"}], reply=Reply(content="b"))]
    labels = choose_labels(plan, 0, seed=0)
    labels = attrs.evolve(labels, measured=[attrs.evolve(t, slices={"kind": "color"}) for t in labels.measured])
    caplog.set_level("INFO")
    learned, limits, end = list[tuple[int, int, float | None]](), list[float](), Auditing.end
    monkeypatch.setattr(Auditing, "end", lambda self, *given: (limits.append(self.wall_s), end(self, *given))[1])
    made = make_start(plan, wanted, labels, turns, enough=enough, learned=lambda *of: learned.append(of))
    assert [of[:2] for of in learned] == [(n, 6) for n in range(1, passes + 1) for _ in "ab"], "after each step, twice"
    seconds = [s for _, _, s in learned if s is not None]
    assert [s for _, _, s in learned[1::2]] == [None] * passes, "while a step is audited, no time of training goes by"
    assert seconds == sorted(seconds)
    assert set(limits) == {60 * wanted.minutes}, "audits take no longer than the training may"
    for nobody_can_mend in ("split too", "not in the training split", str(tmp_path)):
        assert nobody_can_mend not in caplog.text
    assert "checked step 1" in caplog.text
    assert "held-out" not in caplog.text, "it has no such tasks"
    assert ("calls learned" in caplog.text, "advantages" in caplog.text) == (True, False)
    assert "not looked at" not in caplog.text, "a warm-up has no tasks, samples and scores to look at"
    assert len(made.losses) == made.steps == passes
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "the run that trained it is gone"
    assert not (tmp_path / "model" / "trainer").exists()
    assert made.passes == passes
    assert said == [0.1, 0.2, 0.3, 0.4, 0.5][:passes]  # the first try is after the first pass


@pytest.mark.parametrize(
    ("dear", "minutes", "share", "replies", "tries"),
    [
        (False, 3.0, 0.0, 1, [1, 2, 3, 4, 5, 7, 9]),
        (True, 3.0, 0.0, 1, [1, 2, 4, 8]),
        (True, 3.0, 0.1, 1, [1, 2, 3, 4, 5, 7, 9]),
        (True, 3.0, 0.5, 1, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (False, 1e-6, 0.0, 1, []),
        (False, 1e-6, 0.0, 100, []),
    ],
    ids=["cheap", "dear", "dear, some right", "near", "no time left", "a step is a part of a pass"],
)
def test_tries_of_the_model_begin_at_once_get_rarer_and_end_with_the_time(
    colors: Callable[..., Plan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dear: bool,
    minutes: float,
    share: float,
    replies: int,
    tries: list[float],
) -> None:
    """When the time is up, the training ends: no later try measures a model that no longer changes."""
    if dear:
        monkeypatch.setattr("agentrig.run.warmup.TRIALS_S", -1.0)
        monkeypatch.setattr("agentrig.run.warmup.TRIALS", -1.0)
    monkeypatch.setattr("agentrig.run.warmup.FELL", 0.0)  # no loss falls so far
    said = list[float]()

    def enough(done: float, measure: Callable[[], Any]) -> float:
        said.append(done)
        return share

    directory = tmp_path / "model"
    wanted = StartPlan(directory=directory, parameters=60_000, tokenizer="bytes", passes=10.0, minutes=minutes)
    turns = [Turn(messages=[{"role": "user", "content": "a"}], reply=Reply(content="b"))] * replies
    plan = colors()
    make_start(plan, wanted, choose_labels(plan, 0, seed=0), turns, enough=enough)
    assert said == tries


def test_a_pass_of_several_optimizer_steps_is_tried_within_and_again_when_the_loss_fell(
    colors: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tries are dear here, so without the loss they would come after 1, 2, 4, 8 optimizer steps."""
    monkeypatch.setattr("agentrig.run.warmup.TRIALS_S", -1.0)
    monkeypatch.setattr("agentrig.run.warmup.TRIALS", -1.0)
    said = list[float]()

    def enough(done: float, measure: Callable[[], Any]) -> float:
        said.append(done)
        return 0.0

    wanted = StartPlan(
        directory=tmp_path / "model", parameters=60_000, tokenizer="bytes", passes=2.0, lr=1e-2, tokens_per_batch=64
    )
    asked = [f"{letter * 20} and what else is to be said" for letter in "abcdefgh"]
    turns = [Turn(messages=[{"role": "user", "content": text}], reply=Reply(content="b")) for text in asked]
    plan = colors()
    made = make_start(plan, wanted, choose_labels(plan, 0, seed=0), turns, enough=enough)
    assert made.steps == len(made.losses), "a step is one optimizer step"
    assert made.steps > 2 * wanted.passes
    each, powers = wanted.passes / made.steps, [1, 2, 4, 8, 16]
    steps = [round(done / each) for done in said]
    assert steps[0] == 1
    assert set(steps) - set(powers), (steps, made.losses)


def test_the_time_of_training_has_no_audits_and_no_trials() -> None:
    """A step waits for the audit of the step before; a trial is a part of its step."""
    told = list[float | None]()
    progress = _Progress(lambda line: None, lambda done, of, s: told.append(s), 4, 1, 4.0)
    for audit_s, trial_s in ((0.0, 0.0), (40.0, 7.0)):
        progress.on_update()
        progress.add_trial(trial_s)
        figures = {"loss": 1.0, "learner_tokens_per_s": 1.0}
        times = {"audit": audit_s} if audit_s else {}
        metrics = {"step_s": 5.0 + audit_s + trial_s, "time_s": times, "algorithm": figures}
        progress.on_step_end(StepEnd(step=1, metrics=metrics))
    assert progress.spent() == progress.trained == 10.0
    assert (told[1], told[3]) == (None, None)
    assert [int(seconds // 5) for seconds in told if seconds is not None] == [0, 1], "it does not go back"


def test_a_step_of_many_optimizer_steps_tells_each(colors: Callable[..., Plan], tmp_path: Path) -> None:
    """Without trials a step is a pass, which may take a minute: 0 of 20 passes would be said all the time."""
    learned, said = list[int](), list[str]()
    wanted = StartPlan(
        directory=tmp_path / "model", parameters=60_000, tokenizer="bytes", passes=2.0, lr=1e-2, tokens_per_batch=64
    )
    asked = [f"{letter * 20} and what else is to be said" for letter in "abcdefgh"]
    turns = [Turn(messages=[{"role": "user", "content": text}], reply=Reply(content="b")) for text in asked]
    plan = colors()
    labels = choose_labels(plan, 0, seed=0)
    made = make_start(
        plan, wanted, labels, turns, said.append, learned=lambda done, of, s: s is None or learned.append(done)
    )
    assert len(made.losses) == 2 < made.steps, "two steps, of several optimizer steps each"
    assert learned == [*range(1, made.steps + 1)]
    assert [line.partition(" loss")[0] for line in said] == ["pass 1/2", "pass 2/2"]


@pytest.mark.parametrize(
    ("tried", "said"),
    [
        ((0.0, 0.97), "from 0% to 97% between two tries, far past --until 0.2: less is left to learn by reward. "),
        ((0.6,), "to 60% before the first try, far past --until 0.2"),
        ((0.0, 0.48), "from 0% to 48% between two tries"),
        ((0.1, 0.4), ""),
    ],
)
def test_an_accuracy_that_jumped_far_past_until_is_told(tried: Sequence[float], said: str) -> None:
    found = far_past(tried, 0.2, 64)
    assert said in found
    assert bool(said) == found.endswith("Use fewer labels: --labels 21")


@pytest.mark.parametrize(
    ("replies", "rollouts", "share"), [("aaba", 4, 0.75), ("aaba", 2, 0.0), ("abcd", 4, 0.0), ("", 0, 0.0)]
)
def test_what_guessing_the_most_frequent_reply_gets_is_known_where_an_agent_asks_once(
    replies: str, rollouts: int, share: float
) -> None:
    turns = [Turn(messages=[], reply=Reply(content=each)) for each in replies]
    assert guessed(Demonstrations(turns=turns, rollouts=rollouts)) == share
    calls = [Reply(tool_calls=[{"name": "say", "arguments": {"word": each}}]) for each in replies]
    turns = [Turn(messages=[], reply=reply) for reply in calls]
    assert guessed(Demonstrations(turns=turns, rollouts=rollouts)) == share


@pytest.mark.parametrize(
    ("tools", "reply", "before", "warned"),
    [
        (["add"], Reply(content="7"), [], True),
        ([], Reply(content="7"), [], False),
        (["add"], Reply(tool_calls=[{"name": "add", "arguments": {}}]), [], False),
        (["add"], Reply(content="7"), [{"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}], False),
    ],
    ids=["never called", "none offered", "called", "called before"],
)
def test_tools_that_no_demonstration_calls_are_told(
    tools: list[str], reply: Reply, before: list[Any], warned: bool
) -> None:
    offered = [{"type": "function", "function": {"name": name}} for name in tools]
    said = unused_tools([Turn(messages=[{"role": "user", "content": "3 + 4"}, *before], tools=offered, reply=reply)])
    assert bool(said) == warned
    assert not said or said.startswith("the agent's calls offer tools (add), and no demonstration calls one: the model")


# --- the command ---


@pytest.mark.slow
def test_the_command_makes_a_model_and_says_that_it_starts_at_zero(tmp_path: Path) -> None:
    """Two steps at a rate of nearly zero leave random weights: the model's check finds it."""
    words = ["warmup", "colors", "--plugin", FILE, "--labels", "4", "--passes", "2", "--lr", "1e-9", "--until", "0.3"]
    words += ["--parameters", "6e4", "--tokenizer", "bytes", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "agentrig", *words], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (len(found["labels"]), len(found["inputs"]), found["turns"], found["ready"]) == (4, 4, 4, False)
    assert found["after"]["n"] == 64, "8 answers to each of the 8 tasks without a label"
    assert "trying the model with 8 answers to each of 8 training tasks without a label, as in" in done.stderr
    begins = "a run begins, sampled at temperature 1, with: 0.0% of 64 sampled answers to 8 training tasks without a "
    begins += "label are right (95%: 0% to 32%)"
    assert f"{begins}, mean reward" in done.stderr
    assert "  these are sampled answers; greedy answers, which" in done.stderr
    assert "trying it on the labelled tasks too, to find out whether it only repeats" in done.stderr
    assert "would start at zero" in done.stderr.replace("\n", " ")
    assert (
        done.stderr.count("so far: 0.0% of 8 sampled answers to 8 training tasks without") == 1
    )  # between the two passes
    ended = "--until 0.3 was not reached: the training ended after 2 of 2 passes, because no more were"
    assert ended in done.stderr
    assert re.search(r"trying the model of pass 1 on \d+ training tasks? …", done.stderr)
    assert "pass 2/2 loss" in done.stderr
    assert re.search(r"2 optimizer steps in \d+ s \(\d+ s with the model tried 1 time\), loss", done.stderr)
    assert found["known"]["n"] == 4
    assert "demonstrated tasks:" not in done.stderr, "they are not known better than the others"
    assert len(found["model"]["losses"]) == 2
    folder = tmp_path / "models" / "colors"
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == found["model"]["vocabulary"] == 265
    assert json.loads((folder / "warmup.json").read_text()) == found
    again = CliRunner().invoke(main, [*words, "--out", str(folder)])
    assert f"already has a model. Train it: agentrig train colors --plugin {FILE}" in again.output
    assert f"algorithm.model={folder}" in again.output


@pytest.mark.parametrize("model", ["new", "mini"])
def test_a_context_that_is_too_short_is_refused_before_the_demonstrations(tmp_path: Path, model: str) -> None:
    words = ["warmup", "colors", "--plugin", FILE, "--out", str(tmp_path / "m"), "--model", model]
    result = CliRunner().invoke(main, [*words, "--context", "600", "algorithm.use=grpo", "algorithm.max_length=900"])
    assert result.exit_code == 1
    assert "--context 600 is less than [algorithm] max_length = 900" in result.stderr, result.output
    assert "labels:" not in result.output


@pytest.mark.parametrize(
    ("passes", "until", "ended"),
    [
        (22.0, None, "22 of 22 passes, because no more were asked for (--passes)"),
        (15.0, None, "15 of 22 passes, because --minutes 3 was over; for all passes on this machine: --minutes 5"),
        (1 / 7, 0.2, "0.1 of 22 passes, because --until 0.2 was reached, in two tries"),
    ],
)
def test_what_ended_the_training(passes: float, until: float | None, ended: str) -> None:
    wanted = StartPlan(directory=Path("m"), passes=22.0, minutes=3.0)
    made = StartingModel(
        directory=Path("m"), parameters=1, vocabulary=1, context=1, longest=1, longest_reply=1, lr=1e-3, updates=1,
        passes=passes, wall_s=180.0,
    )  # fmt: skip
    assert why_ended(made, wanted, until) == f"the training ended after {ended}"


@pytest.mark.parametrize(("share", "accuracy", "guesses"), [(0.25, 0.23, True), (0.25, 0.6, False), (0.0, 0.2, False)])
def test_a_model_that_may_only_guess_is_told_when_enough_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, accuracy: float, guesses: bool
) -> None:
    """The training is scripted: what the command says of it comes when it happens. The first good try was luck."""
    doing, shown = list[str](), list[Progress]()

    def made(
        plan: Any, wanted: Any, labels: Any, turns: Any, log: Callable[[str], None], enough: Any, learned: Any
    ) -> Any:
        wanted.directory.mkdir()
        assert str(shown[-1]).startswith("  learning the demonstrations, starting and the first optimizer step: ")
        learned(3, 140, 71.0)
        step = "optimizer step 3 of 140 done, pass 0.4 of 20"
        assert str(shown[-1]) == f"  learning the demonstrations, {step}; of 180 s (--minutes): 71 s"
        tries = iter([0.3, 0.1, accuracy, accuracy])
        assert enough(0.5, lambda: Measurement(accuracy=(share := next(tries)), reward=share, n=64)) == 0.5
        doing.clear()
        assert enough(1.0, lambda: Measurement(accuracy=(share := next(tries)), reward=share, n=64)) >= 1
        log("pass 1/2 loss 0.5")
        return StartingModel(
            directory=wanted.directory, parameters=1, vocabulary=1, context=9, longest=1, longest_reply=1, lr=1e-3,
            updates=1, passes=1.0, losses=(0.5,), wall_s=1.0,
        )  # fmt: skip

    @contextmanager
    def waiting(of: int, what: str = "") -> Iterator[Progress]:
        doing.append(what)
        with progress(of, what) as told:
            shown.append(told)
            yield told

    monkeypatch.setattr("agentrig.run.warmup.make_start", made)
    monkeypatch.setattr("agentrig.run.warmup.guessed", lambda found: share)
    monkeypatch.setattr("agentrig.cli.commands.warmup.progress", waiting)
    words = ["warmup", "colors", "--plugin", FILE, "--labels", "4", "--parameters", "6e4", "--tokenizer", "bytes"]
    done = CliRunner().invoke(main, [*words, "--no-measure", "--until", "0.2", "--out", str(tmp_path / "m")])
    assert done.exit_code == 0, done.output
    checking = ["checking the last pass and saving the model"] * 2
    assert doing == ["trying the model", "trying the model again", *checking]
    lucky, confirmed = re.findall(r"so far: (.*)\n  again: (.*)", done.output)
    assert lucky[0].startswith("30.0% of 64")
    assert lucky[0].endswith("; one try may be lucky, so the same model is tried again …")
    assert lucky[1].startswith("10.0% of 64")
    assert lucky[1].endswith("; less than --until 0.2, so the training goes on")
    assert confirmed[1].startswith(f"{accuracy:.1%} of 64")
    assert "the model tried 4 times" in done.output
    assert ("far past --until 0.2" in done.output) == (accuracy >= 0.5)
    said = done.output.rpartition("again: ")[2].splitlines()
    assert said[1] == "  pass 1/2 loss 0.5"
    assert said[3] == "the training ended after 1 of 20 passes, because --until 0.2 was reached, in two tries"
    told = "one and the same answer would be right in about 25% of the tasks, and the training ended at 23.0%: this"
    assert (told in done.output, "a higher --until, such as 0.44" in done.output) == (guesses, share > 0)


@pytest.mark.parametrize("ever", [True, False])
def test_one_easy_class_does_not_end_a_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ever: bool) -> None:
    """The training is scripted. A class that is never right holds it up, but not for ever."""

    def found(count: int, shelf: int) -> Measurement:
        classes = {("kind", "count"): (count, 32), ("kind", "shelf"): (shelf, 32)}
        return Measurement(accuracy=(count + shelf) / 64, reward=0.0, n=64, classes=classes)

    def made(plan: Any, wanted: Any, labels: Any, turns: Any, log: Any, enough: Any, learned: Any) -> Any:
        wanted.directory.mkdir()
        assert 0.5 <= enough(0.5, lambda: found(0, 20)) < 1
        assert enough(1.0, lambda: found(2, 20) if ever else found(0, 29)) >= 1
        return StartingModel(
            directory=wanted.directory, parameters=1, vocabulary=1, context=9, longest=1, longest_reply=1, lr=1e-3,
            updates=1, passes=1.0, losses=(0.5,), wall_s=1.0,
        )  # fmt: skip

    monkeypatch.setattr("agentrig.run.warmup.make_start", made)
    words = ["warmup", "colors", "--plugin", FILE, "--labels", "4", "--parameters", "6e4", "--tokenizer", "bytes"]
    done = CliRunner().invoke(main, [*words, "--no-measure", "--until", "0.2", "--out", str(tmp_path / "m")])
    assert done.exit_code == 0, done.output
    waits = "kind=count (32 rollouts) was never right: reward can't teach what is never right. So the training goes on"
    assert done.output.count(waits) == 1
    assert "because --until 0.2 was reached, in two tries" in done.output
    assert "far past" not in done.output, "it waited"


def test_a_model_is_not_tried_again_after_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(plan: Any, wanted: Any, labels: Any, turns: Any, log: Any, enough: Any, learned: Any) -> Any:
        wanted.directory.mkdir()
        signals = RunSignals(None, lambda error: None)
        signal.signal(signal.SIGINT, signals)

        def measured() -> Measurement:
            signals.first = signal.SIGTERM  # comes while the model is tried
            return Measurement(accuracy=0.9, reward=0.9, n=64)

        assert enough(1.0, measured) >= 1
        return StartingModel(
            directory=wanted.directory, parameters=1, vocabulary=1, context=9, longest=1, longest_reply=1, lr=1e-3,
            updates=1, passes=1.0, losses=(0.5,), wall_s=1.0, interrupted=signal.SIGTERM,
        )  # fmt: skip

    monkeypatch.setattr("agentrig.run.warmup.make_start", made)
    words = ["warmup", "colors", "--plugin", FILE, "--labels", "4", "--parameters", "6e4", "--tokenizer", "bytes"]
    before = signal.getsignal(signal.SIGINT)
    try:
        done = CliRunner().invoke(main, [*words, "--no-measure", "--until", "0.2", "--out", str(tmp_path / "m")])
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == 128 + signal.SIGTERM, done.output
    assert "so far: 90.0% of 64" in done.output
    assert "again" not in done.output


def test_an_answer_of_several_keys_is_told_before_anything_starts_and_by_validate(tmp_path: Path) -> None:
    file = tmp_path / "several.py"
    text = Path(FILE).read_text().replace("def demonstrate(self", "def unused(self")
    text = text.replace('{"gold": COLORS[i % 4]}', '{"color": COLORS[i % 4], "shade": i}')
    file.write_text(text.replace('outcome.answer == task.private["gold"]', 'task.private["color"] in outcome.answer'))
    words = ["warmup", "colors", "--plugin", str(file), "--labels", "4", "--out", str(tmp_path / "m")]
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, result.stdout) == (1, "")
    why = "task train-0 has no gold to demonstrate: its private part has color, shade."
    assert why in result.stderr
    assert "AgentSpec(demonstrate=...)" in result.stderr
    only = ["--limit", "2", "--only", "recipe.loads", "--only", "play.parts", "--only", "reward.gold"]
    last = CliRunner().invoke(main, ["validate", str(file), *only]).stdout.splitlines()[-1]
    assert last.startswith(f"all others passed, 1 skipped; next: say what a right answer is. {why} Name one key: ")
    assert "write AgentSpec(demonstrate=...)" in last
    assert "agentrig warmup colors" not in last
    last = CliRunner().invoke(main, ["validate", str(file), *only[:6], "--gold", "color"]).stdout.splitlines()[-1]
    assert f"next: agentrig warmup colors --plugin {file} --gold color --until " in last


@pytest.mark.parametrize(
    ("word", "said"),
    [("--model=nope", "--model nope: there is no such directory"), ("algorithm.model=/x", "leave algorithm.model out")],
)
def test_what_a_warm_up_starts_from_is_named_by_its_option(word: str, said: str) -> None:
    result = CliRunner().invoke(main, ["warmup", "colors", "--plugin", FILE, word])
    assert (result.exit_code, said in result.stderr) == (1, True)


@pytest.mark.parametrize("model", ["mini", "starter"])
def test_what_only_a_new_model_can_have_is_refused_for_another(model: str) -> None:
    words = ["warmup", "colors", "--plugin", FILE, "--model", model, "--parameters", "3e5", "--tokenizer", "bytes"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert f"--parameters, --tokenizer: only for a new model, and --model {model} has its own" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_warm_up_that_is_ended_leaves_its_model_so_far_or_none(tmp_path: Path, number: signal.Signals) -> None:
    words = ["warmup", "colors", "--plugin", FILE, "--labels", "4", "--passes", "1000", "--lr", "1e-9"]
    words += ["--until", "0.9", "--parameters", "6e4", "--tokenizer", "bytes", "--no-measure"]
    begun = subprocess.Popen([sys.executable, "-m", "agentrig", *words], cwd=tmp_path, stderr=subprocess.PIPE)
    models = tmp_path / "models"
    while not list(models.glob(".colors.part/*/run/metrics.jsonl")):  # a step is done
        assert begun.poll() is None, begun.communicate()
        time.sleep(0.05)
    begun.send_signal(number)
    _, said = begun.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert begun.returncode == 128 + number, said
        assert [left.name for left in models.iterdir()] == ["colors"]
        assert json.loads((models / "colors" / "warmup.json").read_text())["model"]["interrupted"] == number
        assert re.search(rb"interrupted: its model so far, of pass [\d.]+ of 1000, is in models/colors, and", said)
    else:  # the next one to this directory removes it
        assert [left.name for left in models.iterdir()] == [".colors.part"]

from __future__ import annotations

import json
import queue
import re
import threading
from functools import partial
from types import SimpleNamespace

import attrs
import pytest
import torch
from agentrig_grpo import register_algorithms
from agentrig_grpo.algorithm import Grpo, check_device
from agentrig_grpo.config import EmbeddedConfig, GrpoConfig
from agentrig_grpo.learner import Learner
from agentrig_grpo.server.handle import Embedded
from proof_runs import CPU, ProofSession
from transformers import AutoModelForCausalLM

from agentrig import Outcome, Score, Task
from agentrig.algorithms import Measurement
from agentrig.errors import AgentrigError, ConfigError, RunStopped
from agentrig.hardware import Cpu
from agentrig.run.loop import Loop
from agentrig.testing import check, checks

TARGET = 42


class FakeSession(ProofSession):
    """Its reward counts TARGET tokens, and one rollout of a step fails."""

    def __init__(self, directory, *, stop_after=None, resumed=False, **more):
        super().__init__(directory, **more)
        self.resumed = resumed or self.resumed
        self.train_tasks = [Task(id=str(i), input={"question": f"name {i}"}) for i in range(12)]
        self.make = partial(Embedded, EmbeddedConfig())
        self.resumes = f"agentrig train --resume {directory}"
        self.stop_after = stop_after
        self.calls, self.reports, self.validated, self.notes = [], {}, {}, []

    def note(self, text):
        self.notes.append(text)

    def plan_steps(self, steps):
        self.calls.append(("plan", steps))

    def rollouts(self, tasks, *, mode="train", version=None, **more):
        assert mode != "train" or version == more["step"] - 1
        found = super().rollouts(tasks, mode=mode, **more)
        if mode == "train":
            self.sampled = sum(len(t.response_ids) for r in found for t in r.triplets)
        return found

    def judged(self, task, i, mode, body, choice):
        if mode == "train" and i == 0 and task.id == "0":
            return Outcome(failure="llm-error"), None
        value = choice["token_ids"].count(TARGET) / body["max_tokens"]
        return Outcome(answer=choice["message"]["content"]), Score.ok(value)

    def mean(self, endpoint, step, mode):
        rollouts = self.rollouts(self.train_tasks, n=1, endpoint=endpoint, step=step, mode=mode)
        assert {r.trace.llm_calls()[0].attributes["request"]["temperature"] for r in rollouts} == {0.0}
        return sum(r.value for r in rollouts) / len(rollouts)

    def validate(self, endpoint, *, step):
        self.calls.append(("validate", step))
        self.validated[step] = self.mean(endpoint, step, "validation")
        self.measured = Measurement(accuracy=self.validated[step], reward=0.0, n=len(self.train_tasks))
        return self.validated[step]

    def report(self, endpoint, *, when, step):
        self.calls.append(("report", when, step))
        self.reports[when] = self.mean(endpoint, step, "report")
        return self.reports[when]

    def end_step(self, step, *, metrics, time_s, calls, digests=None):
        assert sum(e.tokens for e in calls) == self.sampled, "every sampled token is trained or dropped"
        self.calls.append(("end", step))
        self.steps.append({"step": step, **metrics, "time_s": dict(time_s)})
        self.stopping = step == self.stop_after

    def save_checkpoint(self, step, write, *, keep=False):
        self.calls.append(("save", step, keep))
        return super().save_checkpoint(step, write)


def config_of(model_dir, **more):
    settings = {"steps": 10, "tasks_per_step": 6, "group_size": 6, "lr": 1e-2, "max_tokens": 6, "validate_every": 5}
    return GrpoConfig(model=str(model_dir), **{**settings, "save_every": 4, **more})


@pytest.mark.slow
def test_a_model_learns_through_the_whole_loop(model_dir, tmp_path):
    session = FakeSession(tmp_path / "run")
    Loop(Grpo(config_of(model_dir))).run(session)
    assert session.reports["after"] > session.reports["before"] + 0.5
    assert session.calls[:3] == [("plan", 10), ("report", "before", 0), ("validate", 0)]
    assert session.notes == []
    assert session.calls[-3:] == [("end", 10), ("save", 10, False), ("report", "after", 10)]
    assert [c for c in session.calls if c[0] == "validate"] == [("validate", 0), ("validate", 5), ("validate", 10)]
    assert sorted(session.saved) == [4, 8, 10]
    for line in session.lines:
        figures = "loss clip_fraction ratio_mean ratio_max entropy kl grad_norm lr weight_change trained_tokens"
        assert not set(figures.split()) - set(line)
        if not line["updates"]:  # every group had equal rewards: nothing was left to learn
            continue
        assert line["learner_tokens_per_s"] > 0
        assert line["ratio_max"] == pytest.approx(1.0, abs=2e-3), "the server samples with the learner's weights"
        assert line["weight_change"] > 0
        assert {"update", "push"} <= set(line["time_s"])
    learned = [line for line in session.lines if line["updates"]]
    assert len(learned) >= 5
    assert learned[-1]["entropy"] < learned[0]["entropy"]


SMALL = {"steps": 1, "save_every": 1, "validate_every": 0, "tasks_per_step": 2, "group_size": 2}


def test_the_learner_loads_while_the_accuracy_before_training_is_measured(model_dir, tmp_path, caplog):
    caplog.set_level("INFO", "agentrig")
    loads, measures = threading.Event(), threading.Event()

    class Slow(Grpo):
        def learner(self, session):
            loads.set()
            assert measures.wait(20), "nothing is measured until the learner is there"
            return super().learner(session)

    class Measured(FakeSession):
        def report(self, endpoint, *, when, step):
            measures.set()
            assert loads.wait(20), "the learner waits for the measurement"
            return super().report(endpoint, when=when, step=step)

    session = Measured(tmp_path / "run")
    session.train_tasks = [Task(id=str(i), input={"question": "count " * 100}) for i in range(4)]
    Loop(Slow(config_of(model_dir, **SMALL, tokens_per_batch=64))).run(session)
    assert session.calls[:2] == [("plan", 1), ("report", "before", 0)]
    assert "next: the learner loads its model, and the server must answer with the learner's weights" in caplog.messages
    assert session.delivery.summary()["version"] == 1
    said = r"4 of 4 training tasks .*tokens_per_batch = 64 tokens or more, up to \d+: .* set tokens_per_batch to \d+"
    assert re.match(said, session.notes[0])


def test_a_learner_that_cannot_be_loaded_ends_the_measurement(model_dir, tmp_path):
    class Broken(Grpo):
        def learner(self, session):
            raise ConfigError("the device has too little memory")

    class Measured(FakeSession):
        told = queue.SimpleQueue()
        runtime = SimpleNamespace(end_results=told.put)

        def report(self, endpoint, *, when, step):
            raise self.told.get(timeout=20)

    session = Measured(tmp_path / "run")
    with pytest.raises(ConfigError, match="too little memory"):
        Loop(Broken(config_of(model_dir, **SMALL))).run(session)


@pytest.mark.slow
def test_a_resumed_run_without_a_checkpoint_changes_nothing_before_its_learner_is_loaded(model_dir, tmp_path):
    class Broken(Grpo):
        def learner(self, session):
            assert session.calls == []
            raise ConfigError("the device has too little memory")

    session = FakeSession(tmp_path / "run", resumed=True)
    with pytest.raises(ConfigError, match="too little memory"):
        Loop(Broken(config_of(model_dir, **SMALL))).run(session)
    session = FakeSession(tmp_path / "again", resumed=True)
    Loop(Grpo(config_of(model_dir, **SMALL))).run(session)
    assert session.calls[:3] == [("plan", 1), ("report", "before", 0), ("end", 1)]


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_server_that_answered_with_another_model_until_the_first_transfer_is_named(model_dir, tmp_path, value):
    """Its answers were the accuracy before training: a gain over another model is none."""

    class Other(Grpo):
        def learner(self, session):
            learner = super().learner(session)
            with torch.no_grad():
                next(iter(learner.trained.values())).add_(value)
            return learner

    session = FakeSession(tmp_path / "run")
    run = partial(Loop(Other(config_of(model_dir, **SMALL))).run, session)
    if not value:
        run()
        return
    with pytest.raises(RunStopped, match="the weights of version 0 did not arrive"):
        run()


BANDIT = {"lr": 1e-2, "tasks_per_step": 4, "group_size": 6, "max_tokens": 2, "validate_every": 0}
COSTLY = ("keys-read", "serves", "solves")


@pytest.mark.slow
def test_the_kit():
    names = [check.name for check in checks("algorithm", "grpo")]
    only = [name for name in names if name.partition(".")[2] not in COSTLY]
    report = check("algorithm", "grpo", settings=BANDIT, only=only, overrides=["hardware.threads=1"])
    assert {r.status for r in report.results} == {"passed"}, report


@pytest.mark.slow
def test_the_whole_kit_with_adapters_and_the_bandit_to_its_optimum():
    settings = {**BANDIT, "tasks_per_step": 6, "group_size": 8}
    more = {"learns": 16, "variants": [{"lora_rank": 4}], "overrides": ["hardware.threads=1"]}
    report = check("algorithm", "grpo", settings=settings, only=COSTLY, **more)
    assert {r.status for r in report.results} == {"passed"}, report


def best_of(checkpoint):
    return json.loads((checkpoint / "trainer" / "state.json").read_text())["best"]


@pytest.mark.slow
def test_best_weights_that_were_not_copied_end_the_run(model_dir, tmp_path, monkeypatch):
    """The copy was the live weights: the run said that it ended with the best ones, and ended with the last."""

    class Worsening(FakeSession):
        def validate(self, endpoint, *, step):
            super().validate(endpoint, step=step)
            return 1.0 - step / 10

    def keep(self):
        self._kept = {name: p.detach() for name, p in self.trained.items()}

    monkeypatch.setattr(Learner, "keep", keep)
    with pytest.raises(RunStopped, match="the start: no step did better, which did best, cannot be restored"):
        Loop(Grpo(config_of(model_dir, steps=2, validate_every=1, final="best"))).run(Worsening(tmp_path / "run"))


def test_the_best_weights_are_kept_and_among_equal_accuracies_the_mean_reward_decides(model_dir, tmp_path):
    class Worsening(FakeSession):
        def validate(self, endpoint, *, step):
            super().validate(endpoint, step=step)
            accuracy, reward = {0: (0.1, 0.9), 1: (0.9, 0.2), 2: (0.9, 0.3), 3: (0.4, 0.9)}[step]
            self.measured = Measurement(accuracy=accuracy, reward=reward, n=12)
            return accuracy

    session = Worsening(tmp_path / "run")
    Loop(Grpo(config_of(model_dir, steps=3, validate_every=1, save_every=1, final="best"))).run(session)
    last = [c for c in session.calls if c[0] == "save"][-2:]
    assert last == [("save", 3, False), ("save", 3, False)]
    best = best_of(session.saved[3])
    assert (best["step"], best["accuracy"], best["reward"]) == (2, 0.9, 0.3)
    held = AutoModelForCausalLM.from_pretrained(session.saved[3]).state_dict()
    second = AutoModelForCausalLM.from_pretrained(session.saved[2]).state_dict()
    assert all(torch.equal(held[name], tensor) for name, tensor in second.items())


@pytest.mark.slow
def test_solved_tasks_end_a_run_normally(model_dir, tmp_path):
    class Solved(FakeSession):
        def rollouts(self, tasks, *, step, mode="train", **more):
            self.solved = self.solved or (mode == "train" and step == 2)
            return super().rollouts(tasks, step=step, mode=mode, **more)

    config = config_of(model_dir, steps=9, validate_every=50, save_every=9, final="best")
    session = Solved(tmp_path / "run")
    Loop(Grpo(config)).run(session)
    ends = [c for c in session.calls if c[0] in ("end", "save", "report", "validate")]
    assert ends[:5] == [("report", "before", 0), ("validate", 0), ("end", 1), ("validate", 2), ("end", 2)]
    assert ends[5] == ("save", 2, False)
    assert ends[-1] == ("report", "after", 2)
    resumed = FakeSession(tmp_path / "resumed", checkpoint=session.saved[2], first_step=3)
    resumed.solved = True
    Loop(Grpo(config)).run(resumed)
    assert [c for c in resumed.calls if c[0] in ("end", "report")] == [("report", "after", 2)]


def test_a_broken_accelerator_is_never_replaced_by_the_cpu():
    @attrs.frozen(kw_only=True)
    class Broken(Cpu):
        name: str = "xpu"
        torch_device: str = "xpu"
        torch_cure: str = "install the build for xpu"
        dtypes: tuple[str, ...] = ("bfloat16",)

    with pytest.raises(AgentrigError, match="cannot use the device 'xpu': install the build for xpu"):
        check_device(Broken(), "auto")
    with pytest.raises(AgentrigError, match="no-such-device"):
        check_device(attrs.evolve(Broken(), torch_device="no-such-device"), "auto")
    assert check_device(CPU, "auto") == "float32"


def test_the_spec_builds_and_bad_settings_are_refused(tmp_path):
    spec, _ = register_algorithms()
    assert isinstance(spec.build(spec.config()), Grpo)
    with pytest.raises(ValueError, match="group_size"):
        GrpoConfig(group_size=1)
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        Loop(Grpo(GrpoConfig(model=str(tmp_path)))).run(FakeSession(tmp_path / "run"))
    assert spec.workload(GrpoConfig(model=str(tmp_path / "none"))) is None

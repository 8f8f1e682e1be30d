"""Complete runs of a tiny algorithm: the files, and every guard that ends a run that learns nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pyarrow.parquet as pq
import pytest
from model_server import ModelServer

from agentrig import Endpoint, hookimpl
from agentrig.delivery.proof import Figures
from agentrig.errors import AgentrigError, ConfigError, RunStopped
from agentrig.plan import Plan
from agentrig.rollouts import Rollout
from agentrig.run.resume import resume_plan
from agentrig.run.session import RunSession
from agentrig.run.training import train
from agentrig.view.diagnosis import details, diagnose
from agentrig.view.page import render
from agentrig.view.reading import read_run

MakePlan = Callable[..., Plan]


class Watch:
    """An observer that records its arguments, and checks the threads that the hooks' docstrings state."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.process = os.getpid()

    def here(self, thread: str) -> None:
        """Raise, which the summary counts, in another process or thread."""
        assert (os.getpid(), threading.current_thread().name) == (self.process, thread)

    @hookimpl
    def on_run_start(self, event: Any) -> None:
        assert (event.directory / "manifest.json").is_file()
        self.here("algorithm")
        self.told.append(("start", (event.steps, event.first_step)))

    @hookimpl
    def on_rollout_end(self, rollout: Any) -> None:
        self.here("algorithm")
        self.told.append(("rollout", rollout.mode))

    @hookimpl
    def on_step_end(self, event: Any) -> None:
        self.here("algorithm")
        self.told.append(("step", event.step))

    @hookimpl
    def on_run_end(self, event: Any) -> None:
        self.here("MainThread")
        self.told.append(("end", event.summary["steps"]))

    @hookimpl
    def on_run_error(self, event: Any) -> None:
        self.here("MainThread")
        self.told.append(("error", type(event.error).__name__))

    def of(self, *kinds: str) -> list[Any]:
        return [value for kind, value in self.told if kind in kinds]


class Complain:
    @hookimpl
    def on_step_end(self, event: Any) -> None:
        raise OSError("no tracker there")


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_first_failure_of_a_kind_is_told_with_an_example(toy_plan: MakePlan, caplog: Any) -> None:
    train(
        toy_plan('tasks.do=["raise","","",""]', "run.failure_limit=0.9", "algorithm.steps=3", "algorithm.report=false")
    )
    said = [text for text in caplog.messages if "rollouts failed" in text]
    assert len(said) == 1, said
    assert re.match(
        r"step \d: \d+ of 12 train rollouts failed \(agent-error\), for example at task train-\d+: \w+", said[0]
    )


def test_a_run_from_start_to_end(model: ModelServer, toy_plan: MakePlan, tmp_path: Path) -> None:
    plan = toy_plan("algorithm.steps=2", "run.second_reward=toy-parity", "reward.right=2.0", "run.block=[]")
    watch = Watch()
    plan.registry.add_observer(watch, "watch")
    plan.registry.add_observer(Complain(), "complain")
    summary = train(plan)
    run = tmp_path / "runs" / "toy"

    assert summary["accuracy"] == {"before": 0.5, "after": 0.5, "n": 4}
    assert (summary["steps"], summary["train_rollouts"], summary["rollouts"]) == (2, 24, 24 + 2 * 4 + 2 * 4)
    assert summary["failures"] == {}
    assert summary["complete"] is True
    assert summary["transitions_per_rollout"] == 1.0
    assert summary["response_tokens"] == 3.0
    assert set(summary["time_share"]) == {"rollout", "reward", "update"}
    assert 0 < sum(summary["time_share"].values()) <= 1.0001
    assert summary["observer_errors"] == {"complain": 2}
    assert json.loads((run / "summary.json").read_text()) == summary

    first, second = lines_of(run)
    assert [first["step"], second["step"]] == [1, 2]
    assert (first["reward"], first["reward_std"], first["rollouts"]) == (1.0, 1.0, 12)
    assert first["zero_variance_groups"] == 1.0
    assert first["validation_accuracy"] == 0.5
    assert first["nodes"] == {"seen": {"write_query": 12}, "trained": {"write_query": 12}}
    assert first["algorithm"] == {"weight_change": 1.0, "number": 1.0}
    assert second["algorithm"]["number"] == 3.0
    assert first["second_rewards"] == {
        "toy-parity": {"n": 12, "mean": 0.5, "differs": 6, "agreement": 1.0, "invalid": 0}
    }
    assert first["time_s"]["update"] == 0.001
    assert "audit" not in first["time_s"]
    assert 0 < second["time_s"]["audit"] < sum(second["time_s"].values()) <= second["step_s"]
    assert second["time"] - first["time"] == pytest.approx(second["step_s"], abs=0.5), "a step begins as one ends"
    assert first["tokens_per_s"] == pytest.approx(3 * first["rollouts_per_s"])

    assert watch.of("start", "step", "end", "error") == [(2, 1), 1, 2, 2]
    assert watch.of("rollout").count("train") == 24
    files = sorted(f.stem for f in (run / "rollouts").iterdir())
    assert files == [
        "report-00000",
        "report-00002",
        "train-00001",
        "train-00002",
        "validation-00001",
        "validation-00002",
    ]
    rows = pq.read_table(run / "rollouts" / "train-00001.parquet").to_pylist()
    assert {r["value"] for r in rows} == {0.0, 2.0}
    assert (run / "report.html").stat().st_size > 1000
    assert (run / "checkpoints" / "latest").read_text() == "step-00002"
    assert not (run / "error.json").exists()


@pytest.mark.slow
def test_a_metric_that_is_not_finite_is_null_in_the_metrics_and_named_once(
    model: ModelServer, toy_plan: MakePlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="agentrig"):
        train(toy_plan("algorithm.report=false", "algorithm.figures={odd=nan,large=-inf}", "algorithm.steps=2"))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = (tmp_path / "runs" / "toy" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=refuse)["algorithm"] for line in lines]
    assert [(each["odd"], each["large"]) for each in found] == [(None, None)] * 2
    said = [r.getMessage() for r in caplog.records if "odd" in r.getMessage()]
    assert said == ["step 1: the algorithm's odd is nan and large is -inf: metrics.jsonl has null there"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (['tasks.do=["typed"]', "run.failure_limit=1.0"], "12 x no-plan: for example AgentFailure: there is no plan"),
        (["algorithm.figures.weight_change=nan"], "the weight change is nan: training has diverged"),
    ],
)
def test_a_run_that_would_learn_nothing_stops_in_its_first_step(
    model: ModelServer, toy_plan: MakePlan, tmp_path: Path, overrides: list[str], said: str
) -> None:
    plan = toy_plan("algorithm.report=false", "run.validation_tasks=1", "run.failure_limit=0.25", *overrides)
    watch = Watch()
    plan.registry.add_observer(watch, "watch")
    with pytest.raises(RunStopped) as caught:
        train(plan)
    assert said in str(caught.value)
    assert "step 1" in str(caught.value)
    run = tmp_path / "runs" / "toy"
    error = json.loads((run / "error.json").read_text())
    assert error == {"error": "RunStopped", "message": str(caught.value), "cause": caught.value.cause}
    assert caught.value.cause
    assert (caught.value.run, f"agentrig why {run}" in caught.value.__notes__[0]) == (run, True)
    summary = run / "summary.json"
    assert summary.is_file() == ("algorithm.figures.weight_change=nan" in overrides)  # only that step has an end
    assert not summary.is_file() or json.loads(summary.read_text())["complete"] is False
    assert watch.of("error") == ["RunStopped"]
    assert watch.of("end") == []
    assert (run / "rollouts" / "train-00001.parquet").is_file()  # the rollouts were written


def test_an_interrupted_run_keeps_a_checkpoint_and_resumes(
    model: ModelServer, toy_plan: MakePlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Interrupt:
        sent = False

        @hookimpl
        def on_rollout_end(self, rollout: Rollout) -> None:
            if rollout.step == 2 and rollout.mode == "train" and not self.sent:
                self.sent = True
                os.kill(os.getpid(), signal.SIGINT)

    plan = toy_plan("algorithm.steps=3", "algorithm.wait_s=0.2", "run.report_tasks=4", "run.audit=true")
    plan.registry.add_observer(Interrupt(), "interrupt")
    caplog.set_level("INFO", "agentrig")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"ended early; resume with: agentrig train --resume") as stopped:
        train(plan)
    assert signal.getsignal(signal.SIGINT) is before
    ended, checking, *_ = [text for text in caplog.messages if "once more ends at once" in text]
    assert ended.startswith("Ctrl-C: ending after this step")
    assert re.fullmatch(r"checking step \d, then its checkpoint; Ctrl-C once more .*", checking)
    run = tmp_path / "runs" / "toy"
    told = f"not measured on the held-out tasks after training. To measure it as it is: agentrig train --resume {run}"
    assert f"{told} algorithm.steps={len(lines_of(run))}" in str(stopped.value)
    broken = json.loads((run / "summary.json").read_text())
    assert broken["complete"] is False
    room = "2 of 4 held-out tasks were right before training, so at most 2 can improve"
    assert broken["notes"][0].startswith(room)
    assert broken["notes"][0].endswith("Use more held-out tasks (run.report_tasks limits them)")
    done = len(lines_of(run))
    assert 1 <= done < 3
    assert (run / "checkpoints" / "latest").read_text() == f"step-{done:05d}"

    measured = shutil.copytree(run, tmp_path / "runs" / "measured")  # with the command that it names
    summary = train(resume_plan(measured, overrides=[f"algorithm.steps={done}"]), resume=measured)
    assert (summary["steps"], summary["accuracy"]) == (done, {"before": 0.5, "after": 0.5, "n": 4})
    assert json.loads((measured / "manifest.json").read_text())["most_steps"] == 3, "what `why` suggests to go on to"

    model.requests.clear()
    watch = Watch()
    resumed = resume_plan(run)
    assert resumed.recipe == "toy"
    resumed.registry.add_observer(watch, "watch")
    summary = train(resumed, resume=run)
    assert watch.of("start") == [(3, done + 1)]
    assert [line["step"] for line in lines_of(run)] == [1, 2, 3]
    assert lines_of(run)[-1]["algorithm"]["number"] == 0.5 * (1 + 2 + 3)
    assert summary["complete"] is True
    assert summary["accuracy"] == {"before": 0.5, "after": 0.5, "n": 4}
    assert watch.of("rollout").count("report") == 4  # only after: the measurement before training is kept
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["recipe"] == "toy"
    assert len(manifest["resumed"]) == 1
    assert manifest["warnings"] == []
    told = (run / "log.jsonl").read_text() if (run / "log.jsonl").is_file() else ""
    assert "ending after this step" not in told, "the page of a run that went on would say it"
    assert f", resumed {manifest['resumed'][0][:16].replace('T', ' ')}</p>" in render([read_run(run)])


class Stop:
    """An observer that sends this process signals: the given number of them, one after the other, at one hook."""

    def __init__(self, hook: str, times: int) -> None:
        self.hook, self.times = hook, times

    def stop(self, hook: str) -> None:
        for _ in range(self.times if hook == self.hook else 0):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        self.times = self.times if hook != self.hook else 0

    @hookimpl
    def on_rollout_end(self, rollout: Any) -> None:
        self.stop("after" if rollout.mode == "report" and rollout.step else rollout.mode)

    @hookimpl
    def on_step_end(self, event: Any) -> None:
        self.stop("step")

    @hookimpl
    def on_run_end(self, event: Any) -> None:
        self.stop("end")


@pytest.mark.parametrize(
    ("hook", "times", "said"),
    [
        pytest.param("report", 1, "ended early; resume with: agentrig train --resume", marks=pytest.mark.slow),
        ("step", 2, "ended at once; step 1 was not saved, so a resume starts over; resume with: agentrig train"),
    ],
)
def test_a_run_that_is_stopped_says_so_and_what_it_has_lost(
    toy_plan: MakePlan, tmp_path: Path, caplog: pytest.LogCaptureFixture, hook: str, times: int, said: str
) -> None:
    plan = toy_plan("algorithm.steps=3")
    plan.registry.add_observer(Stop(hook, times), "stop")
    with pytest.raises(KeyboardInterrupt, match=said):
        train(plan)
    run = tmp_path / "runs" / "toy"
    error = json.loads((run / "error.json").read_text())
    assert (error["error"], said in error["message"]) == ("KeyboardInterrupt", True)
    found = diagnose(run)
    assert (found.status, "agentrig train --resume" in found.next_step) == ("stopped", True)
    lost = "ended at once; step 1 was not saved, so a resume starts over"
    assert (lost in [each.text for each in found.warnings]) == (hook == "step")
    assert not any("killed" in each for each in found.missing)
    summary = train(resume_plan(run), resume=run)
    assert (summary["steps"], summary["complete"], (run / "error.json").exists()) == (3, True, False)
    lost = "no checkpoint had been saved yet: the run starts over, and its step is removed"
    assert (lost in caplog.text) == (hook == "step")


def test_a_signal_during_the_measurement_after_training_lets_the_run_complete(
    toy_plan: MakePlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = toy_plan("algorithm.steps=1")
    plan.registry.add_observer(Stop("after", 1), "stop")
    with pytest.raises(KeyboardInterrupt, match="the run has ended, and its report is written"):
        train(plan)
    summary = json.loads((tmp_path / "runs" / "toy" / "summary.json").read_text())
    assert (summary["complete"], summary["accuracy"]["after"] is None) == (True, False)
    assert "SIGTERM: ending after the measuring; SIGTERM once more ends at once" in caplog.messages


@pytest.mark.slow
def test_a_second_signal_after_the_last_step_names_the_report(toy_plan: MakePlan, tmp_path: Path) -> None:
    plan = toy_plan("algorithm.steps=2")
    plan.registry.add_observer(Stop("end", 2), "stop")
    run = tmp_path / "runs" / "toy"
    with pytest.raises(KeyboardInterrupt, match=f"the run is complete; its report: agentrig report {run}"):
        train(plan)
    assert json.loads((run / "summary.json").read_text())["complete"] is True


@pytest.mark.slow
def test_the_first_validation_of_a_resumed_run_is_not_its_start(
    model: ModelServer, toy_plan: MakePlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "agentrig")
    small = ["algorithm.report=false", "algorithm.validate_first=true", "run.validation_tasks=2"]
    train(toy_plan("algorithm.steps=1", *small))
    run = tmp_path / "runs" / "toy"
    start = json.loads((run / "summary.json").read_text())["validation_before"]
    assert start == 0.5
    # The accuracy on other tasks differs; in a resumed run it is the checkpoint's.
    train(resume_plan(run, overrides=["algorithm.steps=2", "run.validation_tasks=1"]), resume=run)
    assert lines_of(run)[-1]["validation_accuracy"] != start
    said = [text for text in caplog.messages if text.startswith("validating")]
    assert said == ["validating on 2 tasks before step 1", "validating on 1 task before step 2"]
    assert json.loads((run / "summary.json").read_text())["validation_before"] == start


@pytest.mark.slow
def test_a_run_whose_report_cannot_be_built_ends_normally_with_a_warning(
    model: ModelServer, toy_plan: MakePlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "runs" / "toy"

    class Occupy:
        @hookimpl
        def on_step_end(self, event: Any) -> None:
            (run / "report.html").mkdir(exist_ok=True)

    plan = toy_plan("algorithm.steps=1", "algorithm.report=false", "run.validation_tasks=1", "run.block=[]")
    plan.registry.add_observer(Occupy(), "occupy")
    assert train(plan)["complete"] is True
    (said,) = [r.getMessage() for r in caplog.records if "the report could not be built" in r.getMessage()]
    assert "report.html" in said


@pytest.mark.slow
def test_observers_get_the_start_once_with_or_without_planned_steps(model: ModelServer, toy_plan: MakePlan) -> None:
    for report in ("true", "false"):
        small = ["run.validation_tasks=1", "run.report_tasks=1", f"algorithm.report={report}", f"run.name=r-{report}"]
        plan = toy_plan("algorithm.steps=1", "algorithm.plans=false", *small)
        watch = Watch()
        plan.registry.add_observer(watch, "watch")
        train(plan)
        assert watch.told[0] == ("start", (None, 1))
        assert len(watch.of("start")) == 1


def test_runs_are_refused_before_anything_is_made(toy_plan: MakePlan, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'run\.report: there is no split "tst"'):
        train(toy_plan("run.report=tst"))
    with pytest.raises(ConfigError, match=r"is not a run directory: it has no config\.toml"):
        resume_plan(tmp_path)
    assert not (tmp_path / "runs").exists()


def test_shared_tasks_and_validation_on_test_data_are_warned_of(
    model: ModelServer, toy_plan: MakePlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = ["algorithm.steps=1", "algorithm.report=false", "run.report_tasks=2", "run.validation_tasks=2"]
    train(toy_plan(*small, "run.report=train", "run.validation=test"))
    warnings = json.loads((tmp_path / "runs" / "toy" / "manifest.json").read_text())["warnings"]
    assert any('validates on "test"' in w for w in warnings)
    assert any(w.startswith("2 of 2 report tasks are in the training split too; the first: train-") for w in warnings)
    assert all(w in caplog.text for w in warnings)


def test_an_algorithm_must_report_the_weight_change(
    model: ModelServer, toy_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    import attrs

    plan = toy_plan("algorithm.report=false")

    class Silent:
        def __init__(self, config: Any) -> None: ...

        def run(self, session: Any) -> None:
            session.plan_steps(1)
            session.end_step(1, metrics={}, time_s={})

    component = plan.components["algorithm"]
    silent = attrs.evolve(component, spec=attrs.evolve(component.spec, build=Silent))
    with pytest.raises(AgentrigError, match="end_step needs metrics"):
        train(attrs.evolve(plan, components={**plan.components, "algorithm": silent}))


def test_what_an_algorithm_notes_is_logged_and_kept_for_the_report(
    model: ModelServer, toy_plan: MakePlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import attrs

    caplog.set_level("INFO")
    plan = toy_plan("algorithm.report=false", "run.validation_tasks=1")
    component = plan.components["algorithm"]

    class Noting:
        def __init__(self, config: Any) -> None: ...

        def run(self, session: Any) -> None:
            session.note("it learns in the slow way: no GPU")
            session.end_step(1, metrics={"weight_change": 0.0}, time_s={})

    noting = attrs.evolve(component, spec=attrs.evolve(component.spec, build=Noting))
    train(attrs.evolve(plan, components={**plan.components, "algorithm": noting}))
    summary = json.loads((tmp_path / "runs" / "toy" / "summary.json").read_text())
    assert summary["notes"] == ["it learns in the slow way: no GPU"]
    assert "it learns in the slow way: no GPU" in caplog.text


def test_rollouts_that_run_ahead_stay_alone_and_end_with_the_run(model: ModelServer, toy_plan: MakePlan) -> None:
    import attrs

    plan = toy_plan("tasks.do=['slow']", "run.block=[]")
    component = plan.components["algorithm"]
    told: list[tuple[str, str | None]] = []

    class Watching:
        @hookimpl
        def on_rollout_end(self, rollout: Any) -> None:
            told.append((threading.current_thread().name, rollout.failure))

    class Hasty:
        def __init__(self, config: Any) -> None: ...

        def run(self, session: Any) -> None:
            to = Endpoint(base_url=model.url, model="toy-model", token_ids=True)
            begin = partial(session.begin_rollouts, session.train_tasks[:2], n=2, endpoint=to, max_staleness=1)
            with pytest.raises(ValueError, match="takes version 1 to 2"):
                begin(step=3, version=0)
            first = begin(step=1, version=0)
            for call in (partial(session.validate, to, step=1), partial(begin, step=2, version=0)):
                with pytest.raises(AgentrigError, match="the rollouts of step 1 are still under way"):
                    call()
            first.wait()
            assert session.validate(to, step=0) == 0.5
            assert [(r.step, r.version) for r in first.rollouts()] == [(1, 0)] * 4
            begin(step=2, version=0)
            raise ConnectionAbortedError("the update failed")

    plan.registry.add_observer(Watching(), "watching")
    hasty = attrs.evolve(component, spec=attrs.evolve(component.spec, build=Hasty))
    with pytest.raises(ConnectionAbortedError, match="the update failed"):
        train(attrs.evolve(plan, components={**plan.components, "algorithm": hasty}))
    assert ("rollouts", None) in told
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]


def test_an_agent_that_cannot_be_built_leaves_no_run_directory(toy_plan: MakePlan, tmp_path: Path) -> None:
    named: list[Path] = []
    with pytest.raises(AgentrigError, match=r"the agent toy-broken cannot be built: RuntimeError: its prompts"):
        train(toy_plan("agent.how=raise", agent="toy-broken"), starting=named.append)
    assert named == [tmp_path / "runs" / "toy"]
    assert not (tmp_path / "runs").exists()


def test_an_agent_that_always_fails_is_not_played_on_every_task(toy_plan: MakePlan, tmp_path: Path) -> None:
    plan = toy_plan(
        *('tasks.do=["raise"]', "algorithm.tasks=24", "algorithm.group=64", "algorithm.report=false", "runners.n=1"),
        *("run.failure_limit=1.0", "run.validation_tasks=1"),
    )
    with pytest.raises(RunStopped, match=r"step 1: all of the first \d+ of 1536 train rollouts failed") as caught:
        train(plan)
    run = tmp_path / "runs" / "toy"
    played = pq.read_table(run / "rollouts" / "train-00001.parquet").num_rows
    assert f"the first {played} of 1536" in str(caught.value)
    assert 32 <= played < 1536
    see = f"See its rollouts, with every span: agentrig watch {run}"
    assert str(caught.value).endswith(f"\n  {see}")
    assert "summary.json is not there" not in str(diagnose(run))
    assert details(diagnose(run).problems[0]).count(see) == 1


def test_an_agent_that_returns_nothing_ends_the_run_with_the_measurement_before_training(
    model: ModelServer, toy_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "^before step 1: the agent returned None in 24 of 24 rollouts: the reward has no answer to judge. Does the"
    keys = ("run.report=train", "run.report_tasks=0", "run.validation_tasks=1", "algorithm.report=true")
    with pytest.raises(RunStopped, match="step 1: all 12 rollouts got the reward"):  # few may have none
        train(toy_plan('tasks.do=["nothing"]', *keys, "run.name=few"))
    monkeypatch.setattr("agentrig.run.guards.EARLY", 24)
    with pytest.raises(RunStopped, match=said) as caught:
        train(toy_plan('tasks.do=["nothing"]', *keys))
    run = tmp_path / "runs" / "toy"
    assert [file.name for file in (run / "rollouts").iterdir()] == ["report-00000.parquet"]
    assert str(caught.value).endswith(f"See its rollouts, with every span: agentrig watch {run}")
    assert "no-answers" in str(diagnose(run))
    with pytest.raises(RunStopped, match="weight change"):  # some answer, and it trains
        train(toy_plan('tasks.do=["nothing", ""]', *keys, "algorithm.figures.weight_change=nan", "run.name=some"))


def test_the_credit_turn_without_scores_of_calls_ends_the_run_in_the_measurement_before_training(
    model: ModelServer, toy_plan: MakePlan, tmp_path: Path
) -> None:
    keys = ("run.report=train", "run.report_tasks=0", "run.validation_tasks=1", "algorithm.report=true")
    plan = toy_plan(*keys)
    turn = plan.registry.find("credit", "turn")
    components, configs = {**plan.components, "credit": turn}, {**plan.configs, "credit": turn.spec.config()}
    with pytest.raises(AgentrigError, match=r"^before step 1: the credit `turn` .* no call of 24 rollouts has one"):
        train(attrs.evolve(plan, components=components, configs=configs))
    assert [file.name for file in (tmp_path / "runs" / "toy" / "rollouts").iterdir()] == ["report-00000.parquet"]


def test_a_wrong_setting_that_shows_late_leaves_no_run_directory(toy_plan: MakePlan, tmp_path: Path) -> None:
    told: list[Path] = []
    plan = toy_plan("algorithm.steps=2", "algorithm.refuse=steps is odd")
    with pytest.raises(ConfigError, match="steps is odd"):
        train(plan, starting=told.append)
    assert told == [tmp_path / "runs" / "toy"]  # it was there
    assert not (tmp_path / "runs").exists()


def test_rollouts_of_a_server_without_the_weights_do_not_count(
    model: ModelServer, toy_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RunSession.plan_steps

    def begun(self: RunSession, steps: int) -> None:
        real(self, steps)
        dead = Endpoint(base_url="http://127.0.0.1:9/v1", model="policy")
        learner: Any = None  # is not asked: there is no answer to compare with
        self.delivery.begin(
            version=0, learner=learner, dtype="float32", servers=[dead], context=64, prompt=lambda: [1, 2, 3]
        )

    monkeypatch.setattr(RunSession, "plan_steps", begun)
    with pytest.raises(RunStopped, match=r"step 0: the model server http://127\.0\.0\.1:9/v1\S* does not answer"):
        train(toy_plan("algorithm.steps=2"))
    assert not (tmp_path / "runs" / "toy" / "metrics.jsonl").exists()


def test_proofs_before_the_first_step_are_no_part_of_its_time(
    model: ModelServer, toy_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RunSession.plan_steps

    def begun(self: RunSession, steps: int) -> None:
        self.delivery.step.add(Figures(version=0, proofs=1, arrived=1, seconds=50.0))
        real(self, steps)

    monkeypatch.setattr(RunSession, "plan_steps", begun)
    train(toy_plan("algorithm.steps=1"))
    (line,) = map(json.loads, (tmp_path / "runs" / "toy" / "metrics.jsonl").read_text().splitlines())
    assert line["delivery"]["seconds"] >= 50
    assert sum(line["time_s"].values()) <= line["step_s"]


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 4])
def test_rollouts_one_at_a_time_wait_for_the_proof_and_others_do_not(
    model: ModelServer, toy_plan: MakePlan, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """A server that decodes a rollout and the probe together rounds otherwise: such a run could not repeat itself."""
    real, seen = RunSession.plan_steps, []

    def held() -> None:
        end = time.monotonic() + (1.0 if threads == 1 else 60.0)
        while not model.requests and time.monotonic() < end:
            time.sleep(0.01)
        seen.append(len(model.requests))

    def begun(self: RunSession, steps: int) -> None:
        real(self, steps)
        dead = Endpoint(base_url="http://127.0.0.1:9/v1", model="policy")
        learner: Any = None
        self.delivery.begin(
            version=0,
            learner=learner,
            dtype="float32",
            servers=[dead],
            context=64,
            prompt=lambda: [1, 2],
            held=held,
        )

    monkeypatch.setattr(RunSession, "plan_steps", begun)
    with pytest.raises(RunStopped, match=r"step 0: the model server .* does not answer"):
        train(toy_plan("algorithm.steps=2", "runners.n=1", f"runners.threads={threads}"))
    (before,) = seen
    assert (before > 0, len(model.requests) > 0) == (threads > 1, threads > 1)

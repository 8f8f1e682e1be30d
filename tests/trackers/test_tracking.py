"""Trackers in a run: their section, the names of figures, and one that fails or never returns."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tracker_readers
from click.testing import CliRunner

from agentrig.background import Background, late
from agentrig.cli.entry import main
from agentrig.errors import ConfigError, LookupFailed
from agentrig.plan import Plan, resolve, to_toml
from agentrig.run.resume import resume_plan
from agentrig.run.training import train
from agentrig.trackers.names import flat_config, main_of, of_step
from agentrig.trackers.tracking import best_checkpoint
from agentrig.view.diagnosis import diagnose
from agentrig.view.terminal import run_ending

MakePlan = Callable[..., Plan]
FILE = str(Path(__file__).parents[1] / "support" / "tracker_plugin.py")


@pytest.mark.slow
def test_a_run_that_is_resumed_is_one_run_of_tensorboard_while_other_trackers_fail_or_never_return(
    toy_plan: MakePlan, tmp_path: Path, toy_file: str
) -> None:
    """Neither a step nor the run's end waits for them; summary and report count what they lost."""
    plan = toy_plan(
        'trackers.use=["tensorboard", "failing", "stuck"]',
        *(
            "trackers.tensorboard.figures=all",
            "trackers.stuck.queue=2",
            "trackers.stuck.flush_s=0.2",
            "trackers.tensorboard.tags=nightly",
        ),
        *("algorithm.steps=4", "algorithm.cut_after=2", "algorithm.report=false", f'run.plugins=["{FILE}"]'),
    )
    with pytest.raises(ConnectionAbortedError):
        train(plan)
    run = tmp_path / "runs" / "toy"
    again = resume_plan(run, overrides=["algorithm.cut_after=0"])
    assert to_toml(again.as_dict()).count("[trackers.") == 3
    summary = train(again, resume=run)
    assert summary["observer_errors"] == {}
    assert summary == json.loads((run / "summary.json").read_text())
    writes = summary["observer_writes"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (seen,) = tracker_readers.tensorboard(run)
    wanted: dict[str, dict[str, float]] = {}
    for line in lines:
        for name, value in of_step(line).items():
            wanted.setdefault(name, {})[str(line["step"])] = pytest.approx(value, rel=1e-6)
    assert {name: values for name, values in seen.figures.items() if not name.startswith("report/")} == wanted
    assert (len(lines), seen.ended) == (4, "finished")
    assert {"train/reward", "train/failed", "time_s/update", "algorithm/weight_change"} <= set(wanted)
    assert (writes["tensorboard"]["failed"], writes["tensorboard"]["dropped"]) == (0, 0)
    assert writes["tensorboard"]["written"] == 8  # start, files, 2 steps, results, files, checkpoint, end
    assert (writes["failing"]["failed"], writes["failing"]["written"]) == (3, 5)
    assert "no route to the tracker in step 4" in writes["failing"]["error"]
    assert writes["stuck"]["unsent"] == 2  # the first step, and the next one that waits
    assert writes["stuck"]["dropped"] == 4  # what came after the run had stopped waiting
    told = "\n".join(f.text for f in diagnose(run).warnings)
    assert "failing: 3 of 8 writes failed (the latest: ConnectionError: no route" in told
    assert "stuck: 4 were dropped, because it was too slow; 2 were not finished when the run ended" in told
    lines = [part for part in run_ending(run) if isinstance(part, str)]
    assert f"tensorboard  tensorboard --logdir {run / 'tensorboard'}" in lines
    assert not [line for line in lines if line.startswith(("failing", "stuck"))]  # they are nowhere


def test_names_of_figures() -> None:
    line = {
        **{"step": 3, "time": 1.0, "reward": 0.5, "accuracy": None, "failures": {"deadline": 2, "llm-error": 1}},
        **{"validation_accuracy": 0.25, "time_s": {"update": 1.5}, "digests": {"weights": 1}, "solved": True},
        "nodes": {"seen": {"write query": 4, "(no node)": 1, "": 2}},
        "algorithm": {"actor/pg_loss": 0.1, "kl": float("inf"), "words": "no figure"},
    }
    assert of_step(line) == {
        **{"train/reward": 0.5, "train/failed": 3.0, "train/solved": 1.0, "validation/accuracy": 0.25},
        **{"failures/deadline": 2.0, "failures/llm-error": 1.0, "time_s/update": 1.5, "algorithm/actor/pg_loss": 0.1},
        **{"nodes/seen/write_query": 4.0, "nodes/seen/_no_node_": 1.0, "nodes/seen/_": 2.0},
    }
    config = {"a": {"x": [1, 2], "y": None, "z": {"k": 1}}, "b": {"t": "text"}}
    assert flat_config(config) == {"a.x": "[1, 2]", "a.z.k": 1, "b.t": "text"}


def test_the_best_checkpoint(tmp_path: Path) -> None:
    assert best_checkpoint(tmp_path) is None
    for step in (2, 3, 4):
        (tmp_path / "checkpoints" / f"step-{step:05d}").mkdir(parents=True)
    (tmp_path / "manifest.json").write_text('{"config": {"algorithm": {"final": "last"}}}')
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-00004"
    lines = [{"step": s, "validation_accuracy": a} for s, a in ((1, 0.9), (2, 0.5), (3, 0.75), (4, 0.25))]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "valid'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-00003"
    (tmp_path / "manifest.json").write_text('{"config": {"algorithm": {"final": "best"}}}')
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-00004"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trackers.use=wandbb"], 'there is no tracker called "wandbb". Did you mean "wandb"?'),
        (["trackers.use=wandbb"], "trackers: mlflow, swanlab, tensorboard, trackio, wandb"),
        (["observer.use=wandb"], 'wandb is a tracker. Write --tracker wandb, or use = ["wandb"] under [trackers]'),
        (["trackers.use=toy-notes"], "toy-notes is an observer and no tracker. Write --observer toy-notes"),
        (["trackers.wandb.project=a"], "settings of a tracker that this run does not use"),
        (["trackers.use=wandb", "trackers.wandb.projct=a"], 'has no key "projct". Did you mean "project"?'),
        (["trackers.use=wandb", "trackers.wandb.api_key=abc"], "a secret does not belong into a run file"),
        (["trackers.use=mlflow", "trackers.mlflow.tracking_uri=http://me:pw@host"], "holds a login"),
        (["trackers.use=trackio", "trackers.trackio.server_url=http://h/?write_token=x"], "holds a login"),
        (["trackers.use=3"], "[trackers] use = 3 must be a list of names"),
    ],
)
def test_a_wrong_section_says_what_to_write(toy_plan: MakePlan, overrides: list[str], said: str) -> None:
    with pytest.raises((ConfigError, LookupFailed), match=re.escape(said)):
        toy_plan(*overrides)


def test_a_client_that_is_not_installed_ends_the_command_before_the_run_starts(
    toy_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "mlflow", "trackio", "swanlab", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
        for module in [m for m in sys.modules if m.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, module)
        said = f"the tracker {name} needs its client, which is not installed: pip install 'agentrig[{name}]'"
        with pytest.raises(ConfigError, match=re.escape(said)):
            train(toy_plan(f"trackers.use={name}"))
    assert not (tmp_path / "runs").exists()


LATE = """
import atexit, threading, click
from agentrig.background import Background
from agentrig.cli.groups import Group

def work():
    late = Background("tracker stuck", limit=9, patience_s=0.1)
    late.put(threading.Event().wait)
    print(late.settle().unsent, flush=True)

atexit.register(threading.Event().wait)
Group.lazy = {"work": ("", "")}
Group("agentrig", commands={"work": click.command()(work)})(["work"])
"""


@pytest.mark.slow
def test_a_command_ends_though_a_client_waits_for_ever_at_exit() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_a_tracker_of_an_earlier_command_ends_no_later_one() -> None:
    stuck, never = Background("tracker stuck", limit=9, patience_s=0.0), threading.Event()
    stuck.put(never.wait)
    stuck.settle()
    assert stuck in late()
    assert CliRunner().invoke(main, ["plugins", "--json"]).exit_code == 0  # os._exit would end this process
    never.set()


def test_resolve_adds_trackers_to_those_of_a_file(tmp_path: Path, toy_file: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text('recipe = "toy"\n[trackers]\nuse = ["tensorboard"]\n[trackers.tensorboard]\nname = "x"\n')
    plan = resolve(str(path), trackers=["wandb", "tensorboard"], files=[toy_file])
    assert plan.as_dict()["trackers"]["use"] == ["tensorboard", "wandb"]
    assert plan.as_dict()["trackers"]["tensorboard"]["name"] == "x"
    assert "observer" not in plan.as_dict()


def test_a_tracker_gets_the_figures_that_most_look_at_unless_it_is_asked_for_all() -> None:
    line = {
        "step": 1, "time": 2.0, "reward": 0.5, "step_s": 3.0, "validation_accuracy": 0.25, "failures": {"deadline": 2},
        "time_s": {"rollout": 1.0}, "nodes": {"seen": {"a": 1}}, "max_staleness": 0,
        "algorithm": {"loss": 0.1, "actor/pg_loss": 0.2, "actor/pg_clipfrac": 0.3, "computed_tokens": 9},
    }  # fmt: skip
    assert main_of(of_step(line)) == {
        "train/reward": 0.5, "train/step_s": 3.0, "train/failed": 2.0, "validation/accuracy": 0.25,
        "algorithm/loss": 0.1, "algorithm/actor/pg_loss": 0.2, "algorithm/actor/pg_clipfrac": 0.3,
    }  # fmt: skip

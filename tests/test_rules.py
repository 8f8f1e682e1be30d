"""The rules that hold everywhere, with one test each.

    1  The agent never sees `private`.
    2  A failure is typed, never 0.0.
    3  No silent knob.
    4  No run that learns nothing in silence.
    5  Nothing heavy at import.
    6  Errors say what to do.
    7  A broken accelerator is never quietly replaced by the CPU.
    8  A run is reproducible, and can be resumed after a crash.

The tests of the modules check the details.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from model_server import ModelServer

from agentrig.cli.entry import main
from agentrig.errors import ConfigError, LookupFailed, PluginError, RunStopped
from agentrig.plan import Plan

MakePlan = Callable[..., Plan]
SOURCES = Path(__file__).resolve().parents[1] / "src" / "agentrig"


def test_rule_1_the_agent_never_sees_private(model: ModelServer, toy_plan: MakePlan) -> None:
    """Check a runner's memory, what is sent to a runner, the requests, and the written spans."""

    from agentrig import Endpoint
    from agentrig.run.directory import RunDirectory
    from agentrig.runners.scorer import Scorer

    plan = toy_plan(agent="toy-spy")
    tasks = plan.build("tasks").load("train")[:4]
    golds = {t.private["gold"] for t in tasks}
    assert len(golds) == 4
    assert all(g.startswith("gold-") for g in golds)  # the form that the search looks for
    judged: list[Any] = []

    def reward(task: Any, outcome: Any, budget_s: float) -> Any:
        judged.append(task.private["gold"])
        return plan.build("reward")(task, outcome, budget_s)

    engine, runtime = plan.engine(scorer=Scorer(reward, budget_s=5), adapter=plan.build("adapter"))
    sent: list[str] = []
    submit = runtime.pool.submit
    runtime.pool.submit = lambda job: (sent.append(repr(job)), submit(job))  # type: ignore[method-assign]
    rollouts: list[Any] = []
    endpoint = Endpoint(base_url=model.url, model="m", token_ids=True)
    runtime.run(lambda: rollouts.extend(engine.run(tasks, n=1, endpoint=endpoint, step=1, mode="train")))

    assert set(judged) == golds  # the reward does see them
    for rollout in rollouts:
        seen = rollout.outcome.answer
        assert seen["pid"] != os.getpid()
        assert seen["input"] == dict(rollout.task.input)
        assert (seen["secrets"], seen["tasks"]) == ([], 0)
    run = RunDirectory.create(plan)
    run.write_rollouts(rollouts, mode="train", step=1)
    rows = pq.read_table(run.path / "rollouts" / "train-00001.parquet").to_pylist()
    for gold in golds:
        assert gold not in "".join(sent)
        assert gold not in json.dumps(model.bodies())
        assert gold not in json.dumps(rows)
    assert "number" in "".join(sent)  # it did have the inputs


def test_rule_2_a_failure_is_typed_and_never_a_zero(model: ModelServer, toy_plan: MakePlan, tmp_path: Path) -> None:
    from agentrig.run.training import train

    # One of three odd numbers fails. With failures as zeros the mean would be 4/12; over the scored ones it is 4/10.
    do = ["", "raise", "", "", "", ""]
    few = ["algorithm.steps=1", "algorithm.report=false", "algorithm.group=2", "run.validation_tasks=1"]
    train(toy_plan(*few, f"tasks.do={json.dumps(do)}", "run.failure_limit=0.5"))
    (line,) = _lines(tmp_path)
    rows = pq.read_table(tmp_path / "runs" / "toy" / "rollouts" / "train-00001.parquet").to_pylist()
    failed = [r for r in rows if r["failure"]]
    assert line["failures"] == {"agent-error": len(failed)} == {"agent-error": 2}
    assert all(r["value"] is None and r["triplets"] == 0 and r["message"] for r in failed)
    values = [r["value"] for r in rows if not r["failure"]]
    assert line["reward"] == pytest.approx(sum(values) / len(values)) == pytest.approx(4 / 10)
    assert line["reward"] != pytest.approx(sum(values) / len(rows))
    with pytest.raises(RunStopped, match=r"2 of 12 train rollouts failed \(limit 10%"):
        train(toy_plan(*few, f"tasks.do={json.dumps(do)}", "run.failure_limit=0.1", "run.name=strict"))


@pytest.mark.parametrize("section", ["run", "tasks", "agent", "reward", "adapter", "algorithm", "hardware", "runners"])
def test_rule_3_no_silent_knob(toy_plan: MakePlan, tmp_path: Path, toy_file: str, section: str) -> None:
    """An unknown key is an error in every section, on the command line and in a run file."""
    from agentrig.plan import resolve

    with pytest.raises(ConfigError, match=rf"\[{section}\] .* has no key \"no_such_key\""):
        toy_plan(f"{section}.no_such_key=1")
    file = tmp_path / "mine.toml"
    file.write_text(f'recipe = "toy"\n[{section}]\nno_such_key = 1\n')
    with pytest.raises(ConfigError, match="no_such_key"):
        resolve(str(file), files=[toy_file])


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (["adapter.match=nothing-like-it"], "They were made under these nodes: write_query"),
        (["algorithm.token_ids=false"], "no token ids"),
        (['tasks.do=["no-call"]'], "No call to the model was recorded"),
        (["reward.right=0", "algorithm.tasks=36"], "so every advantage is zero"),
    ],
)
def test_rule_4_no_run_that_learns_nothing(
    model: ModelServer, toy_plan: MakePlan, tmp_path: Path, wish: list[str], said: str
) -> None:
    from agentrig.run.training import train

    with pytest.raises(RunStopped, match=said):
        train(toy_plan("algorithm.report=false", "run.validation_tasks=1", *wish))
    assert not (tmp_path / "runs" / "toy" / "metrics.jsonl").exists()  # not even one step


def test_rule_5_nothing_heavy_at_import() -> None:
    """Check the imports at module level in the sources. tests/cli/test_cli.py checks what is imported at run time."""
    heavy = {"torch", "verl", "vllm", "transformers", "agentlightning", "langchain_core", "langgraph", "ray", "openai"}
    allowed = {"triton_words.py"}  # kernels, which are imported with torch only
    offenders = []
    for file in SOURCES.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(n.split(".")[0] in heavy for n in names) and file.name not in allowed:
                offenders.append(f"{file.name}:{node.lineno}")
    assert offenders == []
    done = subprocess.run(
        [sys.executable, "-c", "import sys, agentrig.cli.entry, agentrig.run.training; print(sorted(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.split(".")[0] for name in ast.literal_eval(done.stdout)}
    assert loaded & heavy == set()


def test_rule_6_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from distributions import install, reward_source

    from agentrig.plugins.loading import load

    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "toy-lost", "import no_such_library\n")
    install(tmp_path, "toy-kept", reward_source("kept"))
    install(tmp_path, "toy-twin", reward_source("kept"))
    with pytest.raises(LookupFailed) as caught:
        load().find("reward", "kepd")
    # what was asked, the nearest, what exists, what failed to load and why
    for part in ('reward called "kepd"', 'Did you mean "kept"?', "own", "toy-lost (toy-lost 1.2)", "no_such_library"):
        assert part in str(caught.value)
    with pytest.raises(PluginError) as conflict:
        load().check()
    cure = str(conflict.value).split("AGENTRIG_BLOCK=")[1].split()[0]
    monkeypatch.setenv("AGENTRIG_BLOCK", cure)
    load().check()  # the advice works


def test_rule_7_a_broken_accelerator_is_never_replaced_by_the_cpu(
    model: ModelServer, tmp_path: Path, toy_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_HARDWARE", "1")
    accelerator = tmp_path / "toy_accelerator.py"  # the same file under another name, so that it is read again
    accelerator.write_text(Path(toy_file).read_text())
    words = ["train", "toy", "--plugin", str(accelerator), f"algorithm.endpoint={model.url}", "--json"]
    words += [f"run.directory={tmp_path}/runs", "run.name=x", "algorithm.steps=1", "algorithm.report=false"]
    words.append('run.block=["report"]')
    for choice in ("auto", "toy-npu"):
        result = CliRunner().invoke(main, [*words, "--hardware", choice])
        assert result.exit_code == 1, result.output
        assert "the driver does not answer: load toy.ko" in result.stderr
        assert not (tmp_path / "runs" / "x").exists()
    assert not model.requests
    explicit = CliRunner().invoke(main, [*words, "--hardware", "cpu", "run.validation_tasks=1"])
    assert explicit.exit_code == 0, explicit.output  # the CPU can be chosen explicitly
    assert json.loads((tmp_path / "runs" / "x" / "manifest.json").read_text())["hardware"]["name"] == "cpu"


def test_rule_8_a_run_is_reproducible_and_resumes_after_a_crash(
    model: ModelServer, tmp_path: Path, toy_file: str
) -> None:
    run = tmp_path / "runs" / "toy"
    command = [sys.executable, "-m", "agentrig", "train"]
    options = [f"algorithm.endpoint={model.url}", f"run.directory={tmp_path}/runs", "run.name=toy", "run.seed=7"]
    options += ["algorithm.steps=4", "algorithm.wait_s=0.3", "run.validation_tasks=1", "run.report_tasks=2"]
    options.append('run.block=["report"]')
    process = subprocess.Popen(
        [*command, "toy", "--plugin", toy_file, "--json", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    end = time.monotonic() + 150
    latest = run / "checkpoints" / "latest"
    while not (latest.exists() and latest.read_text().strip() == "step-00002"):
        assert time.monotonic() < end, "two steps took too long"
        assert process.poll() is None, process.stderr.read().decode()[-3000:]
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)  # the whole run at once, runners too
    process.wait()
    process.stderr.close()
    killed = _lines(tmp_path)
    assert 2 <= len(killed) < 4
    first = json.loads((run / "manifest.json").read_text())
    assert not (run / "summary.json").exists()

    result = CliRunner().invoke(main, ["train", "--resume", str(run), "--json"])
    assert result.exit_code == 0, result.output
    lines = _lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]  # none lost, none twice
    assert [line["algorithm"]["number"] for line in lines] == [0.5, 1.5, 3.0, 5.0]  # as in an uninterrupted run
    assert lines[:2] == killed[:2]
    summary = json.loads(result.stdout)
    assert (summary["steps"], summary["train_rollouts"]) == (4, 48)
    assert summary["accuracy"] == {"before": 0.5, "after": 0.5, "n": 2}
    trained = sorted(f.stem for f in (run / "rollouts").glob("train-*"))
    assert trained == [f"train-{step:05d}" for step in range(1, 5)]
    assert json.loads((run / "checkpoints" / "step-00004" / "number.json").read_text()) == {"number": 5.0}

    second = json.loads((run / "manifest.json").read_text())
    for manifest in (first, second):
        assert manifest["config"]["algorithm"]["steps"] == 4
        assert manifest["seed"] == 7
        assert {"name": "core", "distribution": "agentrig", "version": manifest["agentrig"]}.items() <= next(
            p for p in manifest["plugins"] if p["name"] == "core"
        ).items()
        assert {role: (d["split"], d["tasks"], len(d["fingerprint"])) for role, d in manifest["data"].items()} == {
            "train": ("train", 24, 64),
            "validation": ("validation", 1, 64),
            "report": ("test", 2, 64),
        }
        assert manifest["hardware"]["devices"]
        assert manifest["packages"]["agentlightning"].startswith("0.3")
    assert first["data"] == second["data"]
    assert first["config"] == second["config"]


def _lines(tmp_path: Path) -> list[dict[str, Any]]:
    text = (tmp_path / "runs" / "toy" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]

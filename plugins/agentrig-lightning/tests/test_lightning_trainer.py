"""A script for Agent Lightning's `Trainer` runs unchanged, and what is not available here is named."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from agentrig_lightning import Trainer
from agentrig_lightning.commands import resumed_algorithm
from agentrig_lightning.scripts import _named, packed
from agentrig_lightning.trainer import ScriptTasks, adapter_spec, other_algorithm
from agentrig_lightning.verl import in_words_of_script
from model_server import model_server

from agentrig.errors import ConfigError
from agentrig.plan import resolve

IDS = {"prompt_token_ids": [1, 2], "response_token_ids": [3], "request": {"messages": []}, "response": {"id": "c"}}
MINI = Path(__file__).parents[2] / "agentrig-grpo" / "src" / "agentrig_grpo" / "models" / "mini"
SCRIPT = Path(__file__).parents[3] / "tests" / "support" / "lightning_script.py"


def agentrig(folder: Path, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentrig", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, **more)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What the script printed, and its folder, after `agentrig run` of it, unchanged."""
    folder = tmp_path_factory.mktemp("script")
    shutil.copy(SCRIPT, folder / "script.py")
    with model_server() as server:
        own = {"HOOKS_FILE": str(folder / "hooks"), "UNIT_WANTED": "km", "MODEL_URL": server.url}
        done = agentrig(folder, "run", "script.py", env={**os.environ, **own})
    assert done.returncode == 0, done.stderr[-5000:]
    printed, _, found = done.stdout.rpartition("\n")
    return {**json.loads(found), "printed": printed}, folder


@pytest.mark.slow
def test_fit_runs_each_row_once_in_its_mode(ran: tuple[dict[str, Any], Path]) -> None:
    wanted = [[n, "train", "succeeded", 1.0] for n in range(3)]
    assert ran[0]["fit"] == [*wanted, [9, "val", "succeeded", 0.5]]


@pytest.mark.slow
def test_dev_runs_the_first_ten_rows_of_each_dataset_once(ran: tuple[dict[str, Any], Path]) -> None:
    """No guard stops it although its calls go to another server: `Baseline` learns nothing."""
    assert ran[0]["dev"] == [*[[n, "train", "succeeded", 1.0] for n in range(10)], [20, "val", "succeeded", 1.0]]


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_what_to_write(tmp_path: Path) -> None:
    """Agent Lightning's own `Trainer` would start its own store in each runner, which imports the script."""
    (tmp_path / "bare.py").write_text(
        "import agentlightning as agl\n\n\n@agl.rollout\ndef agent(task, llm: agl.LLM) -> float:\n    return 1.0\n\n\n"
        "agl.Trainer(algorithm=agl.Baseline(), n_runners=1).fit(agent, train_dataset=[{'n': 1}])\n"
    )
    done = agentrig(tmp_path, "run", "bare.py")
    assert done.returncode == 1
    assert "agentrig: bare.py starts a run whenever it is imported, and each runner imports it." in done.stderr
    assert ("Traceback" in done.stderr, "server" in done.stderr.lower()) == (False, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("x = = 1\n", "SyntaxError: invalid syntax"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f():\n    return 1 / 0\n\n\nf()\n", "ZeroDivisionError: division by zero"),
        (
            "from agentlightning import Trainer\n\nTrainer(no_such=1)\n",
            "TypeError: Trainer.__init__() got an unexpected keyword argument 'no_such'",
        ),
    ],
)
def test_a_script_that_fails_shows_its_own_frames_only(tmp_path: Path, lines: str, said: str) -> None:
    (tmp_path / "wrong.py").write_text(lines)
    done = agentrig(tmp_path, "run", "wrong.py")
    files = re.findall(r'File "(.*)", line', done.stderr)
    assert (done.returncode, {Path(file).name for file in files}) == (1, {"wrong.py"}), done.stderr
    assert done.stderr.splitlines()[-1] == said


@pytest.mark.slow
def test_a_script_that_asks_for_input_that_is_not_there_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text("input()\n")
    done = agentrig(tmp_path, "run", "asks.py", stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert "agentrig: asks.py reads standard input, which has ended (asks.py:1 in <module>)" in done.stderr


def test_an_agent_that_is_only_in_the_main_guard_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = ModuleType("script_with_a_guard")
    module.__file__ = str(tmp_path / "guard.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ConfigError, match=r"^L2 is not in guard\.py when a runner imports it: define L2 at the top"):
        _named(module.__name__, "L2")
    module.L2 = object()  # type: ignore[attr-defined]
    assert _named(module.__name__, "L2") is module.L2


@pytest.mark.slow
def test_dev_prints_every_span(ran: tuple[dict[str, Any], Path]) -> None:
    trees = ran[0]["printed"].split("rollout ro-")[1:]
    assert len(trees) == 11
    assert all("[no-ids]" in tree and "agentlightning.reward.0.value: 1" in tree for tree in trees)


def test_dev_takes_its_rows_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[Any] = []
    monkeypatch.setattr(Trainer, "_run", lambda self, agent, algorithm, *datasets: played.append(datasets[:2]))
    Trainer().dev(lambda task: 1.0, dev_dataset=[1, 2])
    assert played == [([1, 2], None)]
    with pytest.raises(TypeError, match="not both"):
        Trainer().dev(lambda task: 1.0, [1], dev_dataset=[2])


@pytest.mark.slow
def test_hooks_see_every_rollout(ran: tuple[dict[str, Any], Path]) -> None:
    lines = sorted((ran[1] / "hooks").read_text().splitlines())
    modes = [*[f"{n} train" for n in range(3)], "9 val"]
    assert lines == sorted([*[f"start {m}" for m in modes], *[f"end Formats {m}" for m in modes]])


@pytest.mark.slow
def test_a_script_leaves_a_run_directory(ran: tuple[dict[str, Any], Path]) -> None:
    runs = sorted((ran[1] / "runs").iterdir())
    assert [r.name.split("-")[0] for r in runs] == ["script", "script"]
    summary = json.loads((runs[0] / "summary.json").read_text())
    assert (summary["failures"], summary["complete"]) == ({}, True)
    assert list((runs[0] / "rollouts").glob("*.parquet"))
    assert any(
        "sees its gold" in warning for warning in json.loads((runs[0] / "manifest.json").read_text())["warnings"]
    )


def test_a_script_whose_adapter_makes_no_triplets_still_has_them_in_its_run() -> None:
    """APO's adapter gives messages; the run's records need triplets."""
    from agentlightning import TraceToMessages

    from agentrig.traces import LLM_CALL, Span, Trace

    call = Span(id="1", parent=None, name=LLM_CALL, start=0.0, end=1.0, attributes=IDS)
    spec = adapter_spec(TraceToMessages(), "script")
    assert [t.response_ids for t in spec.build(None)(Trace(rollout_id="r", spans=(call,)))] == [(3,)]


PROXY = """
from agentrig_lightning import Trainer
import agentlightning as agl
from agentrig_lightning.algorithms import AlgorithmCall, LightningAlgorithmConfig, Script

proxy = {"type": "agentlightning.LLMProxy", "port": 12345, "model_list": []}
trainer = Trainer(llm_proxy=proxy, algorithm=agl.Baseline)
assert type(trainer.llm_proxy) is agl.LLMProxy
store = agl.InMemoryLightningStore()
script = Script(trainer, None, None)
AlgorithmCall(trainer.algorithm, LightningAlgorithmConfig(), name="x", script=script)._trainer(store, None)
assert trainer.algorithm.get_llm_proxy() is trainer.llm_proxy
assert trainer.llm_proxy.get_store() is store
"""


@pytest.mark.slow
def test_an_algorithm_gets_the_scripts_proxy_with_the_runs_store() -> None:
    done = subprocess.run([sys.executable, "-c", PROXY], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


def test_verl_of_a_script_is_the_algorithm_of_agentrig_verl() -> None:
    pytest.importorskip("agentrig_verl")
    import agentlightning as agl

    verl = agl.VERL({"actor_rollout_ref": {"model": {"path": "some/model"}}, "trainer": {"total_epochs": 3}})
    trainer = Trainer(algorithm=verl, n_runners=10)
    spec = trainer.algorithm_spec("sql-algorithm", verl, [], None)
    config = spec.config()
    assert (spec.name, config.model, config.verl["trainer.total_epochs"]) == ("sql-algorithm", "some/model", 3)


def test_what_is_not_available_is_named_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentlightning import ClientServerExecutionStrategy, InMemoryLightningStore

    monkeypatch.setenv("AGL_CURRENT_ROLE", "runner")
    strategy = ClientServerExecutionStrategy(role="runner")
    with pytest.raises(ConfigError) as caught:
        Trainer(store=InMemoryLightningStore(), max_tasks=3, runner=object, daemon=False, strategy=strategy)
    message = str(caught.value)
    for named in ("store:", "max_rollouts:", "runner:", "daemon=False", "role 'runner'", "AGL_CURRENT_ROLE=runner"):
        assert named in message
    assert "read `trainer.store`" in message
    assert "agentrig train --store" in message


def test_a_port_serves_the_runs_store() -> None:
    plain = Trainer(settings=["runners.deadline_s=5"])
    assert plain.settings == ("runners.deadline_s=5",)
    for trainer in (Trainer(port=4999), Trainer(strategy={"type": "cs", "server_port": 4999})):
        assert resolve("mini", overrides=trainer.settings).runners.store == "127.0.0.1:4999"


def test_a_wrong_component_is_an_error_of_construction() -> None:
    with pytest.raises((TypeError, ValueError), match="tracer"):
        Trainer(tracer=3)
    with pytest.raises((TypeError, ValueError), match="algorithm"):
        Trainer(algorithm=object())
    with pytest.raises(ConfigError, match="strategy"):
        Trainer(strategy=object())


def test_fit_needs_an_algorithm_and_dev_a_fast_one() -> None:
    from agentlightning import Algorithm

    with pytest.raises(ConfigError, match="no algorithm"):
        Trainer().fit(lambda task: 1.0, [])
    with pytest.raises(TypeError, match="FastAlgorithm"):
        Trainer(algorithm=Algorithm()).dev(lambda task: 1.0, [])
    with pytest.raises(ConfigError, match="call fit"):
        _ = Trainer().store


def test_former_names_of_arguments_work_and_warn() -> None:
    with pytest.warns(DeprecationWarning, match="n_runners"):
        assert Trainer(n_workers=3).n_runners == 3
    assert Trainer(triplet_exporter={"agent_match": "x"}).adapter.agent_match == "x"


def test_an_agent_that_cannot_be_sent_is_named_with_the_cure() -> None:
    lock = __import__("threading").Lock()
    with pytest.raises(ConfigError, match=r"the agent Mine can't be sent .*'_thread.lock'") as caught:
        packed(lambda: lock, "the agent Mine")
    assert "in the rollout, not in __init__" in str(caught.value)


def test_agentrig_run_says_what_it_cannot_run(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("import sys, agentlightning as agl\nprint(sys.argv[1:], agl.Trainer.__module__)")
    words = ["idle.py", "fast", "--active-agent", "write", "--set", "run.seed=1", "--", "--model", "x"]
    idle = agentrig(tmp_path, "run", *words)
    assert idle.stdout.strip() == "['fast', '--active-agent', 'write', '--model', 'x'] agentrig_lightning.trainer"
    assert idle.returncode == 1
    assert "idle.py has ended without a run: it called neither fit nor dev" in idle.stderr
    assert "One that needs no Trainer runs with: python idle.py" in idle.stderr
    assert "there is no script gone.py" in agentrig(tmp_path, "run", "gone.py").stderr


def test_another_algorithm_takes_the_place_of_verl_only() -> None:
    import agentlightning as agl

    with pytest.raises(ConfigError, match=r"grpo takes the place of agl\.VERL, and this script trains by Bas"):
        other_algorithm("grpo", agl.Baseline(), 0)


LEARNER = """
import os
import sys
import time
import agentlightning as agl
from openai import OpenAI

class Odd(agl.LitAgent):
    def rollout(self, task, resources, rollout):
        assert "BROKEN" not in os.environ
        llm = resources["main_llm"]
        said = [{"role": "user", "content": task["question"]}]
        answer = OpenAI(base_url=llm.endpoint, api_key="any").chat.completions.create(model=llm.model, messages=said)
        return float(len(answer.choices[0].message.content or "") % 2)

if __name__ == "__main__":
    assert sys.argv[1:] == ["fast", "--own"]
    rows = [{"question": f"count the books {i}"} for i in range(16)]
    verl = agl.VERL({"algorithm": {"adv_estimator": "grpo"}, "data": {"train_batch_size": 4},
                     "actor_rollout_ref": {"rollout": {"n": 4}, "model": {"path": "of-the-script"}},
                     "trainer": {"total_epochs": 1, "test_freq": -1, "save_freq": 1}})
    agl.Trainer(n_runners=2, algorithm=verl).fit(Odd(), train_dataset=rows, val_dataset=rows[:4])
"""


def test_only_agentrig_run_has_set_for_the_settings_of_a_cure() -> None:
    class Shown(Trainer):
        shows = True

    said = "algorithm.max_tokens=9 does;\n  agentrig train RECIPE algorithm.use=grpo algorithm.model=DIR"
    assert Shown()._in_own_words(said, []) == f"--set {said}"


@pytest.mark.slow
def test_an_error_about_a_setting_of_verl_has_the_script_s_name_for_it(tmp_path: Path) -> None:
    text = LEARNER.replace('"train_batch_size": 4', '"train_batch_size": 4, "max_prompt_length": 1 << 20, '
                           '"max_response_length": 16')  # fmt: skip
    (tmp_path / "odd.py").write_text(text)
    ended = agentrig(tmp_path, "run", "--algorithm", "grpo", "--model", str(MINI), "odd.py", "--", "fast", "--own")
    assert ended.returncode != 0
    assert "data.max_prompt_length + data.max_response_length = 1048592: this model's context is" in ended.stderr
    assert "--set algorithm.max_length=0 takes the model's own" in ended.stderr
    assert "[algorithm]" not in ended.stderr


@pytest.mark.parametrize(
    ("key", "said", "named"),
    [
        (
            "max_length",
            "[algorithm] max_length = 528: too long",
            "data.max_prompt_length + data.max_response_length = 528: too long",
        ),
        (
            "group_size",
            "[algorithm] odd (file x.py): 'group_size' must be >= 2: 1",
            "actor_rollout_ref.rollout.n must be >= 2: 1",
        ),
    ],
)
def test_a_setting_has_the_script_s_name_unless_somebody_chose_it_beside_the_script(
    key: str, said: str, named: str
) -> None:
    assert in_words_of_script(said, [key], []) == named
    assert in_words_of_script(said, [key], [key]) == in_words_of_script(said, [], []) == said


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "train_dataset has no rows"),
        (None, "train_dataset has no rows"),
        ("gone.parquet", r"train_dataset is a text \('gone.parquet'\), not rows"),
        ("http://127.0.0.1:9999", "fit with a server's address"),
    ],
)
def test_rows_that_are_none_are_refused_before_the_run(rows: Any, said: str) -> None:
    import agentlightning as agl

    with pytest.raises(ConfigError, match=said):
        Trainer(algorithm=agl.VERL({})).fit(object(), train_dataset=rows)


def test_values_that_become_text_are_told(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"x": 1}, {"x": Path("a")}, {"x": {"y": Path("b")}}]
    tasks = ScriptTasks(rows, None).load("train")
    assert [task.row for task in tasks] == [{"x": 1}, {"x": "a"}, {"x": {"y": "b"}}]
    (said,) = caplog.records
    assert said.message == f"rows of train hold values of these types as text: {type(Path()).__name__}"


RUNS = "agentrig run --resume {run} "


@pytest.mark.parametrize(
    ("resumes", "named", "found"),
    [
        (f"{RUNS}--algorithm grpo a.py -- --algorithm x", "", "grpo"),
        (f"{RUNS}--algorithm grpo folder/a.py", "grpo", "grpo"),
        (f"{RUNS}a.py -- --algorithm x", "", ""),
        (f"{RUNS}a.py", "grpo", "was started without --algorithm, and keeps its"),
        (f"{RUNS}--algorithm grpo a.py", "sft", "was started with --algorithm grpo"),
        (f"{RUNS}b.py", "", "is a run of b.py, not of a.py; it resumes with: agentrig run --resume"),
        ("agentrig train --resume {run}", "", "is not the run of a script: agentrig train --resume"),
        (None, "", "is not a run directory"),
    ],
)
def test_a_resumed_script_keeps_the_algorithm_of_its_own_run(
    tmp_path: Path, resumes: str | None, named: str, found: str
) -> None:
    if resumes is not None:
        (tmp_path / "config.toml").touch()
        (tmp_path / "manifest.json").write_text(json.dumps({"resumes": resumes}))
    if found in ("", "grpo"):
        assert resumed_algorithm(tmp_path, Path("a.py"), named) == found
        return
    with pytest.raises(ConfigError, match=found):
        resumed_algorithm(tmp_path, Path("a.py"), named)


@pytest.mark.slow
def test_the_run_of_a_script_resumes_with_the_command_that_it_prints(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(LEARNER)
    keys = ["run.name=odd", "algorithm.steps=3", "algorithm.max_tokens=16", "algorithm.temperature=1.3"]
    words = ["--algorithm", "grpo", "--model", str(MINI), *(part for key in keys for part in ("--set", key))]
    command = [sys.executable, "-m", "agentrig", "run", *words, "odd.py", "--", "fast", "--own"]
    said = tmp_path / "said"
    with said.open("w") as output:
        begun = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output)
    lines = tmp_path / "runs" / "odd" / "metrics.jsonl"
    while not (lines.is_file() and lines.read_text()):
        assert begun.poll() is None, said.read_text()
        time.sleep(0.05)
    begun.terminate()
    assert begun.wait(timeout=60) == 128 + signal.SIGTERM
    again = "agentrig run --resume runs/odd --algorithm grpo odd.py -- fast --own"
    assert f"resume with: {again}\n" in said.read_text()

    wrong = agentrig(tmp_path, "train", "--resume", "runs/odd")
    assert (wrong.returncode, wrong.stderr) == (
        1,
        f"agentrig: runs/odd is the run of a script; it resumes with: {again}\n",
    )
    short = ["run", "--resume", "runs/odd"]
    script = ["odd.py", "--", "fast", "--own"]
    wrong = agentrig(tmp_path, *short, "--set", "algorithm.stepz=4", *script)
    assert '[algorithm] odd-algorithm (file odd.py) has no key "stepz"' in wrong.stderr
    assert wrong.stderr.rstrip().endswith("runs/odd/config.toml, and in --set algorithm.stepz=4")
    done = agentrig(tmp_path, *short, *script, check=True)  # it keeps its algorithm
    more = again.replace("runs/odd", "runs/odd --set algorithm.steps=6")
    assert re.search(rf"^resume +{re.escape(more)}$", done.stdout, re.M)
    ended = agentrig(tmp_path, *short, "--set", "algorithm.steps=4", *script, env={**os.environ, "BROKEN": "1"})
    assert "rollouts failed" in ended.stderr
    assert f"Once that is mended, resume from the last checkpoint with: {again}\n" in ended.stderr
    agentrig(tmp_path, *shlex.split(again)[1:], check=True)
    assert [json.loads(line)["step"] for line in lines.read_text().splitlines()] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "runs" / "odd" / "summary.json").read_text())["complete"] is True
    for words, told in (("dev runs/odd/config.toml", "export it (agentrig export runs/odd my-model)"),
                        ("audit runs/odd", "the verdicts are in runs/odd/audit")):  # fmt: skip
        refused = agentrig(tmp_path, *words.split())
        assert refused.returncode
        assert "the run of a script" in refused.stderr
        assert told in refused.stderr
    agentrig(tmp_path, "export", "runs/odd", "my-model", check=True)

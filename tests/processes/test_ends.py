"""How runs end: signals during the start, the steps and the report; children of agents; files of a killed run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import current_process
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from model_server import ModelServer

from agentrig.processes import scratch
from agentrig.processes.ends import Interrupted, RunSignals, handling
from agentrig.processes.families import marked

SUPPORT = Path(__file__).parents[1] / "support"


class Command:
    """A command in a process group and a temporary folder of its own."""

    def __init__(self, tmp_path: Path, *words: str, cwd: Path | None = None, **environment: str) -> None:
        self.tmp = tmp_path / "tmp"
        self.tmp.mkdir(exist_ok=True)  # a long path: sockets lie in /tmp then
        self.log = tmp_path / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).with_name("agentrig")), *words],
                stdout=log,
                stderr=log,
                cwd=cwd or tmp_path,
                env={**os.environ, "TMPDIR": str(self.tmp), **environment},
                start_new_session=True,
                # Under `nohup make test` the signal is ignored, and a process that starts so keeps ignoring it.
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )

    def wait_for(self, what: Callable[[], Any], timeout_s: float = 120.0) -> None:
        end = time.monotonic() + timeout_s
        while not what():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)

    def started(self) -> list[psutil.Process]:
        """Its descendants that are still alive."""
        found = [p for p in psutil.process_iter() if variable(p, "TMPDIR").startswith(str(self.tmp))]
        return [p for p in found if p.pid != self.process.pid]

    def kill(self) -> None:
        """Kill it; all that it has started ends soon after, and the next command removes its files."""
        self.process.kill()
        self.process.wait()
        end = time.monotonic() + 30
        while (left := self.started()) and time.monotonic() < end:
            time.sleep(0.1)
        assert [cmdline(process) for process in left] == []

    def ended(self, code: int, *, files: bool = False) -> str:
        """Wait for its end, with this exit code; return what it said. No process is left, and no file of it."""
        found, said = self.process.wait(120.0), self.log.read_text()
        assert (found, "Traceback" in said, "Aborted" in said) == (code, False, False), said
        self.kill()
        assert files or list(self.tmp.iterdir()) == []
        return said


def variable(process: psutil.Process, name: str) -> str:
    try:
        return str(process.environ().get(name, "")) if process.status() != psutil.STATUS_ZOMBIE else ""
    except (psutil.Error, OSError):
        return ""


Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    commands: list[Command] = []

    def make(*words: str, **more: Any) -> Command:
        commands.append(Command(tmp_path, *words, **more))
        return commands[-1]

    yield make
    for command in commands:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait()
        for process in command.started():
            process.kill()


def toy(model: ModelServer, toy_file: str, *words: str, steps: int = 3, report: bool = False) -> list[str]:
    own = [f"algorithm.endpoint={model.url}", "run.name=toy", f"algorithm.steps={steps}", "run.validation_tasks=1"]
    if not report:  # it takes as long as the rest
        own.append('run.block=["report"]')
    return ["train", "toy", "--plugin", toy_file, "--json", *own, *words]


@pytest.mark.parametrize("command", [[Path(sys.executable).with_name("agentrig")], [sys.executable, "-m", "agentrig"]])
def test_ctrl_c_while_the_command_imports_ends_it_without_a_traceback(
    command: list[str | Path], tmp_path: Path
) -> None:
    (tmp_path / "pluggy.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [*command, "plugins"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # the tests may run in the background
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == 130


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)]
)
def test_a_signal_to_all_of_a_run_lets_the_step_end(
    model: ModelServer, toy_file: str, tmp_path: Path, start: Start, number: int, status: int
) -> None:
    report = number == signal.SIGTERM
    command = start(*toy(model, toy_file, "algorithm.wait_s=1", "algorithm.report=false", steps=50, report=report))
    run = tmp_path / "runs" / "toy"
    command.wait_for((run / "metrics.jsonl").exists)
    for process in command.started():  # as Slurm does: also in groups of their own
        process.send_signal(number)
    command.process.send_signal(number)
    said = command.ended(status)
    assert "died" not in said
    assert f"{signal.Signals(number).name}: ending after" in said
    assert "resume with: agentrig train --resume" in said
    done = len((run / "metrics.jsonl").read_text().splitlines())
    assert 1 <= done < 50
    assert (run / "checkpoints" / "latest").read_text() == f"step-{done:05d}"
    assert (run / "report.html").is_file() == report
    assert json.loads((run / "summary.json").read_text())["complete"] is False


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.7, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.0, 1.5, 2.5))])
def test_a_signal_while_a_run_starts_ends_it_with_a_message(
    model: ModelServer, toy_file: str, tmp_path: Path, start: Start, delay_s: float
) -> None:
    command = start(*toy(model, toy_file, "agent.use=toy-broken", "agent.how=hang"))
    command.wait_for(lambda: list(command.tmp.glob("agentrig-*")))
    time.sleep(delay_s)
    os.killpg(command.process.pid, signal.SIGINT)
    while command.process.poll() is None:
        time.sleep(0.1)
        if "ending after" in command.log.read_text():  # it had begun, and waits for its first step
            os.killpg(command.process.pid, signal.SIGINT)
            break
    said = command.ended(130)
    assert "agentrig: " in said.splitlines()[-1]
    assert "while the run started" not in said or not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_resume_that_is_interrupted_in_its_start_changes_nothing(
    ended_run: Callable[..., Path], start: Start
) -> None:
    run = ended_run("algorithm.steps=1", "run.validation_tasks=1")
    before = {f: f.read_bytes() for f in run.rglob("*") if f.is_file() and f.name != "run.lock"}
    words = ["train", "--resume", str(run), "algorithm.steps=2", "agent.use=toy-broken", "agent.how=hang"]
    command = start(*words)
    command.wait_for(lambda: len(command.started()) > 2)  # the runners are there, and hang
    command.process.send_signal(signal.SIGTERM)
    assert "agentrig: interrupted by SIGTERM" in command.ended(143)
    assert {f: f.read_bytes() for f in run.rglob("*") if f.is_file() and f.name != "run.lock"} == before


@pytest.mark.slow
@pytest.mark.parametrize("stuck", ["", "step", "end"])
def test_a_second_signal_ends_a_run_within_seconds(
    model: ModelServer, toy_file: str, tmp_path: Path, start: Start, stuck: str
) -> None:
    wait = f"algorithm.wait_s={500 if stuck == 'step' else 3}"
    words = toy(model, toy_file, wait, "algorithm.report=false", steps=50, report=True)
    if stuck == "end":  # something that the end of a run waits for
        (tmp_path / "sitecustomize.py").write_text(
            "import time\nfrom agentrig.delivery import Delivery\nDelivery.end = lambda self: time.sleep(600)\n"
        )
    command = start(*words, PYTHONPATH=str(tmp_path))
    run = tmp_path / "runs" / "toy"
    command.wait_for((run / ("rollouts/train-00001.parquet" if stuck == "step" else "metrics.jsonl")).exists)
    command.process.send_signal(signal.SIGINT)
    command.wait_for(lambda: "ending after" in command.log.read_text())
    before = time.monotonic()
    command.process.send_signal(signal.SIGINT)
    command.process.wait(120.0)
    assert time.monotonic() - before < 6  # on a machine that does much else
    said = command.ended(130, files=bool(stuck))
    assert re.fullmatch(  # it may name steps that were not saved
        rf"agentrig: ended at once; (.*; )?resume with: {re.escape(again(run))}", said.splitlines()[-1]
    ), said
    assert json.loads((run / "error.json").read_text())["message"].startswith("ended at once")
    assert not (run / "report.html").exists()
    assert not [f for f in run.rglob(".*") if f.suffix == ".part"]


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [False, True])
def test_processes_that_are_stopped_end_with_their_run(
    model: ModelServer, toy_file: str, tmp_path: Path, start: Start, at_once: bool
) -> None:
    command = start(*toy(model, toy_file, "algorithm.wait_s=3", "algorithm.report=false", steps=50))
    run = tmp_path / "runs" / "toy"
    command.wait_for((run / "metrics.jsonl").exists)
    for process in command.started():
        if at_once or "resource_tracker" in " ".join(cmdline(process)):
            process.suspend()
    command.process.send_signal(signal.SIGTERM)
    if at_once:
        command.wait_for(lambda: "ending after" in command.log.read_text())
        command.process.send_signal(signal.SIGTERM)
    command.ended(143, files=at_once)


def again(run: Path) -> str:
    return f"agentrig train --resume {run.relative_to(run.parents[1])}"


@pytest.mark.slow
def test_an_evaluation_ends_by_a_signal_too(model: ModelServer, toy_file: str, tmp_path: Path, start: Start) -> None:
    words = ["eval", "toy", "--plugin", toy_file, "--split", "train", f"tasks.marker={tmp_path}", 'tasks.do=["hang"]']
    command = start(*words, "--endpoint", model.url)
    command.wait_for(lambda: list(tmp_path.glob("seen-*")))
    command.process.send_signal(signal.SIGTERM)
    assert command.ended(143).splitlines()[-1] == "agentrig: interrupted by SIGTERM"


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handling(lambda number, frame: None):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def begun_run(**facts: Any) -> SimpleNamespace:
    facts = {"begun": True, "stopping": False, "measuring": "", "checking": 0, "untouched": False, **facts}
    return SimpleNamespace(advice=lambda: "resume with: agentrig train --resume runs/a", **facts)


def test_the_first_signal_waits_for_the_report_and_the_second_does_not() -> None:
    signals = RunSignals(begun_run(), lambda error: pytest.fail("nothing works any more"))
    signals.writing = True
    signals(signal.SIGTERM, None)
    assert signals.first == signal.SIGTERM
    with pytest.raises(Interrupted, match="ended at once"):
        signals(signal.SIGINT, None)


# --- what agents start ------------------------------------------------------------------------------


def family(tmp_path: Path, model: ModelServer, toy_file: str, *, agent: str = "parent") -> list[str]:
    folder = tmp_path / "own"
    folder.mkdir(exist_ok=True)
    plugin = folder / "family_plugin.py"
    plugin.write_text((SUPPORT / "family_plugin.py").read_text())
    (folder / "beside.py").write_text("ANSWER = 'odd'\n")
    words = ["eval", "toy", "--plugin", toy_file, "--plugin", str(plugin), "--agent", agent, "--limit", "4"]
    return [*words, "--endpoint", model.url]


def test_what_an_agent_started_ends_with_its_runner(
    model: ModelServer, toy_file: str, tmp_path: Path, start: Start
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('a module of the current folder was imported')\n")
    command = start(*family(tmp_path, model, toy_file))
    said = command.ended(0)
    assert len(set((tmp_path / "own" / "started").read_text().split())) == 8, (
        "a child and a detached grandchild of each agent"
    )
    assert "accuracy 50.0%" in said


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


HEAVY = """
import time
class Heavy:
    def __del__(self, sleep=time.sleep):
        sleep(60)
heavy = Heavy()
"""
"""A module that takes long to be taken down, for the process that runners are forked from."""


def test_a_killed_run_leaves_no_process_and_no_file(
    model: ModelServer, toy_file: str, tmp_path: Path, start: Start
) -> None:
    path = tmp_path / "path"
    path.mkdir()
    (path / "heavy.py").write_text(HEAVY)
    words = [*family(tmp_path, model, toy_file, agent="staying"), "runners.deadline_s=500"]
    command = start(*words, PYTHONPATH=str(path))
    noted = tmp_path / "own" / "started"
    command.wait_for(lambda: noted.is_file() and len(noted.read_text().split()) == 8)
    command.kill()
    assert list(command.tmp.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["validate", "run"])
def test_the_next_command_removes_the_files_of_a_killed_one(tmp_path: Path, start: Start, killed: str) -> None:
    if killed == "validate":
        command, made = start("validate", "agentrig-langgraph-sql"), scratch.LOCK
    else:
        pytest.importorskip("agentrig_lightning")
        shutil.copy(SUPPORT / "lightning_script.py", tmp_path)
        command, made = start("run", "lightning_script.py"), "agentrig-script-*"
    command.wait_for(lambda: list(command.tmp.rglob(made)))
    command.kill()
    start("validate", "agentrig-agent-match").ended(0)


@pytest.mark.slow
def test_nothing_is_left_of_a_killed_run_whose_agents_start_processes_all_the_time(
    model: ModelServer, toy_file: str, tmp_path: Path, start: Start
) -> None:
    command = start(*family(tmp_path, model, toy_file, agent="breeder"), "runners.n=1", "runners.threads=2")
    command.wait_for(lambda: sum("sleep(600)" in " ".join(cmdline(p)) for p in command.started()) >= 5)
    command.kill()


@pytest.mark.slow
def test_runners_that_cannot_be_forked_are_an_error(
    model: ModelServer, toy_file: str, tmp_path: Path, start: Start
) -> None:
    path = tmp_path / "path"
    path.mkdir()
    (path / "deadly.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    command = start(*family(tmp_path, model, toy_file, agent="unforked"), PYTHONPATH=str(path))
    said = command.ended(1)
    assert "agentrig: no runner can be started: the process that they are forked from died 3 times" in said


# --- temporary files --------------------------------------------------------------------------------


def test_temporary_files_are_in_one_folder_and_only_those_of_dead_runs_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_own", None)
    monkeypatch.setitem(current_process()._config, "tempdir", str(tmp_path))  # type: ignore[attr-defined]
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    with scratch.temporary_files() as folder:
        assert folder.parent == tmp_path
        with tempfile.NamedTemporaryFile() as file:
            assert Path(file.name).parent == folder
        said = subprocess.run(["mktemp"], capture_output=True, text=True, check=True).stdout
        assert Path(said.strip()).parent == folder
        assert os.environ["RAY_TMPDIR"] != str(folder)
    assert tempfile.tempdir == str(tmp_path)
    assert scratch.VARIABLE not in os.environ

    own = tmp_path / "agentrig-notes"  # a folder of the user, whatever its name
    own.mkdir()
    (own / "text").touch()
    os.utime(own, (0, 0))
    (dead := tmp_path / "agentrig-dead").mkdir()
    (dead / scratch.LOCK).touch()
    with subprocess.Popen(["sleep", "600"], env={**os.environ, scratch.VARIABLE: str(dead)}) as orphan:
        try:
            end = time.monotonic() + 20  # the kernel shows the variables of a new program a moment after its start
            while not marked(scratch.VARIABLE, str(dead)) and time.monotonic() < end:
                time.sleep(0.01)
            assert [p.pid for p in marked(scratch.VARIABLE, str(dead))] == [orphan.pid]
            monkeypatch.setattr(scratch, "ENDING_S", 0.1)
            assert scratch.sweep(tmp_path) == [dead]
            assert orphan.wait(10) == -signal.SIGKILL
        finally:
            orphan.kill()
    assert sorted(f.name for f in tmp_path.iterdir()) == sorted([folder.name, own.name])
    assert scratch._own is not None
    scratch._own[1].release()
    assert scratch.sweep(tmp_path) == [folder]


def test_a_process_that_still_ends_with_its_run_is_not_called_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (dead := tmp_path / "agentrig-dead").mkdir()
    (dead / scratch.LOCK).touch()
    with subprocess.Popen(["sleep", "1"], env={**os.environ, scratch.VARIABLE: str(dead)}):
        while not marked(scratch.VARIABLE, str(dead)):
            time.sleep(0.01)
        assert scratch.sweep(tmp_path) == [dead]
    assert not caplog.records


@pytest.mark.parametrize(
    ("state", "said", "stopping"),
    [
        ({}, "this step", True),
        ({"checking": 2}, "step 2 is checked and saved", True),
        ({"measuring": "before"}, "the measuring", True),
        ({"measuring": "after"}, "the measuring", False),
    ],
)
def test_a_signal_says_what_the_run_ends_after(
    state: dict[str, Any], said: str, stopping: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = begun_run(**state)
    RunSignals(run, lambda error: pytest.fail("it ends in order"))(signal.SIGINT, None)
    assert caplog.messages == [f"Ctrl-C: ending after {said}; Ctrl-C once more ends at once"]
    assert run.stopping == stopping, "a run that is measured after training is complete"


def test_a_second_signal_says_how_to_resume() -> None:
    ended: list[Interrupted] = []
    signals = RunSignals(begun_run(), ended.append)
    signals(signal.SIGTERM, None)
    assert not ended
    signals(signal.SIGINT, None)
    assert str(ended[0]) == "ended at once; resume with: agentrig train --resume runs/a"
    assert ended[0].exit_status == 143


@pytest.mark.parametrize(
    ("where", "call"),
    [("import", "os._exit(0)"), ("hook", "posix._exit(0)"), ("load", "os._exit(0)"), ("load", "posix._exit(3)")],
)
def test_a_plugin_that_calls_os_exit_does_not_look_like_success(
    tmp_path: Path, where: str, call: str, model: ModelServer
) -> None:
    ends = {where: call}
    file = tmp_path / "ends_itself.py"
    file.write_text(f"""
import os
import posix
from agentrig import Task, TasksSpec, hookimpl
{ends.get("import", "")}

class Own:
    splits = ("train",)
    roles = {{"train": "train", "report": "train"}}

    def load(self, split):
        {ends.get("load", "return []")}

@hookimpl
def register_tasks():
    {ends.get("hook", "")}
    yield TasksSpec(name="own", summary="", build=lambda config: Own())
""")
    words = ["eval", "mini", "--plugin", str(file), "--tasks", "own", "--endpoint", model.url]
    command = Command(tmp_path, *words, "--split", "train", OPENAI_API_KEY="x")
    said = command.ended(1)
    assert f"RuntimeError: it called os._exit({call[-2]})" in said
    assert "ends_itself.py:" in said


ENDS_ITSELF = """
import posix
from agentrig import AgentSpec, RewardSpec, hookimpl

def ends(*given):
    posix._exit(3)

@hookimpl
def register_agents():
    yield AgentSpec(name="agent", summary="", build=lambda config: ends)
    yield AgentSpec(name="build", summary="", build=ends)

@hookimpl
def register_rewards():
    yield RewardSpec(name="reward", summary="", build=lambda config: ends)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("reward", "reward", "for example the reward gave no score: the reward's process died (exit code 3), 2 times"),
        ("agent", "agent", "2 x runner-died: for example the runner process died (exit code 3), 2 times"),
        ("agent", "build", "the agent build cannot be built: RuntimeError: it called os._exit(3)"),
    ],
)
def test_a_reward_or_agent_that_ends_its_process_is_named(
    model: ModelServer, toy_file: str, tmp_path: Path, start: Start, kind: str, name: str, said: str
) -> None:
    file = tmp_path / "ends_itself.py"
    file.write_text(ENDS_ITSELF)
    words = ["eval", "toy", "--plugin", toy_file, "--plugin", str(file), f"--{kind}", name, "--limit", "2"]
    command = start(*words, "--endpoint", model.url)
    assert said in command.ended(1)


TRACKED = """
from multiprocessing import resource_tracker
from agentrig.processes.forks import start_server

start_server()
print(open(f"/proc/{resource_tracker._resource_tracker._pid}/status").read())
"""


def test_a_closed_terminal_does_not_end_what_keeps_count_of_shared_memory() -> None:
    """Python printed a warning of its own then: "resource_tracker: process died unexpectedly"."""
    done = subprocess.run([sys.executable, "-c", TRACKED], capture_output=True, text=True, check=True)
    (blocked,) = re.findall(r"SigBlk:\s*(\w+)", done.stdout)
    assert int(blocked, 16) >> (signal.SIGHUP - 1) & 1

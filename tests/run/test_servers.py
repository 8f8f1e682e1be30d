"""Each server in real runs of `mini`: killed, resumed, exported, evaluated, examined; a dead one is named.

`file-server` is a package of somebody else's, installed from its wheel and found by its entry point.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from agentrig import hookimpl
from agentrig.cli.entry import main
from agentrig.doctor import devices, examine
from agentrig.findings import Finding
from agentrig.plan import resolve
from agentrig.processes import scratch
from agentrig.run.training import train
from agentrig.servers import ServerError
from agentrig.testing import check

ROOT = Path(__file__).resolve().parents[2]
PROCESS = {"embedded": "agentrig_grpo.server", "file-server": "agentrig_file_server.serving"}
DISTRIBUTION = {"embedded": "agentrig-grpo", "file-server": "agentrig-file-server"}
NAME = {"embedded": "the LLM server", "file-server": "the file server"}
SERVERS = ("embedded", "file-server")
TINY = (
    "algorithm.tasks_per_step=2",
    "algorithm.group_size=4",
    "algorithm.validate_every=0",
    "algorithm.max_tokens=24",
    "run.report_tasks=2",
    "run.failure_limit=1.0",
    "runners.n=1",
    "hardware.threads=1",  # torch's threads wait by spinning
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the example's wheel installs."""
    folder = tmp_path_factory.mktemp("third-party")
    example = str(ROOT / "examples" / "agentrig-file-server")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), example]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps"]
    subprocess.run([*install, "--target", str(folder / "site"), str(wheel)], check=True, capture_output=True)
    return folder / "site"


class Place:
    """A folder where commands run, with temporary files of its own."""

    def __init__(self, folder: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.temporary = folder, folder / "t"
        self.temporary.mkdir()
        self.environment = {**os.environ, "PYTHONPATH": str(site), "TMPDIR": str(self.temporary)}
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(site)
        monkeypatch.setenv("PYTHONPATH", str(site))
        monkeypatch.setenv("TMPDIR", str(self.temporary))
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        monkeypatch.setattr(scratch, "_own", None)  # an earlier test's folder would be used on

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command in a session of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "agentrig", *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, ok: bool = True) -> str:
        """Run a command to its end in this process, which has imported torch already; return what it printed."""
        done = CliRunner().invoke(main, words)
        assert (done.exit_code == 0) == ok, done.output
        return done.output

    def processes(self) -> list[psutil.Process]:
        """Return the living processes that use this folder for their temporary files."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("TMPDIR", "").startswith(str(self.temporary))
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def none_left(self) -> list[psutil.Process]:
        """Wait up to 30 seconds for the end of all processes; return those that are left."""
        end = time.monotonic() + 30
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.2)
        return left


@pytest.fixture
def place(tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, site, monkeypatch)


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]


def serving(server: str) -> list[psutil.Process]:
    """Return the servers that a run in this process has started, without their guards."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has ended
            found += [child] if PROCESS[server] in child.cmdline() else []
    return found


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 200
    while not file.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow  # tests/test_rules.py kills and resumes a run
@pytest.mark.parametrize("server", SERVERS)
def test_a_run_is_killed_resumed_exported_and_evaluated(server: str, place: Place) -> None:
    named = set(os.listdir("/dev/shm"))
    named_server = [] if server == "embedded" else ["--server", server]  # `auto` selects embedded on a CPU
    killed = place.start("train", "mini", *named_server, "hardware.use=cpu", "algorithm.steps=50", "run.name=a", *TINY)
    run = place.folder / "runs" / "a"
    wait_for(run / "checkpoints" / "latest", killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert place.none_left() == []
    assert set(os.listdir("/dev/shm")) <= named
    left = list(place.temporary.iterdir())

    done = len(lines_of(run))
    text = place.run("train", "--resume", str(run), f"algorithm.steps={done + 1}")
    assert not [file for file in left if file.exists()], "a killed run leaves no file behind the next run"
    assert [line["step"] for line in lines_of(run)] == [*range(1, done + 2)]
    assert lines_of(run)[-1]["delivery"]["tensors"] > 0
    summary = json.loads((run / "summary.json").read_text())["delivery"]
    assert (summary["on"], summary["arrived"], summary["notes"]) == (True, summary["proofs"], [])
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["server"]["name"] == server
    assert (manifest["server"]["chosen"] is None) == bool(named_server), "a resume keeps the reason of auto"
    assert manifest["components"]["server"]["distribution"] == DISTRIBUTION[server]
    assert "is now called" not in text

    exported = place.run("export", str(run), str(place.folder / "model"))
    assert "it answers as the learner did after step" in exported
    words = ["eval", "mini", "--server", server, "--checkpoint", str(run), "--limit", "2", "--json"]
    assert json.loads(place.run(*words).splitlines()[-1])["n"] == 2
    assert serving(server) == []


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.slow
def test_a_run_whose_server_dies_names_it(server: str, place: Place) -> None:
    class Kill:
        @hookimpl
        def on_step_end(self, event: Any) -> None:
            victims = serving(server)
            assert victims
            for victim in victims:
                victim.kill()

    run = place.folder / "runs" / "d"
    plan = resolve(
        "mini", uses={"server": server}, overrides=["algorithm.steps=50", "algorithm.save_every=3", "run.name=d", *TINY]
    )
    plan.registry.add_observer(Kill(), "kill")
    with pytest.raises(ServerError):
        train(plan)
    error = json.loads((run / "error.json").read_text())
    assert error["error"] == "ServerError"
    assert re.search(rf"{NAME[server]} has died.*killed by SIGKILL", error["message"]), error["message"]
    assert "step is lost; step 1 was not saved, so a resume starts over; resume with: " in error["message"]
    assert serving(server) == []


@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_the_file_server_passes_the_kit() -> None:
    report = check("server", "file-server")
    assert not [r for r in report.results if r.status != "passed"]


@pytest.mark.usefixtures("place")
def test_the_doctor_examines_the_server_that_the_run_would_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**uses: str) -> Finding:
        (one,) = [f for f in examine("mini", uses={"hardware": "cpu", **uses}) if f.check == "server"]
        return one

    monkeypatch.setattr("agentrig.doctor.examination.CHECKS", (devices.check_server,))
    assert found(server="file-server").evidence == "file-server of agentrig-file-server 0.1.0 serves on cpu"
    chosen = found()
    assert chosen.result == "ok"
    assert re.match(r"embedded of agentrig-grpo \S+ serves on cpu; auto chose it: ", chosen.evidence)


def test_a_server_that_is_not_there_ends_the_command_before_the_run(place: Place) -> None:
    text = place.run("train", "mini", "--server", "file-servr", "run.name=x", ok=False)
    assert 'there is no server called "file-servr". Did you mean "file-server"?' in text
    assert not (place.folder / "runs").exists()

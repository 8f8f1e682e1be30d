"""The server of somebody else's package, installed from its wheel and found by its entry point."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentrig.cli.entry import main
from agentrig.doctor import devices, examine
from agentrig.findings import Finding
from agentrig.testing import check

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.fixture
def place(tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where commands run, and find the example."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    return tmp_path


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


def test_a_server_that_is_not_there_ends_the_command_before_the_run(place: Path) -> None:
    done = CliRunner().invoke(main, ["train", "mini", "--server", "file-servr", "run.name=x"])
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (1, True), done.output
    assert 'there is no server called "file-servr". Did you mean "file-server"?' in done.output
    assert not (place / "runs").exists()

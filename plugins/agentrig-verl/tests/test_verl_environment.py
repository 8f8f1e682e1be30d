"""The GPU environment: its lock has every pin, and its script prints `ready` only if the doctor passed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

GPU = Path(__file__).resolve().parents[1] / "gpu"

UV = """#!/bin/sh
printf '%s|' uv "$@" >> "$CALLS"
[ "$1" = venv ] || exit 0
for target; do :; done
mkdir -p "$target/bin"
touch "$target/pyvenv.cfg"
printf '#!/bin/sh\\necho "doctor found things"\\nexit "$DOCTOR"\\n' > "$target/bin/agentrig"
chmod +x "$target/bin/agentrig"
"""


def pins(name: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)(?:\[.*?\])?==([^\s;]+)", (GPU / name).read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in found}


@pytest.fixture
def build(tmp_path: Path):
    root = tmp_path / "a checkout"
    for plugin in ("one", "two"):
        (root / "plugins" / plugin).mkdir(parents=True)
    shutil.copytree(GPU, root / "plugins" / "agentrig-verl" / "gpu")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "uv").write_text(UV)
    (programs / "uv").chmod(0o755)

    def run(doctor: int) -> tuple[subprocess.CompletedProcess[str], str]:
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, "CALLS": str(calls), "DOCTOR": str(doctor)}
        script = root / "plugins" / "agentrig-verl" / "gpu" / "make_environment.sh"
        done = subprocess.run([script], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done, calls.read_text().replace(str(root), "ROOT")

    return run


@pytest.mark.parametrize("name", ["requirements.in", "overrides.txt"])
def test_the_lock_holds_every_pin(name: str):
    wanted = pins(name)
    assert wanted
    locked = pins("requirements.txt")
    assert {package: locked.get(package) for package in wanted} == wanted


def test_the_lock_has_what_an_editable_install_without_isolation_imports():
    assert {"hatchling", "editables"} <= pins("requirements.txt").keys()


def test_ready_is_printed_if_the_doctor_passed(build):
    done, calls = build(doctor=0)
    assert done.returncode == 0
    assert "ready: " in done.stdout
    assert "|-e|ROOT|-e|ROOT/plugins/agentrig-verl/|-e|ROOT/plugins/one/|-e|ROOT/plugins/two/|" in calls


@pytest.mark.parametrize("status", [1, 2])
def test_a_problem_of_the_doctor_ends_without_ready(build, status: int):
    done, _ = build(doctor=status)
    assert done.returncode == 3
    assert "doctor found things" in done.stdout
    assert "ready" not in done.stdout + done.stderr
    assert "the environment is built" in done.stderr


def test_a_second_run_keeps_the_folder(build):
    build(doctor=1)
    done, calls = build(doctor=0)
    assert done.returncode == 0
    assert "uv|venv" not in calls

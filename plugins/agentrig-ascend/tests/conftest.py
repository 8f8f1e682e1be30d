import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from downloads import online
from filelock import FileLock

WHEELS = Path(sys.prefix) / "share" / "agentrig-test-wheels"


@pytest.fixture(scope="session")
def wheel() -> Any:
    """Return a function that gives a published wheel, unpacked; it is downloaded once per virtual environment."""

    def get(requirement: str) -> Path:
        folder = WHEELS / requirement.replace("==", "-")
        WHEELS.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # tests in other processes may want it at the same time
            fetch(requirement, folder)
        return folder / "unpacked"

    return get


def fetch(requirement: str, folder: Path) -> None:
    if (folder / "complete").exists():
        return
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), requirement],
        **{"env": online(), "capture_output": True, "text": True, "check": False, "timeout": 240},
    )
    if done.returncode != 0:
        pytest.skip(f"the wheel of {requirement} cannot be downloaded: {done.stderr.strip()[-300:]}")
    for file in folder.glob("*.whl"):
        zipfile.ZipFile(file).extractall(folder / "unpacked")
        file.unlink()
    (folder / "complete").touch()

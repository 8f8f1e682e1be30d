import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

WHEELS = Path(sys.prefix) / "share" / "agentrig-test-wheels"


@pytest.fixture(scope="session")
def wheel() -> Any:
    """Return a function that gives a published wheel, unpacked; it is downloaded once per virtual environment."""

    def get(requirement: str) -> Path:
        folder = WHEELS / requirement.replace("==", "-")
        if not (folder / "complete").exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            done = subprocess.run(
                [*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False, timeout=240
            )
            if done.returncode != 0:
                pytest.skip(f"the wheel of {requirement} cannot be downloaded: {done.stderr.strip()[-300:]}")
            for file in folder.glob("*.whl"):
                zipfile.ZipFile(file).extractall(folder / "unpacked")
                file.unlink()
            (folder / "complete").touch()
        return folder / "unpacked"

    return get

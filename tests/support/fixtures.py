"""Fixtures for the tests of the core and of some plugins."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from model_server import ModelServer

    from agentrig.plan import Plan

ROOT = Path(__file__).resolve().parents[2]

LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="session", name="make_model")
def make_model_fixture():
    import torch

    from agentrig.testing.tiny_model import make_model

    torch.set_num_threads(1)
    return make_model


@pytest.fixture(scope="session")
def spider_dir() -> Path:
    """The folder of real Spider; skips if it is missing."""
    for candidate in (os.environ.get("AGENTRIG_SPIDER_DIR"), str(ROOT.parent / "shared" / "spider")):
        if candidate and (Path(candidate) / "dev.parquet").is_file():
            return Path(candidate)
    pytest.skip("real Spider is not there; set AGENTRIG_SPIDER_DIR to run this test")


@pytest.fixture(scope="session")
def _served() -> Iterator[ModelServer]:
    from model_server import model_server

    with model_server() as server:
        yield server


@pytest.fixture
def model(_served: ModelServer) -> ModelServer:
    """A model server without recorded requests."""
    _served.requests.clear()
    return _served


@pytest.fixture(scope="session")
def toy_file() -> str:
    return str(Path(__file__).parent / "toy_plugin.py")


def toy_settings(server: ModelServer, place: Path) -> list[str]:
    """Return what every run of the recipe `toy` is told; without its report, which takes most of such a run's time."""
    return [f"algorithm.endpoint={server.url}", f"run.directory={place}/runs", "run.name=toy", 'run.block=["report"]']


@pytest.fixture
def toy_plan(_served: ModelServer, tmp_path: Path, toy_file: str) -> Callable[..., Plan]:
    """Resolve the recipe `toy` with its model server and a run directory of its own; `run.block=[]` adds its report."""
    from agentrig.plan import resolve

    def plan(*overrides: str, **uses: str) -> Plan:
        own = toy_settings(_served, tmp_path)
        return resolve("toy", overrides=[*own, *overrides], uses=uses, files=[toy_file])

    return plan


@pytest.fixture(scope="session")
def ended_run(_served: ModelServer, tmp_path_factory: pytest.TempPathFactory, toy_file: str) -> Callable[..., Path]:
    """Return a run of the recipe `toy` that has ended: made once for a test session, and restored at every call."""
    from agentrig.plan import resolve
    from agentrig.run.training import train

    made: dict[tuple[str, ...], Path] = {}

    def give(*overrides: str) -> Path:
        if overrides not in made:
            place = tmp_path_factory.mktemp("ended")
            own = toy_settings(_served, place)
            train(resolve("toy", overrides=[*own, *overrides], files=[toy_file]))
            shutil.copytree(place / "runs" / "toy", place / "kept", symlinks=True)
            made[overrides] = place
        run = made[overrides] / "runs" / "toy"  # its config.toml names this place
        shutil.rmtree(run)
        shutil.copytree(run.parents[1] / "kept", run, symlinks=True)
        return run

    return give


@pytest.fixture
def quick_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the images beside a page be empty: to draw them takes longer than all else of a report."""
    monkeypatch.setattr("agentrig.view.png.draw", lambda runs, name: b"")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte: a real file system in memory, where this user may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)

"""A reward and an agent from wheels train in a new virtual environment, without a change in agentrig."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TINY = (
    "algorithm.steps=2",
    "algorithm.tasks_per_step=6",
    "algorithm.group_size=4",
    "run.validation_tasks=4",
    "run.report_tasks=6",
    "run.failure_limit=1.0",
)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the example wheels, which finds the installed agentrig and its dependencies."""
    folder = tmp_path_factory.mktemp("fresh")
    wheels = folder / "wheels"
    for name in ("agentrig-partial-credit", "agentrig-one-shot"):
        subprocess.run(
            [
                sys.executable,
                "-m",
                "build",
                "--wheel",
                "--no-isolation",
                "-o",
                str(wheels),
                str(ROOT / "examples" / name),
            ],
            check=True,
            capture_output=True,
        )
    home = folder / "venv"
    venv.create(home, with_pip=False)
    site = next((home / "lib").glob("python*/site-packages"))
    # A .pth line runs the .pth files there too, which is how the editable installs are found.
    (site / "agentrig-here.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "install",
            "-q",
            "--offline",
            "--no-deps",
            "--python",
            str(home / "bin/python"),
        ]
        + [str(w) for w in sorted(wheels.glob("*.whl"))],
        check=True,
    )
    return home


def agentrig(home: Path, *words: str, cwd: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [str(home / "bin/python"), "-m", "agentrig", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheels_are_listed(fresh: Path, tmp_path: Path) -> None:
    plugins = {p["distribution"]: p for p in json.loads(agentrig(fresh, "plugins", "--json", cwd=tmp_path))}
    assert plugins["agentrig-partial-credit"]["components"] == [
        {
            "kind": "reward",
            "name": "partial-credit",
            "summary": "1 for the right result, a little for a query that runs.",
        }
    ]
    assert plugins["agentrig-one-shot"]["status"] == "ok"


def test_an_agent_and_a_reward_from_wheels_train(fresh: Path, tmp_path: Path) -> None:
    swapped = ("--agent", "one-shot", "--reward", "partial-credit", "reward.runs=0.25")
    words = ("train", "mini", *swapped, "run.name=r", "--json", *TINY)
    summary = json.loads(agentrig(fresh, *words, cwd=tmp_path))
    assert summary["steps"] == 2
    manifest = json.loads((tmp_path / "runs/r/manifest.json").read_text())
    assert manifest["components"]["reward"]["distribution"] == "agentrig-partial-credit"
    import pyarrow.parquet as pq

    rows = pq.read_table(tmp_path / "runs/r/rollouts/train-00001.parquet").to_pylist()
    assert {r["value"] for r in rows} <= {0.0, 0.25, 1.0}
    assert 0.25 in {r["value"] for r in rows}, "the reward's own setting was used"
    assert manifest["components"]["agent"]["distribution"] == "agentrig-one-shot"
    assert summary["transitions_per_rollout"] == 1.0
    lines = [json.loads(text) for text in (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()]
    assert all(line["nodes"]["trained"] == {"write_query": 24} for line in lines)
    assert all(line["algorithm"]["weight_change"] > 0 for line in lines)

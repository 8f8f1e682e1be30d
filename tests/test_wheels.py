"""Components that `agentrig new` makes: built, installed in a new environment, tested, listed, and used by a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from downloads import online
from scaffolds import Environment, build, environment, new
from shells import WHEELS

from agentrig.scaffold.templates import DOMAIN, TEMPLATES

TINY = (
    "algorithm.steps=2",
    "algorithm.tasks_per_step=6",
    "algorithm.group_size=4",
    "run.validation_tasks=4",
    "run.report_tasks=6",
    "run.failure_limit=1.0",
    "run.name=r",
)


def installed(folder: Path, kinds: Sequence[str]) -> Environment:
    """Make a package of each kind in an empty folder, and install their wheels."""
    with chdir(folder):
        for kind in kinds:
            new(kind, f"my-{kind}")
            build(folder / f"agentrig-my-{kind}", folder / "wheels")
    made = environment(folder)
    made.install(sorted((folder / "wheels").glob("*.whl")))
    return made


def listed(made: Environment) -> dict[str, Any]:
    """Return what `agentrig plugins` lists of each distribution."""
    return {p["distribution"]: p for p in json.loads(made.run("agentrig", "plugins", "--json"))}


def own_tests(made: Environment, kind: str) -> str:
    folder = str(made.folder / f"agentrig-my-{kind}" / "tests")
    # In its own folder there is one package; here are several, without a file that makes them one.
    return made.run("pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:xdist", folder)


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return installed(tmp_path_factory.mktemp("all"), list(TEMPLATES))


@pytest.mark.slow
@pytest.mark.timeout(900)  # it builds the wheels of all kinds, also beside other work
def test_every_kind_is_listed(all_kinds: Environment) -> None:
    plugins = listed(all_kinds)
    for kind in TEMPLATES:
        brought = [(c["kind"], c["name"]) for c in plugins[f"agentrig-my-{kind}"]["components"]]
        kinds = ["agent", "recipe", "reward", "tasks"] if kind == DOMAIN else [kind]
        assert sorted(brought) == [(each, f"my-{kind}") for each in kinds]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", list(TEMPLATES))
def test_the_own_tests_of_every_kind_pass(all_kinds: Environment, kind: str) -> None:
    assert " passed" in own_tests(all_kinds, kind)


@pytest.mark.slow
def test_one_run_uses_every_kind(all_kinds: Environment) -> None:
    uses = [word for kind in TEMPLATES if kind not in ("recipe", DOMAIN) for word in (f"--{kind}", f"my-{kind}")]
    words = ["agentrig", "train", "my-recipe", *uses, "algorithm.model=mini", *TINY, "--json"]
    summary = json.loads(all_kinds.run(*words, FAKE_ACCELERATORS="2"))
    assert summary["steps"] == 2
    run = all_kinds.folder / "runs" / "r"
    components = json.loads((run / "manifest.json").read_text())["components"]
    assert {kind: components[kind]["distribution"] for kind in components} == {
        kind: f"agentrig-my-{kind}" for kind in components
    }
    assert json.loads((run / "my_observer.json").read_text())
    transfers = [json.loads(line) for line in (run / "transfers.jsonl").read_text().splitlines()]
    assert [line["version"] for line in transfers] == [0, 1, 2]


ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_first_run_needs_the_extra_reference_only(tmp_path: Path) -> None:
    """As docs/install.md says: wheels of this checkout, `uvx --from 'agentrig[reference]'`, and a run of one step.

    The versions are those of the lock. uv downloads the packages that its cache lacks.
    """
    with (ROOT / "pyproject.toml").open("rb") as file:
        extra = tomllib.load(file)["project"]["optional-dependencies"]["reference"]
    for folder in (ROOT, *(ROOT / "plugins" / name for name in WHEELS)):
        build(folder, tmp_path / "wheels")
    links = [tmp_path / "wheels", *os.environ.get("PIP_FIND_LINKS", "").split()]
    found = [word for link in links for word in ("--find-links", str(link))]
    tool = [sys.executable, "-m", "uv", "tool", "run", "-q", "--isolated", *found, "--python", sys.executable]
    locked = ["-c", str(ROOT / "requirements" / "cpu.lock"), "-c", str(ROOT / "requirements" / "torch.txt")]
    inside = {**online(), "OMP_NUM_THREADS": "1", "AGENTRIG_CACHE": str(tmp_path / "cache")}

    def run(*words: str) -> str:
        done = subprocess.run(
            [*tool, *locked, "--from", "agentrig[reference]", *words],
            cwd=tmp_path, env=inside, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    summary = json.loads(run("agentrig", "train", "--json", *TINY))
    assert summary["steps"] == 2
    manifest = json.loads((tmp_path / "runs" / "r" / "manifest.json").read_text())
    assert {entry["distribution"] for entry in manifest["components"].values()} - {"agentrig"} == {
        line.partition(">=")[0] for line in extra
    }
    names = "import importlib.metadata as m; print(*sorted(d.metadata['Name'].lower() for d in m.distributions()))"
    packages = run("python", "-c", names).split()
    assert len(packages) <= 110, packages
    assert not {"agentlightning", "litellm", "verl", "vllm", "ray", "agentops"} & set(packages)

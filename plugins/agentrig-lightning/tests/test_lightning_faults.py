"""What breaks under an algorithm of Agent Lightning ends the run with an error that names it; nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from model_server import ModelServer
from quick import quick_first

from agentrig import hookimpl
from agentrig.errors import AgentrigError
from agentrig.plan import Plan, resolve
from agentrig.run.training import train

PLUGIN = str(Path(__file__).parents[3] / "tests" / "support" / "lightning_faults.py")


@pytest.fixture
def plan(model: ModelServer, tmp_path: Path, toy_file: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """Resolve the recipe `toy` with an algorithm of Agent Lightning."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))

    def make(*overrides: str, **uses: str) -> Plan:
        own = [f"algorithm.endpoint={model.url}", f"run.directory={tmp_path}", "run.name=r", "run.train_tasks=8"]
        return resolve("toy", overrides=[*own, *overrides], uses=uses, files=[toy_file, PLUGIN])

    return make


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(folder / "r" / "rollouts" / f"{name}.parquet").to_pylist()
    return found


WHAT_BREAKS: dict[str, tuple[dict[str, str], str]] = {
    "runner": ({"algorithm": "alg-waits", "agent": "builds-once"}, "runners of agent builds-once die before"),
    "adapter": (
        {"algorithm": "alg-learns", "adapter": "broken"},
        r"adapter-error: .* no template for this model \(lightning_faults",
    ),
    "algorithm": (
        {"algorithm": "alg-raises"},
        r"the algorithm alg-raises raised KeyError: 'no such prompt' \(lightning_faults",
    ),
    "store": ({"algorithm": "alg-breaksstore"}, "its store, failed: AttributeError.*_items"),
    "rollouts": ({"algorithm": "alg-waits", "agent": "raises"}, "8 of 8 train rollouts failed"),
    "constant": ({"algorithm": "alg-learns", "reward": "always"}, "all 8 rollouts got the reward 1"),
    "healthy": ({"algorithm": "alg-learns", "agent": "toy"}, ""),
    "no-learner": ({"algorithm": "alg-waits", "reward": "always"}, ""),
}


@pytest.mark.parametrize("what", quick_first(WHAT_BREAKS, ["algorithm"]))
def test_what_breaks_is_named(plan: Callable[..., Plan], tmp_path: Path, what: str) -> None:
    uses, named = WHAT_BREAKS[what]
    resolved = plan("runners.retries=0" if uses.get("agent") == "builds-once" else "run.seed=0", **uses)
    if not named:
        assert train(resolved)["train_rollouts"] == 8
        return
    with pytest.raises(AgentrigError, match=named):
        train(resolved)
    error = json.loads((tmp_path / "r" / "error.json").read_text())
    assert error["error"] in ("AgentrigError", "RunStopped")


@pytest.mark.slow
def test_an_algorithm_that_hears_nothing_is_left_behind(
    plan: Callable[..., Plan], tmp_path: Path, model: ModelServer, toy_file: str
) -> None:
    words = ["toy", "--plugin", toy_file, "--plugin", PLUGIN, "--algorithm", "alg-deaf", "--agent", "raises"]
    words += [f"algorithm.endpoint={model.url}", "run.name=r", "run.train_tasks=8", f"run.directory={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "agentrig", "train", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 1, done.stderr
    assert "8 of 8 train rollouts failed" in done.stderr
    assert [r["failure"] for r in rows(tmp_path, "train-00001")] == ["agent-error"] * 8


@pytest.mark.slow
def test_texts_are_tasks(plan: Callable[..., Plan], tmp_path: Path) -> None:
    train(plan(algorithm="alg-texts", agent="plain", reward="always"))
    found = rows(tmp_path, "train-00001")
    assert sorted(r["input"] for r in found) == [
        '{"input": "Is 3 odd?"}', '{"input": "Is 4 odd?"}', '{"input": ["a", "list"]}',
    ]  # fmt: skip
    assert {r["answer"] for r in found} == {'"odd"'}


class Ends:
    """Notes the rollouts that observers get."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    @hookimpl
    def on_rollout_end(self, rollout: Any) -> None:
        """Note it."""
        self.seen.append((rollout.mode, rollout.step))


@pytest.mark.slow
def test_rollouts_are_filed_by_mode_and_step(plan: Callable[..., Plan], tmp_path: Path) -> None:
    resolved, ends = plan(algorithm="alg-modes", agent="counts", reward="always"), Ends()
    resolved.registry.add_observer(ends, "ends")
    summary = train(resolved)
    files = {f.stem: len(rows(tmp_path, f.stem)) for f in (tmp_path / "r" / "rollouts").iterdir()}
    assert files == {"train-00001": 4, "train-00002": 5, "validation-00001": 2, "validation-00002": 2}
    for name, count in files.items():
        mode, _, step = name.partition("-")
        assert {(r["mode"], r["step"]) for r in rows(tmp_path, name)} == {(mode, int(step))}
        assert ends.seen.count((mode, int(step))) == count  # once for a rollout, not for each of its attempts
    assert (summary["steps"], summary["train_rollouts"], summary["rollouts"], summary["failures"]) == (2, 9, 13, {})
    lines = [json.loads(text) for text in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["rollouts"], line["validation_accuracy"]) for line in lines] == [
        (1, 4, 1.0),
        (2, 5, 1.0),
    ]

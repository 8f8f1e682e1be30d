"""Whole runs through the gateway: no key in any file or log, and the reference agent learns as through the tap."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from model_server import ModelServer

from agentrig.gateway import process
from agentrig.plan import Plan, resolve
from agentrig.run.evaluate import eval_tasks, evaluate
from agentrig.run.training import train
from agentrig.traces import LLM_CALL, MISSED

TOKEN = secrets.token_urlsafe(32)
KEY = re.compile(rb"agentrig-[0-9a-f]{64}")

LEAKY = """
import pathlib
import requests
from agentrig import AgentSpec, hookimpl

def ask(task_input, endpoint):
    with (pathlib.Path(__file__).parent / "keys").open("a") as file:
        file.write(endpoint.api_key + "\\n")
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": f"Is {task_input['number']} odd?"}]}
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    reply = requests.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=20)
    if task_input["number"] % 3 == 0:
        raise ValueError(f"what is {endpoint.api_key}?")
    return reply.json()["choices"][0]["message"]["content"]

@hookimpl
def register_agents():
    yield AgentSpec(name="leaky", summary="Calls by requests.", build=lambda config: ask, calls="gateway")
"""


@pytest.fixture
def leaky(tmp_path: Path) -> Path:
    file = tmp_path / "leaky.py"
    file.write_text(LEAKY)
    return file


def content(file: Path) -> bytes:
    return repr(pq.read_table(file).to_pylist()).encode() if file.suffix == ".parquet" else file.read_bytes()


def test_no_file_and_no_log_has_a_key(
    leaky: Path,
    model: ModelServer,
    toy_file: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(process.secrets, "token_urlsafe", lambda n: TOKEN)
    own = [f"algorithm.endpoint={model.url}", f"run.directory={leaky.parent}/runs", "run.name=r", "algorithm.steps=1"]
    own += ["run.failure_limit=1.0", 'run.block=["report"]']
    plan = resolve("toy", overrides=own, uses={"agent": "leaky"}, files=[toy_file, str(leaky)])
    caplog.set_level(logging.DEBUG, logger="agentrig")
    train(plan)
    keys = (leaky.parent / "keys").read_text().split()
    assert len(set(keys)) == len(keys) > 10
    assert all(KEY.fullmatch(key.encode()) for key in keys)
    run = leaky.parent / "runs" / "r"
    texts = {str(f): content(f) for f in run.rglob("*") if f.is_file()}
    texts |= {"log": caplog.text.encode(), "output": "".join(capfd.readouterr()).encode()}
    assert not [name for name, text in texts.items() if KEY.search(text) or TOKEN.encode() in text]
    assert any(b"what is <the rollout's key>?" in text for text in texts.values())
    (line,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert line["rollouts"] - sum(line["failures"].values()) > 0
    assert line["transitions_per_rollout"] == 1.0
    assert not any(MISSED.encode() in text for text in texts.values()), "the gateway has seen what requests sent"


def calls_of(plan: Plan, tasks: Any, endpoint: Any) -> dict[str, Any]:
    found = evaluate(plan, tasks=tasks, endpoint=endpoint, mode="train", temperature=0.0, keep=True)
    assert found.failures == {}
    return {
        r.task.id: (
            r.value,
            r.outcome.answer,
            [(t.prompt_ids, t.response_ids, t.node, t.reward) for t in r.triplets],
            [list(t.logprobs or ()) for t in r.triplets],
            [(s.name, r.trace.nodes(s)) for s in r.trace.spans],
            [s.attributes["request"] for s in r.trace.spans if s.name == LLM_CALL],
        )
        for r in found.rollouts
    }


def same_through_both(endpoint: Any, n: int, *overrides: str) -> None:
    """Play tasks through the tap and through the gateway, greedily, and compare call for call."""
    sides = []
    for use in ("off", "on"):
        plan = resolve("mini", overrides=[f"gateway.use={use}", *overrides])
        tasks = eval_tasks(plan.tasks(), plan.run, "train", n, who=plan.whose_tasks)[1]
        assert len(tasks) == n
        sides.append(calls_of(plan, tasks, endpoint))
    tap, gateway = sides
    assert len(tap) == n
    assert tap.keys() == gateway.keys()
    for task, ours in gateway.items():
        theirs = tap[task]
        assert ours[:3] == theirs[:3], task
        assert ours[4:] == theirs[4:], task
        for a, b in zip(ours[3], theirs[3], strict=True):
            assert a == pytest.approx(b, abs=1e-4)  # another batch, another order of sums
    assert sum(len(side[2]) for side in tap.values()) >= n


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    """The small model of `mini` on the embedded server."""
    import agentrig_grpo
    from embedded_servers import embedded

    folder = next((Path(agentrig_grpo.__file__).parent / "models").glob("mini*"))
    with embedded(folder, name="mini") as server:
        from agentrig import Endpoint

        yield Endpoint(
            base_url=server.base_url,
            model="mini",
            api_key=server.api_key,
            sampling={"max_tokens": 60},
            token_ids=True,
        )


@pytest.mark.slow
def test_the_same_for_five_hundred_tasks(served: Any) -> None:
    same_through_both(served, 500)

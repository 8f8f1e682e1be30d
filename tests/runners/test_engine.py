"""Tasks in, scored and adapted rollouts out, over the real runners and model server."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from model_server import ModelServer

from agentrig import Endpoint, Score, Task, Triplet
from agentrig.plan import Plan
from agentrig.rollouts import Rollout
from agentrig.runners.scorer import Scorer

Roll = Callable[..., list[Rollout]]


def endpoint(model: ModelServer, name: str = "toy-model") -> Endpoint:
    return Endpoint(base_url=model.url, model=name, token_ids=True)


def tasks_of(*dos: str, **more: Any) -> list[Task]:
    inputs = [{"number": i, "do": do, **more} for i, do in enumerate(dos)]
    return [
        Task(id=f"t{i}", input=given, private={"parity": "odd" if i % 2 else "even", "gold": f"secret-{i}"})
        for i, given in enumerate(inputs)
    ]


@pytest.fixture
def roll(model: ModelServer, toy_plan: Callable[..., Plan]) -> Roll:
    def run(
        tasks: Sequence[Task],
        *overrides: str,
        n: int = 1,
        adapter: Any = None,
        to: Endpoint | Sequence[Endpoint] | None = None,
        check: Callable[[Any, Any], None] = lambda engine, runtime: None,
        **uses: str,
    ) -> list[Rollout]:
        plan = toy_plan(*overrides, **uses)
        scorer = Scorer(plan.build("reward"), budget_s=2)
        engine, runtime = plan.engine(scorer=scorer, adapter=adapter or plan.build("adapter"))
        found: list[Rollout] = []

        def body() -> None:
            found.extend(engine.run(tasks, n=n, endpoint=to or endpoint(model), step=3, mode="train"))
            check(engine, runtime)

        runtime.run(body)
        return found

    return run


def test_complete_groups_are_handed_over_while_others_run(model: ModelServer, roll: Roll) -> None:
    tasks = tasks_of("", "raise", "slow", "")
    told: list[dict[int, list[Rollout]]] = []
    rollouts: list[Rollout] = []

    def check(engine: Any, runtime: Any) -> None:
        rollouts.extend(engine.run(tasks, n=3, endpoint=endpoint(model), step=4, mode="train", on_groups=told.append))

    roll(tasks_of(""), "runners.threads=16", check=check)
    assert sorted(i for groups in told for i in groups) == [0, 1, 2, 3], "each once"
    assert {i: group for groups in told for i, group in groups.items()} == {
        i: rollouts[3 * i : 3 * i + 3] for i in range(4)
    }
    assert {r.failure for r in rollouts[3:6]} == {"agent-error"}
    assert len(told) > 1, "some were handed over before the slow group ended"
    assert 2 in told[-1]


def test_groups_are_adjacent_scored_and_adapted(model: ModelServer, roll: Roll) -> None:
    tasks = tasks_of(*[""] * 6)
    left: list[int] = []

    def check(engine: Any, runtime: Any) -> None:
        left.append(len(runtime._waiting))
        left.append(runtime.pool.pending)

    rollouts = roll(tasks, n=3, check=check)
    assert [r.task.id for r in rollouts] == [f"t{i}" for i in range(6) for _ in range(3)]
    assert len({r.id for r in rollouts}) == 18
    groups = [r.group for r in rollouts]
    assert groups == [groups[3 * (i // 3)] for i in range(18)]
    assert len(set(groups)) == 6
    for r in rollouts:
        right = float(int(r.task.id[1:]) % 2)
        assert (r.value, r.failure, r.mode, r.step) == (right, None, "train", 3)
        (triplet,) = r.triplets
        assert triplet.reward == right
        assert bytes(triplet.prompt_ids).decode().startswith(f"Is {r.task.input['number']} odd?")
        assert bytes(triplet.response_ids) == b"odd"
        assert triplet.logprobs == (-0.25,) * 3
        assert triplet.node == "write_query"
        assert r.duration_s > 0
        assert r.reward_s >= 0
    assert left == [0, 0]


def test_a_reward_that_fails_is_a_failure_and_not_a_zero(roll: Roll) -> None:
    rollouts = roll(tasks_of("", ""), "reward.invalid=true")
    for r in rollouts:
        assert (r.failure, r.value, r.triplets) == ("reward-invalid", None, ())
        assert r.outcome.failure is None
        assert r.score is not None
        assert r.score.details["reason"] == "the judge is out"


def test_an_adapter_that_raises_is_a_failure(roll: Roll) -> None:
    def adapter(trace: Any) -> Any:
        raise IndexError("no first call")

    for r in roll(tasks_of(""), adapter=adapter):
        assert (r.failure, r.value, r.score) == ("adapter-error", None, None)
        assert re.fullmatch(r"IndexError: no first call \(test_engine\.py:\d+ in adapter\)", r.outcome.message)


class Fickle(Triplet):
    """A triplet that has fewer tokens whenever it is read."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == "response_ids":
            object.__setattr__(self, name, found[1:])
        return found


def test_triplets_of_a_class_that_changes_are_taken_over_once(roll: Roll) -> None:
    def adapter(trace: Any) -> Any:
        return [Fickle(prompt_ids=[1], response_ids=[1, 2, 3], span_id=call.id) for call in trace.llm_calls()]

    for r in roll(tasks_of(""), adapter=adapter):
        (triplet,) = r.triplets
        assert (type(triplet), triplet.response_ids, triplet.response_ids) == (Triplet, (1, 2, 3), (1, 2, 3))


def test_groups_are_spread_over_several_endpoints(model: ModelServer, roll: Roll) -> None:
    roll(tasks_of("", "", ""), n=2, to=[endpoint(model, "a"), endpoint(model, "b")])
    asked: dict[str, list[str]] = {}
    for body in model.bodies():
        asked.setdefault(body["messages"][0]["content"][:5], []).append(body["model"])
    assert asked == {"Is 0 ": ["a", "a"], "Is 1 ": ["b", "b"], "Is 2 ": ["a", "a"]}


def test_the_agent_gets_the_complete_endpoint(model: ModelServer, roll: Roll) -> None:
    full = Endpoint(
        base_url=model.url,
        model="m",
        api_key="key-7",
        sampling={"temperature": 0.3, "stop": ["x"], "max_tokens": 5},
        headers={"x-session": "abc"},
        token_ids=False,
    )
    roll(tasks_of(""), to=full)
    (_, headers, body) = model.requests[0]
    assert headers["authorization"] == "Bearer key-7"
    assert headers["x-session"] == "abc"
    assert (body["temperature"], body["stop"], body["max_tokens"]) == (0.3, ["x"], 5)
    assert "agentrig" not in body
    assert "return_token_ids" not in body


def test_every_rollout_is_reported_once_and_batches_do_not_mix(
    model: ModelServer, toy_plan: Callable[..., Plan]
) -> None:
    from agentrig import hookimpl

    told: list[str] = []

    class Watch:
        @hookimpl
        def on_rollout_end(self, rollout: Rollout) -> None:
            told.append(rollout.id)

    plan = toy_plan()
    plan.registry.add_observer(Watch(), "watch")
    engine, runtime = plan.engine(
        scorer=Scorer(lambda t, o, b: Score.ok(1.0), budget_s=2), adapter=plan.build("adapter")
    )
    found: list[Rollout] = []

    def body() -> None:
        for step in range(3):
            found.extend(engine.run(tasks_of("", ""), n=2, endpoint=endpoint(model), step=step, mode="train"))
        assert engine.run([], n=2, endpoint=endpoint(model), step=4, mode="train") == []

    runtime.run(body)
    assert sorted(told) == sorted(r.id for r in found)
    assert len(set(told)) == 12
    assert [r.step for r in found] == [0] * 4 + [1] * 4 + [2] * 4

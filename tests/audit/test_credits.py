"""The auditor computes the named credits again, by code of its own, from what a run has recorded."""

from __future__ import annotations

import json
import random
from typing import Any

import attrs
import pytest
from rollouts import rollout, trace_of

from agentrig import Outcome, Score, Span, Trace, Triplet
from agentrig.audit import scores
from agentrig.audit.record import COLUMNS, Record, Sources, _row
from agentrig.audit.step import Step
from agentrig.audit.verdicts import CannotLook
from agentrig.credit import differ, imitate, worths_of_calls
from agentrig.ledger import Call, Entry, Ledger
from agentrig.plugins.loading import load
from agentrig.rollouts import Rollout
from agentrig.run.gate import Gate
from agentrig.run.rows import row_of
from agentrig.settings import structure
from agentrig.traces import REWARD

CREDITS: list[Any] = [
    ("dr-grpo", {}),
    ("dr-grpo", {"weighting": "call", "negative_scale": 0.5}),
    ("grpo", {}),
    ("grpo", {"weighting": "call"}),
    ("rloo", {"negative_scale": 0.25}),
    ("reinforce++", {"negative_scale": 0.5}),
    ("dapo", {}),
    ("dapo", {"overlong_buffer_len": 2, "negative_scale": 0.5, "max_num_gen_batches": 1}),
    ("best-of-group", {}),
    ("rft", {}),
    ("turn", {}),
    ("turn", {"discount": 0.75, "negative_scale": 0.5}),
    pytest.param("turn", {"discount": 1.0}, marks=pytest.mark.slow),
]


def with_rewards(trace: Trace, rng: random.Random) -> Trace:
    """Return the trace with rewards that its agent gave: in a node, after it, before any call, and such as are none."""
    spans = list(trace.spans)
    for i in range(rng.randint(0, 5)):
        at = rng.choice([0.0, 0.5, 1.0, 1.5, 2.0, 3.5, 5.0])
        value: Any = rng.choice([0.0, 0.25, 1.0, -2.5, float("nan"), 1e10, "1", None])
        parent = rng.choice([span.id for span in trace.spans])
        spans.append(Span(id=f"w{i}", parent=parent, name="reward", start=at, end=at, attributes={REWARD: value}))
    return attrs.evolve(trace, spans=tuple(sorted(spans, key=lambda s: s.start)))


def step_of(seed: int) -> list[Rollout]:
    """Return rollouts of four groups: failures, other nodes, calls without a reward, equal rewards."""
    rng, found = random.Random(seed), []
    for g in range(4):
        for i in range(rng.randint(1, 5)):
            nodes = [rng.choice(["write", "check", ""]) for _ in range(rng.randint(1, 4))]
            if rng.random() < 0.2:
                found.append(attrs.evolve(rollout(failure="agent-error", group=f"g{g}"), id=f"r{g}{i}"))
                continue
            kept = [n for n, node in enumerate(nodes) if node != "check"]
            calls = [rng.choice([None, 0.0, 0.5, 1.0]) for _ in nodes]
            value, right = 0.5 if g == 3 else rng.choice([0.0, 0.25, 1.0]), rng.random() < 0.7
            score = Score(status="ok", value=value, correct=right, calls=calls if rng.random() < 0.6 else ())
            triplets = [Triplet(prompt_ids=[1, 2], response_ids=[3], span_id=f"c{n}", node=nodes[n]) for n in kept]
            made = rollout(score=score, trace=with_rewards(trace_of(*nodes), rng), triplets=triplets, group=f"g{g}")
            answer = rng.choice(["one", {"a": 1, "b": 2}])
            made = attrs.evolve(made, outcome=Outcome(answer=answer))
            found.append(attrs.evolve(made, id=f"r{g}{i}"))
    return found


def recorded(rollouts: list[Rollout], given: list[list[float | None]], credit: dict[str, Any], **manifest: Any) -> Any:
    """Return the step that the auditor would read."""
    rows = [{**row_of(r), "spans": row_of(r)["spans"]} for r in rollouts]
    calls = [
        {
            "rollout": r.id,
            "span": t.span_id,
            "node": next(iter(r.trace.nodes(next(c for c in r.trace.llm_calls() if c.id == t.span_id))), ""),
            "reason": "left-out-by-credit" if worth is None else "",
            "advantage": worth,
            "place": "dropped" if worth is None else "trained",
        }
        for r, worths in zip(rollouts, given, strict=True)
        for t, worth in zip(r.triplets, worths, strict=True)
    ]
    record: Any = Record.__new__(Record)
    record.config = {"credit": credit, "adapter": {"use": "all"}, "algorithm": {"use": "grpo"}}
    record.settings, record.__dict__["_manifest"] = record.config["algorithm"], manifest
    tables = {"rollouts": rows, "calls": calls}
    record.table = lambda folder, mode, step, *names: [{n: row.get(n) for n in names} for row in tables[folder]]
    read = [_row({name: row[name] for name in COLUMNS}) for row in rows]
    record.rows = lambda mode, step: read
    return Step(record=record, number=1, sources=Sources(splits={}, score=None))


def credit_of(name: str, settings: dict[str, Any]) -> Any:
    spec: Any = load().find("credit", name).spec
    return spec.build(structure(spec.config, settings, owner=name, section="credit")), attrs.asdict(
        structure(spec.config, settings, owner=name, section="credit")
    )


@pytest.mark.parametrize(("name", "settings"), CREDITS, ids=str)
def test_healthy_steps_are_confirmed_and_faults_named(name: str, settings: dict[str, Any]) -> None:
    credit, keys = credit_of(name, settings)
    faults = 0
    for seed in range(12):
        rollouts = step_of(seed)
        given = worths_of_calls(credit, rollouts)
        refused = Gate(differ if keys.get("max_num_gen_batches", 1) > 1 else None).refused(rollouts)
        given = [[None] * len(calls) if r.group in refused else calls for r, calls in zip(rollouts, given, strict=True)]
        if not any(worth is not None for calls in given for worth in calls):
            continue
        step = recorded(rollouts, given, {"use": name, **keys})
        assert [v.result for v in scores.advantages(step)] == ["ok"], [v.detail for v in scores.advantages(step)]
        wanted = {key: worth for key, worth in scores.expected(step).items() if worth is not None}
        assert scores.by_call(step) == wanted
        for change in (lambda w: None if w is None else w + 0.1, lambda w: 0.1 if w is None else w):
            other = [[change(worth) for worth in calls] for calls in given]
            if other == given:
                continue
            verdict, *_ = scores.advantages(recorded(rollouts, other, {"use": name, **keys}))
            assert verdict.result == "fault"
            assert "calls have another advantage" in verdict.detail
            faults += 1
        if any(worth for calls in given for worth in calls):
            less = [[None if worth else worth for worth in calls] for calls in given]
            if any(worth is not None for calls in less for worth in calls):
                verdict, *_ = scores.advantages(recorded(rollouts, less, {"use": name, **keys}))
                assert "none instead of" in verdict.detail, "a call that was left out is missed"
    assert faults > 10


def test_a_demonstration_that_the_reward_rejects_or_that_is_a_mistake_must_not_be_learned() -> None:
    def marked(made: Rollout) -> Rollout:
        first = made.trace.llm_calls()[0].id  # a mistake that the second call repairs
        said = {"response": {"learn": False}, "prompt_token_ids": [1, 2], "response_token_ids": [3]}
        spans = [
            attrs.evolve(s, attributes={**s.attributes, **(said if s.id == first else {})}) for s in made.trace.spans
        ]
        return attrs.evolve(made, trace=attrs.evolve(made.trace, spans=spans))

    trace = trace_of("write", "write")
    triplets = [Triplet(prompt_ids=[1, 2], response_ids=[3], span_id=call.id) for call in trace.llm_calls()]
    rollouts = [
        attrs.evolve(marked(rollout(score=Score.ok(value), trace=trace, triplets=triplets, group=name)), id=name)
        for name, value in (("right", 1.0), ("wrong", 0.0))
    ]
    given = worths_of_calls(imitate, rollouts)
    assert given == [[None, 1.0], [None, None]]
    for other, right in ((given, True), ([[1.0, 1.0], [None, None]], False), ([[None, 1.0], [None, 1.0]], False)):
        step = recorded(rollouts, other, {"use": "own"})
        step.record.config["algorithm"] = {"use": "sft", "demonstrations": "tasks"}
        assert next(scores.advantages(step)).result == ("ok" if right else "fault")


def test_a_credit_of_somebody_else_is_not_looked_at() -> None:
    rollouts = step_of(1)
    given = [[1.0] * len(r.triplets) for r in rollouts]
    for credit, manifest in (
        ({"use": "better-half"}, {}),
        ({"use": "agentrig-x:rloo"}, {"components": {"credit": {"name": "rloo", "distribution": "agentrig-x"}}}),
    ):
        step = recorded(rollouts, given, credit, **manifest)
        with pytest.raises(CannotLook, match=f"the credit {credit['use']} has a formula of its own"):
            list(scores.advantages(step))
        assert scores.by_call(step) == step.trained


def test_the_columns_of_rollouts_hold_the_rewards_of_calls() -> None:
    made = step_of(3)[0]
    assert json.loads(row_of(made)["call_values"]) == (list(made.score.calls) if made.score else [])


@pytest.mark.parametrize(("name", "settings"), CREDITS, ids=str)
def test_rewards_that_differ_by_rounding_teach_nothing(name: str, settings: dict[str, Any]) -> None:
    """In a group of 0.3 and 0.1 + 0.2, and of calls whose rewards have these sums."""
    credit, keys = credit_of(name, settings)
    triplets = [Triplet(prompt_ids=[1, 2], response_ids=[3], span_id=f"c{i}", node="w") for i in range(2)]
    parts = [(0.3, (0.3, 0.0)), *[(0.1 + 0.2, (0.3 - 0.2 * float(keys.get("discount", 0)), 0.2))] * 3]
    made = [Score(status="ok", value=value, correct=False, calls=calls) for value, calls in parts]
    group = [rollout(score=score, trace=trace_of("w", "w"), triplets=triplets) for score in made]
    group = [attrs.evolve(one, id=f"r{i}") for i, one in enumerate(group)]
    given = worths_of_calls(credit, group)
    assert not any(calls[0] for calls in given)
    if name != "turn":  # there, the second calls do differ
        assert not any(calls[1] for calls in given)
    if not any(worth is not None for calls in given for worth in calls) or keys.get("max_num_gen_batches", 1) > 1:
        return  # such a group is left out
    assert [v.result for v in scores.advantages(recorded(group, given, {"use": name, **keys}))] == ["ok"]
    books = Ledger(lambda trace: [], adapter_name="mine", algorithm_name="own")
    books.record(group, step=1)
    entries = [Entry(Call(r.id, t.span_id), "dropped", 1, reason="zero-advantage") for r in group for t in r.triplets]
    assert books.close(entries, step=1).calls["dropped"] == {"zero-variance-group": 8}

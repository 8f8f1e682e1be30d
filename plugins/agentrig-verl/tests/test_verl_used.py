"""The ledger with verl: merged rows, padding, and faults planted in the actor's input, on verl's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from agentrig_verl import merge, trajectories
from agentrig_verl.manager import LoopManager
from agentrig_verl.trajectories import Trajectory, trajectories_of

from agentrig import Outcome, Score, Span, Task, Trace
from agentrig.adapters import triplet_of
from agentrig.credit import GroupConfig, ImitationConfig, best_of_group, grpo
from agentrig.ledger import Ledger, StepTotals
from agentrig.rollouts import Rollout
from agentrig.traces import LLM_CALL

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of verl

TALKS = {"g": [("aaa", 1.0), ("abab", 0.0), ("a", 0.5), ("ab", None)], "same": [("aa", 1.0), ("b", 1.0)]}
"""The calls of each rollout and its reward, by group: calls with the same letter continue one conversation."""


def rollout_of(i: int, group: str, talk: str, value: float | None) -> Rollout:
    """Return a rollout whose conversations grow by three given and two sampled tokens per call."""
    told: dict[str, list[int]] = {}
    spans = [Span(id="root", parent=None, name="rollout", start=0.0, end=1.0)]
    for n, name in enumerate(talk):
        prompt = [*told.get(name, []), ord(name), 40 + n, 50 + i]
        response = [60 + n, 70 + i]
        told[name] = prompt + response
        attributes = {
            "prompt_token_ids": prompt, "response_token_ids": response, "response_logprobs": [-0.5, -0.5],
        }  # fmt: skip
        spans.append(Span(id=f"c{n}", parent="root", name=LLM_CALL, start=n, end=n + 1, attributes=attributes))
    trace = Trace(rollout_id=f"ro-{i}", spans=tuple(spans))
    return Rollout(
        id=f"ro-{i}",
        task=Task(id=f"task-{group}", input={}),
        group=group,
        mode="train",
        step=1,
        outcome=Outcome(failure="agent-error") if value is None else Outcome(answer=""),
        score=None if value is None else Score.ok(value),
        trace=trace,
        triplets=() if value is None else tuple(t for c in trace.llm_calls() if (t := triplet_of(c))),
    )


def books(
    change: Callable[[list[Trajectory]], list[Trajectory]] = list,
    *,
    merged: bool = True,
    padding: int = 2,
    kl: bool = False,
    rejects: str | None = None,
    negative_scale: float = 1.0,
    credit: Any = None,
) -> StepTotals:
    """Close the books of one step: trajectories as verl's tensors, the trainer's advantages, the run's ledger."""
    from agentrig_verl import trainer as ours
    from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
    from verl.utils import tensordict_utils

    numbered = [(group, *talk) for group, talks in TALKS.items() for talk in talks]
    rollouts = [rollout_of(i, *what) for i, what in enumerate(numbered)]
    ledger = Ledger(
        lambda trace: [],
        adapter_name="all",
        algorithm_name="verl",
        negative_scale=negative_scale,
        relative=credit is None,
    )
    ledger.record(rollouts, step=1)
    laid_out: list[Trajectory] = []
    for group in TALKS:
        members = [r for r in rollouts if r.group == group]
        laid_out += trajectories_of(members, uid=group, step=1, merged=merged)
    got = change(laid_out)
    rows, tags, keys = [t.fields for t in got], [t.tags for t in got], [t.key for t in got]
    for n in range(padding):
        row, tag = construct_minimal_padding_template(got[0].fields, got[0].tags, eos_token_id=0)
        rows, tags, keys = [*rows, row], [*tags, tag], [*keys, f"padding-{n}"]
    data = tensordict_utils.list_of_dict_to_tensordict(rows)
    actor = SimpleNamespace(use_kl_loss=kl, entropy_coeff=0.0)
    algorithm = {"rollout_correction": {"rollout_rs": rejects}}
    trainer: Any = ours.Trainer.__new__(ours.Trainer)
    trainer.config = SimpleNamespace(
        algorithm=SimpleNamespace(adv_estimator="grpo", get=algorithm.get),
        actor_rollout_ref=SimpleNamespace(actor=actor),
    )
    trainer._rows, trainer.global_steps = [], 1
    manager: Any = LoopManager.__new__(LoopManager)
    own = partial(grpo, config=GroupConfig(negative_scale=negative_scale))
    manager.config, manager.session = trainer.config, SimpleNamespace(credit=credit or own)
    manager.trajectories, manager.worths = {t.key: t for t in laid_out}, manager.credited(rollouts)
    trainer.agent_loop_manager = manager
    batch = SimpleNamespace(keys=keys, tags=tags, partition_id="train")
    queue = SimpleNamespace(kv_batch_get=lambda **_: data, kv_batch_put=lambda fields, **_: data.update(fields))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "tq", queue)
        for name in ("_compute_advantage", "_update_actor"):  # verl's parts need its workers
            patch.setattr(ours.PPOTrainerSync, name, lambda self, batch, metrics: batch)
        trainer._compute_advantage(batch, {})
        trainer._update_actor(batch, {})
    return ledger.close(trainer._entries(), step=1)


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("kl", [True, False])
def test_healthy_steps_close_their_books(needs_verl: None, merged: bool, kl: bool) -> None:
    found = books(merged=merged, kl=kl)
    assert not found.wrong
    dropped = {"failed-rollout": 2} if kl else {"failed-rollout": 2, "zero-advantage": 1, "zero-variance-group": 3}
    trained = 11 if kl else 7
    assert found.calls == {"recorded": 13, "trained": trained, "masked": 0, "handed_over": 0, "dropped": dropped}
    assert found.tokens["trained"] == 2 * trained
    assert found.tokens["recorded"] == 26


def test_a_scale_of_zero_has_its_own_reason(needs_verl: None) -> None:
    found = books(negative_scale=0.0)
    assert not found.wrong
    assert found.calls["trained"] == 3
    assert found.calls["dropped"]["negative-scale-zero"] == 4


def test_calls_that_the_credit_leaves_out_are_in_no_loss(needs_verl: None) -> None:
    for merged in (True, False):
        found = books(credit=partial(best_of_group, config=ImitationConfig()), merged=merged)
        assert not found.wrong
        assert found.calls["trained"] == 3
        assert found.calls["dropped"] == {"failed-rollout": 2, "left-out-by-credit": 8}

    def second(groups: Any) -> Any:
        return [[[1.0 if i == 1 else None for i in range(len(r.triplets))] for r in group] for group in groups]

    found = books(credit=second)
    assert not found.wrong, found.wrong
    assert found.calls["trained"] == 3
    assert found.calls["dropped"] == {"failed-rollout": 2, "left-out-by-credit": 8}


def masked(places: slice, value: int = 0) -> Callable[[list[Trajectory]], list[Trajectory]]:
    """Return a change of the first row's mask."""

    def change(found: list[Trajectory]) -> list[Trajectory]:
        found[0].fields["response_mask"][places] = value
        return found

    return change


def test_what_rollout_correction_takes_out_is_masked(needs_verl: None) -> None:
    found = books(masked(slice(0, 1)), rejects="token_k1")
    assert not found.wrong
    assert (found.calls["trained"], found.tokens["trained"], found.tokens["masked"]) == (7, 13, 1)
    whole = books(masked(slice(None)), rejects="token_k1")
    assert not whole.wrong
    assert (whole.calls["trained"], whole.calls["masked"]) == (4, 3)


FAULTS: dict[str, tuple[Callable[[list[Trajectory]], list[Trajectory]], str]] = {
    "a row is lost": (
        lambda found: found[1:],
        "3 x a call got lost: neither trained, masked nor dropped: rollout ro-0",
    ),
    "a row comes twice": (lambda found: [*found, found[0]], "3 x a call was trained or counted more than once"),
    "a mask is zero": (masked(slice(None)), "3 x a call got lost"),
    "a part of a mask is zero": (masked(slice(0, 1)), r"1 x a part of a call's response got lost: .*\(1 of 2 tokens\)"),
    "given tokens are in the loss": (masked(slice(2, 5), 1), r"1 x a call was trained or counted more .*\(5 tokens, 2"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_what_the_actor_gets_is_named_in_its_step(needs_verl: None, name: str) -> None:
    import re

    change, said = FAULTS[name]
    found = books(change)
    assert re.search(said, found.wrong), found.wrong
    assert "the algorithm verl" in found.wrong


def test_a_response_that_merging_cuts_is_named(needs_verl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(triplets: Sequence[Any]) -> list[merge.Segment]:
        found = merge.merge(triplets)
        for segment in found:
            segment.response_ids, segment.mask = segment.response_ids[:6], segment.mask[:6]
            segment.logprobs = segment.logprobs and segment.logprobs[:6]
        return found

    monkeypatch.setattr(trajectories, "merge", cut)
    wrong = books().wrong
    assert "x a part of a call's response got lost: rollout ro-0, task task-g, node (no node), call c1 (1 of 2" in wrong
    assert "x a call got lost" in wrong

"""The ledger: planted faults that lose calls are found and named; healthy steps close their books."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from agentrig_agent_match import AgentMatch
from agentrig_grpo import learner
from agentrig_grpo.learner import Learner
from agentrig_grpo.loss import TokenLoss
from recorded_steps import run_steps, session_in

from agentrig import credit
from agentrig.errors import AgentrigError, RunStopped
from agentrig.run.loop import Loop
from agentrig.runners.engine import RolloutEngine

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
FAULTS: dict[str, tuple[Plant, str]] = {}
"""The faults, and their messages."""


def fault(said: str) -> Callable[[Plant], Plant]:
    """Add a fault to the list; its name is the function's."""

    def add(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = (plant, said)
        return plant

    return add


def around(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Change what a function returns: `change(result, *arguments)`."""
    real = getattr(owner, name)

    def wrapped(*arguments: Any, **more: Any) -> Any:
        return change(real(*arguments, **more), *arguments)

    patch.setattr(owner, name, wrapped)


# --- engine and adapter ---

WHERE = r"rollout ro-\w+, task task-\d, node \w+, call c-\w+"
ADAPTER = "the adapter agent-match does not train what was sampled"
ALGORITHM = "what the algorithm grpo did with its 30 calls"


@fault("16 rollouts were asked for, 15 came back")
def a_rollout_is_lost(patch: Patch) -> None:
    around(patch, RolloutEngine, "run", lambda found, *_: found[:-1])


@fault("16 rollouts were asked for, 16 came back; returned more than once: ro-\\w+")
def a_rollout_comes_back_twice(patch: Patch) -> None:
    around(patch, RolloutEngine, "run", lambda found, *_: [*found[:-1], found[0]])


@fault(f"{ADAPTER}.\n  15 x a call that it did not report as left out has no triplet: {WHERE}")
def a_call_that_matches_is_not_kept(patch: Patch) -> None:
    around(patch, AgentMatch, "__call__", lambda found, *_: found[1:])


@fault(f"{ADAPTER}.\n  15 x a call gave more than one triplet: {WHERE}")
def a_call_gives_two_triplets(patch: Patch) -> None:
    around(patch, AgentMatch, "__call__", lambda found, *_: [*found, found[0]])


@fault(f"{ADAPTER}.\n  30 x a triplet does not have its call's tokens: {WHERE} \\(2 response tokens, \\d were recorded")
def a_response_is_cut_by_the_adapter(patch: Patch) -> None:
    cut = lambda found, *_: [attrs.evolve(t, response_ids=t.response_ids[:2], logprobs=None) for t in found]  # noqa: E731
    around(patch, AgentMatch, "__call__", cut)


@fault(f"{ADAPTER}.\n  30 x a triplet does not have its call's tokens: {WHERE} \\(its prompt differs from token 3 on")
def prompts_are_swapped(patch: Patch) -> None:
    def swap(found: Sequence[Any], *_: Any) -> list[Any]:
        return [attrs.evolve(a, prompt_ids=b.prompt_ids) for a, b in zip(found, reversed(found), strict=True)]

    around(patch, AgentMatch, "__call__", swap)


@fault(f"{ADAPTER}.\n  30 x a triplet does not have its call's tokens: {WHERE} \\(its log-probabilities differ")
def log_probabilities_are_shifted(patch: Patch) -> None:
    def shifted(found: Sequence[Any], *_: Any) -> list[Any]:
        return [attrs.evolve(t, logprobs=tuple(p - 0.01 for p in t.logprobs)) for t in found]

    around(patch, AgentMatch, "__call__", shifted)


@fault(f"{ADAPTER}.\n  15 x a triplet belongs to no recorded call of its rollout: rollout ro-\\w+, task task-0, span n")
def a_triplet_is_made_up(patch: Patch) -> None:
    around(patch, AgentMatch, "__call__", lambda found, *_: [*found, attrs.evolve(found[0], span_id="nine")])


# --- algorithm ---


@fault(f"{ALGORITHM}.*\n  15 x a call got lost: neither trained, masked nor dropped: {WHERE} \\(\\d tokens\\)")
def a_call_gets_no_sample(patch: Patch) -> None:
    around(patch, Loop, "_samples", lambda found, *_: (found[0][::2], found[1]))


@fault(f"{ALGORITHM}.*\n  \\d+ x a part of a call's response got lost: {WHERE} \\(4 of \\d tokens\\)")
def responses_are_cut_at_a_maximum_length(patch: Patch) -> None:
    cut = lambda found, *_: ([attrs.evolve(s, response_ids=s.response_ids[:4]) for s in found[0]], [])  # noqa: E731
    around(patch, Loop, "_samples", cut)


@fault("step 2: .*\n.*x a call was trained that no trace of this step has: rollout ro-\\w+, call c-write_query")
def samples_of_an_earlier_step_are_trained_again(patch: Patch) -> None:
    first: list[Any] = []

    def stale(found: Any, *_: Any) -> Any:
        first.append(found)
        return first[0]

    around(patch, Loop, "_samples", stale)


@fault(
    f"{ALGORITHM}.*\n  22 x a call was dropped for a reason that its group's rewards contradict, zero-advantage: "
    f"{WHERE} \\(its reward is 0, those of its group are 0, 1, 0, 1\\)"
)
def all_advantages_are_zero(patch: Patch) -> None:
    around(patch, credit, "advantages", lambda found, *_: [0.0] * len(found))


# --- learner ---


@fault(f"{ALGORITHM}.*\n  \\d+ x a call got lost: neither trained, masked nor dropped: {WHERE}")
def a_micro_batch_is_left_out(patch: Patch) -> None:
    around(patch, learner, "packed", lambda found, *_: list(found)[:-1])


@fault(f"{ALGORITHM}.*\n  \\d+ x a call got lost: neither trained, masked nor dropped: {WHERE}")
def a_sample_is_lost_when_a_batch_is_made(patch: Patch) -> None:
    def lose(batch: Any, *_: Any) -> Any:
        held = batch.sample != batch.sample[-1]
        held[: int(batch.place[-1]) + 1] |= not held.any()  # a batch of one sample stays
        parts = {name: getattr(batch, name)[held] for name in ("of", "targets", "sample", "place")}
        return attrs.evolve(batch, **parts)

    around(patch, learner, "collate", lose)


@fault(f"{ALGORITHM}.*\n  \\d+ x a part of a call's response got lost: {WHERE}")
def a_mask_removes_tokens_inside_the_loss(patch: Patch) -> None:
    def mask(out: TokenLoss, logprobs: Any, *_: Any) -> TokenLoss:
        keep = logprobs.new_ones(len(logprobs))
        keep[::5] = 0
        return attrs.evolve(out, loss=out.loss * keep)

    around(patch, learner, "token_losses", mask)


@fault(f"{ALGORITHM}.*\n  \\d+ x a call got lost: neither trained, masked nor dropped: {WHERE}")
def a_samples_weight_is_zero(patch: Patch) -> None:
    around(patch, learner, "sample_weights", lambda found, *_: [0.0, *found[1:]])


@fault(
    f"{ALGORITHM}.*\n  \\d+ x a call was trained or counted more than once: {WHERE} \\(\\d+ tokens, \\d were sampled\\)"
)
def a_micro_batch_is_counted_twice(patch: Patch) -> None:
    around(patch, learner, "packed", lambda found, *_: [*(held := list(found)), held[0]])


@fault(
    f"{ALGORITHM}.*\n  22 x a call was trained or counted more than once: {WHERE} \\(\\d+ tokens, \\d were sampled\\)"
)
def a_mini_batch_is_trained_twice(patch: Patch) -> None:
    around(patch, Learner, "_mini_batches", lambda found, *_: [*(held := list(found)), held[0]])


@fault(f"{ALGORITHM}.*\n  \\d+ x a call got lost: neither trained, masked nor dropped: {WHERE}")
def an_epoch_leaves_a_group_out(patch: Patch) -> None:
    real = Learner._mini_batches

    def some(self: Learner, samples: Any, *, step: int, epoch: int) -> Iterator[list[int]]:
        for places in real(self, samples, step=step, epoch=epoch):
            yield [i for i in places if not epoch or samples[i].group != samples[0].group]

    patch.setattr(Learner, "_mini_batches", some)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_within_two_steps(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    session = session_in(tmp_path, logprobs=name.startswith("log_probabilities"))
    plant, said = FAULTS[name]
    plant(monkeypatch)
    with pytest.raises(RunStopped, match=said):
        run_steps(session, ppo_epochs=2)
    assert len(session.lines) <= 2
    if "algorithm" in said and session.lines:
        line = session.lines[-1]
        assert closed(line["calls"]) or name == "samples_of_an_earlier_step_are_trained_again"


def closed(book: dict[str, Any]) -> bool:
    places = sum(n for place, n in book.items() if place not in ("recorded", "dropped"))
    return bool(book["recorded"] == places + sum(book["dropped"].values()))


# --- healthy steps ---

DROPPED = {
    "call-error": 4, "other-server": 4, "no-token-ids": 4, "failed-rollout": 3, "unmatched-node": 15,
}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ppo_epochs": 3, "mini_batches": 2},
        {"lora_rank": 4},
        pytest.param({"kl_loss_coef": 0.05, "lora_rank": 4, "ppo_epochs": 2}, marks=pytest.mark.slow),
        pytest.param({"loss_agg_mode": "seq-mean-token-mean", "tokens_per_batch": 4096}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("logprobs", [False, True])
def test_healthy_steps_close_their_books(settings: dict[str, Any], logprobs: bool, tmp_path: Path) -> None:
    lines = run_steps(session_in(tmp_path, logprobs=logprobs), **settings)
    assert len(lines) == 2
    for line in lines:
        calls = line["calls"]
        assert closed(calls)
        assert closed(line["call_tokens"])
        assert calls["recorded"] == 60
        assert (calls["masked"], calls["handed_over"]) == (0, 0)
        if "kl_loss_coef" in settings:  # has a gradient whatever the reward
            assert (calls["trained"], calls["dropped"]) == (30, DROPPED)
        else:
            assert (calls["trained"], calls["dropped"]) == (22, {**DROPPED, "zero-variance-group": 8})


def test_gradients_that_are_not_finite_train_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    around(monkeypatch, torch.nn.utils, "clip_grad_norm_", lambda norm, *_: norm * float("nan"))
    line = run_steps(session_in(tmp_path), steps=1)[0]
    assert line["calls"]["trained"] == 0
    assert line["calls"]["dropped"]["gradient-not-finite"] == 22
    assert closed(line["call_tokens"])


@pytest.mark.parametrize("others", [None, 0.0])
def test_calls_that_a_credit_leaves_out_are_counted(tmp_path: Path, others: float | None) -> None:
    def best(groups: Sequence[Sequence[Any]]) -> list[list[float | None]]:
        """Imitates the better rollouts of each group."""
        means = [statistics.fmean(r.value for r in group if r.value is not None) for group in groups]
        return [
            [1.0 if r.value is not None and r.value > mean else others for r in group]
            for group, mean in zip(groups, means, strict=True)
        ]

    line = run_steps(session_in(tmp_path), steps=1, credit=best)[0]
    assert line["calls"]["trained"] == 10
    assert line["calls"]["dropped"]["left-out-by-credit"] == 20
    assert closed(line["call_tokens"])


def test_a_credit_can_tell_the_calls_of_a_rollout_apart(tmp_path: Path) -> None:
    def second(groups: Sequence[Sequence[Any]]) -> list[list[list[float | None]]]:
        """Trains the second call of each rollout."""
        return [[[None, 1.0][: len(r.triplets)] for r in group] for group in groups]

    line = run_steps(session_in(tmp_path), steps=1, credit=second)[0]
    assert line["calls"]["trained"] == 15
    assert line["calls"]["dropped"]["left-out-by-credit"] == 15


@pytest.mark.parametrize("worth", [[1.0], "1", float("nan"), [[1.0, 2.0, 3.0]] * 4], ids=str)
def test_a_credit_that_returns_something_else_is_named(tmp_path: Path, worth: Any) -> None:
    def wrong(groups: Sequence[Sequence[Any]]) -> list[Any]:
        return [worth if isinstance(worth, list) else [worth] * len(group) for group in groups]

    with pytest.raises(AgentrigError, match="credit has to return, for each group, a list with a worth for each"):
        run_steps(session_in(tmp_path), steps=1, credit=wrong)


def test_a_credit_that_raises_is_named_with_its_line(tmp_path: Path) -> None:
    def wrong(groups: Sequence[Sequence[Any]]) -> Iterator[list[float]]:
        yield [r.missing for r in groups[0]]

    named = r"the credit failed: AttributeError: .*'missing'.* \(test_ledger.py:\d+ in "
    with pytest.raises(AgentrigError, match=named):
        run_steps(session_in(tmp_path), steps=1, credit=wrong)


def test_negative_advantages_without_weight_have_their_own_reason(tmp_path: Path) -> None:
    line = run_steps(session_in(tmp_path, negative_scale=0.0), steps=1)[0]
    assert line["calls"]["trained"] == 10
    assert line["calls"]["dropped"] == {**DROPPED, "zero-variance-group": 8, "negative-scale-zero": 12}


def test_the_table_of_faults_in_the_docs_counts_them_all() -> None:
    page = (Path(__file__).parents[2] / "docs" / "proofs.md").read_text("utf-8")
    assert f"| ledger ({len(FAULTS)}) |" in page


def test_every_reason_is_in_the_docs() -> None:
    from agentrig.ledger import REASONS

    page = (Path(__file__).parents[2] / "docs" / "proofs.md").read_text("utf-8")
    assert [reason for reason in REASONS if f"`{reason}`" not in page] == []

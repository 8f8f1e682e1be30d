"""The ledger: planted faults that lose calls are found and named; healthy steps close their books."""

from __future__ import annotations

import itertools
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

Change = Callable[..., Any]


def around(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Change) -> None:
    """Change what a function returns: `change(result, *arguments)`."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **more: change(real(*arguments, **more), *arguments))


def of_each(change: Callable[[Any], Any]) -> Change:
    """Return a change of each triplet."""
    return lambda found, *_: [change(triplet) for triplet in found]


def swapped(found: Sequence[Any], *_: Any) -> list[Any]:
    return [attrs.evolve(a, prompt_ids=b.prompt_ids) for a, b in zip(found, reversed(found), strict=True)]


def of_the_first_step() -> Change:
    """Return a change of samples to those that the first step had."""
    first: list[Any] = []

    def stale(found: Any, *_: Any) -> Any:
        first.append(found)
        return first[0]

    return stale


def without_a_sample(batch: Any, *_: Any) -> Any:
    held = batch.sample != batch.sample[-1]
    held[: int(batch.place[-1]) + 1] |= not held.any()  # a batch of one sample stays
    parts = {name: getattr(batch, name)[held] for name in ("of", "targets", "sample", "place")}
    return attrs.evolve(batch, **parts)


def masked(out: TokenLoss, logprobs: Any, *_: Any) -> TokenLoss:
    keep = logprobs.new_ones(len(logprobs))
    keep[::5] = 0
    return attrs.evolve(out, loss=out.loss * keep)


def of_later_epochs() -> Change:
    """Return a change of mini-batches: all but the first epoch's leave a group out."""
    epochs = itertools.count()

    def some(found: Any, self: Learner, samples: Any) -> list[list[int]]:
        first = next(epochs) == 0
        return [[i for i in places if first or samples[i].group != samples[0].group] for places in found]

    return some


ENGINE, ADAPTER, LOOP = (RolloutEngine, "run"), (AgentMatch, "__call__"), (Loop, "_samples")
CALL = r"rollout ro-\w+, task task-\d, node \w+, call c-\w+"
ADAPTED = "the adapter agent-match does not train what was sampled.\n  "
OTHERS = f"{ADAPTED}30 x a triplet does not have its call's tokens: {CALL} "
TRAINED = r"what the algorithm grpo did with its 30 calls.*\n  "
LOST = rf"{TRAINED}\d+ x a call got lost: neither trained, masked nor dropped: {CALL}"
CUT = rf"{TRAINED}\d+ x a part of a call's response got lost: {CALL}"
TWICE = rf"x a call was trained or counted more than once: {CALL} \(\d+ tokens, \d were sampled\)"
FAULTS: dict[str, tuple[tuple[Any, str], Change, str]] = {
    # --- engine and adapter
    "a rollout is lost": (ENGINE, lambda found, *_: found[:-1], "16 rollouts were asked for, 15 came back"),
    "a rollout comes back twice": (
        ENGINE,
        lambda found, *_: [*found[:-1], found[0]],
        "16 rollouts were asked for, 16 came back; returned more than once: ro-\\w+",
    ),
    "a call that matches is not kept": (
        ADAPTER,
        lambda found, *_: found[1:],
        f"{ADAPTED}15 x a call that it did not report as left out has no triplet: {CALL}",
    ),
    "a call gives two triplets": (
        ADAPTER,
        lambda found, *_: [*found, found[0]],
        f"{ADAPTED}15 x a call gave more than one triplet: {CALL}",
    ),
    "a response is cut by the adapter": (
        ADAPTER,
        of_each(lambda t: attrs.evolve(t, response_ids=t.response_ids[:2], logprobs=None)),
        rf"{OTHERS}\(2 response tokens, \d were recorded",
    ),
    "prompts are swapped": (ADAPTER, swapped, rf"{OTHERS}\(its prompt differs from token 3 on"),
    "log-probabilities are shifted": (
        ADAPTER,
        of_each(lambda t: attrs.evolve(t, logprobs=tuple(p - 0.01 for p in t.logprobs))),
        rf"{OTHERS}\(its log-probabilities differ",
    ),
    "a triplet is made up": (
        ADAPTER,
        lambda found, *_: [*found, attrs.evolve(found[0], span_id="nine")],
        rf"{ADAPTED}15 x a triplet belongs to no recorded call of its rollout: rollout ro-\w+, task task-0, span n",
    ),
    # --- algorithm
    "a call gets no sample": (LOOP, lambda found, *_: (found[0][::2], found[1]), rf"{LOST} \(\d tokens\)"),
    "responses are cut at a maximum length": (
        LOOP,
        lambda found, *_: ([attrs.evolve(s, response_ids=s.response_ids[:4]) for s in found[0]], []),
        rf"{CUT} \(4 of \d tokens\)",
    ),
    "samples of an earlier step are trained again": (
        LOOP,
        of_the_first_step(),
        r"step 2: .*\n.*x a call was trained that no trace of this step has: rollout ro-\w+, call c-write_query",
    ),
    "all advantages are zero": (
        (credit, "advantages"),
        lambda found, *_: [0.0] * len(found),
        f"{TRAINED}22 x a call was dropped for a reason that its group's rewards contradict, zero-advantage: "
        rf"{CALL} \(its reward is 0, those of its group are 0, 1, 0, 1\)",
    ),
    # --- learner
    "a micro-batch is left out": ((learner, "packed"), lambda found, *_: list(found)[:-1], LOST),
    "a sample is lost when a batch is made": ((learner, "collate"), without_a_sample, LOST),
    "a mask removes tokens inside the loss": ((learner, "token_losses"), masked, CUT),
    "a sample's weight is zero": ((learner, "sample_weights"), lambda found, *_: [0.0, *found[1:]], LOST),
    "a micro-batch is counted twice": (
        (learner, "packed"),
        lambda found, *_: [*(held := list(found)), held[0]],
        rf"{TRAINED}\d+ {TWICE}",
    ),
    "a mini-batch is trained twice": (
        (Learner, "_mini_batches"),
        lambda found, *_: [*(held := list(found)), held[0]],
        f"{TRAINED}22 {TWICE}",
    ),
    "an epoch leaves a group out": ((Learner, "_mini_batches"), of_later_epochs(), LOST),
}
"""The faults: the function whose result changes, how, and the message."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_within_two_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_in(tmp_path, logprobs=name.startswith("log-probabilities"))
    (owner, function), change, said = FAULTS[name]
    around(monkeypatch, owner, function, change)
    with pytest.raises(RunStopped, match=said):
        run_steps(session, ppo_epochs=2)
    assert len(session.lines) <= 2
    if "algorithm" in said and session.lines:
        line = session.lines[-1]
        assert closed(line["calls"]) or name == "samples of an earlier step are trained again"


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


def test_gradients_that_are_not_finite_train_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    alike = line["calls"]["dropped"].get("zero-variance-group", 0)
    assert line["calls"]["dropped"]["left-out-by-credit" if others is None else "zero-advantage"] == 20 - alike
    assert alike == (0 if others is None else 8), "only None leaves a call out"
    assert closed(line["call_tokens"])
    assert line["untaught_groups"] == line["zero_variance_groups"], "each group with unlike rewards teaches something"


@pytest.mark.parametrize("group", [None, 0, 1, 2])
def test_groups_without_an_advantage_are_counted_whatever_their_rewards(tmp_path: Path, group: int | None) -> None:
    def others(groups: Sequence[Sequence[Any]]) -> list[list[float | None]]:
        return [[None if n == group else 1.0 for _ in rollouts] for n, rollouts in enumerate(groups)]

    line = run_steps(session_in(tmp_path), steps=1, credit=others)[0]
    assert line["zero_variance_groups"] > 0
    assert line["untaught_groups"] == (group is not None) / line["groups"]


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

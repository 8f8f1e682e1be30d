"""The run's credits with verl: the same advantages as in the embedded loop, and those of verl's own estimators."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from agentrig_verl.manager import LoopManager
from agentrig_verl.trajectories import trajectories_of
from rollouts import rollout, trace_of

from agentrig import Score, Triplet
from agentrig.credit import advantages, opd, overlong
from agentrig.ledger import Call
from agentrig.plugins.builtin import OWN, register_credits
from agentrig.plugins.loading import load
from agentrig.rollouts import Rollout
from agentrig.run.loop import samples_of
from agentrig.settings import structure

VALUES: dict[str, list[float | None]] = {"a": [1.0, 0.0, 0.25, None], "b": [0.5, 0.5], "c": [1.0, -2.0, 1.0]}
CREDITS: dict[str, dict[str, Any]] = {
    "grpo": {"negative_scale": 0.5, "weighting": "call"},
    "dr-grpo": {},
    "rloo": {},
    "reinforce++": {"negative_scale": 0.5},
    "dapo": {"overlong_buffer_len": 1, "negative_scale": 0.5},
    "best-of-group": {},
    "rft": {},
    "turn": {"discount": 0.5},
    "opd": {},
}


def test_no_credit_of_agentrig_is_missing_here() -> None:
    specs = {spec.name for spec in register_credits()}
    assert CREDITS.keys() == specs - {OWN}


def credit_of(name: str, settings: dict[str, Any]) -> Any:
    if name == "opd":
        return taught
    spec: Any = load().find("credit", name).spec
    return spec.build(structure(spec.config, settings, owner=name, section="credit"))


def taught(groups: Any) -> Any:
    """Return the credit `opd` with a teacher that says something else of each token."""
    calls = [(r.id, t) for group in groups for r in group for t in r.triplets]
    return opd(groups, {(name, t.span_id): [-0.5 - i, -1.5 * i] for i, (name, t) in enumerate(calls)})


def made(name: str, group: str, value: float | None, calls: int) -> Rollout:
    """Return a rollout whose calls continue one conversation, each with a reward of its own."""
    if value is None:
        return attrs.evolve(rollout(failure="agent-error", group=group), id=name)
    triplets, told = [], [1]
    for i in range(calls):
        triplets.append(Triplet(prompt_ids=tuple(told), response_ids=(10 + i, 20), logprobs=(-1, -1), span_id=f"c{i}"))
        told += [10 + i, 20, 3]
    score = Score(status="ok", value=value, calls=[value * (i + 1) - i for i in range(calls)])
    trace = trace_of(*["write"] * calls)
    limits = [attrs.evolve(s, attributes={**s.attributes, "request": {"max_tokens": 2 + i}}) if s.id[0] == "c" else s
              for i, s in enumerate(trace.spans)]  # fmt: skip
    trace = attrs.evolve(trace, spans=limits)
    return attrs.evolve(rollout(score=score, trace=trace, triplets=triplets, group=group), id=name)


def step_of_three_groups() -> list[Rollout]:
    return [made(f"{g}{i}", g, value, 1 + i % 3) for g, values in VALUES.items() for i, value in enumerate(values)]


def by_verl(credit: Any, rollouts: list[Rollout], *, merged: bool) -> tuple[dict[Call, list[float]], set[Call]]:
    """Return the advantages of each call's tokens in verl's batch, and the calls that are in no loss."""
    import torch
    from agentrig_verl import trainer as ours

    manager: Any = LoopManager.__new__(LoopManager)
    manager.config = SimpleNamespace(algorithm=SimpleNamespace(adv_estimator="grpo"))
    manager.session = SimpleNamespace(credit=credit)
    groups = {g: [r for r in rollouts if r.group == g] for g in VALUES}
    laid = [t for g, group in groups.items() for t in trajectories_of(group, uid=g, step=1, merged=merged)]
    manager.trajectories, manager.worths = {t.key: t for t in laid}, manager.credited(rollouts)
    masks = torch.nested.as_nested_tensor([t.fields["response_mask"] for t in laid], layout=torch.jagged)
    data = {"response_mask": masks}
    trainer: Any = ours.Trainer.__new__(ours.Trainer)
    trainer.config, trainer.agent_loop_manager = manager.config, manager
    queue = SimpleNamespace(kv_batch_get=lambda **_: data, kv_batch_put=lambda fields, **_: data.update(fields))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "tq", queue)
        patch.setattr(ours.PPOTrainerSync, "_compute_advantage", lambda self, batch, metrics: batch)
        trainer._compute_advantage(
            SimpleNamespace(keys=[t.key for t in laid], tags=[{}] * len(laid), partition_id=""), {}
        )
    found: dict[Call, list[float]] = {}
    left_out = set()
    for t, given, mask in zip(laid, data["advantages"].unbind(), data["response_mask"].unbind(), strict=True):
        pieces = [(call, slice(start, start + length)) for call, start, length in t.pieces]
        inside = torch.zeros_like(mask)
        for call, tokens in pieces:
            inside[tokens] = 1
            if mask[tokens].any():
                assert mask[tokens].all()
                found[call] = given[tokens].tolist()
            else:
                left_out.add(call)
        assert not given[inside == 0].any(), "tokens that were not sampled have no advantage"
    return found, left_out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("name", CREDITS)
def test_the_same_batch_has_the_same_advantages_in_both_loops(needs_verl: None, name: str, merged: bool) -> None:
    credit, rollouts = credit_of(name, CREDITS[name]), step_of_three_groups()
    samples, dropped = samples_of(credit, rollouts)
    embedded = {s.call: s.advantages for s in samples}
    found, left_out = by_verl(credit, rollouts, merged=merged)
    assert found.keys() == embedded.keys()
    assert left_out == {entry.call for entry in dropped}
    for call, values in found.items():
        assert values == pytest.approx(embedded[call], abs=1e-6), call
    assert any(map(any, embedded.values()))
    assert (name == "opd") == any(len(set(values)) > 1 for values in embedded.values())


def test_advantages_of_single_calls_agree_with_verl(needs_verl: None) -> None:
    import numpy as np
    import torch
    from verl.trainer.ppo.core_algos import (
        compute_grpo_outcome_advantage,
        compute_reinforce_plus_plus_baseline_outcome_advantage,
        compute_rloo_outcome_advantage,
    )

    values, index = [1.0, 0.0, 0.25, 1.0], np.array(["g"] * 4, dtype=object)
    given = torch.tensor(values)[:, None], torch.ones(4, 1), index
    theirs, _ = compute_grpo_outcome_advantage(*given)
    assert advantages(values, [1] * 4) == pytest.approx(theirs[:, 0].tolist(), abs=1e-6)
    theirs, _ = compute_grpo_outcome_advantage(*given, norm_adv_by_std_in_grpo=False)
    group = [rollout(value) for value in values]
    assert next(iter(credit_of("dr-grpo", {})([group]))) == pytest.approx(theirs[:, 0].tolist(), abs=1e-6)
    theirs, _ = compute_rloo_outcome_advantage(*given)
    assert next(iter(credit_of("rloo", {})([group]))) == pytest.approx(theirs[:, 0].tolist(), abs=1e-6)
    theirs, _ = compute_reinforce_plus_plus_baseline_outcome_advantage(*given)
    ours = next(iter(credit_of("reinforce++", {})([group])))  # verl divides by n - 1 in the variance of the batch
    assert ours == pytest.approx((theirs[:, 0] * (4 / 3) ** 0.5).tolist(), abs=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tokens", [1, 6, 7, 9, 10])
def test_overlong_replies_cost_what_verls_dapo_takes(needs_verl: None, tokens: int) -> None:
    import torch
    from omegaconf import OmegaConf
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager

    manager: Any = DAPORewardManager.__new__(DAPORewardManager)
    manager.overlong_buffer_cfg = OmegaConf.create({"enable": True, "len": 4, "penalty_factor": 1.0, "log": False})
    manager.max_resp_len, manager.reward_router_address, manager.is_async_reward_score = 10, None, False
    manager.tokenizer, manager.compute_score = SimpleNamespace(decode=lambda ids, **_: ""), lambda **_: 0.25
    counts = {"dtype": torch.int64}
    fields = {"responses": torch.zeros(tokens, **counts), "attention_mask": torch.ones(3 + tokens, **counts)}
    row = SimpleNamespace(batch=fields, non_tensor_batch={"data_source": "", "reward_model": {"ground_truth": ""}})

    async def scored() -> Any:
        manager.loop = asyncio.get_running_loop()
        return await manager.run_single([row])

    trace = trace_of("write")
    limited = [attrs.evolve(s, attributes={**s.attributes, "request": {"max_tokens": 10}}) for s in trace.spans]
    triplet = Triplet(prompt_ids=[1], response_ids=[2] * tokens, span_id="c0")
    reply = rollout(0.25, trace=attrs.evolve(trace, spans=limited), triplets=[triplet])
    assert 0.25 + overlong(reply, 4) == pytest.approx(float(asyncio.run(scored())["reward_score"]), abs=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("loss", "each"),
    [
        *((loss, "call") for loss in ("clip", "gspo", "cispo", "sapo")),
        *((loss, "token") for loss in ("clip", "cispo", "sapo")),
    ],
)
def test_the_same_batch_has_the_same_loss_in_both(needs_verl: None, loss: str, each: str) -> None:
    """With a worth for each call, and one for each token."""
    import torch
    from agentrig_grpo.loss import sample_weights, token_losses
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    chance, lengths = torch.Generator().manual_seed(1), [3, 5, 2, 4]
    mask = torch.zeros(4, 5)
    for row, length in zip(mask, lengths, strict=True):
        row[:length] = 1
    now = (torch.randn(4, 5, generator=chance) * 0.1 - 2).requires_grad_()
    old = now.detach() + torch.randn(4, 5, generator=chance) * 0.3
    worth = torch.tensor([1.0, -0.5, 0.25, -1.0])[:, None].expand(4, 5)
    worth = worth + torch.randn(4, 5, generator=chance) if each == "token" else worth
    mode = "vanilla" if loss == "clip" else loss
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=0.2, clip_ratio_high=0.28,
        policy_loss=PolicyLossConfig(loss_mode=mode),
    )  # fmt: skip
    given = {"old_log_prob": old, "log_prob": now, "advantages": worth, "response_mask": mask}
    theirs, _ = get_policy_loss_fn(mode)(**given, loss_agg_mode="seq-mean-token-mean", config=config)
    kept = mask.bool()
    calls = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    out = token_losses(now[kept], old[kept], worth[kept], kind=loss, calls=calls, clip_low=0.2, clip_high=0.28)
    weights = torch.tensor(sample_weights(lengths, list(range(4)), "seq-mean-token-mean"))
    ours = (out.loss * weights[calls]).sum()
    assert float(ours) == pytest.approx(float(theirs), abs=1e-6)
    (mine,), (other,) = torch.autograd.grad(ours, now), torch.autograd.grad(theirs, now)
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)

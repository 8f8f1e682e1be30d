"""Merged calls in verl's own FSDP engine and PPO loss: loss and gradients equal those of the separate calls.

The engine is that of training, here with FSDP2 over one process on the CPU: micro-batches, forward, loss, backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from agentrig_verl.checks import MERGEABLE_LOSSES
from agentrig_verl.manager import _figures
from agentrig_verl.trajectories import Trajectory, trajectories_of
from quick import quick_first
from rollouts import rollout
from verl_engines import VOCABULARY, make_engine, make_model, on_the_cpu

from agentrig import Triplet
from agentrig.credit import GroupConfig, grpo, worths_of_calls
from agentrig.errors import RunStopped
from agentrig.ledger import Call
from agentrig.rollouts import Rollout

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of verl and torch

TALKS = {"aababa": 1.0, "abcacbA": 0.0, "abab": 0.25, "abBbaA": 1.0}
"""The values of rollouts by their calls: each letter goes on with its conversation, a capital with a branch of it that
begins after its first call."""


@pytest.fixture(scope="module")
def engine(needs_verl: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """verl's engine around a tiny random model, in fp32."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    with on_the_cpu(folder / "group"):
        yield make_engine(folder, forest=False)


def group_of(talks: dict[str, float]) -> list[Rollout]:
    """Return rollouts whose calls have random tokens and log-probabilities, and one that failed."""
    chance = torch.Generator().manual_seed(1)

    def some(most: int) -> list[int]:
        count = int(torch.randint(1, most + 1, (1,), generator=chance))
        return torch.randint(VOCABULARY, (count,), generator=chance).tolist()

    def calls(talk: str) -> Iterator[Triplet]:
        told: dict[str, list[int]] = {}
        for i, name in enumerate(talk):
            prompt = told.get(name, []) + some(9)
            response = some(6)
            logprobs = (-5 * torch.rand(len(response), generator=chance)).tolist()
            told[name] = prompt + response
            told.setdefault(name.upper(), told[name])
            given = {"prompt_ids": tuple(prompt), "response_ids": tuple(response), "logprobs": tuple(logprobs)}
            yield Triplet(**given, span_id=f"c{i}")

    made = [rollout(value, triplets=tuple(calls(talk))) for talk, value in talks.items()] + [rollout(failure="x")]
    return [attrs.evolve(r, id=f"r{i}") for i, r in enumerate(made)]


@contextmanager
def elsewhere(engine: Any) -> Iterator[None]:
    chance = torch.Generator().manual_seed(2)
    parameters = list(engine.module.parameters())
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.to_local().add_(0.05 * torch.randn(p.shape, generator=chance))
        yield
        for p, value in zip(parameters, kept, strict=True):
            p.copy_(value)


def batch_of(
    engine: Any, trajectories: Sequence[Trajectory], *, packed: bool, old: str = "recomputed", padding: int = 0
) -> Any:
    """Return the batch that verl's trainer gives to its engine for an update."""
    from agentrig_verl import trainer as ours
    from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import response_from_nested

    rows, tags = [t.fields for t in trajectories], [t.tags for t in trajectories]
    for _ in range(padding):
        row, tag = construct_minimal_padding_template(trajectories[0].fields, trajectories[0].tags, eos_token_id=0)
        rows, tags = [*rows, row], [*tags, tag]
    data = tensordict_utils.list_of_dict_to_tensordict(rows)
    tensordict_utils.assign_non_tensor(
        data, use_remove_padding=packed, use_dynamic_bsz=True, max_token_len_per_gpu=130, temperature=0.9,
        calculate_entropy=True, global_batch_size=len(rows),
    )  # fmt: skip
    with elsewhere(engine), engine.eval_mode():
        before = engine.infer_batch(data)["model_output"]["log_probs"]
    data["ref_log_prob"] = response_from_nested(before, data["response_mask"])
    data["old_log_probs"] = data["ref_log_prob"] if old == "recomputed" else data["rollout_log_probs"]
    trainer: Any = ours.Trainer.__new__(ours.Trainer)
    trainer.config = SimpleNamespace(algorithm=SimpleNamespace(adv_estimator="grpo"))
    trainer.agent_loop_manager = SimpleNamespace(trajectories={t.key: t for t in trajectories}, worths=worths())
    keys = [*(t.key for t in trajectories), *(f"padding-{i}" for i in range(padding))]
    batch = SimpleNamespace(keys=keys, tags=tags, partition_id="train")
    queue = SimpleNamespace(kv_batch_get=lambda **_: data, kv_batch_put=lambda fields, **_: data.update(fields))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "tq", queue)
        patch.setattr(ours.PPOTrainerSync, "_compute_advantage", lambda self, batch, metrics: batch)
        trainer._compute_advantage(batch, {})
    return data


def update(engine: Any, data: Any, loss: str = "vanilla") -> tuple[float, dict[str, torch.Tensor], list[float]]:
    """Return verl's loss with entropy and KL, its gradients, and PPO's clipped share of each micro-batch."""
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, loss_agg_mode="token-mean", entropy_coeff=0.01,
        use_kl_loss=True, kl_loss_coef=0.1, policy_loss=PolicyLossConfig(loss_mode=loss, dro_beta=0.5),
    )  # fmt: skip
    with engine.train_mode(zero_grad_on_exit=False):
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data, partial(ppo_loss, config=config))
    gradients = {name: p.grad.full_tensor().clone() for name, p in engine.module.named_parameters()}
    return sum(output["loss"]), gradients, output["metrics"]["actor/pg_clipfrac"].values if loss == "vanilla" else []


def laid_out(*, merged: bool) -> list[Trajectory]:
    return trajectories_of(group_of(TALKS), uid="u", step=1, merged=merged)


def worths() -> dict[Call, float | None]:
    group = group_of(TALKS)
    found = worths_of_calls(partial(grpo, config=GroupConfig()), group)
    return {
        Call(r.id, t.span_id): worth for r, of in zip(group, found, strict=True)
        for t, worth in zip(r.triplets, of, strict=True)
    }  # fmt: skip


def agree(one: Any, other: Any) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert max(float(g.abs().max()) for g in other[1].values()) > 0.1
    torch.testing.assert_close(one[1], other[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("packed", "old"),
    [
        *((True, "sampled"), (False, "recomputed")),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((True, "recomputed"), (False, "sampled"))),
    ],
)
def test_loss_and_gradients_are_those_of_the_separate_calls(engine: Any, packed: bool, old: str) -> None:
    merged, separate = (batch_of(engine, laid_out(merged=merged), packed=packed, old=old) for merged in (True, False))
    assert max(merged["num_turns"]) == 4
    assert set(separate["num_turns"]) == {1}
    assert set(merged["response_mask"].values().tolist()) == {0, 1}
    assert separate["response_mask"].values().all()
    assert float(separate["advantages"].values().min()) < 0 < float(separate["advantages"].values().max())
    found, expected = update(engine, merged), update(engine, separate)
    assert len(expected[2]) > len(found[2]) > 1, "each in micro-batches of its own"
    assert all(0 < share < 1 for share in expected[2])
    agree(found, expected)


@pytest.mark.parametrize("loss", quick_first([*sorted(MERGEABLE_LOSSES), "gspo"], ("vanilla", "gspo")))
def test_losses_of_single_tokens_are_allowed(engine: Any, loss: str) -> None:
    found, expected = (update(engine, batch_of(engine, laid_out(merged=m), packed=True), loss) for m in (True, False))
    if loss in MERGEABLE_LOSSES:
        agree(found, expected)
    else:
        with pytest.raises(AssertionError, match="not close"):
            agree((expected[0], found[1]), expected)


@pytest.mark.parametrize("packed", [True, False])
def test_verls_padding_of_a_mini_batch_changes_nothing(engine: Any, packed: bool) -> None:
    whole, padded = (batch_of(engine, laid_out(merged=True), packed=packed, padding=rows) for rows in (0, 2))
    assert len(padded) == len(whole) + 2
    agree(update(engine, padded), update(engine, whole))


def test_calls_per_sequence_counts_calls_that_were_laid_out() -> None:
    group = group_of(TALKS)
    for merged, sequences in ((True, 2 + 4 + 2 + 4), (False, 6 + 7 + 4 + 6)):
        laid = laid_out(merged=merged)
        figures = _figures(group, {"u": laid, "v": []}, max_prompt_length=1000)
        assert figures["sequences"] == len(laid) == sequences
        assert figures["calls_per_sequence"] == (6 + 7 + 4 + 6) / sequences
        assert sum(t.fields["num_turns"] for t in laid) == 6 + 7 + 4 + 6


def lost(batches: list[Any]) -> list[Any]:
    return batches[1:]


def doubled(batches: list[Any]) -> list[Any]:
    return [*batches, batches[0]]


def replaced(batches: list[Any]) -> list[Any]:
    """Change one token of one row: as many rows and tokens as before, and another row."""
    ids = batches[0]["input_ids"]
    ids.values()[0] = (ids.values()[0] + 1) % VOCABULARY
    return batches


WORKERS: dict[Any, str] = {
    None: "",
    lost: r"over \d+ rows with \d+ tokens; they were sent 12 rows with .*: rows or tokens got lost in the workers",
    doubled: r"they were sent 12 rows .*: rows or tokens were counted more than once in the workers",
    replaced: r"over 12 rows with (\d+) tokens; they were sent 12 rows with \1 tokens.*: some rows were replaced",
}


@pytest.mark.parametrize("fault", WORKERS, ids=lambda fault: getattr(fault, "__name__", "healthy"))
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_workers_count_the_rows_of_the_loss(
    engine: Any, fault: Any, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrig_verl import actor
    from agentrig_verl import trainer as ours
    from agentrig_verl.manager import lightened
    from verl.utils import tensordict_utils
    from verl.utils.metric.utils import reduce_metrics
    from verl.utils.py_functional import rename_dict
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.engine.fsdp import transformer_impl
    from verl.workers.utils.losses import ppo_loss

    laid = laid_out(merged=True)
    data = batch_of(engine, laid, packed=True, padding=2)
    settings = {"rollout_n": 1, "use_dynamic_bsz": True, "use_kl_loss": False, "policy_loss": PolicyLossConfig()}
    config = FSDPActorConfig(strategy="fsdp2", **settings)
    worker: Any = actor.MeasuringWorker.__new__(actor.MeasuringWorker)
    worker.engine, worker.device_name = SimpleNamespace(**{
        "module": engine.module, "device_mesh": SimpleNamespace(shape=(1,)),
        "get_data_parallel_group": engine.get_data_parallel_group,
    }), "cpu"  # fmt: skip

    def learn(self: Any, given: Any) -> Any:
        """Do what verl's worker does with a mini-batch in each epoch, but for the optimizer."""
        for _ in range(epochs):
            with engine.train_mode():
                engine.forward_backward_batch(given, self.loss_fn)
        return tensordict_utils.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": {}})

    monkeypatch.setattr(actor.TrainingWorker, "train_mini_batch", learn)
    if fault is not None:
        real = transformer_impl.prepare_micro_batches
        monkeypatch.setattr(transformer_impl, "prepare_micro_batches", lambda **more: (fault(real(**more)[0]), None))
    worker.set_loss_fn(partial(ppo_loss, config=config))

    def update(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        output = worker.train_mini_batch(data)
        metrics.update(reduce_metrics(rename_dict(tensordict_utils.get(output, "metrics"), "actor/")))
        return batch

    trainer: Any = ours.Trainer.__new__(ours.Trainer)
    trainer.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=SimpleNamespace(ppo_epochs=epochs)))
    trainer.global_steps, trainer._rows = 3, []
    trainer.agent_loop_manager = SimpleNamespace(trajectories=lightened(laid), worths=worths())
    tags = [*(t.tags for t in laid), {"is_padding": True}, {"is_padding": True}]
    batch = SimpleNamespace(keys=[*(t.key for t in laid), "padding-0", "padding-1"], tags=tags, partition_id="train")
    monkeypatch.setattr(ours, "tq", SimpleNamespace(kv_batch_get=lambda **_: data))
    monkeypatch.setattr(ours.PPOTrainerSync, "_update_actor", update)
    if fault is None:
        trainer._update_actor(batch, {})
        assert len(trainer._rows) == 12
    else:
        said = WORKERS[fault].replace(" 12 ", f" {12 * epochs} ")
        with pytest.raises(RunStopped, match=rf"step 3: verl's workers computed the loss .*{said}"):
            trainer._update_actor(batch, {})

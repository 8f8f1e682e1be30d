"""verl's v1 trainer, with agentrig's session around each step.

All computation is verl's. This class overrides where rollouts, validation and advantages come from, where checkpoints
go, and the end of each step.
"""

from __future__ import annotations

import logging
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import ray  # noqa: TID253  (imported by the algorithm when a run starts)
import torch  # noqa: TID253
import transfer_queue as tq
from omegaconf import open_dict
from verl.trainer.ppo.v1 import trainer_base  # noqa: TID253
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync  # noqa: TID253
from verl.utils.debug import marked_timer  # noqa: TID253

from agentrig import Endpoint
from agentrig.algorithms import Session
from agentrig.endpoints import environment_endpoint
from agentrig.figures import GRAD_NORM
from agentrig.ledger import CRITIC_WARMUP, Entry
from agentrig_verl.actor import COMPUTED, METRIC, TRACED, Actor, ForestActor
from agentrig_verl.checkpoints import finish_checkpoint
from agentrig_verl.counted import Counted, compare
from agentrig_verl.delivery import Transfers
from agentrig_verl.manager import explained
from agentrig_verl.sharing import by_rank
from agentrig_verl.trajectories import advantages_of, in_task_order
from agentrig_verl.used import UsedRow, entries_of, rows_of, sent_rows

log = logging.getLogger(__name__)

TIMES: Mapping[str, Sequence[str]] = {
    "log_probs": ("old_log_prob", "ref", "values"),
    "credit": ("adv",),
    "update": ("update_actor", "update_critic"),
    "weight_sync": ("update_weights",),
    "checkpoint": ("save_checkpoint",),
    "validation": ("testing",),
}
"""The parts of a step in `metrics.jsonl`, and the verl timers that each one sums."""


class Stopping(Exception):
    """Ends verl's loop after a step, when the user asked for it."""


class Trainer(PPOTrainerSync):  # type: ignore[misc]
    """The synchronous trainer of one run.

    Args:
        forest: Compute tokens that rows share once.

    Attributes:
        endpoints: The vLLM servers with the sampling settings of training; set by `init`.
    """

    _transfers: Transfers | None = None

    def __init__(self, config: Any, session: Session, *, forest: bool = False) -> None:
        super().__init__(config)
        self.session = session
        self.forest = forest
        self.endpoints: list[Endpoint] = []
        self.finished = False
        self._written = False
        self._ctrl_c: Any = None
        self._rows: list[UsedRow] = []
        self._updated = False
        self._aside = Path(session.directory) / "checkpoints" / ".verl"

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        from verl.workers.engine_workers import ActorRolloutRefWorker

        for role, remote in self.role_worker_mapping.items():
            # what ray.remote wrapped is known by its metadata only
            if remote.__ray_metadata__.modified_class.__name__.endswith(ActorRolloutRefWorker.__name__):
                self.role_worker_mapping[role] = ray.remote(ForestActor if self.forest else Actor)

    def on_init_end(self) -> None:
        """Give the servers the weights that the run starts with."""
        tasks = self.session.train_tasks
        rollout = self.config.actor_rollout_ref.rollout
        self._transfers = Transfers(
            self.session.delivery,
            Path(self.session.directory),
            rollout,
            self.actor_rollout_wg,
            self.tokenizer,
            tasks[0].input if tasks else {},
        )
        self._transfers.before()
        super().on_init_end()

    def on_step_end(self) -> None:
        """Give the servers the step's weights, and begin to prove that they answer with them."""
        if self._transfers is None:
            super().on_step_end()
            return
        self._transfers.before()
        super().on_step_end()
        self._prove(self.global_steps)

    def _prove(self, version: int) -> None:
        if self._transfers is not None:
            with explained(self.session, self.endpoints):
                self._transfers.after(version, self.endpoints, self.llm_server_manager.get_replicas())

    def init(self) -> None:
        """Start workers and servers, load the checkpoint, and find the servers' endpoints."""
        super().init()
        rollout = self.config.actor_rollout_ref.rollout
        sampling = {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "max_tokens": self.config.data.max_response_length,
            # fields of vLLM that the OpenAI API does not have: sent only when set
            **({"top_k": rollout.top_k} if rollout.top_k > 0 else {}),
            **({"ignore_eos": True} if rollout.ignore_eos else {}),
        }
        for address in self.llm_server_manager.get_addresses():
            served = environment_endpoint(f"http://{address}/v1", api_key="none")
            assert served is not None  # it has an address
            self.endpoints.append(attrs.evolve(served, sampling=sampling, token_ids=True))

    @property
    def greedy(self) -> list[Endpoint]:
        """The servers with the sampling of validation: verl's `val_kwargs`, temperature 0 by default."""
        values = self.config.actor_rollout_ref.rollout.val_kwargs
        return [
            e.with_sampling(
                temperature=values.temperature,
                top_p=values.top_p,
                **({"top_k": values.top_k} if values.top_k > 0 or "top_k" in e.sampling else {}),
            )
            for e in self.endpoints
        ]

    def fit(self, agent_loop_manager: Any) -> None:
        """Evaluate, train, evaluate again."""
        self._prove(self.global_steps)
        self.session.check_teacher(self.endpoints)
        with explained(self.session, self.endpoints):
            self.session.plan_steps(self.total_training_steps)  # a resumed run rewrites its directory from here on
            self.session.report(self.greedy, when="before", step=self.global_steps)
        self._ctrl_c = signal.getsignal(signal.SIGINT)
        trainer_base.tqdm = partial(trainer_base.tqdm, disable=True)  # the run's own display shows how far it is
        last = self.global_steps
        if not self.session.solved:  # a resumed run may only need the last evaluation
            try:
                super().fit(agent_loop_manager)
            except Stopping:
                return
            last = self.global_steps - 1
        self.finished = True
        with explained(self.session, self.endpoints):
            self.session.report(self.greedy, when="after", step=last)
            self.session.delivery.settle()

    def _keep_ctrl_c(self) -> None:
        """Restore the run's Ctrl-C handler. SwanLab's would end its run, and fail at the next metrics."""
        if self._ctrl_c is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._ctrl_c)

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], **more: Any) -> Any:
        """Put the rows in the order of the tasks, let verl balance them, then put each group's rows side by side."""
        batch.reorder(in_task_order(batch.keys, self.agent_loop_manager.trajectories))
        batch = super()._balance_batch(batch, metrics, **more)
        if self.forest:
            ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
            # a key is {uid}_{session}_{index}; the rows that verl adds have other ones
            groups = [key.rpartition("_")[0].rpartition("_")[0] for key in batch.keys]
            batch.reorder(by_rank(groups, [tag["seq_len"] for tag in batch.tags], ranks))
        return batch

    def on_sample_end(self) -> None:
        """Let the servers sleep; a part of verl's `gen`."""
        with marked_timer("sleep", self.timing_raw):
            super().on_sample_end()

    def prepare_step(self) -> dict[str, Any]:
        """Roll out; the time counts as verl's `gen`, as with its own loop."""
        self._keep_ctrl_c()
        with marked_timer("gen", self.timing_raw, color="red"):
            figures: dict[str, Any] = super().prepare_step()
        return figures

    def _validate(self) -> dict[str, float]:
        self._keep_ctrl_c()
        with explained(self.session, self.endpoints):
            accuracy = self.session.validate(self.greedy, step=self.global_steps)
        # verl wants at least one figure
        figures = {"val-core/agentrig/acc/mean@1": float("nan") if accuracy is None else accuracy}
        found = self.session.measured
        if accuracy is not None and found is not None and found.reward is not None:
            figures["val-core/agentrig/reward/mean@1"] = found.reward
        return figures

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Run verl's part (rollout correction), then replace its advantages by the worths of the run's credit.

        verl computes advantages over sequences. A failed rollout, or one without a trained call, would then
        shift the baseline, and a single rollout would get its score as advantage.
        """
        batch = super()._compute_advantage(batch, metrics)
        if self.config.algorithm.adv_estimator != "grpo":
            return batch
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        manager = self.agent_loop_manager
        rows = [
            advantages_of(None if tag.get("is_padding") else manager.trajectories[key], manager.worths, mask)
            for key, tag, mask in zip(batch.keys, batch.tags, data["response_mask"].unbind(), strict=True)
        ]
        nested, masks = (
            torch.nested.as_nested_tensor(list(each), layout=torch.jagged) for each in zip(*rows, strict=True)
        )
        from tensordict import TensorDict

        found = {"advantages": nested, "returns": nested.clone()}
        if None in manager.worths.values():
            found |= {"response_mask": masks, "loss_mask": masks.clone()}
        fields = TensorDict(found, batch_size=len(batch.keys))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Run verl's update, and note which rows and tokens its actor got.

        Raises:
            RunStopped: The workers say that they computed the loss over others.
        """
        batch = super()._update_actor(batch, metrics)
        fields = ["response_mask", "advantages"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        rows = rows_of(batch.keys, batch.tags, data)
        told = Counted.told(metrics)
        if told is None:
            log.warning("step %d: verl's workers do not say which rows they computed the loss over", self.global_steps)
        else:
            epochs = self.config.actor_rollout_ref.actor.ppo_epochs
            sent = sent_rows(rows, self.agent_loop_manager.trajectories)
            compare(sent, told, step=self.global_steps, epochs=epochs)
        self._rows += rows
        self._updated = True
        return batch

    def _entries(self) -> list[Entry]:
        """Return what the step did with each call, and begin the next step's rows."""
        actor, manager = self.config.actor_rollout_ref.actor, self.agent_loop_manager
        rows, updated, self._rows, self._updated = self._rows, self._updated, [], False
        if not updated:
            found = [piece for t in manager.trajectories.values() for piece in t.pieces]
            return [Entry(call, "dropped", n, CRITIC_WARMUP) for call, _, n in found]
        return entries_of(
            manager.trajectories,
            rows,
            worths=manager.worths,
            always=bool(actor.use_kl_loss or actor.entropy_coeff),
            rejects=bool((self.config.algorithm.get("rollout_correction") or {}).get("rollout_rs")),
        )

    def _save_checkpoint(self) -> None:
        """Save to a temporary folder: verl saves and validates before the step's metrics are written.

        If the run dies in between, no checkpoint may exist for a step without metrics.
        """
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir(parents=True)
        with open_dict(self.config):
            self.config.trainer.default_local_dir = str(self._aside.resolve() / "trainer")
        super()._save_checkpoint()
        finish_checkpoint(self._aside, self.global_steps, base=self.config.actor_rollout_ref.model.path)
        self._written = True

    def _file_checkpoint(self) -> None:
        """Make the saved checkpoint the run's latest one."""

        def move(path: Path) -> None:
            for part in self._aside.iterdir():
                part.rename(path / part.name)
            with explained(self.session, self.endpoints):
                self.session.delivery.signature()(path)

        self.session.save_checkpoint(self.global_steps, move)
        self._aside.rmdir()
        self._written = False

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], timing_raw: Any, **more: Any) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, **more)
        times = {part: sum(timing_raw.get(t, 0.0) for t in timers) for part, timers in TIMES.items()}
        metrics.update({f"agentrig/{k}": v for k, v in self.agent_loop_manager.figures.items()})
        for spent in self.actor_rollout_wg.spent():
            for part, seconds in spent.items():  # of the slowest rank
                name = f"agentrig/weight_sync_{part}_s"
                metrics[name] = max(seconds, metrics.get(name, 0.0))
        self.session.end_step(
            self.global_steps,
            metrics=step_figures(metrics, padding=sum(bool(t.get("is_padding")) for t in batch.tags)),
            time_s={part: s for part, s in times.items() if s},
            calls=self._entries(),
        )
        if self.session.solved:
            self.total_training_steps = self.global_steps  # verl's loop ends by itself then
        last = self.global_steps >= self.total_training_steps
        stopping = self.session.stopping and not last
        if (stopping or last) and not self._written:
            # Always save at the end, whatever `save_freq` is: nothing else keeps the weights.
            self._save_checkpoint()
        if self._written:
            self._file_checkpoint()
        if stopping:
            raise Stopping


def step_figures(metrics: Mapping[str, Any], *, padding: int) -> dict[str, float]:
    """Select the metrics for the run's report from verl's hundred or so.

    Args:
        padding: How many empty sequences verl added to fill the last mini-batch.
    """
    names = {
        METRIC: f"actor/{METRIC}",
        COMPUTED: f"actor/{COMPUTED}",
        TRACED: f"actor/{TRACED}",
        "loss": "actor/pg_loss",
        GRAD_NORM: "actor/grad_norm",
        "entropy": "actor/entropy",
        "clip_fraction": "actor/pg_clipfrac",
        "kl_k1": "actor/ppo_kl",  # `kl` is the k3 estimate, which verl does not report
        "lr": "actor/lr",
        "logprob_difference": "training/rollout_probs_diff_mean",
        "mfu": "perf/mfu/actor",
        "memory_gb": "actor/perf/max_memory_allocated_gb",
        "total_tokens": "perf/total_num_tokens",
        "verl_step_s": "timing_s/step",
        "verl_rollout_s": "timing_s/gen",
        "verl_sleep_s": "timing_s/sleep",
    }
    found = {name: float(metrics[key]) for name, key in names.items() if key in metrics}
    found.update({k.removeprefix("agentrig/"): float(v) for k, v in metrics.items() if k.startswith("agentrig/")})
    return {**found, "padding_sequences": float(padding)}


def shut_down(trainer: Trainer | None, *, failed: str = "") -> None:
    """Shut down loggers, TransferQueue and Ray, which ends its workers and servers.

    Args:
        trainer: The run's trainer, if it was created.
        failed: Why the run failed, for loggers that mark failed runs; empty if it did not.
    """
    logger = getattr(trainer, "logger", None)
    if logger is not None:
        if failed and "swanlab" in logger.logger:  # verl's own finish reports success
            logger.logger["swanlab"].finish(state="crashed", error=failed)
        logger.finish(exit_code=1 if failed else 0)
    tq.close()
    ray.shutdown()

"""The agent-loop manager: gets a step's prompts from verl, runs the agent, and writes trajectories to TransferQueue."""

from __future__ import annotations

import logging
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPException
from typing import Any

import attrs

from agentrig import Endpoint
from agentrig.algorithms import Session
from agentrig.credit import CallWorth, worths_of_calls
from agentrig.endpoints import without_proxy
from agentrig.errors import AgentrigError, RunStopped
from agentrig.ledger import Call
from agentrig.refusals import check_single_calls
from agentrig.rollouts import Rollout
from agentrig_verl.trajectories import PARTITION, Trajectory, in_chunks, trajectories_of

log = logging.getLogger(__name__)

OVERLONG = re.compile("max(imum)? (context|input|model) len(gth)?|context length|max_model_len", re.IGNORECASE)
"""Matches the error of every vLLM version for a prompt that leaves no room for a reply."""


class LoopManager:
    """Implements the contract of verl 0.9's v1 trainer for agent frameworks.

    Args:
        endpoints: The vLLM servers, with the sampling of training.
        merged: See `agentrig_verl.merge`.
    """

    def __init__(self, config: Any, session: Session, endpoints: Sequence[Endpoint], *, merged: bool = True) -> None:
        self.config, self.session, self.endpoints, self.merged = config, session, endpoints, merged
        self.figures: dict[str, float] = {}
        self.trajectories: dict[str, Trajectory] = {}
        self.worths: dict[Call, CallWorth] = {}

    def generate_sequences(self, prompts: Any) -> None:
        """Run the agent on a batch of prompts and write the trajectories to TransferQueue.

        Blocks until every rollout has ended. Each group is written as soon as it is complete. Its status is written
        after its trajectories.

        Args:
            prompts: A TensorDict with `uid` (verl's id of each group), `index` (the task's place in
                the training split) and `global_steps` (the training step).

        Raises:
            agentrig.errors.RunStopped: See `Session.rollouts`.
            ConfigError: The loss has one ratio for a whole reply, and a rollout has several calls.
        """
        uids = [str(uid) for uid in prompts["uid"]]
        indices = [int(i) for i in prompts["index"]]
        step = int(_scalar(prompts["global_steps"]))
        n = self.config.actor_rollout_ref.rollout.n
        tasks = [self.session.train_tasks[i] for i in indices]
        found: dict[str, list[Trajectory]] = {}

        def write_groups(groups: Mapping[int, Sequence[Rollout]]) -> None:
            found.update(self.put({uids[i]: group for i, group in groups.items()}, step=step))

        with explained(self.session, self.endpoints):
            rollouts = self.session.rollouts(tasks, n=n, endpoint=self.endpoints, step=step, on_groups=write_groups)
        loss = self.config.actor_rollout_ref.actor.policy_loss.loss_mode
        check_single_calls(loss, (rollout.id for rollout in rollouts for _ in rollout.triplets))
        self.worths = self.credited(rollouts)
        self.trajectories = lightened([t for uid in uids for t in found.get(uid, ())])
        self.figures = _figures(rollouts, found, self.config.data.max_prompt_length)
        self.figures |= servers_done(rollouts, n=n, servers=len(self.endpoints))

    def credited(self, rollouts: Sequence[Rollout]) -> dict[Call, CallWorth]:
        """Return what the run's credit says that each call of a step is worth; nothing if verl itself computes it."""
        if self.config.algorithm.adv_estimator != "grpo":
            return {}
        worths = worths_of_calls(self.session.credit, rollouts)
        return {
            Call(rollout.id, triplet.span_id): worth
            for rollout, calls in zip(rollouts, worths, strict=True)
            for triplet, worth in zip(rollout.triplets, calls, strict=True)
        }

    def put(self, groups: Mapping[str, Sequence[Rollout]], *, step: int) -> dict[str, list[Trajectory]]:
        """Write the trajectories of whole groups, then the groups' final status.

        The status is `failure` for a group without a rollout to train on, else `finished`.

        Args:
            groups: verl's id of each group to its rollouts.
        """
        import transfer_queue as tq
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        by_group = {
            uid: trajectories_of(group, uid=uid, step=step, merged=self.merged) for uid, group in groups.items()
        }
        found = [t for trajectories in by_group.values() for t in trajectories]
        if not self.config.actor_rollout_ref.rollout.calculate_log_probs:
            for trajectory in found:  # all or none: verl takes the fields of a batch from its first row
                trajectory.fields.pop("rollout_log_probs", None)
        elif not all("rollout_log_probs" in t.fields for t in found):
            raise AgentrigError(
                "the endpoint returned tokens without log-probabilities; vLLM returns them when logprobs is set"
            )
        for chunk in in_chunks(found):
            tq.kv_batch_put(
                keys=[t.key for t in chunk],
                fields=list_of_dict_to_tensordict([t.fields for t in chunk]),
                tags=[t.tags for t in chunk],
                partition_id=PARTITION,
            )
        status = [{"status": "finished" if by_group[uid] else "failure"} for uid in groups]
        tq.kv_batch_put(keys=list(groups), partition_id=PARTITION, tags=status)
        return by_group


def lightened(trajectories: Sequence[Trajectory]) -> dict[str, Trajectory]:
    """Return trajectories by key, without their tensors and with their checksums."""
    from agentrig_verl.counted import checksums_of

    sums = checksums_of([t.fields["input_ids"] for t in trajectories])
    pairs = zip(trajectories, sums, strict=True)
    return {t.key: attrs.evolve(t, fields={}, checksum=checksum) for t, checksum in pairs}


@contextmanager
def explained(session: Session, endpoints: Sequence[Endpoint]) -> Iterator[None]:
    """Add to a `RunStopped` which model server died, and how to resume."""
    try:
        yield
    except RunStopped as stopped:
        dead = [e.base_url for e in endpoints if not answers(e)]
        if not dead:
            raise
        raise RunStopped(
            f"{stopped}\n  The model server {', '.join(dead)} does not answer any more. The unfinished step is "
            f"lost; resume with: {session.resumes}",
            cause="server-failed",
        ) from stopped


def answers(endpoint: Endpoint) -> bool:
    """Whether a server still works. vLLM's `/health` fails when its engine died, even if the server is up."""
    without_proxy(endpoint.base_url)
    root = endpoint.base_url.removesuffix("/v1")
    try:
        with urllib.request.urlopen(f"{root}/health", timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code == HTTPStatus.NOT_FOUND  # a server without this route, but it answers
    except (OSError, HTTPException):
        return False


def _scalar(value: Any) -> Any:
    """Unwrap a per-batch value from tensordict."""
    value = getattr(value, "data", value)
    several = isinstance(value, list | tuple) or bool(getattr(value, "ndim", 0))
    return value[0] if several else value


def servers_done(rollouts: Sequence[Rollout], *, n: int, servers: int) -> dict[str, float]:
    """Return after how many seconds the first and the last server had finished its groups, which they get in turn."""
    times = [(i // n % servers, r.start, r.start + r.duration_s) for i, r in enumerate(rollouts) if r.start]
    begun = min((start for _, start, _ in times), default=0.0)
    ends = [max(end for at, _, end in times if at == server) for server in sorted({at for at, _, _ in times})]
    return {"rollout_first_server_s": min(ends) - begun, "rollout_last_server_s": max(ends) - begun} if ends else {}


def _figures(
    rollouts: Sequence[Rollout], by_group: Mapping[str, Sequence[Trajectory]], max_prompt_length: int
) -> dict[str, float]:
    triplets = [t for rollout in rollouts for t in rollout.triplets]
    failed = [r for r in rollouts if r.failure is not None]
    sequences = sum(map(len, by_group.values()))
    return {
        "sequences": sequences,
        "calls_per_sequence": len(triplets) / sequences if sequences else 0.0,
        "groups_without_sequences": sum(not t for t in by_group.values()),
        # vLLM refuses a prompt that leaves no room for a reply. The rollout fails, and is counted here.
        "overlong_prompts": sum(bool(OVERLONG.search(r.outcome.message)) for r in failed)
        + sum(len(t.prompt_ids) > max_prompt_length for t in triplets),
    }

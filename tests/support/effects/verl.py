"""The keys of `verl` that need no Ray, observed in verl's whole configuration and in a group's trajectories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from agentrig_grpo.naming import model_directory
from agentrig_verl.sharing import choose
from agentrig_verl.trajectories import trajectories_of
from rollouts import rollout, trace_of

from agentrig import Task, Triplet
from effects import Elsewhere, Flip, Settings, exact, folder
from effects.tasks import build

CLUSTER = "plugins/agentrig-verl/tests/test_verl_cluster.py"


def session() -> Any:
    """Return the parts of a session that the algorithm needs to compose verl's configuration."""
    tasks = [Task(id=f"t{i}", input={}) for i in range(4)]
    hardware = build("hardware.cuda", {"attention": "sdpa"})
    return SimpleNamespace(hardware=hardware, directory=folder(), seed=7, checkpoint=None, train_tasks=tasks, calls=40)


def composed(settings: Settings) -> Any:
    own = {"data.train_batch_size": 2, **settings.get("verl", {})}
    return build("algorithm.verl", {"model": "some/model", **settings, "verl": own}).compose(session())


def sequences(settings: Settings) -> Sequence[Sequence[int]]:
    """Return the response of each sequence: four calls, two of them one conversation, and one call."""
    first = [Triplet(prompt_ids=[1], response_ids=[2]), Triplet(prompt_ids=[1, 2, 3], response_ids=[4])]
    alone = [Triplet(prompt_ids=[9], response_ids=[8]), Triplet(prompt_ids=[7], response_ids=[6])]
    group = [
        rollout(0.0, trace=trace_of("write"), triplets=[*first, *alone]),
        rollout(1.0, trace=trace_of("write"), triplets=[Triplet(prompt_ids=[1], response_ids=[5])]),
    ]
    merged = build("algorithm.verl", settings).manager(None, session(), []).merged
    return [t.fields["responses"].tolist() for t in trajectories_of(group, uid="u", step=1, merged=merged)]


def engine(settings: Settings) -> bool:
    """Return whether the engine that trains on a GPU computes shared tokens once."""
    local = {**settings, "model": str(model_directory("mini"))}
    return choose(settings["engine"], composed(local), device="cuda")[0]


TABLE = {
    "engine": exact("auto", "verl", engine, (True, False)),
    "model": exact("first/model", "second/model", lambda s: composed(s).actor_rollout_ref.model.path),
    "verl": Flip(
        a={},
        b={"actor_rollout_ref.actor.optim.lr": 0.125},
        look=lambda s: json.dumps(composed(s).actor_rollout_ref.actor.optim.lr),
        shows=lambda a, b: b == "0.125" != a,
    ),
    "merge": Flip(
        a=True,
        b=False,
        look=sequences,
        shows=lambda a, b: a == [[2, 3, 4], [8], [6], [5]] and b == [[2], [4], [8], [6], [5]],
    ),
    "runners": Elsewhere(f"{CLUSTER}::test_the_keys_of_runners_place_them", "it needs a Ray cluster"),
    "runner_cpus": Elsewhere(
        f"{CLUSTER}::test_an_actor_takes_the_cpus_that_runner_cpus_says", "it needs a Ray cluster"
    ),
    "worker_logs": Elsewhere(f"{CLUSTER}::test_worker_logs_are_printed_when_asked", "it starts Ray twice"),
}
